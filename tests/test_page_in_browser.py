"""A study's page in a real browser: it runs, sorts, shows its figures, and asks for nothing."""

from __future__ import annotations

import http.server
import json
import re
import subprocess
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browsers
import pytest
from study_files import make_text, tiny

from enwik8.__main__ import main
from enwik8.study.page import Cell, Picture, Table, page

# First in the page, so that no fault of its own script is missed; the answer is text in the page.
_PROBE = """<script>
const faults = [];
addEventListener("error", (e) => faults.push(e.message || "not loaded: " + e.target.outerHTML
  .slice(0, 120)), true);
addEventListener("unhandledrejection", (e) => faults.push(String(e.reason)));
addEventListener("securitypolicyviolation", (e) => faults.push(
  "forbidden: " + e.violatedDirective + " " + e.blockedURI));
addEventListener("load", () => {
  const keys = (table, column) => [...table.tBodies[0].rows].map((row) => {
    const cell = row.children[column];
    return [cell.dataset.order === undefined ? null : Number(cell.dataset.order),
            cell.textContent, [...row.children].map((c) => c.textContent).join("|")];
  });
  const tables = [...document.querySelectorAll("table")].map((table) =>
    [...table.tHead.rows[0].children].map((head, column) => {
      const seen = [{marks: "", keys: keys(table, column)}];
      for (let click = 0; click < 3; ++click) {
        head.querySelector("button").click();
        const marks = [...table.tHead.rows[0].children].map((h) => h.getAttribute("aria-sort"));
        seen.push({marks: marks.join(" "), keys: keys(table, column)});
      }
      return seen;
    }));
  const found = {
    faults, tables,
    pictures: [...document.images].map((i) => [i.alt, i.naturalWidth, i.naturalHeight, i.width]),
    width: [document.documentElement.scrollWidth, innerWidth],
    fetched: performance.getEntriesByType("resource").map((e) => e.name)
      .filter((name) => !name.startsWith("data:")),
  };
  const answer = document.createElement("output");
  answer.id = "answer";
  answer.textContent = encodeURIComponent(JSON.stringify(found));
  document.body.append(answer);
});
</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = browsers.find()
    return found if found is not None else pytest.skip(browsers.WANTED)


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[str, list[str]]]:
    """A proxy that takes all that would leave this machine, and what it was asked for."""
    asked: list[str] = []

    class Refuse(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(502)

        do_CONNECT = do_POST = do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}", asked
    server.shutdown()


@pytest.fixture
def look(browser: str, network: tuple[str, list[str]], tmp_path: Path) -> Any:
    """look(page): open the page as a file, click every column three times, say what was seen."""
    proxy, asked = network

    def look(text: str) -> dict[str, Any]:
        assert text.count("<head>") == 1
        file = tmp_path / "looked-at.html"
        file.write_text(text.replace("<head>", "<head>" + _PROBE), encoding="utf-8")
        asked.clear()
        done = subprocess.run(
            [
                *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
                *("--disable-background-networking", "--disable-component-update"),
                *("--disable-sync", "--disable-dev-shm-usage", "--window-size=1200,900"),
                *(f"--user-data-dir={tmp_path / 'profile'}", f"--proxy-server={proxy}"),
                *("--virtual-time-budget=10000", "--dump-dom", file.as_uri()),
            ],
            capture_output=True,
            timeout=120,
        )
        answer = re.search(rb'<output id="answer">(.*?)</output>', done.stdout)
        assert answer, f"the page never loaded: {done.stderr.decode(errors='replace')[-2000:]}"
        found: dict[str, Any] = json.loads(urllib.parse.unquote(answer[1].decode()))
        # What the browser asks for by itself is no matter of the page.
        found["asked"] = [each for each in asked if "page-asks" in each]
        return found

    return look


def wrong(found: dict[str, Any]) -> list[str]:
    """What is wrong with a page that was looked at."""
    said = [*found["faults"], *found["fetched"], *found["asked"]]
    for words, width, height, shown in found["pictures"]:
        if not (width and height and shown):
            said.append(f"no picture: {words}")
    if found["width"][0] > found["width"][1]:
        said.append(f"wider than the window: {found['width']}")
    moved = False
    for number, table in enumerate(found["tables"]):
        for column, (before, *after) in enumerate(table):
            name = f"table {number}, column {column}"
            numbers = [[k[0] for k in each["keys"] if k[0] is not None] for each in after]
            up, down = sorted(numbers[0]), sorted(numbers[0], reverse=True)
            if numbers != [up, down, up]:
                said.append(f"{name} is not sorted: {numbers}")
            for each in (before, *after):
                missing = [k[0] is None for k in each["keys"]]
                if each is not before and missing != sorted(missing):
                    said.append(f"{name}: text before numbers")
                if sorted(k[2] for k in each["keys"]) != sorted(k[2] for k in before["keys"]):
                    said.append(f"{name}: rows were lost")
            if after[0]["keys"] != after[2]["keys"]:
                said.append(f"{name}: not as it was after two more clicks")
            turned = after[0]["keys"] != after[1]["keys"]
            if not turned and len({(k[0], k[1]) for k in before["keys"]}) > 1:
                several = len({k[0] for k in before["keys"]} - {None}) > 1
                if several or all(k[0] is None for k in before["keys"]):
                    said.append(f"{name}: a click changes nothing")
            moved = moved or turned
            for each, mark in zip(after, ("ascending", "descending", "ascending"), strict=True):
                marks = ["none"] * len(table)
                marks[column] = mark
                if each["marks"] != " ".join(marks):
                    said.append(f"{name}: marked {each['marks']}")
    if not moved:
        said.append("no table can be sorted")
    return said


@pytest.mark.slow
def test_a_study_s_page(look: Any, tmp_path: Path) -> None:
    file, out = tmp_path / "it.toml", tmp_path / "out"
    top = 'arms = ["elu-none", "elu-rope", "elu-learned"]\nseeds = [0, 1]'
    file.write_text(tiny(make_text(tmp_path / "text.txt"), top))
    assert main(["study", str(file), "--out", str(out), "--measure-speed", "1"]) == 0
    found = look((out / "report.html").read_text(encoding="utf-8"))
    assert wrong(found) == []
    figures = [p for p in out.glob("*.png")]
    assert len(found["pictures"]) == len(figures) >= 3 and len(found["tables"]) >= 3
    # As large as the files beside the page.
    sizes = {
        tuple(int.from_bytes(p.read_bytes()[i : i + 4], "big") for i in (16, 20)) for p in figures
    }
    assert {(width, height) for _, width, height, _ in found["pictures"]} == sizes


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A page with a table, a column of which lacks a number, and a picture."""
    from matplotlib.figure import Figure

    Figure(figsize=(1, 1)).savefig(tmp_path / "it.png")
    rows = [("b", 10.0, -1.0), ("a <i>", 9.0, None), ("c", 100.0, 3.0)]
    cells = [tuple(Cell(str(v), v if isinstance(v, float) else None) for v in row) for row in rows]
    table = Table(("name", "value", "other"), tuple(cells))
    return page("A small one", ["## Heading", table, Picture(tmp_path / "it.png", "a figure")])


def test_a_small_page(look: Any, small: str) -> None:
    assert wrong(look(small)) == []


_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy".*?>', re.DOTALL)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda p: p.replace("for (const button", "nobody();\nfor (const button"), "nobody"),
        (lambda p: p.replace("body.append(...rows)", ""), "is not sorted"),
        (lambda p: p.replace("(Number(x) - Number(y))", "x.localeCompare(y)"), "is not sorted"),
        (
            lambda p: p.replace("x === undefined ? 1 : -1", "x === undefined ? -1 : 1"),
            "text before",
        ),
        (lambda p: p.replace("image/png;base64,iVBOR", "image/png;base64,iVBOX"), "no picture"),
        (lambda p: p.replace("</h1>", '</h1><img src="http://page-asks.test/x.png">'), "forbidden"),
        (
            lambda p: _POLICY.sub("", p).replace(
                "</h1>", '</h1><script src="http://page-asks.test/x.js"></script>'
            ),
            "page-asks.test/x.js",
        ),
        (lambda p: p.replace("</h1>", '</h1><div style="width: 3000px">x</div>'), "wider than"),
    ],
)
def test_faults_of_a_page_are_seen(look: Any, small: str, damage: Any, named: str) -> None:
    damaged = damage(small)
    assert damaged != small
    said = wrong(look(damaged))
    assert any(named in each for each in said), said
