"""Corpora: archives, damage, splits, downloads (from this machine only), and honest names."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import importlib.metadata
import io
import lzma
import os
import re
import sys
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from enwik8 import corpus as module
from enwik8.corpus import Corpus, Official, load_corpus, prepare
from enwik8.download import ResumableDownloader
from enwik8.errors import UserError

TEXT = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8).tobytes()


def zipped(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".txt": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zip": lambda content: zipped(text=content),
}
ARCHIVES = [suffix for suffix in PACK if suffix not in ("", ".txt")]


def refused(*arguments: object, **keywords: object) -> str:
    """The message of the refusal: one line, one sentence."""
    with pytest.raises(UserError) as caught:
        load_corpus(*arguments, **keywords)  # type: ignore[arg-type]
    message = str(caught.value)
    assert message and "\n" not in message
    return message


# --- the same bytes from every kind of file -------------------------------------------------------


@pytest.mark.parametrize("suffix", PACK)
def test_the_same_bytes_from_every_kind_of_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"text{suffix}"
    path.write_bytes(PACK[suffix](TEXT))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy's fromstring, torch's read-only buffers
        corpus = load_corpus(path)
        tensor = torch.from_numpy(corpus.train)
    assert corpus.bytes.tobytes() == TEXT
    assert corpus.bytes.dtype == np.uint8
    assert corpus.sha256 == hashlib.sha256(TEXT).hexdigest()
    assert tensor.dtype == torch.uint8
    tensor[0] = 0  # writable, and the file stays what it was
    assert load_corpus(str(path)).bytes.tobytes() == TEXT


def test_line_ends_and_invalid_utf8_are_bytes_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "text"
    content = b"\r\n\xff\xfe\x00\x1a" * 10
    path.write_bytes(content)
    assert load_corpus(path).bytes.tobytes() == content


def test_a_member_of_a_zip_can_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "two.zip"
    path.write_bytes(zipped(one=TEXT, two=TEXT[::-1]))
    message = refused(path)
    assert "one, two" in message and f"{path}::MEMBER" in message
    assert load_corpus(f"{path}::two").bytes.tobytes() == TEXT[::-1]
    assert "'three'" in refused(f"{path}::three")


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_truncated_archives_are_refused(tmp_path: Path, suffix: str) -> None:
    packed = PACK[suffix](TEXT)
    path = tmp_path / f"half{suffix}"
    for keep in (len(packed) // 2, len(packed) - 1, 12):
        path.write_bytes(packed[:keep])
        message = refused(path)
        assert str(path) in message and "get it again" in message
        assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_damaged_archives_are_refused(tmp_path: Path, suffix: str) -> None:
    packed = bytearray(PACK[suffix](TEXT))
    packed[len(packed) // 2] ^= 0xFF
    path = tmp_path / f"damaged{suffix}"
    path.write_bytes(packed)
    assert str(path) in refused(path)


@pytest.mark.parametrize("suffix", ARCHIVES)
def test_a_suffix_must_be_true(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plain{suffix}"
    path.write_bytes(TEXT)
    assert f"not a {suffix} archive" in refused(path)
    path = tmp_path / "archive"
    path.write_bytes(PACK[suffix](TEXT))
    assert f"is a {suffix} archive: rename it" in refused(path)


@pytest.mark.parametrize("suffix", PACK)
def test_empty_files_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"empty{suffix}"
    path.write_bytes(b"")
    assert "empty" in refused(path)
    path.write_bytes(PACK[suffix](b""))
    assert "empty" in refused(path)


def test_what_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "folder" in refused(tmp_path)
    assert "no file" in refused(tmp_path / "missing.txt")
    assert "enwik8, wiki-sample" in refused("enwik9")
    assert "x" * 100 in refused(tmp_path / ("x" * 300))
    if os.path.exists("/dev/zero"):
        assert "not a regular file" in refused("/dev/zero")

    def forbidden(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "secret").write_bytes(TEXT)
    monkeypatch.setattr(Path, "read_bytes", forbidden)  # mode bits do not stop every account
    assert "Permission denied" in refused(tmp_path / "secret")


# --- splits ---------------------------------------------------------------------------------------


def test_a_toy_is_split_in_order_without_overlap(tmp_path: Path) -> None:
    path = tmp_path / "toy"
    path.write_bytes(TEXT)
    corpus = load_corpus(path)
    assert corpus.splits == (900, 50, 50)
    parts = [corpus.train, corpus.valid, corpus.test]
    assert [len(part) for part in parts] == [900, 50, 50]
    assert b"".join(part.tobytes() for part in parts) == TEXT
    assert all(np.shares_memory(part, corpus.bytes) for part in parts)
    assert corpus.record() == {
        "name": "toy",
        "bytes": 1000,
        "sha256": hashlib.sha256(TEXT).hexdigest(),
        "splits": {"train": 900, "valid": 50, "test": 50},
        "description": "local file toy, 1,000 bytes unpacked",
    }


def test_the_split_of_enwik8_is_the_usual_one() -> None:
    assert module._split(100_000_000, None, Path("e")) == (90_000_000, 5_000_000, 5_000_000)


@pytest.mark.parametrize("size", [20, 21, 39, 1001, 6_089_746])
def test_splits_use_every_byte(size: int) -> None:
    splits = module._split(size, None, Path("e"))
    assert sum(splits) == size and min(splits) >= 1


def test_splits_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "toy"
    path.write_bytes(TEXT)
    assert load_corpus(path, splits=(800, 100, 100)).splits == (800, 100, 100)
    message = refused(path, splits=(90_000_000, 5_000_000, 5_000_000))
    assert "1,000 bytes" in message and "not be comparable" in message
    assert "at least 1" in refused(path, splits=(1000, 0, 0))
    path.write_bytes(TEXT[:19])
    assert "19 bytes" in refused(path)


# --- the names of texts ---------------------------------------------------------------------------


@pytest.fixture
def toy_enwik8(monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, bytes]:
    """A small text in enwik8's place: (content, zip)."""
    content = b"".join(b"<page>%d</page>\n" % i for i in range(20_000))[:200_000]
    packed = zipped(enwik8=content)

    def digest(piece: bytes) -> str:
        return hashlib.sha256(piece).hexdigest()

    official = Official(
        url="http://127.0.0.1:9/enwik8.zip",
        zip_size=len(packed),
        zip_sha256=digest(packed),
        size=len(content),
        sha256=digest(content),
    )
    monkeypatch.setattr(module, "ENWIK8", official)
    sizes = (1_000, 10_000, 40_000, len(content))
    monkeypatch.setattr(module, "ENWIK8_PREFIXES", {n: digest(content[:n]) for n in sizes})
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    return content, packed


def named(path: Path, content: bytes) -> Corpus:
    path.write_bytes(content)
    return load_corpus(path)


def test_a_part_of_enwik8_is_never_called_enwik8(
    tmp_path: Path, toy_enwik8: tuple[bytes, bytes]
) -> None:
    content, _ = toy_enwik8
    path = tmp_path / "enwik8"

    whole = named(path, content)
    assert whole.name == "enwik8" and whole.description == "enwik8, all 200,000 bytes"

    part = named(path, content[:40_000])
    assert part.name == "enwik8-first-40000-bytes"
    assert part.description.startswith("first 40,000 of enwik8's 200,000 bytes")

    between = named(path, content[:25_000])
    assert between.name == "enwik8-first-25000-bytes-unverified"
    assert "starts as enwik8 does" in between.description
    assert "25,000 of its 200,000 bytes" in between.description
    assert "first 10,000 bytes" in between.description

    changed = named(path, content[:20_000] + b"#" + content[20_001:40_000])
    assert changed.name == "local-enwik8"
    assert "first 10,000 bytes are those of enwik8, the rest not" in changed.description

    longer = named(path, content + b"more")
    assert longer.name == "local-enwik8"
    assert "first 200,000 bytes are those of enwik8, the rest not" in longer.description

    other = named(path, TEXT)
    assert other.name == "local-enwik8" and "not comparable" in other.description


def test_a_part_of_enwik8_by_name(tmp_path: Path, toy_enwik8: tuple[bytes, bytes]) -> None:
    content, packed = toy_enwik8
    name = "enwik8-first-40000-bytes"
    (tmp_path / "enwik8.zip").write_bytes(packed)
    part = load_corpus(name, data_dir=tmp_path)
    assert part.name == name and part.path == tmp_path / "enwik8.zip"
    assert part.bytes.tobytes() == content[:40_000]
    assert part.splits == (36_000, 2_000, 2_000)

    (tmp_path / "enwik8.zip").unlink()
    alone = tmp_path / f"{name}.xz"
    alone.write_bytes(lzma.compress(content[:40_000]))  # without the whole
    again = load_corpus(name, data_dir=tmp_path)
    assert again.path == alone and again.record() == part.record()

    alone.write_bytes(lzma.compress(content[1:40_001]))
    assert f"{alone} is not the first 40,000 bytes" in refused(name, data_dir=tmp_path)
    said = refused("enwik8-first-40001-bytes", data_dir=tmp_path)
    assert "no known checksum" in said and "10000, 40000" in said


def test_the_known_prefixes_are_in_the_real_table() -> None:
    digest = "9f9ca3a41e2b87a0268d00380577e2c308e07959b22a94c8d7b1e8901bdefc37"
    assert module.ENWIK8_PREFIXES[4_000_000] == digest
    assert module.ENWIK8_PREFIXES[module.ENWIK8.size] == module.ENWIK8.sha256
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in module.ENWIK8_PREFIXES.values())


@pytest.mark.parametrize("file", ["enwik8", "enwik8.zip"])
def test_enwik8_of_the_wrong_size_or_content_is_refused(
    tmp_path: Path, toy_enwik8: tuple[bytes, bytes], file: str
) -> None:
    content, packed = toy_enwik8
    right = packed if file.endswith("zip") else content
    path = tmp_path / file
    path.write_bytes(right)
    assert load_corpus("enwik8", data_dir=tmp_path).bytes.tobytes() == content
    for wrong in (right[: len(right) // 2], right + b"\0", right[:-1] + b"\xff", b""):
        path.write_bytes(wrong)
        message = refused("enwik8", data_dir=tmp_path)
        assert str(path) in message and "not be comparable" in message
        assert path.read_bytes() == wrong  # the user's file is the user's


# --- downloads, from this machine -----------------------------------------------------------------


class Shelf:
    """A server of one file, on loopback, that can cut connections and ignore ranges."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.cuts: list[int] = []  # for each of the next answers: end after so many bytes
        self.ranges = True
        self.status = 200
        self.asked: list[str | None] = []
        shelf = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = self.headers.get("Range")
                shelf.asked.append(asked)
                size, start = len(shelf.content), 0
                if shelf.status != 200:
                    self.send_error(shelf.status)
                    return
                if asked and shelf.ranges:
                    start = int(asked.removeprefix("bytes=").removesuffix("-"))
                    if start >= size:
                        self.send_response(416)
                        self.send_header("Content-Range", f"bytes */{size}")
                        self.send_header("Content-Length", "0")
                        self.end_headers()
                        return
                    self.send_response(206)
                    self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
                else:
                    self.send_response(200)
                self.send_header("Content-Length", str(size - start))
                self.end_headers()
                rest = shelf.content[start:]
                self.wfile.write(rest[: shelf.cuts.pop(0)] if shelf.cuts else rest)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/enwik8.zip"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def shelf(toy_enwik8: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    pytest.importorskip("pooch")
    pytest.importorskip("tqdm")
    shelf = Shelf(toy_enwik8[1])
    official = module.ENWIK8
    monkeypatch.setattr(
        module,
        "ENWIK8",
        Official(shelf.url, official.zip_size, official.zip_sha256, official.size, official.sha256),
    )
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    yield shelf
    shelf.close()


def test_a_download_is_verified_kept_and_not_repeated(
    tmp_path: Path,
    shelf: Shelf,
    toy_enwik8: tuple[bytes, bytes],
    capsys: pytest.CaptureFixture[str],
) -> None:
    corpus = prepare("enwik8", tmp_path / "new")
    assert corpus.name == "enwik8" and corpus.bytes.tobytes() == toy_enwik8[0]
    assert os.listdir(tmp_path / "new") == ["enwik8.zip"]
    printed = capsys.readouterr()
    for fact in (str(tmp_path / "new" / "enwik8.zip"), "200,000", corpus.sha256, "180,000"):
        assert fact in printed.out
    assert "enwik8.zip" in printed.err and "B/s" in printed.err  # the progress bar
    load_corpus("enwik8", data_dir=tmp_path / "new")
    assert shelf.asked == [None]


def test_a_cut_connection_is_resumed_by_itself(
    tmp_path: Path, shelf: Shelf, toy_enwik8: tuple[bytes, bytes]
) -> None:
    half = len(shelf.content) // 2
    shelf.cuts = [half]
    assert load_corpus("enwik8", data_dir=tmp_path).bytes.tobytes() == toy_enwik8[0]
    assert shelf.asked == [None, f"bytes={half}-"]
    assert os.listdir(tmp_path) == ["enwik8.zip"]


def test_a_download_that_broke_off_is_resumed_by_the_next_try(tmp_path: Path, shelf: Shelf) -> None:
    shelf.cuts = [1000, 1000, 0]
    message = refused("enwik8", data_dir=tmp_path)
    assert str(tmp_path / "enwik8.zip") in message and "enwik8.zip.part" in message
    assert os.listdir(tmp_path) == ["enwik8.zip.part"]
    assert (tmp_path / "enwik8.zip.part").read_bytes() == shelf.content[:2000]
    load_corpus("enwik8", data_dir=tmp_path)
    assert shelf.asked == [None, "bytes=1000-", "bytes=2000-", "bytes=2000-"]
    assert os.listdir(tmp_path) == ["enwik8.zip"]


def test_a_server_without_ranges_starts_again(tmp_path: Path, shelf: Shelf) -> None:
    shelf.ranges = False
    shelf.cuts = [5000]
    load_corpus("enwik8", data_dir=tmp_path)
    assert len(shelf.asked) == 2
    assert (tmp_path / "enwik8.zip").read_bytes() == shelf.content


@pytest.mark.parametrize("extra", [b"", b"too much"])
def test_a_part_that_is_whole_or_too_long_is_sorted_out(
    tmp_path: Path, shelf: Shelf, extra: bytes
) -> None:
    (tmp_path / "enwik8.zip.part").write_bytes(shelf.content + extra)
    load_corpus("enwik8", data_dir=tmp_path)
    assert os.listdir(tmp_path) == ["enwik8.zip"]


def test_wrong_content_is_never_cached(tmp_path: Path, shelf: Shelf) -> None:
    right = shelf.content
    shelf.content = right[:-1] + b"\xff"
    message = refused("enwik8", data_dir=tmp_path / "new")
    assert "SHA-256" in message and str(tmp_path / "new" / "enwik8.zip") in message
    assert not (tmp_path / "new").exists()
    shelf.content = right
    (tmp_path / "enwik8.zip.part").write_bytes(b"rubbish")
    refused("enwik8", data_dir=tmp_path)
    assert os.listdir(tmp_path) == []
    load_corpus("enwik8", data_dir=tmp_path)


@pytest.mark.parametrize("status", [403, 404, 503])
def test_a_refusal_of_the_server_leaves_nothing(tmp_path: Path, shelf: Shelf, status: int) -> None:
    shelf.status = status
    message = refused("enwik8", data_dir=tmp_path / "new")
    assert f"HTTP {status}" in message and str(tmp_path / "new" / "enwik8.zip") in message
    assert os.listdir(tmp_path) == []


def test_without_network_the_message_names_where_to_put_the_file(
    tmp_path: Path, toy_enwik8: tuple[bytes, bytes]
) -> None:
    pytest.importorskip("pooch")  # port 9 of this machine: nobody answers
    message = refused("enwik8", data_dir=tmp_path / "new")
    assert str(tmp_path / "new" / "enwik8.zip") in message and "put it at" in message
    assert os.listdir(tmp_path) == []


def test_an_unwritable_data_dir_is_one_sentence(tmp_path: Path, shelf: Shelf) -> None:
    (tmp_path / "file").write_bytes(b"")
    message = refused("enwik8", data_dir=tmp_path / "file")
    assert "could not write" in message and os.listdir(tmp_path) == ["file"]


def test_the_downloader_gives_up_without_a_new_byte(tmp_path: Path, shelf: Shelf) -> None:
    import requests

    shelf.cuts = [0] * 9
    fetch = ResumableDownloader(tmp_path / "part", attempts=9, progressbar=False)
    with pytest.raises(requests.ConnectionError):
        fetch(shelf.url, str(tmp_path / "out"))
    assert len(shelf.asked) == 1 and os.listdir(tmp_path) == []


# --- the sample -----------------------------------------------------------------------------------


def test_the_wiki_sample() -> None:
    try:
        importlib.metadata.distribution("gensim")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("gensim (extra 'sample') is not installed")
    imported = "gensim" in sys.modules
    corpus = load_corpus("wiki-sample")
    assert ("gensim" in sys.modules) == imported  # its import takes seconds
    assert corpus.name == "wiki-sample" and len(corpus.bytes) == 6_089_746
    assert corpus.splits == (5_480_771, 304_487, 304_488)
    assert corpus.bytes[:10].tobytes() == b"<mediawiki"
    assert "Wikipedia" in corpus.description and "gensim" in corpus.description


def test_without_gensim_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert "pip install linear-rope[sample]" in refused("wiki-sample")
