"""A report's parts, written as Markdown and as one HTML page that needs nothing else.

The figures are in the page as PNG data, the style and the few lines that sort tables too: it opens
without a network, and its content security policy forbids one.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cell", "Picture", "Table", "markdown", "page"]


@dataclass(frozen=True)
class Cell:
    """Text, and the number that sorts it (None: by its text, after all numbers)."""

    text: str
    order: float | None


@dataclass(frozen=True)
class Table:
    """Names of the columns, and rows of as many cells."""

    names: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Picture:
    """A PNG file and what it shows."""

    path: Path
    words: str


Part = str | Table | Picture | list[str]  # a heading such as "## Results", ..., a list


def markdown(title: str, parts: Sequence[Part]) -> str:
    """The report as Markdown, with pictures beside it."""
    lines = [f"# {title}", ""]
    for part in parts:
        if isinstance(part, str):
            lines += [part, ""]
        elif isinstance(part, Table):
            lines.append("| " + " | ".join(part.names) + " |")
            lines.append("|:--|" + "--:|" * (len(part.names) - 1))
            for row in part.rows:
                lines.append("| " + " | ".join(cell.text for cell in row) + " |")
            lines.append("")
        elif isinstance(part, Picture):
            lines += [f"![{part.words}]({part.path.name})", ""]
        elif part:
            lines += [*(f"- {line}" for line in part), ""]
    return "\n".join(lines).rstrip() + "\n"


def page(title: str, parts: Sequence[Part]) -> str:
    """The report as one page."""
    body = [f"<h1>{html.escape(title)}</h1>"]
    for part in parts:
        if isinstance(part, str):
            level = len(part) - len(part.lstrip("#"))
            body.append(f"<h{level}>{_inline(part.lstrip('# '))}</h{level}>")
        elif isinstance(part, Table):
            body.append(_table(part))
        elif isinstance(part, Picture):
            data = base64.b64encode(part.path.read_bytes()).decode()
            words = html.escape(part.words)
            body.append(
                f'<figure><img alt="{words}" src="data:image/png;base64,{data}">'
                f"<figcaption>{words}</figcaption></figure>"
            )
        elif part:
            items = "".join(f"<li>{_inline(line)}</li>" for line in part)
            body.append(f"<ul>{items}</ul>")
    return _PAGE.format(title=html.escape(title), body="\n".join(body))


def _inline(text: str) -> str:
    text = html.escape(text, quote=False)
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text)
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)


def _table(table: Table) -> str:
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{html.escape(name)}</button></th>'
        for name in table.names
    )
    rows = []
    for row in table.rows:
        cells = "".join(
            f"<td{'' if cell.order is None else f' data-order={chr(34)}{cell.order!r}{chr(34)}'}>"
            f"{_inline(cell.text)}</td>"
            for cell in row
        )
        rows.append(f"<tr>{cells}</tr>")
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1080px; margin: 2em auto;
  padding: 0 1em; }}
h1 {{ font-size: 1.6em; }} h2 {{ font-size: 1.25em; margin-top: 2em; }} h3 {{ font-size: 1.05em; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }}
th, td {{ padding: 4px 9px; border-bottom: 1px solid #e2e2e2; text-align: right; }}
td {{ white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
th {{ vertical-align: bottom; border-bottom: 2px solid #999; }}
th button {{ font: inherit; font-weight: 600; background: none; border: 0; padding: 0;
  color: inherit; cursor: pointer; text-align: inherit; }}
th[aria-sort=ascending] button::after {{ content: " \\2191"; }}
th[aria-sort=descending] button::after {{ content: " \\2193"; }}
tbody tr:hover {{ background: #f6f6f6; }}
figure {{ margin: 1.5em 0; }} img {{ max-width: 100%; height: auto; }}
figcaption {{ color: #666; font-size: 13px; }}
code {{ font-size: 12px; overflow-wrap: anywhere; }}
</style>
</head>
<body>
{body}
<script>
for (const button of document.querySelectorAll("th button")) {{
  button.addEventListener("click", () => {{
    const head = button.parentElement, row = head.parentElement;
    const column = [...row.children].indexOf(head);
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of row.children) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = head.closest("table").tBodies[0];
    const key = (line) => line.children[column];
    const rows = [...body.rows].sort((a, b) => {{
      const [x, y] = [key(a).dataset.order, key(b).dataset.order];
      if (x === undefined && y === undefined)
        return (up ? 1 : -1) * key(a).textContent.localeCompare(key(b).textContent);
      if (x === undefined || y === undefined) return x === undefined ? 1 : -1;
      return (up ? 1 : -1) * (Number(x) - Number(y));
    }});
    body.append(...rows);
  }});
}}
</script>
</body>
</html>
"""
