"""Texts to train on: found, checked, unpacked, split, and named for what they are.

A corpus is bytes; nothing is decoded, normalized or given line ends. Its name, size and SHA-256 go
into each run's ``config.json``, so that two results can be known to be of the same text. Only the
official 100,000,000 bytes are ever called ``enwik8``: a part of them is named with its size.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .archives import SIGNATURES, read_file, unpack
from .download import ResumableDownloader
from .errors import UserError

Splits = tuple[int, int, int]

DATA_DIR = Path("data")  # where downloads go unless told otherwise: below the current folder


@dataclass(frozen=True)
class Official:
    """What is known of a text before it is fetched."""

    url: str
    zip_size: int
    zip_sha256: str
    size: int
    sha256: str


# The Hutter prize's text: the first 10^8 bytes of the English Wikipedia dump of 3 March 2006.
ENWIK8 = Official(
    url="http://mattmahoney.net/dc/enwik8.zip",
    zip_size=36_445_475,
    zip_sha256="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
    size=100_000_000,
    sha256="2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
)

# SHA-256 of the first so many bytes of enwik8: how a part of it is recognized without the whole.
ENWIK8_PREFIXES = {
    1_000: "0f35cdeee80ba4c570885c34ee901aa579441fb8ba97351568a81bacdfc241fd",
    10_000: "321868b6f37a7bc0b1253c7fa04c3823de4a6f4a61f939cd514720d2aef38284",
    100_000: "581bee9758c531de3795885a1adb331b9c51bfdeefd9a63407815479e22a9072",
    200_000: "20486802c948015c70e06b26ccd97cb8ae3f69b8c6731cf4c0a4d42481f54229",
    500_000: "9034cb739e91d5509b9807b7f079b0bf84ef482f9ccf5ec4fba2828da20d3623",
    1_000_000: "369b688978f649681136198fb96db14c1616756260c55fb4b65e9bc049552cad",
    2_000_000: "f35c97c117cef50d6650f334befce5415f727139e28d2ff6524e05f1d90bbc68",
    3_000_000: "72953fccfeb78e55251024bd6ffbe269d1d8d730ce2e4fb028117a3613c45aac",
    4_000_000: "9f9ca3a41e2b87a0268d00380577e2c308e07959b22a94c8d7b1e8901bdefc37",
    100_000_000: ENWIK8.sha256,
}

# gensim (Rehurek and Sojka, 2010) ships this extract of English Wikipedia as test data.
WIKI_SAMPLE_START = "enwiki-latest-pages-articles1.xml-"
WIKI_SAMPLE_SIZE = 6_089_746
WIKI_SAMPLE_SHA256 = "34c1c63050c87cc8477b9ae36b1cb0edf372612c92938b742e579a7109c20fa4"


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text and what it is.

    Attributes:
        name: short, without blanks; "enwik8" for the official text only.
        description: one sentence for people; says how much of which text this is.
        bytes: (size,) uint8, writable (so that `torch.from_numpy` has nothing to warn of).
        sha256: of ``bytes``, hexadecimal.
        splits: sizes in bytes of train, valid and test, which follow each other in this order.
        path: the file it was read from.
    """

    name: str
    description: str
    bytes: np.ndarray
    sha256: str
    splits: Splits
    path: Path

    @property
    def train(self) -> np.ndarray:
        """The first part: a view, uint8."""
        return self.bytes[: self.splits[0]]

    @property
    def valid(self) -> np.ndarray:
        """The part after train: a view, uint8."""
        return self.bytes[self.splits[0] : self.splits[0] + self.splits[1]]

    @property
    def test(self) -> np.ndarray:
        """The part after valid: a view, uint8."""
        return self.bytes[self.splits[0] + self.splits[1] : sum(self.splits)]

    def record(self) -> dict[str, Any]:
        """The entry "corpus" of a run's config.json (no paths: they are of one machine only)."""
        return {
            "name": self.name,
            "bytes": len(self.bytes),
            "sha256": self.sha256,
            "splits": dict(zip(("train", "valid", "test"), self.splits, strict=True)),
            "description": self.description,
        }


def read_corpus(
    name_or_path: str | Path, *, data_dir: str | Path | None = None
) -> tuple[Path, bytes]:
    """The bytes of a text of any length but 0, and the file that they are from; see `load_corpus`.

    Raises:
        UserError: missing, unreadable, damaged or empty; the message names the path and the remedy.
    """
    name = str(name_or_path)
    data_dir = Path(DATA_DIR if data_dir is None else data_dir)
    if name in KNOWN:
        return KNOWN[name](data_dir)
    if match := FIRST.fullmatch(name):
        return _read_first(name, int(match[1]), data_dir)
    return _read_local(name)


def load_corpus(
    name_or_path: str | Path,
    *,
    data_dir: str | Path | None = None,
    splits: Splits | None = None,
) -> Corpus:
    """A corpus by name, or any local file.

    Args:
        name_or_path: "enwik8" (downloaded once, verified), "enwik8-first-N-bytes" (for N with
            a known checksum; from a file of that name in data_dir, or from the whole),
            "wiki-sample" (ships with gensim), or a file: raw, .gz, .bz2, .xz or .zip
            (``archive.zip::member`` where it has several). A file that happens to be called like a
            known name: ``./enwik8``.
        data_dir: where downloads are kept; None: ``./data``.
        splits: sizes in bytes of train, valid, test; None: 90 %, 5 % and the rest, in order (of
            enwik8: 90, 5 and 5 million bytes).

    Raises:
        UserError: missing, unreadable, damaged, empty or too short; the message names the path and
            the remedy.
    """
    path, content = read_corpus(name_or_path, data_dir=data_dir)
    data = np.frombuffer(content, dtype=np.uint8).copy()
    digest = hashlib.sha256(data.data).hexdigest()
    known_as, description = _describe(data, digest, path)
    return Corpus(
        name=known_as,
        description=description,
        bytes=data,
        sha256=digest,
        splits=_split(len(data), splits, path),
        path=path,
    )


def prepare(name: str | Path, data_dir: str | Path | None = None) -> Corpus:
    """Make sure that a corpus is there and whole, and print what and where it is."""
    corpus = load_corpus(name, data_dir=data_dir)
    train, valid, test = corpus.splits
    print(f"corpus   {corpus.name}: {corpus.description}")
    print(f"path     {corpus.path.resolve()}")
    print(f"size     {len(corpus.bytes):,} bytes")
    print(f"sha256   {corpus.sha256}")
    print(f"splits   train {train:,}, valid {valid:,}, test {test:,} bytes, in this order")
    return corpus


def _split(size: int, splits: Splits | None, path: Path) -> Splits:
    if splits is None:
        train, valid = size * 90 // 100, size * 5 // 100
        splits = (train, valid, size - train - valid)
        if min(splits) < 1:
            raise UserError(
                f"{path} has {size} bytes, which is too short to be split 90/5/5: "
                "use a text of at least 20 bytes, in practice of many thousands"
            )
    splits = (int(splits[0]), int(splits[1]), int(splits[2]))
    if min(splits) < 1:
        raise UserError(f"splits must be three sizes of at least 1 byte, got {splits}")
    if sum(splits) > size:
        parts = " + ".join(f"{part:,}" for part in splits)
        raise UserError(
            f"splits {parts} = {sum(splits):,} bytes do not fit {path} of {size:,} bytes, and "
            "results on another split would not be comparable: use the whole text, or leave "
            "splits out for 90/5/5 per cent of this one"
        )
    return splits


# ------------------------------------------------------------------------------------------------
# What a text is
# ------------------------------------------------------------------------------------------------


def _describe(data: np.ndarray, digest: str, path: Path) -> tuple[str, str]:
    """Name and description, from the content: a file's name proves nothing."""
    size, whole = len(data), ENWIK8.size
    if digest == ENWIK8.sha256:
        return "enwik8", f"enwik8, all {whole:,} bytes"
    if digest == WIKI_SAMPLE_SHA256:
        return "wiki-sample", (
            f"extract of English Wikipedia (pages-articles XML, 206 pages, {size:,} bytes) that "
            f"gensim ships as test data; text by Wikipedia's authors, CC BY-SA"
        )
    same, differs = _common_with_enwik8(data)
    if same == size:
        return (
            f"enwik8-first-{size}-bytes",
            f"first {size:,} of enwik8's {whole:,} bytes (not comparable with results on all)",
        )
    if same and not differs:
        return (
            f"enwik8-first-{size}-bytes-unverified",
            f"starts as enwik8 does (verified for the first {same:,} bytes); {size:,} of its "
            f"{whole:,} bytes if the rest follows it too (not comparable with results on all)",
        )
    name = path.name if path.stem not in KNOWN else f"local-{path.name}"
    name = "-".join(name.split())
    description = f"local file {path.name}, {size:,} bytes unpacked"
    if same:
        return name, f"{description}; its first {same:,} bytes are those of enwik8, the rest not"
    if path.stem in KNOWN:
        description += f"; not the text known as {path.stem}: results are not comparable with it"
    return name, description


def _common_with_enwik8(data: np.ndarray) -> tuple[int, bool]:
    """Longest checked prefix shared with enwik8 (0: none), and whether a longer one differs."""
    running, done, same = hashlib.sha256(), 0, 0
    for size, digest in sorted(ENWIK8_PREFIXES.items()):
        if size > len(data):
            return same, False
        running.update(data[done:size].data)
        done = size
        if running.hexdigest() != digest:
            return same, True
        same = size
    return same, same < len(data)  # longer than the longest known prefix: enwik9, for example


# ------------------------------------------------------------------------------------------------
# Where a text comes from
# ------------------------------------------------------------------------------------------------


def _read_local(name: str) -> tuple[Path, bytes]:
    file, _, member = (name, "", "") if os.path.exists(name) else name.partition("::")
    path = Path(os.path.expanduser(file))
    if not os.path.exists(path) and not path.suffix and len(path.parts) == 1:
        raise UserError(
            f"there is no corpus and no file called {file!r}: known corpora are "
            f"{', '.join(KNOWN)}, enwik8-first-N-bytes; anything else must be the path of a file"
        )
    return path, unpack(path, read_file(path), member)


def _read_enwik8(data_dir: Path) -> tuple[Path, bytes]:
    raw, packed = data_dir / "enwik8", data_dir / "enwik8.zip"
    if raw.exists():
        content = read_file(raw)
        _require(raw, content, ENWIK8.size, ENWIK8.sha256)
        return raw, content
    if not packed.exists():
        _download(packed)
    content = read_file(packed)
    _require(packed, content, ENWIK8.zip_size, ENWIK8.zip_sha256)
    content = unpack(packed, content)
    _require(packed, content, ENWIK8.size, ENWIK8.sha256)
    return packed, content


def _read_first(name: str, size: int, data_dir: Path) -> tuple[Path, bytes]:
    """The first bytes of enwik8: from a file of that name, packed or not, else from the whole."""
    if size not in ENWIK8_PREFIXES:
        known = ", ".join(str(size) for size in sorted(ENWIK8_PREFIXES))
        raise UserError(f"{name} has no known checksum; parts with one are of {known} bytes")
    for suffix in ("", *SIGNATURES):
        path = data_dir / (name + suffix)
        if path.exists():
            content = unpack(path, read_file(path))
            if hashlib.sha256(content).hexdigest() != ENWIK8_PREFIXES[size]:
                raise UserError(
                    f"{path} is not the first {size:,} bytes of enwik8 (it has {len(content):,}, "
                    "with another SHA-256): delete it to take them from enwik8, or name this file "
                    "by its path"
                )
            return path, content
    path, content = _read_enwik8(data_dir)
    return path, content[:size]


def _require(path: Path, content: bytes, size: int, sha256: str) -> None:
    """Refuse what is not the official text: its split and results would mean something else."""
    remedy = (
        f"results on it would not be comparable with those on enwik8: delete it to download the "
        f"official one, put that there yourself ({ENWIK8.url}), or name this file by its path"
    )
    if len(content) != size:
        raise UserError(
            f"{path} is not the official enwik8 ({len(content):,} instead of {size:,} bytes: "
            f"truncated, or another text); {remedy}"
        )
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"{path} has the official size, but another SHA-256 (damaged); {remedy}")


def _download(target: Path) -> None:
    """The official zip, verified by pooch, at ``target``; or a UserError and no such file."""
    try:
        import pooch
        import requests
        import tqdm  # noqa: F401  (the downloader's progress bar)
    except ImportError as failure:
        raise UserError(
            f"downloading enwik8 needs {failure.name}: pip install linear-rope[enwik8], or put "
            f"{ENWIK8.url} at {target.resolve()}"
        ) from None
    created = not target.parent.exists()
    part = target.with_name(target.name + ".part")
    try:
        pooch.retrieve(
            ENWIK8.url,
            known_hash=f"sha256:{ENWIK8.zip_sha256}",
            fname=target.name,
            path=target.parent,
            downloader=ResumableDownloader(part),
        )
    except (requests.RequestException, ValueError, OSError) as failure:
        kept = f" ({part.name} there is kept and resumed by the next try)" if part.exists() else ""
        if isinstance(failure, requests.RequestException):
            status = getattr(failure.response, "status_code", None)
            what = f"could not download {ENWIK8.url}" + (f" (HTTP {status})" if status else "")
        elif isinstance(failure, ValueError):
            what = f"what {ENWIK8.url} sent has not the official SHA-256 and was thrown away"
        else:
            what = f"could not write {target} ({failure.strerror or failure})"
        if created and target.parent.is_dir() and not any(target.parent.iterdir()):
            target.parent.rmdir()
        raise UserError(
            f"{what}: get that file ({ENWIK8.zip_size:,} bytes) by other means and put it at "
            f"{target.resolve()}{kept}"
        ) from failure


def _read_wiki_sample(data_dir: Path) -> tuple[Path, bytes]:
    # Through the metadata: importing gensim takes seconds, and the text is all that is wanted.
    try:
        installed = importlib.metadata.distribution("gensim")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "wiki-sample is a file of the package gensim, which is not installed: "
            "pip install linear-rope[sample]"
        ) from None
    for file in installed.files or []:
        if file.name.startswith(WIKI_SAMPLE_START) and file.suffix == ".bz2":
            path = Path(str(file.locate()))
            content = unpack(path, read_file(path))
            if hashlib.sha256(content).hexdigest() == WIKI_SAMPLE_SHA256:
                return path, content
            raise UserError(
                f"{path} is not the text known as wiki-sample ({len(content):,} bytes instead of "
                f"{WIKI_SAMPLE_SIZE:,}, or others): pip install --force-reinstall gensim==4.4.0"
            )
    raise UserError(
        f"gensim {installed.version} is installed without the file {WIKI_SAMPLE_START}*.bz2: "
        "pip install --force-reinstall gensim==4.4.0"
    )


FIRST = re.compile(r"enwik8-first-(\d+)-bytes")
KNOWN: dict[str, Callable[[Path], tuple[Path, bytes]]] = {
    "enwik8": _read_enwik8,
    "wiki-sample": _read_wiki_sample,
}
