"""Reading logs, smoothing, the curves' figure, the long-term-decay figure."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from enwik8.curves import align, load_runs, read_metrics, smooth
from enwik8.decay_figure import (
    main,
    mean_weight,
    plot_long_term_decay,
    relative_upper_bound,
    weight_sum,
)
from enwik8.errors import UserError
from enwik8.methods import METHODS
from enwik8.metrics import column_names
from enwik8.plot import COLORS, _spread, curves_figure, plot, style_of

ROOT = Path(__file__).parents[1]


def write_run(
    folder: Path,
    train: list[float],
    validation: dict[int, float] | None = None,
    *,
    arm: str = "elu-rope",
    seed: int = 0,
    batch: int = 4,
    config: bool = True,
) -> Path:
    """A run's folder with one row for each training value; `validation` by step."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "metrics.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(column_names())
        for step, value in enumerate(train, start=1):
            evaluated = (validation or {}).get(step, "")
            tokens = step * batch * 16
            writer.writerow(
                [step, tokens, value, evaluated, 1e-3, 1.0, step * 0.5, 128, f"{step:016x}"]
            )
    if config:
        record = {
            "arm": arm,
            "model": {"layers": 2, "dim": 32, "heads": 2},
            "training": {"seed": seed, "batch_size": batch},
            "corpus": {"name": "enwik8-first-4000-bytes", "description": "first 4,000 of enwik8"},
            "parameters": 123_456,
        }
        (folder / "config.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


def write_comparison(folder: Path, arms: list[str], steps: int = 30) -> Path:
    rows = [",".join(("arm", "seed", *column_names()))]
    for number, arm in enumerate(arms):
        for step in range(1, steps + 1):
            value = 8 / step**0.3 + number / 10
            evaluated = value if step % 10 == 0 else ""
            rows.append(
                f"{arm},0,{step},{step * 64},{value},{evaluated},0.1,1,{step},64,{step:016x}"
            )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    models = {arm: {"model": {"layers": 2}, "parameters": 1000 + i} for i, arm in enumerate(arms)}
    (folder / "config.json").write_text(json.dumps({"arms": models, "corpus": {"name": "text"}}))
    return folder


def lines_of(figure, panel: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {
        str(line.get_label()): (np.asarray(line.get_xdata()), np.asarray(line.get_ydata()))
        for line in figure.axes[panel].get_lines()
    }


def texts_of(figure) -> str:
    texts = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    return "\n".join(text.get_text() for text in texts)


# Smoothing


def test_smoothing_has_no_start_up_bias():
    result = smooth([10.0] + [1.0] * 20, 0.9)
    assert result[0] == pytest.approx(10.0)
    assert result[-1] == pytest.approx(1.122862, abs=1e-6)


def test_smoothing_is_causal():
    series = np.random.default_rng(0).normal(size=100)
    np.testing.assert_array_equal(smooth(series[:50], 0.9), smooth(series, 0.9)[:50])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_no_number_is_a_gap_and_poisons_nothing(bad):
    series = [3.0, 2.0, bad, 4.0, 5.0]
    result = smooth(series, 0.8)
    assert np.isnan(result[2])
    np.testing.assert_allclose(np.delete(result, 2), smooth([3.0, 2.0, 4.0, 5.0], 0.8))


def test_smoothing_of_nothing_and_by_nothing():
    assert smooth([], 0.9).shape == (0,)
    np.testing.assert_allclose(smooth([1.0, 5.0, 2.0], 0.0), [1.0, 5.0, 2.0])
    with pytest.raises(ValueError, match="beta is 1"):
        smooth([1.0], 1.0)


# Reading


def test_reading_a_run_and_its_empty_cells(tmp_path):
    columns = read_metrics(write_run(tmp_path, [8.0, float("nan"), 6.0], {3: 6.5}) / "metrics.csv")
    assert list(columns) == list(column_names())
    np.testing.assert_array_equal(columns["tokens"], [64, 128, 192])
    np.testing.assert_array_equal(columns["train_bits_per_byte"], [8.0, np.nan, 6.0])
    np.testing.assert_array_equal(columns["validation_bits_per_byte"], [np.nan, np.nan, 6.5])
    assert columns["batch_hash"].tolist() == [f"{step:016x}" for step in (1, 2, 3)]


@pytest.mark.parametrize("removed", [1, 2, 10, 30])
def test_a_last_line_cut_by_a_kill_is_left_out(tmp_path, removed):
    path = write_run(tmp_path, [8.0, 7.0, 6.0], {3: 6.5}) / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-removed])
    assert read_metrics(path)["step"].tolist() == [1.0, 2.0]


def test_a_step_repeated_by_a_resumed_run_counts_once(tmp_path):
    path = write_run(tmp_path, [8.0, 7.0]) / "metrics.csv"
    path.write_text(path.read_text() + "2,128,5.0,,0.1,1,1,128,0\n")
    (run,) = load_runs(tmp_path)
    assert run.train.tolist() == [8.0, 5.0]


def test_reading_a_comparison(tmp_path):
    runs = load_runs(write_comparison(tmp_path, ["elu-none", "elu-rope"]))
    assert [(run.arm, run.seed, len(run.tokens)) for run in runs] == [
        ("elu-none", 0, 30),
        ("elu-rope", 0, 30),
    ]
    assert [run.config["parameters"] for run in runs] == [1000, 1001]


def test_a_comparison_killed_before_its_merge_is_read_from_its_runs(tmp_path):
    write_run(tmp_path / "runs/elu-rope-seed0", [8.0, 7.0], arm="elu-rope")
    write_run(tmp_path / "runs/a-seed0", [8.0], arm="a")
    (tmp_path / "config.json").write_text(json.dumps({"arms": {"elu-rope": {}, "a": {}}}))
    assert [run.arm for run in load_runs(tmp_path)] == ["elu-rope", "a"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a metrics log"),
        (b"date,price\n1,2\n", "no column step, tokens"),
        (b"\x89PNG\r\n\x1a\n\xff", "cannot be read"),
        (b"step,tokens,train_bits_per_byte,validation_bits_per_byte\n1,2,x,\n", "line 2: train_"),
        (b"step,tokens,train_bits_per_byte,validation_bits_per_byte\n1,2\n2,3,4,\n", "line 2: 2 c"),
    ],
)
def test_a_foreign_or_damaged_file_is_named(tmp_path, content, message):
    path = tmp_path / "metrics.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_metrics(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_or_folder_is_named_with_a_remedy(tmp_path):
    for call in (lambda: read_metrics(tmp_path / "no.csv"), lambda: plot(tmp_path / "no.csv")):
        with pytest.raises(UserError, match=r"no\.csv .*enwik8 train"):
            call()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not readable JSON"):
        load_runs(tmp_path)


def test_equal_arms_are_seeds_only_if_nothing_but_the_seed_differs(tmp_path):
    first = write_run(tmp_path / "first", [8.0, 7.0], seed=0)
    second = write_run(tmp_path / "second", [8.0, 7.0], seed=1)
    other = write_run(tmp_path / "other", [8.0, 7.0], seed=1, batch=8)
    assert [run.arm for run in load_runs([first, second])] == ["elu-rope", "elu-rope"]
    names = [run.arm for run in load_runs([first, other])]
    assert names == ["elu-rope (first)", "elu-rope (other)"]


def test_seeds_meet_on_their_common_tokens():
    tokens, values = align(
        [
            (np.array([1.0, 2.0, 4.0]), np.array([10.0, 20.0, 40.0])),
            (np.array([2.0, 3.0, 4.0]), np.array([2.0, 3.0, 4.0])),
        ]
    )
    assert tokens.tolist() == [2.0, 4.0]
    assert values.tolist() == [[20.0, 40.0], [2.0, 4.0]]


# The figure


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_log_of_few_rows_can_be_plotted(tmp_path, rows):
    paths = plot(write_run(tmp_path, [8.0, 7.0, 6.0][:rows]))
    assert [path.name for path in paths] == ["curves.png", "curves.svg"]
    assert imread(paths[0]).shape[1] > 1000
    figure = curves_figure(load_runs(tmp_path))
    assert ("no data yet" in texts_of(figure)) == (rows == 0)
    assert ("no validation yet" in texts_of(figure)) == (rows > 0)


def test_a_header_without_rows_of_a_comparison(tmp_path):
    plot(write_comparison(tmp_path, ["elu-none", "elu-rope"], steps=0))
    assert [run.arm for run in load_runs(tmp_path)] == ["elu-none", "elu-rope"]


def test_one_point_is_visible(tmp_path):
    figure = curves_figure(load_runs(write_run(tmp_path, [8.0], {1: 7.9})))
    for panel, label in ((0, "elu-rope"), (1, "elu-rope")):
        (line,) = [one for one in figure.axes[panel].get_lines() if one.get_label() == label]
        assert line.get_marker() not in ("None", None, "")
    figure.axes[0].get_lines()[1].set_visible(False)  # the average's dot; compare pixels
    figure.axes[0].get_lines()[0].set_visible(False)
    figure.canvas.draw()
    without = np.asarray(figure.canvas.buffer_rgba()).copy()
    figure.axes[0].get_lines()[1].set_visible(True)
    figure.canvas.draw()
    assert (np.asarray(figure.canvas.buffer_rgba()) != without).any(axis=-1).sum() > 10


def test_the_raw_curve_stays_visible_beside_the_average(tmp_path):
    train = list(np.linspace(8, 3, 40) + np.tile([0.2, -0.2], 20))
    figure = curves_figure(load_runs(write_run(tmp_path, train)), smoothing=0.9)
    lines = lines_of(figure, 0)
    np.testing.assert_allclose(lines["elu-rope, each step"][1], train)
    np.testing.assert_allclose(lines["elu-rope"][1], smooth(train, 0.9))
    raw = figure.axes[0].get_lines()[0]
    assert raw.get_visible() and raw.get_alpha() > 0.1 and raw.get_linewidth() > 0.3


def test_arms_with_different_batches_share_the_token_axis(tmp_path):
    small = write_run(tmp_path / "small", [8.0, 7.0, 6.0, 5.0], {4: 5.0}, arm="a", batch=4)
    large = write_run(tmp_path / "large", [8.0, 7.0], {2: 6.0}, arm="b", batch=8)
    figure = curves_figure(load_runs([small, large]))
    training, validation = lines_of(figure, 0), lines_of(figure, 1)
    assert training["a"][0].tolist() == [64, 128, 192, 256]
    assert training["b"][0].tolist() == [128, 256]
    assert training["a, each step"][0].tolist() == [64, 128, 192, 256]
    assert training["b, each step"][0].tolist() == [128, 256]
    assert validation["a"][0].tolist() == validation["b"][0].tolist() == [256]
    for axes in figure.axes:
        assert axes.get_xlabel() == "training tokens (bytes)"
    assert figure.axes[0].get_ylabel() == "bits per byte"


def test_nan_is_a_gap_of_the_curve(tmp_path):
    train = [8.0, 7.0, float("nan"), 6.0, float("inf"), 5.0]
    path = write_run(tmp_path, train, {2: 7.0, 4: float("nan"), 6: 5.0})
    figure = curves_figure(load_runs(path))
    for label in ("elu-rope", "elu-rope, each step"):
        assert np.isnan(lines_of(figure, 0)[label][1]).tolist() == [0, 0, 1, 0, 1, 0]
    assert lines_of(figure, 1)["elu-rope"][1].tolist() == [7.0, 5.0]
    plot(path)


def test_seeds_are_a_mean_and_a_band(tmp_path):
    folders = [
        write_run(tmp_path / str(seed), [8.0, 6.0 + seed], {2: 6.0 + seed}, seed=seed)
        for seed in (0, 1)
    ]
    figure = curves_figure(load_runs(folders), smoothing=0.0)
    assert lines_of(figure, 0)["elu-rope"][1].tolist() == [8.0, 6.5]
    assert lines_of(figure, 1)["elu-rope"][1].tolist() == [6.5]
    (band,) = figure.axes[0].collections
    assert {6.0, 7.0} <= set(band.get_paths()[0].vertices[:, 1])
    assert "Mean of 2 seeds" in texts_of(figure)


def test_the_first_steps_do_not_squash_the_rest_and_it_says_so(tmp_path):
    train = [8.0, 7.5, 7.0, *np.linspace(3.2, 3.0, 97)]
    figure = curves_figure(load_runs(write_run(tmp_path, train, {50: 3.1, 100: 3.0})))
    low, high = figure.axes[1].get_ylim()
    assert 2.5 < low < 3.0 and 3.2 < high < 6.0
    assert figure.axes[0].get_ylim() == (low, high)
    assert "Cut at the top: the first steps reach 8.0" in texts_of(figure)


def test_the_title_tells_corpus_and_size_and_never_more_than_recorded(tmp_path):
    figure = curves_figure(load_runs(write_run(tmp_path, [8.0])))
    text = texts_of(figure)
    assert "enwik8-first-4000-bytes" in text and "first 4,000 of enwik8" in text
    assert "2 layers, 32 wide, 2 heads, 0.123 M parameters" in text
    bare = curves_figure(load_runs(write_run(tmp_path / "bare", [8.0], config=False)))
    assert "unknown corpus" in texts_of(bare)


def test_runs_on_different_corpora_are_called_not_comparable(tmp_path):
    first, second = write_run(tmp_path / "a", [8.0]), write_run(tmp_path / "b", [8.0], seed=1)
    record = json.loads((second / "config.json").read_text())
    record["corpus"] = {"name": "other", "description": "another text"}
    (second / "config.json").write_text(json.dumps(record))
    assert "NOT comparable" in texts_of(curves_figure(load_runs([first, second])))


def test_style_does_not_depend_on_the_company():
    alone, together = style_of(["elu-rope"]), style_of(["mine", "elu-none", "elu-rope"])
    assert alone["elu-rope"] == together["elu-rope"]
    assert len({style["color"] for style in together.values()}) == 3
    assert together["elu-rope"]["linestyle"] == "-" != together["elu-none"]["linestyle"]
    assert len(set(COLORS.values())) == len(COLORS)


def test_names_with_markup_are_printed_as_they_are(tmp_path):
    run = write_run(tmp_path / "cost $x$ \\frac", [8.0, 7.0], config=False)
    plot(run)


def test_writing_is_whole_or_not_at_all(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", [8.0, 7.0])
    plot(run)
    before = (run / "curves.png").read_bytes()

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("enwik8.plot.os.replace", refuse)
    with pytest.raises(UserError, match="No space left on device"):
        plot(run, title="another")
    assert (run / "curves.png").read_bytes() == before
    assert sorted(path.name for path in run.iterdir()) == [
        *("config.json", "curves.png", "curves.svg", "metrics.csv"),
    ]
    monkeypatch.undo()
    with pytest.raises(UserError, match="cannot be written"):
        plot(run, run / "metrics.csv" / "below-a-file")


def test_without_a_display_a_backend_or_pyplot(tmp_path):
    run = write_run(tmp_path / "run", [8.0, 7.0, 6.0], {3: 6.1})
    code = (
        "import sys; from enwik8.plot import plot; import matplotlib as m; "
        "before = m.rcParams.copy(); plot(sys.argv[1]); assert m.rcParams.copy() == before; "
        "assert 'matplotlib.pyplot' not in sys.modules; assert 'torch' not in sys.modules"
    )
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "MPLBACKEND")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(run)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "curves.svg").read_text().rstrip().endswith("</svg>")


# Long-term decay


def test_the_upper_bound_against_its_definition():
    width, distance = 8, 7
    theta = [10000 ** (-2 * i / width) for i in range(width // 2)]
    sums = [sum(np.exp(1j * distance * t) for t in theta[:j]) for j in range(1, width // 2 + 1)]
    expected = np.mean(np.abs(sums))
    assert relative_upper_bound(distance, width) == pytest.approx(expected)
    assert relative_upper_bound(0, 128) == pytest.approx(32.5)
    bound = relative_upper_bound(np.arange(251), 128)
    assert bound[200:].mean() < bound[20:70].mean() < bound[:5].mean()


def test_weights_of_rotated_features_against_sampling():
    """The closed form is the mean over queries and keys of the actual rotated products."""
    width, positions, samples = 64, 101, 400
    generator = np.random.default_rng(0)

    def features(*shape: int) -> np.ndarray:
        x = generator.normal(size=shape)
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))

    theta = 10000.0 ** (-2 * np.arange(width // 2) / width)
    q, k = features(samples, width), features(samples, positions, width)
    turn = np.exp(1j * np.outer(100 - np.arange(positions), theta))  # R_{t-n}, t = 100
    paired_q = q[:, 0::2] + 1j * q[:, 1::2]
    paired_k = k[..., 0::2] + 1j * k[..., 1::2]
    rotated = np.einsum("si,ti,sti->st", paired_q, turn, paired_k.conj()).real
    plain = np.einsum("si,sti->st", q, k)
    assert rotated.sum() / plain.sum() == pytest.approx(weight_sum(101)[100], abs=0.01)
    np.testing.assert_allclose(
        rotated.mean(0) / plain.mean(), mean_weight(100 - np.arange(positions)), atol=0.06
    )


def test_the_sum_of_weights_falls_with_the_position():
    total = weight_sum(2001)
    assert total[0] == 1
    assert total[100] == pytest.approx(0.5300, abs=1e-4)
    assert total[2000] == pytest.approx(0.2074, abs=1e-4)


def test_the_decay_figure_and_its_numbers(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "--feature-width", "16"]) == 0
    names = [f"long-term-decay.{suffix}" for suffix in ("png", "svg", "csv")]
    assert capsys.readouterr().out.split() == [str(tmp_path / name) for name in names]
    with open(tmp_path / "long-term-decay.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2001
    assert float(rows[250]["relative_upper_bound"]) == pytest.approx(6.54818, abs=1e-4)
    assert rows[251]["relative_upper_bound"] == ""
    assert float(rows[9]["weight_sum"]) == pytest.approx(weight_sum(10, 16)[9])
    assert main(["--out", str(tmp_path), "--width", "7"]) == 2
    assert "width is 7" in capsys.readouterr().err
    with pytest.raises(ValueError, match="width is 3"):
        plot_long_term_decay(tmp_path, feature_width=3)


def test_twenty_arms_have_twenty_colors() -> None:
    arms = [name for name in METHODS if name.startswith(("best", "softmax-rope"))][:20]
    styles = style_of([*arms, "softmax-rope"])
    assert len({style["color"] for style in styles.values()}) == len(styles) >= 20


def test_labels_of_many_arms_stay_above_the_note() -> None:
    step = 1.1 / 15
    places = _spread([0.1] * 14 + [0.9, 1.0], step)
    assert places[0] >= -0.05 and places[-1] <= 1.06
    gaps = [b - a for a, b in pairwise(places)]
    assert min(gaps) >= step - 1e-9
    assert _spread([0.2, 0.9], step) == pytest.approx([0.2, 0.9])  # where there is room


CURVES = (
    "arm,seed,step,tokens,train_bits_per_byte,validation_bits_per_byte,corpus\n"
    "best,0,10,640,4.0,4.5,some text (a part)\n"
    "best,0,20,1280,3.0,3.5,some text (a part)\n"
    "best,1,20,1280,3.2,3.25,some text (a part)\n"
)


def test_the_published_curves_of_a_study_are_drawn(tmp_path: Path) -> None:
    """Also with own runs. A study may hold two objectives, whose rows have cells of their own."""
    file = tmp_path / "study" / "curves.csv"
    file.parent.mkdir()
    file.write_text(CURVES)
    first, second = load_runs(file)
    assert (first.arm, second.seed) == ("best", 1)
    assert first.validation[1].tolist() == [4.5, 3.5] and second.train.tolist() == [3.2]
    assert {path.parent for path in plot(file)} == {file.parent}
    figure = curves_figure([first], smoothing=0.9)  # means already: not smoothed again
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert lines["best"].get_ydata().tolist() == [4.0, 3.0]
    assert any(text.get_text().startswith("Training: means of") for text in figure.texts)
    own = write_run(tmp_path / "mine", [4.0, 3.0], {2: 3.0}, arm="best")
    assert [run.arm for run in load_runs([file, own])] == ["best (study)"] * 2 + ["best (mine)"]

    rows = [line + ",," for line in CURVES.splitlines()[1:]]
    header = CURVES.splitlines()[0] + ",train_bits_per_masked_byte,validation_bits_per_masked_byte"
    masked = "elu-rope,0,10,640,,,some text (a part),2.0,2.5"
    file.write_text("\n".join([header, *rows]) + "\n")
    assert load_runs(file)[0].validation[1].tolist() == [4.5, 3.5]
    file.write_text("\n".join([header, *rows, masked]) + "\n")
    with pytest.raises(UserError, match=r"best in .*elu-rope in .*different quantities"):
        load_runs(file)
    file.write_text("\n".join([header, masked]) + "\n")
    assert load_runs(file)[0].validation[1].tolist() == [2.5]


def test_another_table_is_no_curves_file(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    for text, match in (
        ("arm,final\nbest,2.0\n", "no column step"),
        (CURVES.splitlines()[0] + "\n", "holds no curves"),
        (CURVES.replace("arm,", "name,"), "not a number"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=match):
            plot(file)
