"""Numbers that the README claims are those of the committed results."""

from __future__ import annotations

import csv
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
CLAIM = re.compile(r"(\d\.\d{3})(?:\s±\s(\d\.\d{3}))?")


def published() -> set[tuple[str, str]]:
    """(mean, half of its interval or nothing) of tables and final losses, three digits each."""
    found = set()
    for path in RESULTS.glob("*/table.csv"):
        for row in csv.DictReader(path.read_text().splitlines()):
            for name in row:
                if f"{name}_high" in row and row[name]:
                    mean, high = float(row[name]), row[f"{name}_high"]
                    half = "" if high in ("", "nan") else f"{float(high) - mean:.3f}"
                    found |= {(f"{abs(mean):.3f}", half), (f"{abs(mean):.3f}", "")}
    for path in RESULTS.glob("*/metrics.csv"):
        last: dict[str, str] = {}
        for row in csv.DictReader(path.read_text().splitlines()):
            for name, value in row.items():
                if name.startswith("validation") and value:
                    last[row["arm"]] = value
        found |= {(f"{float(value):.3f}", "") for value in last.values()}
    for path in RESULTS.glob("*/summary.md"):
        # Pairs of arms stand in the summary alone.
        for mean, half in re.findall(r"([+-]\d\.\d{4}) ± (\d\.\d{4}) against", path.read_text()):
            found |= {
                (f"{abs(float(mean)):.3f}", f"{float(half):.3f}"),
                (f"{abs(float(mean)):.3f}", ""),
            }
    return found


def claims(text: str) -> list[tuple[str, str]]:
    return [(match[1], match[2] or "") for match in CLAIM.finditer(text)]


def section() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.split("<!-- results:begin -->")[1].split("<!-- results:end -->")[0]


def test_the_readme_claims_what_was_published() -> None:
    known, made = published(), claims(section())
    assert len(made) > 25
    missing = [claim for claim in made if claim not in known]
    assert not missing, f"in no file of results/: {missing}"


def test_a_wrong_number_would_be_found() -> None:
    known = published()
    assert claims("2.389 ± 0.016, and 0.5") == [("2.389", "0.016")]
    assert ("2.388", "0.016") in known
    assert ("2.389", "0.016") not in known and ("2.388", "0.017") not in known


def test_figures_are_there() -> None:
    figures = re.findall(r"\]\((results/[^)]+\.png)\)", (ROOT / "README.md").read_text("utf-8"))
    assert figures
    assert all((ROOT / figure).stat().st_size > 10_000 for figure in figures)
