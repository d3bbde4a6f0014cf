"""What README.md shows is run as it stands: code, commands, links and the numbers in the text."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from linear_rope import (
    AttentionState,
    KeyValueCache,
    MixedState,
    Rotary,
    SelectiveState,
    WindowCache,
    linear_attention,
    make_feature_map,
)

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "examples/README.md", "results/README.md")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(language: str, name: str = "README.md") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text(name), re.MULTILINE | re.DOTALL)


CODE = blocks("python")
COMMANDS = [
    shlex.split(line, comments=True)
    for name in DOCUMENTS
    for block in blocks("bash", name)
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip()
]


def test_every_block_of_code_was_found() -> None:
    # Blocks that the pattern misses (a wrong fence, another language's name) would not be run.
    fences = re.findall(r"^\s*```(\w*)", text("README.md"), re.MULTILINE)
    assert fences.count("python") == len(CODE) >= 5
    assert set(fences) <= {"", "python", "bash", "text"}


@pytest.mark.parametrize("code", CODE, ids=lambda code: str(CODE.index(code) + 1))
def test_code_runs_by_itself(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert max(map(len, code.splitlines())) <= 100
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    # A comment such as "# -0.11: negative" behind a print says what is printed: hold it to that.
    promised = re.findall(r"^print\(.*?# (-?\d[\d.]*(?:, -?\d[\d.]*)*)", code, re.MULTILINE)
    printed = capsys.readouterr().out
    for line, numbers in zip(printed.split("tensor")[1:], promised, strict=bool(promised)):
        values = [float(x) for x in re.findall(r"-?\d+\.\d*(?:e-?\d+)?", line)]
        wanted = numbers.split(", ")
        assert len(values) >= len(wanted), (line, wanted)
        for want, got in zip(wanted, values, strict=False):
            digits = len(want.partition(".")[2])
            assert abs(float(want) - got) <= 0.5 * 10**-digits + 1e-6, (want, got)


def test_commands_exist() -> None:
    enwik8 = pytest.importorskip("enwik8.__main__", exc_type=ImportError)
    targets = set(re.findall(r"^([a-z]+):", text("Makefile"), re.MULTILINE))
    assert len(COMMANDS) >= 10
    for command in COMMANDS:
        while "=" in command[0]:  # a variable of the environment
            command = command[1:]
        match command:
            case ["make", *wanted]:
                assert wanted and set(wanted) <= targets, command
            case ["python", "-m", "enwik8", *arguments]:
                enwik8.parse(arguments)  # exits, and so fails, if a flag is unknown
            case ["python", "-m", "enwik8.decay_figure", *arguments]:
                assert set(arguments[::2]) <= {"--out", "--width", "--feature-width", "--base"}
            case [
                "python",
                "-m",
                "benchmarks.long" | "benchmarks.packing" | "enwik8.synthetic",
                "--out",
                _,
            ]:
                pass
            case ["python", "-m", module, *arguments] if module.startswith("benchmarks."):
                pytest.importorskip(module).parse(arguments)
            case ["python", path]:
                assert (ROOT / path).is_file(), path
            case ["pip", "install", _] | ["python", "-m", "pytest" | "mypy" | "ruff", *_]:
                pass
            case _:
                raise AssertionError(f"nobody checks this command: {shlex.join(command)}")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", text(name))
    missing = [
        link for link in links if "://" not in link and not ((ROOT / name).parent / link).exists()
    ]
    assert links and not missing


@pytest.mark.parametrize("name", DOCUMENTS)
def test_tables_are_whole(name: str) -> None:
    prose = re.sub(r"^```.*?^```$", "", text(name), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", prose, re.MULTILINE):
        head, rule, *rows = table.splitlines()
        assert re.fullmatch(r"\|(---\|)+", rule), head
        assert {line.count("|") for line in (head, *rows)} == {rule.count("|")}, head


def test_names_in_the_tables_are_all_there_are() -> None:
    from linear_rope import BACKENDS, FEATURE_MAPS
    from linear_rope.functional import DENOMINATORS

    def first_column(title: str) -> list[str]:
        table = re.search(
            rf"^\| {re.escape(title)}.*\n\|[-|]+\n((?:^\|.*\n)+)", text("README.md"), 8
        )
        assert table, title
        return [row.split("`")[1] for row in table[1].splitlines()]

    assert first_column("Name | φ(x)") == list(FEATURE_MAPS)
    assert first_column("Name | What the numerator") == list(DENOMINATORS)
    assert sorted(first_column("Name | Time")) == sorted(["auto", *BACKENDS])


def test_presets_in_the_table_are_as_described() -> None:
    presets = pytest.importorskip("enwik8.presets", exc_type=ImportError).PRESETS
    row = (
        r"^\| `([\w-]+)`[^|]*\| ([\w-]+) \| (\d+), (\d+), (\d+) \| (\d+) "
        r"\| ([\d.]+) (million|billion)"
    )
    rows = re.findall(row, text("README.md"), re.MULTILINE)
    assert [row[0] for row in rows] == list(presets)
    for name, corpus, layers, dim, heads, length, tokens, unit in rows:
        s = presets[name].settings
        assert (corpus, *map(int, (layers, dim, heads, length))) == (
            *(s.corpus, s.layers, s.dim, s.heads, s.length),
        )
        scale = {"million": 1e6, "billion": 1e9}[unit]
        assert abs(s.steps * s.batch_size * s.length / scale / float(tokens) - 1) < 0.03


def test_shrinking_output_has_the_stated_size() -> None:
    assert "to 0.53 at position 100 and to 0.21 at position 2000" in " ".join(
        text("README.md").split()
    )
    q, k = torch.randn(2, 2, 8, 2016, 64)
    sums = linear_attention(q, k, torch.ones(2, 8, 2016, 1), rotary=Rotary(64)).mean((0, 1, 3))
    assert sums[0].item() == pytest.approx(1.0, abs=1e-6)
    assert sums[85:116].mean().item() == pytest.approx(0.53, abs=0.03)
    assert sums[1985:].mean().item() == pytest.approx(0.21, abs=0.02)


@pytest.mark.parametrize(
    ("width", "scale", "features", "least", "most"),
    [(32, 0.5, 2048, 0.05, 0.11), (64, 0.25, 256, 0.04, 0.08), (64, 1.0, 256, 1.0, 2.0)],
)
def test_favor_error_has_the_stated_size(
    width: int, scale: float, features: int, least: float, most: float
) -> None:
    errors = []
    for seed in range(6):
        q, k, v = torch.randn(3, 1, 1, 24, width, dtype=torch.float64)
        phi = make_feature_map("favor+", width, features=features, seed=seed)
        out = linear_attention(q * scale, k * scale, v, feature_map=phi, causal=False)
        exact = torch.nn.functional.scaled_dot_product_attention(q * scale, k * scale, v)
        errors.append(((out - exact).abs().sum() / exact.abs().sum()).item())
    assert least < sum(errors) / len(errors) < most


@pytest.mark.parametrize(
    "state", [AttentionState, KeyValueCache, MixedState, SelectiveState, WindowCache]
)
def test_the_states_are_listed_with_all_of_their_fields(state: Any) -> None:
    (row,) = re.findall(rf"^\| `{state.__name__}`.*$", text("README.md"), re.MULTILINE)
    assert [name for name in state._fields if f"`{name}`" not in row] == []
