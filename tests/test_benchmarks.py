"""The benchmarks run, judge what they time, and say what they leave out. No time is asserted."""

from __future__ import annotations

import csv
import math
import re
import shlex
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import judge
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("matplotlib", exc_type=ImportError)

from benchmarks import attention, decode, long, packing, train
from benchmarks._contestants import Contestant, Field, Run, find_contestants, torch_rotation
from benchmarks._generate import decode_report, products
from benchmarks._judge import relative_error, rows_of, turned
from benchmarks._memory import STATUS, Meter
from benchmarks._models import Size, Trainer
from benchmarks._problem import Case, Problem
from benchmarks._results import MODES, Row
from benchmarks._steps import Ours, Sizes, find_steppers
from benchmarks._targets import targets_table
from benchmarks._timing import chunkwise_flops, interleave, matmul_call, slope
from linear_rope import LanguageModel, Rotary, linear_attention
from linear_rope.recipes import best

ROOT = Path(__file__).resolve().parent.parent
LINUX = pytest.mark.skipif(not STATUS.exists(), reason="memory is read from Linux's /proc")
TINY = ["--threads", "1", "--rounds", "2", "--shapes", "2x2x8", "--budget", "0"]


# --- the judge ------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", ["product", "attention", "rotary"])
def test_rows_are_those_of_the_whole(job: str) -> None:
    q, k, v = torch.randn(3, 1, 1, 20, 6, dtype=torch.float64)
    rows = torch.tensor([0, 3, 7, 19])
    if job == "product":
        want = judge.product(q, k, v)[0]
    else:
        want = judge.attention(q, k, v, rotate="after" if job == "rotary" else "none")
    got = rows_of(job, q[0, 0], k[0, 0], v[0, 0], rows)
    assert judge.error(got, want[0, 0, rows]) < 1e-12


@pytest.mark.parametrize("job", ["softmax", "softmax-rotary"])
def test_rows_of_softmax_attention(job: str) -> None:
    q, k, v = torch.randn(3, 20, 6, dtype=torch.float64)
    rows, at = torch.tensor([0, 3, 7, 19]), torch.arange(20)
    got = rows_of(job, q, k, v, rows)
    if job == "softmax-rotary":
        q, k = judge.turn(q, at), judge.turn(k, at)
    weights = ((q @ k.T) / 6**0.5).exp().tril()
    want = (weights / weights.sum(-1, keepdim=True)) @ v
    assert judge.error(got, want[rows]) < 1e-12


def test_rotations() -> None:
    x, at = torch.randn(2, 30, 8, dtype=torch.float64), torch.arange(30)
    assert judge.error(turned(x, at), judge.turn(x, at)) < 1e-12
    for dtype, near in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 3e-2)):
        got = torch_rotation(30, 8, dtype)(x.to(dtype))
        assert got.dtype == dtype
        assert judge.error(got, judge.turn(x, at)) < near


def test_nan_is_as_wrong_as_can_be() -> None:
    assert relative_error(torch.tensor([1.0, math.nan]), torch.ones(2).double()) == math.inf
    assert relative_error(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0]).double()) == 0.25


# --- timing ---------------------------------------------------------------------------------------


def test_useful_flops_are_those_of_the_chunkwise_form() -> None:
    B, H, T, M, E, C = 2, 3, 128, 16, 8, 64
    q, k = torch.randn(2, B, H, T // C, C, M, requires_grad=True)
    v = torch.randn(B, H, T // C, C, E, requires_grad=True)
    counter = FlopCounterMode(display=False)
    with counter:
        states = (k.mT @ v).cumsum(2)
        out = q @ states + (q @ k.mT).tril() @ v
    assert counter.get_total_flops() == chunkwise_flops(B, H, T, M, E, backward=False)
    with counter:
        out.sum().backward()
    assert counter.get_total_flops() * 1.5 == chunkwise_flops(B, H, T, M, E, backward=True)


def test_every_round_calls_everybody_and_slow_ones_stop_early() -> None:
    calls: list[str] = []

    def call(name: str, seconds: float = 0.0) -> Callable[[], None]:
        def it() -> None:
            calls.append(name)
            time.sleep(seconds)

        return it

    times = interleave(
        {"a": call("a"), "b": call("b"), "slow": call("slow", 0.05)}, rounds=6, budget=0.04
    )
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 6, "b": 6, "slow": 2}
    assert min(times["slow"]) >= 0.05
    assert calls[:3] == ["a", "b", "slow"]  # warm
    for turn in range(2):
        assert sorted(calls[3 + 3 * turn : 6 + 3 * turn]) == ["a", "b", "slow"]
    # A long first call, made elsewhere, counts and spares one.
    times = interleave({"a": call("a")}, rounds=2, budget=1.0, first={"a": 3.0})
    assert times["a"][0] == 3.0 and len(times["a"]) == 2


def test_slope_is_the_exponent() -> None:
    x = [512, 1024, 4096]
    assert slope(x, [3e-9 * t**1.7 for t in x]) == pytest.approx(1.7)
    assert math.isnan(slope([512], [1.0]))


# --- memory ---------------------------------------------------------------------------------------

TASKS = """
import os, signal, time
import torch

def allocate(megabytes):
    held = torch.ones(20_000_000, dtype=torch.uint8)  # an input
    def call():
        print("not a reply")
        return torch.ones(megabytes * 1_000_000, dtype=torch.uint8)
    return call

def allocate_again(tensors):
    # Freed beforehand: one that takes glibc's threshold for a mapping of its own above 2 MB, and as
    # many as the call will make, below one that keeps the end of the heap where it is.
    torch.ones(8_000_000, dtype=torch.uint8)
    freed = [torch.ones(2_000_000, dtype=torch.uint8) for _ in range(tensors)]
    end = torch.ones(2_000_000, dtype=torch.uint8)
    del freed
    def call(end=end):
        return [torch.ones(2_000_000, dtype=torch.uint8) for _ in range(tensors)]
    return call

def sleep(seconds):
    return lambda: time.sleep(seconds)

def die():
    return lambda: os.kill(os.getpid(), signal.SIGKILL)

def fail():
    raise ValueError("of no use")
"""


@LINUX
def test_memory_of_a_call_and_why_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory_tasks.py").write_text(TASKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Meter(threads=1) as meter:

        def measure(task: str, limit: float = 60.0, **arguments: float):  # type: ignore[no-untyped-def]
            small = {"megabytes": 1} if task == "allocate" else dict.fromkeys(arguments, 0)
            return meter.measure(f"memory_tasks:{task}", arguments, small, limit)

        for megabytes in (50, 200):
            got = measure("allocate", megabytes=megabytes)
            assert got.failure is None and got.seconds is not None and got.extra is not None
            assert megabytes - 3 < got.extra / 1e6 < megabytes + 10
        got = measure("allocate_again", tensors=10)
        assert got.extra is not None and 19.5 < got.extra / 1e6 < 24, got
        too_large = measure("allocate", megabytes=10_000_000)
        assert too_large.failure == "needs more memory than there is"
        start = time.perf_counter()
        assert "takes more than 0.2 s" in str(measure("sleep", 0.2, seconds=900).failure)
        assert time.perf_counter() - start < 300  # it was ended, not waited for
        assert "died" in str(measure("die").failure)
        assert measure("fail").failure == "ValueError: of no use"
        assert measure("allocate", megabytes=50).failure is None  # the helper lives on


# --- attention ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's rate is nothing to wait for here."""
    monkeypatch.setattr(attention, "matmul_call", partial(matmul_call, 64))


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than measuring at these sizes, and one test of it is enough."""
    monkeypatch.setattr(attention, "save_figure", lambda *_: [])


@pytest.mark.slow
def test_attention_runs(tmp_path: Path) -> None:
    arguments = [*TINY, "--lengths", "64", "80", "--more-lengths", "128", "--out", str(tmp_path)]
    rows = attention.main(arguments)
    by_entry = {(row.contestant, row.job, row.mode, row.time): row for row in rows}
    assert len(by_entry) == len(rows)
    ours = [row for row in rows if row.backend]
    for backend in {row.backend for row in ours} | {"reference", "chunked", "recurrent"}:
        for job in ("product", "attention", "rotary"):
            for mode in MODES.values():
                for length in (64, 80, 128):
                    row = by_entry[f"linear_rope {backend}", job, mode, length]
                    assert row.counts and row.runs == 2 and row.error is not None, row
                    assert row.error < 1e-5 and (row.grad_error or 0.0) < 1e-5, row
                    assert row.extra_bytes is None or not STATUS.exists() or row.extra_bytes >= 0
    for row in rows:
        assert row.counts, f"{row.contestant}, {row.job}: {row.note}"
    text = (tmp_path / "attention.md").read_text()
    for part in ("## batch x heads", "Bare product", "with rotation", "best peer", "load"):
        assert part in text
    for name in find_contestants().absent:
        assert f"absent: {name}" in text
    # The lengths of --more-lengths are in the CSV only.
    assert "| linear_rope chunked | 80 |" in text and "| linear_rope chunked | 128 |" not in text
    with (tmp_path / "attention.csv").open() as file:
        assert {row["time"] for row in csv.DictReader(file)} == {"64", "80", "128"}
    assert "(attention-memory.png)" in text
    for name in ("attention-time.png", "attention-memory.svg"):
        assert (tmp_path / name).stat().st_size > 1000


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("layout", ["own", "layer"])
def test_attention_of_other_dtypes_and_orders_in_memory(tmp_path: Path, layout: str) -> None:
    rows = attention.main(
        [
            *TINY,
            *("--dtypes", "bfloat16", "float64", "--layout", layout, "--no-memory"),
            *("--lengths", "70", "--more-lengths", "--only", "chunked", "softmax", "fla", "fast"),
            *("--out", str(tmp_path)),
        ]
    )
    assert {row.dtype for row in rows if row.counts} == {"bfloat16", "float64"}
    for row in rows:
        assert row.counts or row.note in ("WRONG", f"does not take {row.dtype}"), row
        if row.note == "WRONG":
            assert not row.backend, row  # a peer may be, in bfloat16
        elif row.dtype == "float64" and row.seconds is not None:
            assert max(row.error or 0.0, row.grad_error or 0.0) < 1e-10, row


@pytest.mark.usefixtures("no_figures")
@LINUX
def test_memory_alone_is_measured_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a call was timed")

    monkeypatch.setattr(attention, "interleave", refuse)
    rows = attention.main(
        [
            *("--only-memory", "--threads", "1", "--lengths", "100", "512", "--only", "chunked"),
            *("--jobs", "product", "rotary", "--out", str(tmp_path)),
        ]
    )
    assert len(rows) == 8
    for row in rows:
        assert row.right and row.seconds is None and row.error is not None, row
        assert row.extra_bytes is not None and row.extra_share is not None, row
        # What is returned is held at the end: as always, to a page or two.
        assert row.extra_share > 0.97, row
    assert list(attention.attention_figures(rows)) == ["memory"]
    text = (tmp_path / "attention.md").read_text()
    for word in ("(attention-memory.png)", "of a process that makes the call once"):
        assert word in text
    for word in ("attention-time", "GFLOP/s", "Times:", "best peer", " ms"):
        assert word not in text
    # The bounds are for lengths from 512 on, and the verdict says so.
    for job in ("bare product", "rotation"):
        (line,) = re.findall(rf"chunked: extra memory / .output . gradients., {job} (.*)", text)
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        assert cells[2:] in (["≤ 1.4", "met at 512"], ["≤ 1.4", "**missed** at 512"])
        shares = {row.time: row.extra_share for row in rows if row.mode == MODES[True]}
        assert shares.keys() == {100, 512} and all(re.fullmatch(r"\d\.\d\d", c) for c in cells[:2])
    by_entry = {(row.job, row.mode, row.time): row for row in rows}
    for (job, mode, length), row in by_entry.items():
        if mode == MODES[True]:
            shown = f"| {(row.extra_bytes or 0) / 1e6:.1f} | {row.extra_share or 0:.2f} |"
            lines = [x for x in text.splitlines() if x.startswith("| linear_rope chunked")]
            assert any(f"| {length} |" in x and shown in x for x in lines), (job, shown)


def _sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).tril() @ v


def _blind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).tril(-1) @ v  # a token does not see itself


def _half_deaf(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).tril() @ v.detach() + 0 * v  # the gradient of v is lost


def _prepared(run: Run, time: int, width: int, dtype: torch.dtype) -> Run:
    return run


def _broken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise RuntimeError("this peer is broken")


@pytest.mark.usefixtures("no_figures")
def test_a_wrong_result_counts_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {"right": _sums, "blind": _blind, "deaf": _half_deaf, "broken": _broken}
    found = Field()
    for name, run in runs.items():
        jobs = {"product": partial(_prepared, run)}
        found.present[name] = Contestant(name, jobs, rival=True)
    monkeypatch.setattr(attention, "find_contestants", lambda _: found)
    rows = attention.main(
        [*TINY, "--lengths", "50", "--more-lengths", "--no-memory", "--out", str(tmp_path)]
    )
    right = {(row.contestant, row.mode): row.counts for row in rows}
    forward, both = MODES.values()
    assert right["right", forward] and right["right", both]
    assert not right["blind", forward] and not right["blind", both]
    assert right["deaf", forward] and not right["deaf", both]
    assert not right["broken", forward]
    text = (tmp_path / "attention.md").read_text()
    assert "best peer, product, forward+backward, ms | right" in text
    assert text.count("WRONG") == 3 and "this peer is broken" in text
    # No memory was measured, so none is drawn or shown.
    assert "attention-time.png" in text and "attention-memory" not in text
    assert list(attention.attention_figures(rows)) == ["time"]


@pytest.mark.usefixtures("no_figures")
@LINUX
def test_who_is_too_slow_is_left_out_and_named(tmp_path: Path) -> None:
    rows = attention.main(
        [
            *TINY,
            *("--lengths", "64", "128", "--more-lengths", "--only", "chunked", "--limit", "1e-9"),
            *("--jobs", "product", "--out", str(tmp_path)),
        ]
    )
    # Once too slow, it is not tried again at a greater length.
    assert [row.note for row in rows] == ["takes more than 1e-09 s at T=64"] * 4
    assert "takes more than" in (tmp_path / "attention.md").read_text()


def test_judged_rows_reach_gradients_far_from_them() -> None:
    # A fault that only shows at the end of a long sequence must be seen at that length.
    def forgets(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        far = torch.arange(k.shape[2]) >= 64
        return (q @ torch.where(far[:, None], k.detach(), k).mT).tril() @ v

    problem = Problem(Case(200, 2, 2, 8, 8))
    for run, is_right in ((_sums, True), (forgets, False)):
        who = Contestant("it", {"product": partial(_prepared, run)})
        errors = problem.judge(who, "product", True)
        assert errors.out < 1e-6
        assert errors.within("float32") == is_right


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--shapes", "4x8"], "BATCHxHEADSxWIDTH"),
        (["--shapes", "4x8x7"], "odd width"),
        (["--lengths", "0"], "T=0"),
        (["--dtypes", "int8"], "int8"),
        (["--only-memory", "--no-memory"], "not allowed with"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        attention.parse(arguments)
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


# --- targets --------------------------------------------------------------------------------------


def _row(contestant: str, time: int, seconds: float, **fields: object) -> Row:
    values: dict[str, object] = {
        "backend": contestant.removeprefix("linear_rope ") if "linear" in contestant else "",
        "rival": "peer" in contestant,
        "job": "product",
        "mode": "forward",
        "shape": "4x8x64x64",
        "dtype": "float32",
        "layout": "own",
        "result_bytes": 1000,
        "right": True,
    }
    return Row(contestant, time=time, seconds=seconds, **{**values, **fields})  # type: ignore[arg-type]


def _verdicts(rows: list[Row]) -> dict[str, list[str]]:
    lines = [line.split("|")[1:-1] for line in targets_table(rows).splitlines()[2:]]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}


def test_ratios_are_to_the_best_peer_that_is_right() -> None:
    rows = [
        _row("linear_rope chunked", 1024, 0.010),
        _row("linear_rope chunked", 4096, 0.050),
        _row("peer a", 1024, 0.030),
        _row("peer a", 4096, 0.100),
        _row("peer b", 1024, 0.020, right=False),
        _row("peer c", 4096, 0.200),
        _row("not a rival", 1024, 0.001),
    ]
    verdicts = _verdicts(rows)
    assert verdicts["best peer, product, forward, ms"][:2] == ["peer a 30", "peer a 100"]
    ratio = verdicts["chunked / best peer, bare product, forward"]
    assert ratio == ["0.33", "0.50", "≤ 0.45", "**missed** at 4096"]
    rows[1] = _row("linear_rope chunked", 4096, 0.044)
    assert _verdicts(rows)["chunked / best peer, bare product, forward"][-1] == "met"
    # The targets are for one shape and dtype.
    others = [_row(row.contestant, row.time, row.seconds or 0.0, dtype="bfloat16") for row in rows]
    assert _verdicts(others)["chunked / best peer, bare product, forward"][1:] == ["0.44", "", ""]


def test_a_verdict_is_of_the_lengths_that_are_judged() -> None:
    lengths = [128, 512, 1024, 2048, 4096, 8192, 16384, 32768]
    name = "chunked / best peer, bare product, forward"

    def verdict(seconds: dict[int, float]) -> str:
        rows = [_row("peer", time, 1.0) for time in lengths]
        rows += [_row("linear_rope chunked", time, x) for time, x in seconds.items()]
        return _verdicts(rows)[name][-1]

    kept = dict.fromkeys(lengths, 0.3)
    assert verdict(kept) == "met at 512 to 16384"
    # 128 and 32768 have no bound, whatever they are.
    assert verdict({**kept, 128: 9.0, 32768: 9.0}) == "met at 512 to 16384"
    assert verdict({512: 0.3, 4096: 0.3}) == "met at 512, 4096"
    most = {**kept, 512: 0.9, 16384: 0.9}
    assert verdict(most) == "**missed** at 512, 16384; met at 1024 to 8192"
    assert verdict(dict.fromkeys(lengths, 0.9)) == "**missed** at 512 to 16384"
    rows = [_row("peer", 512, 1.0), _row("linear_rope chunked", 512, 0.9)]
    assert _verdicts(rows)[name][-1] == "**missed**"


def test_memory_rate_and_slope_have_targets() -> None:
    both = MODES[True]
    rows = [
        _row("linear_rope native", 4096, 1.0, rate=60.0, matmul_rate=100.0),
        _row("linear_rope native", 16384, 4.1, rate=40.0, matmul_rate=100.0),
        _row("linear_rope native", 4096, 1.0, mode=both, extra_bytes=1050),
        _row("linear_rope native", 16384, 4.0, mode=both, extra_bytes=1200),
    ]
    verdicts = _verdicts(rows)
    rate = verdicts["native: of the matmul rate, bare product, forward"]
    assert rate == ["0.60", "0.40", "≥ 0.55 / 0.45", "**missed** at 16384"]
    memory = verdicts["native: extra memory / (output + gradients), bare product"]
    assert memory == ["1.05", "1.20", "≤ 1.1", "**missed** at 16384"]
    name = "native: slope of time from T = 2048 on, bare product, forward"
    assert name not in verdicts  # two lengths that lie close together tell no slope
    rows += [_row("linear_rope native", 32768, 9.0), _row("linear_rope native", 512, 9.0)]
    assert _verdicts(rows)[name][-3:] == ["1.05", "≤ 1.1", "met"]


# --- decode ---------------------------------------------------------------------------------------


def test_decode_runs(tmp_path: Path) -> None:
    rows = decode.main(
        [
            *("--threads", "1", "--rounds", "2", "--contexts", "16", "64", "--far", "1000"),
            *("--heads", "2", "--width", "8", "--new-tokens", "4", "--model", "1", "16", "2"),
            *("--out", str(tmp_path)),
        ]
    )
    kept: dict[str, dict[int, int]] = {}
    for row in rows:
        assert row.error < 1e-5 and 0 < row.low <= row.seconds <= row.high, row
        kept.setdefault(row.contestant, {})[row.context] = row.state_bytes
    assert set(kept["linear_rope, rotation"]) == {16, 64, 1000}
    assert len(set(kept["linear_rope, rotation"].values())) == 1
    cache = kept["softmax cache, rotation"]
    assert cache == {16: 2 * 2 * 16 * 8 * 4, 64: 2 * 2 * 64 * 8 * 4}
    text = (tmp_path / "decode.md").read_text()
    for part in ("linear_rope, rotation, 1000 / 16", "tokens/s", "share in matrix products"):
        assert part in text
    assert "torch, operation by operation" in text and "torch.compile" not in text
    for name in ("decode.csv", "decode.png", "decode.svg"):
        assert (tmp_path / name).stat().st_size > 100


def test_steps_are_judged_at_their_position() -> None:
    sizes = Sizes(heads=2, width=8, tokens=3, seed=0)
    for make in find_steppers(sizes)[0].values():
        assert make(50).judge() < 1e-5
    late = Ours(sizes, 50)
    late.state = late.state._replace(position=late.state.position + 1)
    assert late.judge() > 1e-3


@pytest.mark.slow
def test_ways_to_decode_are_timed_and_judged() -> None:
    torch._dynamo.reset()
    options = decode.parse(["--compile", "--rounds", "2", "--new-tokens", "3"])
    options.model = [1, 16, 2]
    text = decode_report(options, compiler="aot_eager")
    torch._dynamo.reset()
    rows = [re.findall(r"[^|]+", line) for line in text.splitlines() if " to " in line]
    names = [row[0].strip() for row in rows]
    assert names[0] == "torch, operation by operation" and names[-1] == "torch.compile"
    for row in rows:
        assert 0 <= float(row[3]) < 1e-5 and float(row[2]) > 0, row


# --- long -----------------------------------------------------------------------------------------


def test_long_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--length", "1300", "--heads", "2", "--width", "8", "--samples", "40"]
    long.main([*sizes, "--threads", "1", "--out", str(tmp_path)])
    text = (tmp_path / "long.md").read_text()
    assert text in capsys.readouterr().out and "1,300 tokens" in text
    (error,) = re.findall(r"relative error of 40 rows \| (\S+)", text)
    assert 0 < float(error) < 1e-5
    (forward,) = re.findall(r"forward \| (\S+) s", text)
    assert 0 <= float(forward) < 60


def test_the_error_of_a_long_sequence_is_that_of_its_worst_row() -> None:
    q, k, v = torch.randn(3, 1, 1, 50, 4)
    out = linear_attention(q, k, v, rotary=Rotary(4))
    assert long.sampled_error(q, k, v, out, piece=16, samples=200) < 1e-5
    out[0, 0, 33] *= 1.5
    worst = long.sampled_error(q, k, v, out, piece=16, samples=200)
    assert worst == pytest.approx(0.5, rel=1e-3)


# --- packing ------------------------------------------------------------------------------------


def test_packing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--length", "50", "--documents", "7", "--heads", "2", "--width", "8")
    packing.main([*sizes, "--threads", "1", "--rounds", "2", "--out", str(tmp_path)])
    text = (tmp_path / "packing.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if line.startswith(("| chun", "| nat"))]
    assert {row[1].strip() for row in rows} >= {"chunked"} and len(rows) in (2, 4)
    for row in rows:
        assert float(row[5]) > 0 and float(row[6]) < 1e-5
    with pytest.raises(SystemExit):
        packing.main(["--length", "3", "--documents", "4", "--out", str(tmp_path)])
    assert "--documents must lie between 1 and --length, got 4 for 3" in capsys.readouterr().err


# --- train ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_train_runs(tmp_path: Path) -> None:
    rows = train.main(
        [
            *("--threads", "1", "--rounds", "2", "--lengths", "16", "--tokens", "64"),
            *("--layers", "1", "--dim", "16", "--heads", "2", "--profile", "--out", str(tmp_path)),
        ]
    )
    for row in rows:
        assert not row.note and (row.time, row.batch, row.part) == (16, 4, 4), row
        assert row.first_loss is not None and row.last_loss is not None
        assert row.last_loss < row.first_loss
        assert not STATUS.exists() or row.extra_bytes is not None
    names = {row.model for row in rows}
    assert {"linear_rope chunked", "linear_rope softmax", "floor: no mixing"} <= names
    text = (tmp_path / "train.md").read_text()
    assert "tokens/s" in text and "largest costs" in text and "aten::" in text


def test_a_batch_in_parts_makes_the_same_step() -> None:
    size = Size(time=8, batch=5, layers=1, dim=16, heads=2)
    for name in ("linear_rope chunked", "linear_rope softmax", "floor: no mixing"):
        whole, parts = Trainer(name, size, 5), Trainer(name, size, 2)
        for _ in range(2):
            assert whole.step() == pytest.approx(parts.step(), rel=1e-5)
        for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-4)


# --- the text -------------------------------------------------------------------------------------


def test_documented_commands_exist() -> None:
    text = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    documented = [text, *((module.__doc__ or "") for module in (attention, decode, train))]
    found = re.findall(
        r"python -m benchmarks\.(attention|decode|train)([^`\n(]*)", "\n".join(documented)
    )
    assert len(found) >= 9
    for name, arguments in found:
        {"attention": attention, "decode": decode, "train": train}[name].parse(
            shlex.split(arguments)
        )
    for name in re.findall(r"`--([\w-]+)`", text):
        if name not in ("help", "no-build-isolation", "no-cache-dir"):
            assert any(f'"--{name}"' in p.read_text() for p in (ROOT / "benchmarks").glob("*.py"))


def test_the_least_that_generation_costs_has_the_product_of_every_matrix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, seen = LanguageModel(best(vocab_size=11, dim=16, heads=4, layers=2)), []
    monkeypatch.setattr(
        "benchmarks._generate.F.linear", lambda x, weight, bias: seen.append(weight)
    )
    products(model, 1)
    # The gates of decays and of outputs too; the embedding is the output layer.
    wanted = sorted(id(p) for p in model.parameters() if p.ndim == 2)
    assert sorted(map(id, seen)) == wanted and len(wanted) == 2 * 9 + 1
