"""The commands: each is a dataclass whose fields are the flags, and whose docstrings are the help.

What a command needs is imported when it runs, so that help and mistakes come at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tyro.conf import OmitArgPrefixes, Positional

from .methods import METHODS
from .objectives import OBJECTIVES
from .presets import PRESETS, Settings

__all__ = ["Command", "PresetName"]

PresetName = Literal["demo", "small", "paper", "performer-example"]


@dataclass
class Prepare:
    """Fetch a corpus, or check a local file, and show its size, SHA-256 and splits."""

    corpus: Positional[str] = "wiki-sample"
    """enwik8 (downloaded once), wiki-sample (part of gensim), or the path of a file."""
    data_dir: Path | None = None
    """Folder that downloads are kept in (none: ./data)."""

    def __call__(self, command: str) -> None:
        from .corpus import prepare

        prepare(self.corpus, self.data_dir)


@dataclass
class Train:
    """Train one model into a run folder: config.json, metrics.csv and checkpoint.pt.

    Ctrl-C finishes the current step and saves; the same command with --resume goes on from there.
    """

    out: Path
    """Run folder to write. One that holds a run already is refused without one of the next two."""
    arm: str = "elu-rope"
    """What to train: a feature map and a position method, like elu-rope. See `arms`."""
    resume: bool = False
    """Go on from the folder's checkpoint; the other flags must be as they were."""
    overwrite: bool = False
    """Remove the folder's run and start again."""
    preset: PresetName = "demo"
    """Where all values below come from; each can be replaced by its own flag."""
    settings: OmitArgPrefixes[Settings] = field(default_factory=Settings)

    def __call__(self, command: str) -> None:
        from .checkpoint import latest
        from .train import train

        if self.resume and latest(self.out) is None:
            print(f"no checkpoint in {self.out} yet: starting with step 1")
        result = train(
            self.settings,
            self.arm,
            self.out,
            resume=self.resume,
            overwrite=self.overwrite,
            command=command,
        )
        print(f"finished {self.arm} at step {result.step}: {result.folder}")


@dataclass
class Compare:
    """Train several arms with equal data, initial values and tokens, and draw their curves.

    Writes metrics.csv, summary.md, curves.png, curves.svg, config.json and a run folder per arm and
    seed. Ctrl-C is safe: with --resume, finished runs are skipped and interrupted ones go on.
    """

    out: Path
    """Folder to write. One that holds a comparison is refused without one of the next two."""
    arms: tuple[str, ...] = ()
    """Arms to compare, like elu-none elu-rope (none: the preset's). See `arms`."""
    seeds: tuple[int, ...] = ()
    """Repeat each arm with these seeds (none: --seed)."""
    resume: bool = False
    """Go on with the comparison in the folder; the other flags must be as they were."""
    overwrite: bool = False
    """Remove the folder's comparison and start again."""
    preset: PresetName = "demo"
    """Where all values below come from; each can be replaced by its own flag."""
    settings: OmitArgPrefixes[Settings] = field(default_factory=Settings)

    def __call__(self, command: str) -> None:
        from .compare import compare

        compare(
            self.settings,
            self.out,
            arms=self.arms or PRESETS[self.preset].arms,
            seeds=self.seeds,
            resume=self.resume,
            overwrite=self.overwrite,
            command=command,
        )


@dataclass
class Study:
    """Run a study (arms x seeds x settings, as a file) and write its report.

    Writes study.toml, runs/, summary.md, table.csv, runs.csv, curves.csv, figures and report.html.
    The same command again skips finished runs and goes on with interrupted ones; Ctrl-C is safe.
    """

    file: Positional[str | None] = None
    """Study file (TOML), or a name such as demo or small (none: the study in the folder --out)."""
    out: Path = field(kw_only=True)
    """Folder of the study. More runs may be added to one that is there; nothing else may change."""
    workers: int = 1
    """Runs trained at once, each in a process of its own, spread over the accelerators if any."""
    dry_run: bool = False
    """Print the runs with parameters, tokens, estimated time and memory, and train nothing. The
    corpus is read, and so downloaded if it is not there."""
    time_steps: int = 0
    """Steps to train for the dry run's times, where no run in the folder tells them."""
    report_only: bool = False
    """Train nothing; write the report of what is there."""
    measure_speed: int = 0
    """Steps of each arm to time in the end, with the machine to itself, for the results at equal
    time (0: none). Leave the machine alone meanwhile. With --report-only it is all that is done."""

    def __call__(self, command: str) -> None:
        from .study.runner import study

        study(
            self.file,
            self.out,
            workers=self.workers,
            dry_run=self.dry_run,
            time_steps=self.time_steps,
            report_only=self.report_only,
            measure_speed=self.measure_speed,
            command=command,
        )


@dataclass
class Plot:
    """Draw the curves of runs or comparisons again, from their files alone, as PNG and SVG.

    All of them must have the same objective.
    """

    folders: Positional[tuple[Path, ...]]
    """Folders of runs or comparisons, or a study's curves.csv; several are drawn together."""
    out: Path | None = None
    """Folder for curves.png and curves.svg (none: the first of the folders, or the file's)."""
    smoothing: float = 0.9
    """Factor of the exponential average of the training curve; 0: none."""
    title: str | None = None
    """Title of the figure (none: the corpus)."""

    def __call__(self, command: str) -> None:
        from .plot import plot

        for path in plot(self.folders, self.out, smoothing=self.smoothing, title=self.title):
            print(path)


@dataclass
class Sample:
    """Print a prompt and its continuation by a trained model, byte by byte as it is drawn.

    Memory does not depend on the lengths (softmax arms: it grows by a row a byte).
    """

    run: Positional[Path]
    """Run folder, or checkpoint file."""
    prompt: str | None = None
    """Text to continue (none: "The ")."""
    prompt_file: Path | None = None
    """Continue the bytes of this file instead, of any length; - is standard input."""
    length: int = 500
    """Bytes to draw."""
    temperature: float = 0.8
    """Below 1: safer, above 1: wilder; 0: always the likeliest byte."""
    top_k: int | None = None
    """Draw among the k likeliest bytes only."""
    top_p: float | None = None
    """Draw among the likeliest bytes that together have this probability."""
    seed: int = 0
    """Same seed, same text."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, ..."""

    def __call__(self, command: str) -> None:
        from .sample import read_prompt, sample

        sample(
            self.run,
            read_prompt(self.prompt, self.prompt_file),
            self.length,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            device=self.device,
        )


@dataclass
class Evaluate:
    """Measure bits per byte of a trained model on a split of a corpus or on a whole file.

    A model that was trained with --objective mlm: bits per masked byte.
    """

    run: Positional[Path]
    """Run folder, or checkpoint file."""
    split: Literal["train", "valid", "test"] = "valid"
    """Part of the corpus to measure."""
    corpus: str | None = None
    """Corpus, or path of a file, whose split it is (none: the one of the training)."""
    data_dir: Path | None = None
    """Folder that downloaded corpora are kept in (none: as in training)."""
    file: Path | None = None
    """Measure this file as a whole, instead of a split."""
    length: int | None = None
    """Bytes in a window; each window starts afresh (none: as in training)."""
    batch_size: int = 16
    """Windows computed at once; does not change the result."""
    limit: int | None = None
    """Stop after that many bytes (none: measure all)."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, ..."""

    def __call__(self, command: str) -> None:
        from .evaluate import evaluate

        evaluate(
            self.run,
            split=self.split,
            corpus=self.corpus,
            data_dir=self.data_dir,
            file=self.file,
            length=self.length,
            batch_size=self.batch_size,
            limit=self.limit,
            device=self.device,
        )


@dataclass
class Redraw:
    """Measure trained FAVOR+ models again with other random features, on their validation splits.

    A model that uses the kernel which its features estimate bears another draw, and gains by more
    features; one that uses the very features it was given loses by either.
    """

    runs: Positional[tuple[Path, ...]]
    """Run folders, or checkpoint files, of arms such as favor-rope."""
    out: Path | None = None
    """Folder for redraw.csv (none: it is printed only)."""
    features: tuple[int, ...] = (64, 256, 1024)
    """Numbers of random features a head to measure with, each of a new draw."""
    limit: int = 65_536
    """Bytes to measure on."""
    threads: int | None = None
    """CPU threads of PyTorch (none: as PyTorch chooses)."""

    def __call__(self, command: str) -> None:
        from .redraw import redraw

        redraw(self.runs, self.out, self.features, limit=self.limit, threads=self.threads)


@dataclass
class Compress:
    """Compress a file by a trained model's own probabilities, with an arithmetic coder.

    Prints the file's bits per byte beside the model's own cross-entropy: the size of the file is
    the proof of that figure, since `decompress` gets the text back exactly. That takes the same
    machine and the same versions, or at least ones that round alike; it is checked.
    """

    run: Positional[Path]
    """Run folder, or checkpoint file."""
    file: Positional[Path]
    """File to compress, any bytes."""
    out: Positional[Path]
    """File to write."""
    streams: int | None = None
    """Parts of the file that are read side by side: more is faster, fewer save some bits (none: up
    to 256, by the size of the file)."""
    length: int | None = None
    """Bytes in a window; each window starts afresh (none: as in training)."""
    threads: int = 1
    """CPU threads of PyTorch; decompression uses as many."""
    overwrite: bool = False
    """Replace the file to write, if it exists."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, ... Decompression must compute there too."""

    def __call__(self, command: str) -> None:
        from .compression import compress

        compress(
            self.run,
            self.file,
            self.out,
            streams=self.streams,
            length=self.length,
            threads=self.threads,
            overwrite=self.overwrite,
            device=self.device,
        )


@dataclass
class Decompress:
    """Get a file back that `compress` has written, and check it by its SHA-256."""

    run: Positional[Path]
    """Run folder, or checkpoint file, of the model that compressed it."""
    file: Positional[Path]
    """File that `compress` wrote."""
    out: Positional[Path]
    """File to write."""
    overwrite: bool = False
    """Replace the file to write, if it exists."""
    device: str = "cpu"
    """Where to compute, as in compression."""

    def __call__(self, command: str) -> None:
        from .compression import decompress

        decompress(self.run, self.file, self.out, overwrite=self.overwrite, device=self.device)


@dataclass
class Arms:
    """List the arms that can be trained, and the presets."""

    def __call__(self, command: str) -> None:
        width = max(map(len, METHODS))
        for method in METHODS.values():
            print(f"{method.name:<{width}}  {method.description}")
        print()
        for objective in OBJECTIVES.values():
            which = "all arms" if objective.causal else "arms that do not follow the order"
            print(f"--objective {objective.name}: {objective.description} For {which}.")
        print()
        for name, preset in PRESETS.items():
            print(f"--preset {name}: {preset.description} Arms: {', '.join(preset.arms)}.")


Command = (
    Prepare
    | Train
    | Compare
    | Study
    | Plot
    | Sample
    | Evaluate
    | Redraw
    | Compress
    | Decompress
    | Arms
)
