"""`python -m linear_rope.checks MODULE:CALLABLE`: the table of checks for a module by its name."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from linear_rope.checks.suite import CHECKS, check_all

DESCRIPTION = """Checks an attention module or language model: causality, positions, streaming,
padding, packing, precision, gradients. Exits 1 if a check fails, 2 if it could not start."""


class UsageError(Exception):
    """Something that the caller has to change; the message is one sentence."""


def load(spec: str) -> tuple[nn.Module, Tensor | None, dict[str, Any]]:
    """The module, example input (or None) and options that "package.module:name" stands for."""
    path, colon, name = spec.partition(":")
    if not (path and colon and name):
        raise UsageError(f"{spec!r} must be MODULE:CALLABLE, such as my_package.layers:Attention")
    try:
        found: Any = importlib.import_module(path)
    except Exception as error:
        raise UsageError(f"cannot import {path!r}: {_sentence(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{path!r} has no {name!r}")
        found = getattr(found, part)
    if not isinstance(found, nn.Module):
        found = _make(spec, found)
    parts = found if isinstance(found, tuple) else (found,)
    module, example, options = (*parts, None, None)[:3] if len(parts) < 4 else (None, None, None)
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"{spec!r} must be a torch.nn.Module, or return one, or return (module, example input "
            f"or None, options of check_all); got {type(found).__name__}"
        )
    if not isinstance(example, Tensor | None) or not isinstance(options, dict | None):
        raise UsageError(f"{spec!r} must return (module, example tensor, dict of options)")
    return module, example, options or {}


def _make(spec: str, maker: Any) -> Any:
    if not callable(maker):
        raise UsageError(f"{spec!r} is {type(maker).__name__}, neither a module nor callable")
    try:
        needed = [
            p.name
            for p in inspect.signature(maker).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):  # built-in callables tell nothing
        needed = []
    if needed:
        raise UsageError(
            f"{spec!r} needs the arguments {', '.join(needed)}; name a function without arguments "
            "that returns the module"
        )
    try:
        return maker()
    except Exception as error:
        raise UsageError(f"calling {spec!r} failed: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m linear_rope.checks", description=DESCRIPTION)
    parser.add_argument(
        "module",
        metavar="MODULE:CALLABLE",
        help="a module, a class without required arguments, or a function that returns a module, "
        "(module, example input) or (module, example input, options of check_all)",
    )
    parser.add_argument("--length", type=int, help="time of the inputs (default 12)")
    parser.add_argument("--max-length", type=int, help="positions that the module has")
    parser.add_argument("--batch", type=int, help="rows of the inputs (default 2)")
    parser.add_argument("--seed", type=int, help="of the module and the inputs (default 0)")
    parser.add_argument(
        "--non-causal", action="store_true", help="an encoder: leave out causality and streaming"
    )
    parser.add_argument(
        "--skip", action="append", default=[], choices=list(CHECKS), help="leave a check out"
    )
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="ARGUMENT=WORD",
        help="the module's word for an argument, such as key_mask=attention_mask",
    )
    given = parser.parse_args(arguments)
    try:
        names = dict(pair.split("=", 1) for pair in given.name if "=" in pair)
        if len(names) < len(given.name):
            raise UsageError("--name must be ARGUMENT=WORD, such as key_mask=attention_mask")
        # So that a module in the working folder is found, however this was started.
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        torch.manual_seed(given.seed or 0)
        module, example, options = load(given.module)
        for name in ("length", "max_length", "batch", "seed"):
            if getattr(given, name) is not None:
                options[name] = getattr(given, name)
        if names:
            options["names"] = {**(options.get("names") or {}), **names}
        if given.skip:
            options["skip"] = [*options.get("skip", ()), *given.skip]
        if given.non_causal:
            options["causal"] = False
        options.pop("raises", None)  # the table and the exit code say it
        reports = check_all(module, example, **options)
    except (UsageError, ValueError, TypeError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(reports)
    return 1 if reports.failed else 0


if __name__ == "__main__":
    sys.exit(main())
