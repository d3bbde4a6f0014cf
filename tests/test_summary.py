"""The words about a comparison: table, verdict, check of the batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from enwik8.curves import load_runs
from enwik8.errors import UserError
from enwik8.metrics import column_names
from enwik8.summary import batch_check, summarize, tokens_to_reach, verdict

Points = dict[int, float]  # validation bits per byte by step


def write(
    folder: Path,
    arms: dict[str, Points | list[Points]],
    *,
    steps: int = 40,
    hashes: dict[str, str] | None = None,
    planned: int | None = None,
    corpus: dict | None = None,
) -> Path:
    """A comparison of 100 tokens a step and 50 tokens a second; a list holds one entry a seed."""
    rows = [",".join(("arm", "seed", *column_names()))]
    for arm, curves in arms.items():
        for seed, points in enumerate(curves if isinstance(curves, list) else [curves]):
            for step in range(1, steps + 1):
                batch = (hashes or {}).get(arm, "") if step > 5 else ""
                rows.append(
                    f"{arm},{seed},{step},{step * 100},{9 - step / 10},{points.get(step, '')},"
                    f"0.001,1,{step * 2},50,{seed:04d}{step:08x}{batch or 'same'}"
                )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    record = {
        "arms": {arm: {"parameters": 1_000_000 + i} for i, arm in enumerate(arms)},
        "training": {"tokens": steps * 100 if planned is None else planned},
        "corpus": corpus
        or {"name": "enwik8-first-4000000-bytes", "description": "first 4,000,000 of enwik8's "
            "100,000,000 bytes", "sha256": "9f9ca3"},
        "command": "python -m enwik8 compare --preset small",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


TWO = {
    "elu-none": {10: 5.0, 20: 4.0, 40: 3.5},
    "elu-rope": {10: 4.6, 20: 3.8, 40: 3.3},
}


def test_tokens_to_reach():
    tokens, values = np.array([100.0, 200.0, 400.0]), np.array([5.0, 4.0, 3.0])
    assert tokens_to_reach(tokens, values, 4.5) == 150
    assert tokens_to_reach(tokens, values, 4.0) == 200
    assert tokens_to_reach(tokens, values, 3.25) == 350
    assert tokens_to_reach(tokens, values, 6.0) == 100
    assert tokens_to_reach(tokens, values, 2.9) is None
    assert tokens_to_reach(np.empty(0), np.empty(0), 3.0) is None
    # The first crossing counts, whatever comes later.
    assert tokens_to_reach(tokens, np.array([5.0, 3.0, 4.0]), 3.5) == 175


def test_three_lines_for_two_arms(tmp_path):
    lines = verdict(write(tmp_path, TWO))
    assert len(lines) == 3
    assert lines[0] == "Validation bits per byte: elu-none 3.5000, elu-rope 3.3000"
    assert "elu-rope is 0.2000 (5.71%) lower" in lines[1]
    # From 3.8 at 2,000 tokens to 3.3 at 4,000: 3.5 lies at 3,200.
    assert "elu-rope reached 3.5000 after 3,200 tokens (80%)" in lines[2]


def test_the_arm_with_rope_is_measured_whatever_the_order(tmp_path):
    swapped = verdict(write(tmp_path, dict(reversed(TWO.items()))))
    assert swapped == verdict(write(tmp_path, TWO))


def test_it_says_when_the_goal_was_not_reached(tmp_path):
    worse = {"elu-none": {20: 4.0, 40: 3.5}, "elu-rope": {20: 4.2, 40: 3.6}}
    lines = verdict(write(tmp_path, worse))
    assert "elu-rope is 0.1000 (2.86%) higher" in lines[1]
    assert "elu-rope did not reach 3.5000" in lines[2]


def test_a_goal_reached_at_the_first_evaluation_is_a_bound(tmp_path):
    lines = verdict(write(tmp_path, {"elu-none": {20: 4.0, 40: 3.5}, "elu-rope": {20: 3.0}}))
    assert "after at most 2,000 tokens (50%)" in lines[2]
    assert "UNEQUAL tokens (2,000 against 4,000)" in lines[1]


def test_more_arms_are_compared_with_the_first(tmp_path):
    lines = verdict(write(tmp_path, {**TWO, "softmax-rope": {20: 3.0, 40: 2.5}, "late": {}}))
    assert lines[0].startswith("elu-none 3.5000") and "baseline" in lines[0]
    assert lines[1].startswith("elu-rope 3.3000: 0.2000 (5.71%) lower; reached 3.5000 after 3,200")
    assert lines[2].startswith("softmax-rope 2.5000: 1.0000 (28.57%) lower")
    assert lines[3] == "late: no validation yet"


def test_seeds_are_averaged(tmp_path):
    seeds = {"elu-none": [{40: 3.4}, {40: 3.6}], "elu-rope": [{20: 3.6, 40: 3.2}] * 2}
    lines = verdict(write(tmp_path, seeds))
    assert lines[0] == "Validation bits per byte: elu-none 3.5000 ± 0.1000, elu-rope 3.2000"
    assert "after 2,500 tokens" in lines[2]


def test_the_summary_is_written_and_says_what_was_run(tmp_path):
    text = summarize(write(tmp_path, TWO))
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == text
    assert "Corpus: first 4,000,000 of enwik8's 100,000,000 bytes." in text
    assert "sha256 `9f9ca3`" in text
    assert "python -m enwik8 compare --preset small" in text
    for line in verdict(tmp_path):
        assert f"- {line}\n" in text
    rows = [line for line in text.splitlines() if line.startswith("| elu-")]
    assert rows[0] == (
        f"| elu-none | 0 | 1,000,000 | 4,000 | 3.5000 | 3.5000 | {2**3.5:.3f} | 50 |"
    )
    assert rows[1].startswith("| elu-rope | 0 | 1,000,001 | 4,000 | 3.3000 |")


def test_best_final_and_unfinished_are_told_apart(tmp_path):
    points = {"elu-none": {10: 3.0, 30: 3.2}}
    text = summarize(write(tmp_path, points, steps=35, planned=8000))
    assert "| 3,500 of 8,000 (unfinished) | 3.2000 (at 3,000 tokens) | 3.0000 |" in text


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_log_of_few_rows_has_a_summary(tmp_path, steps):
    text = summarize(write(tmp_path, TWO, steps=steps))
    assert "elu-none: no validation yet" in text and "elu-rope: no validation yet" in text
    assert f"| {steps * 100:,} | - | - | - |" in text


def test_a_loss_that_is_no_number_is_marked(tmp_path):
    folder = write(tmp_path, {"elu-none": {1: 5.0}}, steps=2)
    log = folder / "metrics.csv"
    log.write_text(log.read_text().replace(",200,8.8,", ",200,nan,"))
    assert "(loss no longer finite)" in summarize(folder)


def test_equal_batches_are_confirmed(tmp_path):
    runs = load_runs(write(tmp_path, {name: [points] * 2 for name, points in TWO.items()}))
    assert batch_check(runs).startswith("Batches: equal in all arms")


def test_unequal_batches_are_called_out(tmp_path):
    text = summarize(write(tmp_path, TWO, hashes={"elu-rope": "else"}))
    assert "**WARNING: the batches of the arms are NOT equal" in text
    assert "elu-rope and elu-none (seed 0) differ from step 6 on" in text


def test_one_arm_alone_claims_nothing_about_batches(tmp_path):
    runs = load_runs(write(tmp_path, {"elu-none": {40: 3.5}}))
    assert "nothing to compare" in batch_check(runs)
    assert verdict(runs) == [
        "elu-none 3.5000: final validation bits per byte of the first arm, the baseline"
    ]


def test_a_folder_without_a_log_is_named(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.csv does not exist"):
        summarize(tmp_path)
    assert not list(tmp_path.iterdir())
