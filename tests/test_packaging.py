"""What a user meets first: the installation, a silent import, the version, the license."""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import linear_rope

ROOT = Path(__file__).resolve().parent.parent
OPTIONAL = {
    *(
        "accelerate",
        "constriction",
        "enwik8",
        "fla",
        "gensim",
        "matplotlib",
        "performer_pytorch",
        "pooch",
    ),
    *("tensorboard", "tqdm", "transformers", "triton", "tyro"),
}


def python(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


# --- the import -----------------------------------------------------------------------------------


@pytest.mark.parametrize("setup", ["", "import sys; sys.modules['numpy'] = None; "])
def test_import_prints_nothing_and_warns_of_nothing(tmp_path: Path, setup: str) -> None:
    # From another folder, without a compiler on PATH, with no GPU to be seen; with and without
    # NumPy, which torch does not require but misses.
    done = python(
        *("-W", "error", "-c", f"{setup}import linear_rope"),
        cwd=tmp_path,
        PATH=str(tmp_path),
        CUDA_VISIBLE_DEVICES="",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What `import linear_rope` changes in a fresh process that has torch and einops already."""
    script = """
import json, sys, time
import torch, einops

def torch_state():
    return [
        str(torch.get_default_dtype()), torch.get_num_threads(), torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(), torch.get_rng_state().sum().item(),
    ]

before, modules, start = torch_state(), set(sys.modules), time.process_time()
import linear_rope
seconds, new = time.process_time() - start, set(sys.modules) - modules
print(json.dumps(
    {"seconds": seconds, "modules": sorted(new), "before": before, "after": torch_state()}
))
"""
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_brings_in_nothing_optional(report: dict[str, Any]) -> None:
    assert "linear_rope.functional" in report["modules"]
    assert {name.partition(".")[0] for name in report["modules"]} & OPTIONAL == set()


def test_import_adds_little_to_torchs_own(report: dict[str, Any]) -> None:
    assert report["seconds"] < 1.0, "seconds of processor time"


def test_import_leaves_torchs_global_state_alone(report: dict[str, Any]) -> None:
    assert report["after"] == report["before"]


def test_every_public_name_exists_once() -> None:
    assert len(set(linear_rope.__all__)) == len(linear_rope.__all__)
    assert [name for name in linear_rope.__all__ if not hasattr(linear_rope, name)] == []


# --- the distribution -----------------------------------------------------------------------------


def test_version_is_that_of_the_distribution() -> None:
    installed = importlib.metadata.version("linear_rope")
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", linear_rope.__version__)
    assert linear_rope.__version__ == installed, "the environment is stale: run `make -B venv`"


def test_library_requires_torch_and_einops_only() -> None:
    requirements = importlib.metadata.requires("linear_rope") or []
    always = [line for line in requirements if "extra ==" not in line]
    assert sorted(re.split(r"[^A-Za-z0-9_-]", line)[0] for line in always) == ["einops", "torch"]
    extras = importlib.metadata.metadata("linear_rope").get_all("Provides-Extra")
    assert {"cuda", "dev", "enwik8", "performer", "sample"} <= set(extras or [])


def test_license_goes_with_the_distribution() -> None:
    metadata = importlib.metadata.metadata("linear_rope")
    assert metadata["License-Expression"] == "MIT"
    assert metadata.get_all("License-File") == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert text.startswith("MIT License") and "linear_rope contributors" in text


@pytest.mark.parametrize("package", ["linear_rope", "enwik8"])
def test_package_is_marked_as_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_experiment_requires_what_it_imports_and_nothing_else() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = config["options.extras_require"]["enwik8"].split("\n")
    required = {Requirement(line).name for line in lines if line and not line.startswith("#")}
    sources = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "enwik8").rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:import|from) ([a-z]\w*)", sources, re.MULTILINE))
    # gensim, the extra `sample`, is only searched for a file.
    ours = {"enwik8", "linear_rope", "torch", "einops"}
    assert imported - ours - set(sys.stdlib_module_names) == required


# --- the pinned set -------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_every_requirement_has_one_pin_in_its_range(version: str) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins: dict[str, str] = {}
    for pin in (Requirement(line) for line in lines if line and not line.startswith("#")):
        if pin.marker is None or pin.marker.evaluate({"python_version": version}):
            name = canonicalize_name(pin.name)
            assert name not in pins, f"{name} has two pins"
            pins[name] = str(pin.specifier).removeprefix("==")
    for line in importlib.metadata.requires("linear_rope") or []:
        requirement = Requirement(line)
        if 'extra == "cuda"' in line:  # cannot be tested without a GPU
            continue
        extra = re.search(r'extra == "([^"]+)"', line)
        environment = {"python_version": version, "extra": extra[1] if extra else ""}
        if requirement.marker and not requirement.marker.evaluate(environment):
            continue  # asked of another Python only, which has its pin
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), line


@pytest.mark.slow
def test_a_wheel_holds_all_that_an_installation_needs(tmp_path: Path) -> None:
    source, built = tmp_path / "source", tmp_path / "built"
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in ("linear_rope", "enwik8"):
        shutil.copytree(
            ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(built), str(source)], check=True, timeout=120)
    (wheel,) = built.glob("linear_rope-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    for package in ("linear_rope", "enwik8"):
        wanted = {str(p.relative_to(ROOT)) for p in (ROOT / package).rglob("*.py")}
        assert wanted | {f"{package}/py.typed"} <= held
    assert any(name.endswith("LICENSE") for name in held)
    # Imported from the wheel alone, with nothing of the source tree on the path.
    code = f"import sys; sys.path.insert(0, {str(wheel)!r}); import linear_rope; "
    code += "import linear_rope.checks; print(linear_rope.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert str(wheel) in done.stdout
