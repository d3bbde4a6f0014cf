"""A study as data: a TOML file, checked as a whole, becomes the list of its runs.

    preset = "small"                    # where the settings begin (none: the defaults of `train`)
    baseline = "elu-none"               # none: the first arm
    arms = ["elu-none", "elu-rope"]
    seeds = [0, 1, 2]
    pairs = [["elu-rope", "elu-none"]]  # arms to compare beside those with the baseline

    [settings]                          # any setting of `train` but the seed
    steps = 300

    [sweep]                             # each value of each setting, in all combinations
    learning_rate = [1e-3, 2e-3, 4e-3]

    [arm.elu-rope]                      # settings of one arm, which win over all others
    learning_rate = 4e-3

    [[group]]                           # any number; each may replace arms, seeds and sweep,
    seeds = [0]                         # and add settings. Without one, the file is one group.
    [group.settings]
    steps = 100

    [evaluation]                        # after training; false: none
    factors = [1, 2, 4, 16]             # windows of that many training lengths, read recurrently
    bytes = 65536                       # of the validation split

A run that two groups share is trained once.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..methods import METHODS
from ..presets import FREE_ON_RESUME, PRESETS, Settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Evaluation", "Plan", "RunSpec", "changes", "examine", "parse", "slug"]

# Settings that leave the run as it is: no part of its name, and free to change later.
UNNAMED = FREE_ON_RESUME - {"evaluate_every", "corpus"}
_TOP = (
    *("title", "preset", "baseline", "arms", "seeds", "pairs"),
    *("settings", "sweep", "arm", "group", "evaluation"),
)
# What a run computes with.
_SHARED = ("threads", "cpu")
_GROUP = ("name", "arms", "seeds", "settings", "sweep")


@dataclass(frozen=True)
class RunSpec:
    """One run: an arm with settings (its seed among them), and the folder under ``runs/``."""

    arm: str
    settings: Settings
    folder: str

    @property
    def seed(self) -> int:
        return self.settings.seed


@dataclass(frozen=True)
class Evaluation:
    """What is measured of each finished run: ``factors`` x training length, on ``bytes`` bytes."""

    factors: tuple[int, ...] = (1, 2, 4, 16)
    bytes: int = 65_536


@dataclass(frozen=True)
class Plan:
    """A checked study. ``base`` holds the settings that runs are named by their difference to."""

    title: str
    baseline: str
    base: Settings
    runs: tuple[RunSpec, ...]
    evaluation: Evaluation | None
    text: str
    pairs: tuple[tuple[str, str], ...] = ()


def parse(text: str, source: str) -> Plan:
    """Read a study file.

    What only the corpus or the model can tell (a window longer than the text, an odd width of the
    heads) is checked by `enwik8.study.runner`.

    Raises:
        UserError: with every fault of the file, a line each.
    """
    plan, faults = examine(text, source)
    refuse(source, faults)
    return plan


def examine(text: str, source: str) -> tuple[Plan, list[str]]:
    """The plan of what is right in a study file, for further checks, and the faults of the rest.

    Raises:
        UserError: the file is not TOML.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{source} is not TOML ({error}); correct it there") from error
    reader = _Reader(data)
    return reader.plan(text), reader.faults


def refuse(source: str, faults: Sequence[str]) -> None:
    """Raise a ``UserError`` that names all faults, if there are any."""
    faults = list(dict.fromkeys(faults))
    if faults:
        count = "a fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise UserError(f"{source} has {count}: " + "".join(f"\n  - {each}" for each in faults))


class _Reader:
    """Collects faults instead of stopping at the first."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.faults: list[str] = []
        self.arms: list[str] = []  # as they are written, right or wrong
        self.unsure = False  # a width or a number of heads is wrong: what fits it is not known

    def plan(self, text: str) -> Plan:
        data = self.data
        self._names(data, _TOP, "the file")
        name = data.get("preset")
        base = Settings()
        if name is not None and not (isinstance(name, str) and name in PRESETS):
            self.faults.append(f"preset {name!r} is unknown; known presets: {', '.join(PRESETS)}")
        elif name is not None:
            base = PRESETS[name].settings
        # One thread, unless said otherwise: the only number that repeats a run bit by bit.
        shared = {"threads": 1, **self._settings(data.get("settings", {}), "[settings]")}
        base = self._replaced(base, shared, "[settings]")
        of_arms = self._table(data.get("arm", {}), "[arm]")
        of_arm = {arm: self._settings(values, f"[arm.{arm}]") for arm, values in of_arms.items()}
        groups = data.get("group", [{}])
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            self.faults.append("group must be written as [[group]] tables")
            groups = []
        runs: dict[str, RunSpec] = {}
        for number, group in enumerate(groups, start=1):
            label = group.get("name", number)
            if not isinstance(label, str | int):
                self.faults.append(f"group {number}: name must be a text, got {label!r}")
            where = f"group {label!r}" if "group" in data else "the file"
            for run in self._group(group, where, base, of_arm):
                if runs.setdefault(run.folder, run) != run:
                    self.faults.append(
                        f"{where} gives {run.folder} other checkpoints than another group does; "
                        "give both the same"
                    )
        used = list(dict.fromkeys(self.arms))
        for arm in of_arm:
            if used and arm not in used:
                self.faults.append(f"[arm.{arm}] is about an arm that no group trains")
        baseline = data.get("baseline", used[0] if used else "")
        if used and baseline not in used:
            self.faults.append(
                f"baseline {baseline!r} is not among the arms; name one of {', '.join(used)}"
            )
        pairs = self._pairs(data.get("pairs", []), used)
        title = data.get("title", "Study")
        if not isinstance(title, str):
            self.faults.append(f"title must be a text, got {title!r}")
        evaluation = self._evaluation(data.get("evaluation", {}))
        return Plan(title, baseline, base, tuple(runs.values()), evaluation, text, pairs)

    def _pairs(self, values: Any, arms: Sequence[str]) -> tuple[tuple[str, str], ...]:
        found = []
        for pair in values if isinstance(values, list) else [values]:
            texts = isinstance(pair, list) and all(isinstance(each, str) for each in pair)
            if not texts or len(pair) != 2 or pair[0] == pair[1]:
                self.faults.append(f"pairs must be a list of two arms each, got {pair!r}")
            elif arms and not set(pair) <= set(arms):
                self.faults.append(
                    f"pairs: {pair!r} is not of arms of this study; they are {', '.join(arms)}"
                )
            else:
                found.append((pair[0], pair[1]))
        return tuple(found)

    def _group(
        self,
        group: Mapping[str, Any],
        where: str,
        base: Settings,
        of_arm: Mapping[str, Mapping[str, Any]],
    ) -> Iterator[RunSpec]:
        if group:
            self._names(group, _GROUP, where)
        arms = []
        for arm in self._list(group.get("arms", self.data.get("arms")), "arms", where):
            self.arms += [arm] if isinstance(arm, str) else []
            if isinstance(arm, str) and arm in METHODS:
                arms.append(arm)
            else:
                near = difflib.get_close_matches(str(arm), METHODS, 3)
                hint = f"; did you mean {' or '.join(near)}?" if near else "; see `arms`"
                self.faults.append(f"{where}: arm {arm!r} is unknown{hint}")
        seeds = []
        for seed in self._list(group.get("seeds", self.data.get("seeds", [0])), "seeds", where):
            if type(seed) is int and 0 <= seed < 2**63:
                seeds.append(seed)
            else:
                self.faults.append(f"{where}: seed {seed!r} must be an integer in 0 .. 2**63 - 1")
        own = self._settings(group.get("settings", {}), f"{where}, settings")
        settings = self._replaced(base, own, f"{where}, settings")
        sweep = self._table(group.get("sweep", self.data.get("sweep", {})), f"{where}, sweep")
        axes = []
        for name, values in sweep.items():
            values = self._list(values, f"sweep of {name}", where)
            right = [self._settings({name: value}, f"{where}, sweep") for value in values]
            axes.append([each for each in right if each] or [{}])
        for seed in seeds:
            for parts in itertools.product(*axes):
                swept = {name: value for part in parts for name, value in part.items()}
                for arm in arms:
                    values = {**swept, **of_arm.get(arm, {}), "seed": seed}
                    final = self._replaced(settings, values, f"{where}, arm {arm}")
                    yield RunSpec(arm, final, f"{arm}/{slug(base, final)}-seed{seed}")

    def _evaluation(self, values: Any) -> Evaluation | None:
        if values is False:
            return None
        values = self._table(values, "[evaluation]")
        names = tuple(field.name for field in dataclasses.fields(Evaluation))
        self._names(values, names, "[evaluation]")
        result = Evaluation(
            tuple(self._list(values.get("factors", [1, 2, 4, 16]), "factors", "[evaluation]")),
            values.get("bytes", Evaluation.bytes),
        )
        numbers = [*result.factors, result.bytes]
        if not all(type(number) is int and number >= 1 for number in numbers):
            self.faults.append("[evaluation]: factors and bytes must be integers of at least 1")
        return result

    # --- single values ---

    def _names(self, table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
        for name in table:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                self.faults.append(f"{where}: {name!r} is unknown{hint}")

    def _table(self, value: Any, where: str) -> Mapping[str, Any]:
        if isinstance(value, dict):
            return value
        self.faults.append(f"{where} must be a table, got {value!r}")
        return {}

    def _list(self, value: Any, name: str, where: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            got = "nothing" if value is None else repr(value)
            self.faults.append(f"{where}: {name} must be a list with at least one entry, got {got}")
            return []
        twice = [each for i, each in enumerate(value) if each in value[:i]]
        for each in twice:
            self.faults.append(f"{where}: {name} has {each!r} twice")
        return value

    def _settings(self, values: Any, where: str) -> dict[str, Any]:
        """The settings that a table gives, each of the right type and possible by itself."""
        kinds = typing.get_type_hints(Settings)
        kept = {}
        for name, value in self._table(values, where).items():
            if name == "seed":
                self.faults.append(f"{where}: give seeds = [...] instead of a seed")
            elif name in _SHARED and where != "[settings]":
                self.faults.append(
                    f"{where}: {name} must be equal in all runs, or their speeds do not compare; "
                    "give it in [settings]"
                )
            elif name not in kinds:
                near = difflib.get_close_matches(name, kinds, 1)
                hint = f"; did you mean {near[0]!r}?" if near else "; see `train --help`"
                self.faults.append(f"{where}: the setting {name!r} is unknown{hint}")
            elif not _fits(value, kinds[name]):
                self.faults.append(f"{where}: {name} cannot be {value!r}; {_wanted(kinds[name])}")
                self.unsure |= name in ("dim", "heads")
            else:
                alone = {"dim": value, "heads": 1} if name == "dim" else {name: value}
                alone = {"dim": value, "heads": value} if name == "heads" else alone
                if self._possible(Settings(**alone), where):
                    # As a float where a float is meant, so that 1 and 1.0 are one run.
                    kept[name] = float(value) if float in _options(kinds[name]) else value
                else:
                    self.unsure |= name in ("dim", "heads")
        return kept

    def _possible(self, settings: Settings, where: str) -> bool:
        try:
            settings.check()
        except ValueError as error:
            if not any(fault.endswith(f": {error}") for fault in self.faults):
                self.faults.append(f"{where}: {error}")
            return False
        return True

    def _replaced(self, settings: Settings, values: Mapping[str, Any], where: str) -> Settings:
        result = dataclasses.replace(settings, **values)
        if not self.unsure:  # together: heads that do not divide the width
            self._possible(result, where)
        return result


def _options(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a type: of ``int | None`` the two, of others the type alone."""
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def _fits(value: Any, kind: Any) -> bool:
    for option in _options(kind):
        if typing.get_origin(option) is typing.Literal:
            if value in typing.get_args(option):
                return True
        elif type(value) is option or (option is float and type(value) is int):
            return True
    return False


def _wanted(kind: Any) -> str:
    names = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
    words = []
    for option in _options(kind):
        if typing.get_origin(option) is typing.Literal:
            words += [repr(each) for each in typing.get_args(option)]
        elif option is not type(None):
            words.append(names[option])
    return f"give {' or '.join(words)}"


def slug(base: Settings, settings: Settings) -> str:
    """The name of settings, by what differs from the study's: ``learning_rate=0.002,steps=100``."""
    parts = []
    for field in dataclasses.fields(Settings):
        name, value = field.name, getattr(settings, field.name)
        if name == "seed" or name in UNNAMED or value == getattr(base, name):
            continue
        text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else value
        safe = re.sub(r"[^\w.+-]+", "_", str(text))
        if safe != str(text) or len(safe) > 40:  # a path: named by its end, told apart by its hash
            safe = f"{safe[-24:]}_{hashlib.sha256(str(text).encode()).hexdigest()[:6]}"
        parts.append(f"{name}={safe}")
    return ",".join(parts) or "base"


def changes(old: Plan, new: Plan) -> tuple[list[str], list[str]]:
    """What a study's file says otherwise than before: (what cannot be, names of new runs).

    Runs may be added, and what only concerns the report may change. A run that is gone or that is
    other settings under the same name is named with them.
    """

    def fixed(settings: Settings) -> dict[str, Any]:
        values = dataclasses.asdict(settings)
        return {k: v for k, v in values.items() if k not in UNNAMED and k != "corpus"}

    before, after = ({run.folder: run for run in plan.runs} for plan in (old, new))
    wrong = []
    was, now = fixed(old.base), fixed(new.base)
    for name in was:
        if was[name] != now[name]:
            wrong.append(f"the setting {name} was {was[name]!r}, is {now[name]!r}")
    if not wrong:  # otherwise all runs have changed, and their names with them
        gone: dict[str, list[str]] = {}
        for name, run in before.items():
            if name not in after:
                gone.setdefault(run.arm, []).append(name.partition("/")[2])
        for arm, names in gone.items():
            whole = "" if any(run.arm == arm for run in new.runs) else "the whole arm "
            wrong.append(f"{whole}{arm} is gone: {', '.join(names)}")
    return wrong, [name for name in after if name not in before]
