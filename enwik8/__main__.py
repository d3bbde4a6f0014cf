"""``python -m enwik8 {prepare,train,compare,study,plot,sample,...}``: the command line.

The commands themselves are in `enwik8.commands`. Errors that the user can put right are one
sentence and exit code 2; an interrupted run exits with 130 or 143.
"""

from __future__ import annotations

import csv
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any, cast

from .errors import UserError
from .interrupt import Interrupted
from .presets import PRESETS

# PyTorch's words, on the CPU and on accelerators.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
_EXTRA = "pip install 'linear_rope[enwik8]' brings what the experiment needs"

try:
    import tyro
    from tyro.conf import subcommand

    from .commands import (
        Arms,
        Command,
        Compare,
        Compress,
        Decompress,
        Evaluate,
        Plot,
        Prepare,
        PresetName,
        Redraw,
        Sample,
        Study,
        Train,
    )
except ModuleNotFoundError as missing:
    sys.exit(f"error: the package {missing.name} is not installed; {_EXTRA}")

_DESCRIPTION = (
    "Byte-level language models with and without rotary positions (RoPE) in linear attention. "
    "Start with `compare --out results/demo`; each command has its own --help."
)


def parse(arguments: Sequence[str]) -> Command:
    """The command that the arguments say; prints help or the mistake and exits otherwise.

    The preset named in the arguments gives the defaults that single flags then replace, so
    ``--help`` shows the values that will be used.

    Raises:
        UserError: there is no preset of that name.
    """
    preset = _preset_in(arguments)
    settings = PRESETS[preset].settings
    train = Train(tyro.MISSING, preset=preset, settings=settings)
    compare = Compare(tyro.MISSING, preset=preset, settings=settings)
    commands: Any = (
        Annotated[Prepare, subcommand("prepare")]
        | Annotated[Train, subcommand("train", default=train)]
        | Annotated[Compare, subcommand("compare", default=compare)]
        | Annotated[Study, subcommand("study")]
        | Annotated[Plot, subcommand("plot")]
        | Annotated[Sample, subcommand("sample")]
        | Annotated[Evaluate, subcommand("evaluate")]
        | Annotated[Redraw, subcommand("redraw")]
        | Annotated[Compress, subcommand("compress")]
        | Annotated[Decompress, subcommand("decompress")]
        | Annotated[Arms, subcommand("arms")]
    )
    command: Command = tyro.cli(
        commands,
        prog="python -m enwik8",
        description=_DESCRIPTION,
        args=list(arguments),
        config=(tyro.conf.FlagCreatePairsOff,),  # --resume, without a --no-resume
    )
    return command


def _preset_in(arguments: Sequence[str]) -> PresetName:
    name = "demo"
    if arguments and arguments[0] not in ("train", "compare"):
        return "demo"  # elsewhere the word can be text, such as a prompt
    for i, argument in enumerate(arguments):
        if argument == "--preset" and i + 1 < len(arguments):
            name = arguments[i + 1]
        elif argument.startswith("--preset="):
            name = argument.partition("=")[2]
    if name not in PRESETS:
        raise UserError(f"--preset {name!r} is unknown; known presets: {', '.join(PRESETS)}")
    return cast(PresetName, name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        command = parse(arguments)
        command(shlex.join(["python", "-m", "enwik8", *arguments]))
    except BrokenPipeError:
        # Whoever read the output (head, less) has enough. Python flushes at exit: not into it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UserError, ValueError, csv.Error, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"error: the package {error.name} is not installed; {_EXTRA}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(w in str(error) for w in _NO_MEMORY):
            raise
        print(
            "error: there is not enough memory here for these sizes; smaller ones need less (in "
            "training, --micro-batch-size alone changes no result)",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Interrupted as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _leave_the_others(failed: bool) -> None:
    """Close the connection to the other processes of a launcher, if there are any.

    A thread of gloo's that outlives the interpreter can abort the process (exit code -6) when all
    is done and saved: pytorch/pytorch, pull request 179291. Other backends close together, and
    after a failure that may be waiting for nobody.
    """
    distributed = sys.modules.get("torch.distributed")  # commands import torch if they need it
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if not failed or distributed.get_backend() == "gloo":
        distributed.destroy_process_group()


if __name__ == "__main__":
    exit_code = main()
    _leave_the_others(failed=exit_code == 2)
    sys.exit(exit_code)
