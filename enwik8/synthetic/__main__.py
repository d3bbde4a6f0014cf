"""``python -m enwik8.synthetic``: train small models on recall tasks, write a table and a figure.

Finished cells are kept in the folder and skipped, so the same command goes on after Ctrl-C.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enwik8.errors import UserError
from enwik8.methods import METHODS, find

from .tasks import TASKS
from .train import Settings

ARMS = (
    *("softmax-rope", "elu-none", "elu-rope"),
    *("best", "best-no-rope", "best-no-decay", "elu-selective-decay", "elu-rope-decay-spread"),
)


@dataclass
class Synthetic:
    """Recall, copying, induction, parity and counting: accuracy over pairs and over length.

    Writes config.json, results.csv and accuracy.png/.svg.
    """

    out: Path = Path("results/synthetic")
    """Folder to write, or to go on with."""
    arms: tuple[str, ...] = ARMS
    """Arms of `python -m enwik8 arms`, or names in --arms-file."""
    arms_file: Path | None = None
    """JSON file of further arms: {"name": {"field of Config": value, ...}, ...}."""
    tasks: tuple[str, ...] = tuple(TASKS)
    """What to learn."""
    seeds: tuple[int, ...] = (0,)
    """Repeat everything with these seeds."""
    draw_only: bool = False
    """Draw the folder's table again, and train nothing."""
    settings: Settings = field(default_factory=Settings)

    def __call__(self) -> None:
        from .figure import draw
        from .grid import CONFIG, read, run

        if self.draw_only:
            path = self.out / CONFIG
            try:
                kept = json.loads(path.read_text(encoding="utf-8"))["settings"]
                lists = {name: tuple(kept[name]) for name in ("longer", "pairs")}
                settings = Settings(**{**kept, **lists})
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UserError(f"{path} cannot be read ({error}); name another --out") from error
            table = read(self.out)
        else:
            settings = self.settings
            table = run(
                self.out,
                settings,
                {name: self._fields(name) for name in self.arms},
                tasks=self.tasks,
                seeds=self.seeds,
            )
        print("\n".join(map(str, draw(table, settings, self.out))))

    def _fields(self, name: str) -> Mapping[str, Any]:
        more: dict[str, Any] = {}
        if self.arms_file is not None:
            try:
                more = json.loads(self.arms_file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise UserError(f"{self.arms_file} cannot be read as JSON ({error})") from error
            if not isinstance(more, dict) or not all(isinstance(v, dict) for v in more.values()):
                raise UserError(f"{self.arms_file} must hold an object of names and objects")
        if name in more:
            return dict(more[name])
        if name not in METHODS and more:
            known = ", ".join((*more, *METHODS))
            raise ValueError(f"arm {name!r} is unknown; known arms: {known}")
        return find(name).overrides


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        import tyro
    except ModuleNotFoundError:
        print("error: pip install 'linear_rope[enwik8]' brings what this needs", file=sys.stderr)
        return 2
    command = tyro.cli(
        tyro.conf.OmitArgPrefixes[Synthetic],
        prog="python -m enwik8.synthetic",
        args=None if arguments is None else list(arguments),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        command()
    except (UserError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on with the next cell", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
