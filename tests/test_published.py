"""Numbers that the README claims are those of the committed results."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from enwik8.statistics import interval

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
CLAIM = re.compile(r"(\d\.\d{3})(?:\s±\s(\d\.\d{3}))?")


def published() -> dict[str, set[tuple[str, str]]]:
    """Of each arm, and of all under "": (mean, half of its interval or nothing), of tables, pairs
    and final losses of single runs, three digits each."""
    found: dict[str, set[tuple[str, str]]] = {"": set()}

    def add(arm: str, mean: float, half: str = "") -> None:
        for key in (arm, ""):
            found.setdefault(key, set()).update(
                {(f"{abs(mean):.3f}", half), (f"{abs(mean):.3f}", "")}
            )

    for path in RESULTS.glob("*/table.csv"):
        for row in csv.DictReader(path.read_text().splitlines()):
            for name in row:
                if f"{name}_high" in row and row[name]:
                    mean, high = float(row[name]), row[f"{name}_high"]
                    add(
                        row["arm"], mean, "" if high in ("", "nan") else f"{float(high) - mean:.3f}"
                    )
    for path in RESULTS.glob("*/runs.csv"):
        for row in csv.DictReader(path.read_text().splitlines()):
            if row["final"]:
                add(row["arm"], float(row["final"]))
    for path in RESULTS.glob("*/metrics.csv"):
        last: dict[str, str] = {}
        for row in csv.DictReader(path.read_text().splitlines()):
            for name, value in row.items():
                if name.startswith("validation") and value:
                    last[row["arm"]] = value
        for arm, value in last.items():
            add(arm, float(value))
    for path in RESULTS.glob("*/summary.md"):
        # Pairs of arms stand in the summary alone.
        pair = r"- ([\w-]+): ([+-]\d\.\d{4})(?: ± (\d\.\d{4}))? against"
        for arm, mean, half in re.findall(pair, path.read_text()):
            add(arm, float(mean), f"{float(half):.3f}" if half else "")
    return found


def claims(text: str) -> list[tuple[str, tuple[str, str]]]:
    """Numbers of three decimals, each with the arm that begins its row of a table, or nothing."""
    lines = text.splitlines()
    found = [("", "\n".join(line for line in lines if not line.startswith("|")))]
    for line in lines:
        if line.startswith("|"):
            row = re.match(r"\| `([\w-]+)`", line)
            found.append((row[1] if row else "", line))
    return [
        (arm, (match[1], match[2] or "")) for arm, part in found for match in CLAIM.finditer(part)
    ]


def section(name: str = "results") -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.split(f"<!-- {name}:begin -->")[1].split(f"<!-- {name}:end -->")[0]


def test_the_readme_claims_what_was_published() -> None:
    known, made = published(), claims(section())
    known[""] |= over_seeds()
    assert len(made) > 25 and len([arm for arm, _ in made if arm]) > 15
    missing = [(arm, number) for arm, number in made if number not in known.get(arm, set())]
    assert not missing, f"in no file of results/: {missing}"


def test_a_wrong_number_would_be_found() -> None:
    known = published()
    assert claims("2.389 ± 0.016, and 0.5") == [("", ("2.389", "0.016"))]
    assert claims("| `best`: all | 2.388 |") == [("best", ("2.388", ""))]
    assert ("2.388", "0.016") in known[""]
    assert ("2.389", "0.016") not in known[""] and ("2.388", "0.017") not in known[""]
    # The same number of another arm is no proof.
    assert ("2.388", "0.016") in known["best"]
    assert ("2.388", "0.016") not in known["softmax-rope-llama"]


def over_seeds() -> set[tuple[str, str]]:
    """Of each arm of a study at each rate, and of the difference of any two over the seeds that
    both have (two or more): final losses and those in longer windows. More seeds of a study lie
    beside it, in a folder called NAME-seeds."""
    found: set[tuple[str, str]] = set()
    studies: dict[str, dict[tuple[str, str], dict[str, float]]] = {}
    for path in RESULTS.glob("*/runs.csv"):
        runs = studies.setdefault(path.parent.name.removesuffix("-seeds"), {})
        for row in csv.DictReader(path.read_text().splitlines()):
            for name in row:
                if row[name] and (name == "final" or name.startswith("at_")):
                    arm = row["run"].rsplit("-seed", 1)[0]
                    runs.setdefault((name, arm), {})[row["seed"]] = float(row[name])
    for runs in studies.values():
        several = [list(seeds.values()) for seeds in runs.values()]
        for one, other in combinations(runs, 2):
            if one[0] == other[0]:
                seeds = sorted(set(runs[one]) & set(runs[other]))
                several.append([runs[one][seed] - runs[other][seed] for seed in seeds])
        for values in several:
            if len(values) > 1:
                known = interval(values)
                found.add((f"{abs(known.mean):.3f}", f"{known.half:.3f}"))
    return found


def test_the_log_claims_what_was_published() -> None:
    """Numbers with an interval; others stand in files too, but chance would find them there."""
    known = published()[""] | over_seeds()
    log = (RESULTS / "README.md").read_text(encoding="utf-8")
    made = [number for _, number in claims(log) if number[1]]
    assert len(made) > 60
    missing = [number for number in made if number not in known]
    assert not missing, f"in no file of results/: {missing}"
    assert ("0.268", "0.123") in known and ("0.268", "0.122") not in known


# ---- The paragraph on speed ---------------------------------------------------------------------

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w])")


class Fact(NamedTuple):
    """A number, and what is said around it: lengths (powers of two) and forms of the product."""

    number: str
    lengths: frozenset[int]
    forms: frozenset[str]


def facts_of(text: str, around: str = "") -> list[Fact]:
    context = f"{around} {text}"
    numbers = [x.replace(",", "") for x in NUMBER.findall(context)]
    lengths = frozenset(
        n for x in numbers if x.isdigit() and (n := int(x)) >= 256 and not n & (n - 1)
    )
    forms = frozenset(x for x in ("native", "chunked") if x in context)
    return [Fact(x.replace(",", ""), lengths, forms) for x in NUMBER.findall(text)]


def in_prose(text: str) -> Iterator[Fact]:
    """Each number in its sentence, or in its part of one."""
    for paragraph in re.split(r"\n\s*\n|\n- ", text):
        for sentence in re.split(r"[.;:]\s", " ".join(paragraph.split()) + " "):
            yield from facts_of(sentence)


def in_tables(text: str) -> Iterator[Fact]:
    """Each number in its cell, with the column's title, the row's name and, if there, its T."""
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
        else:
            at = cells[header.index("T")] if "T" in header else ""
            for title, cell in zip(header[1:], cells[1:], strict=False):
                yield from facts_of(cell, f"{title.replace('T=', '')} {cells[0]} {at}")


def measured() -> list[Fact]:
    """Of the reports of benchmarks, and of the entry on speed in the log of results."""
    (entry,) = (
        part
        for part in (RESULTS / "README.md").read_text(encoding="utf-8").split("\n## ")
        if "speed and memory" in part.splitlines()[0]
    )
    prose = "\n".join(x for x in entry.splitlines() if not x.startswith("|"))
    prose = re.sub(r"```.*?```", "", prose, flags=re.DOTALL)
    texts = [path.read_text(encoding="utf-8") for path in (RESULTS / "benchmarks").rglob("*.md")]
    return [*in_prose(prose), *(fact for text in (entry, *texts) for fact in in_tables(text))]


def is_measured(claim: Fact, known: list[Fact]) -> bool:
    """Whether such a number was measured; a whole one may be rounded.

    One with decimals must be of one of the lengths and of one of the forms that the claim's
    sentence names; where it names neither, of a sentence that names no form.
    """
    if "." not in claim.number:
        return any(
            int(claim.number) in fact.lengths or f"{float(fact.number):.0f}" == claim.number
            for fact in known
        )
    return any(
        claim.number == fact.number
        and (claim.lengths & fact.lengths or not claim.lengths)
        and (claim.forms & fact.forms or not claim.forms)
        and (claim.lengths or claim.forms or not fact.forms)
        for fact in known
    )


def test_the_readme_claims_the_speed_that_was_measured() -> None:
    known, made = measured(), list(in_prose(section("speed")))
    assert len([claim for claim in made if "." in claim.number]) >= 5
    missing = [claim for claim in made if not is_measured(claim, known)]
    assert not missing, f"neither in results/benchmarks nor in the log's entry: {missing}"


def test_a_wrong_speed_would_be_found() -> None:
    known = list(
        in_tables(
            "| | T=512 | T=4096 |\n| --- | ---: | ---: |\n| native / best peer | 0.27 | 0.11 |\n"
            "\n| contestant | T | ms |\n|---|---|---|\n| chunked | 512 | 0.31 (0.3 to 0.32) |"
        )
    ) + list(in_prose("`generate` is 5.9 times as fast, 4.96 GiB. It has 8 heads"))

    def found(text: str) -> list[bool]:
        return [is_measured(claim, known) for claim in in_prose(text)]

    assert found("`native` takes 0.11 at T = 4096; at 512 it is 0.27 and 0.31") == [True] * 5
    assert found("`native` takes 0.12 at T = 4096") == [False, True]
    assert found("`native` takes 0.11 at T = 512") == [False, True]
    assert found("`chunked` takes 0.11 at T = 4096") == [False, True]
    assert found("5.9 times with 8 heads, 5 GiB; 5.8 times") == [True, True, True, False]


def test_figures_are_there() -> None:
    figures = re.findall(r"\]\((results/[^)]+\.png)\)", (ROOT / "README.md").read_text("utf-8"))
    assert figures
    assert all((ROOT / figure).stat().st_size > 10_000 for figure in figures)
