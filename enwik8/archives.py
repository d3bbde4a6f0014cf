"""Files and archives: all of the bytes, or one sentence that says what is wrong with the file."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import zipfile
import zlib
from pathlib import Path

from .errors import UserError


def read_file(path: Path) -> bytes:
    """The whole content of a regular file, or a UserError that says why not."""
    # os.path rather than Path: its questions never raise, whatever the name.
    if os.path.isdir(path):
        raise UserError(f"{path} is a folder: name a file in it")
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{path} is not a regular file: copy its content to one")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"there is no file {path}: check the path") from None
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or failure
        raise UserError(f"cannot read {path} ({reason}): check its name and permissions") from None


# The bytes that an archive begins with, by its suffix.
SIGNATURES = {
    ".gz": rb"\x1f\x8b\x08",
    ".bz2": rb"BZh[1-9](1AY&SY|\x17rE8P\x90)",
    ".xz": rb"\xfd7zXZ\x00",
    ".zip": rb"PK(\x03\x04|\x05\x06)",
}


def unpack(path: Path, content: bytes, member: str = "") -> bytes:
    """Content of an archive, or ``content`` itself where it is none. Never empty."""
    if not content:
        raise UserError(f"{path} is empty: use a file with text in it")
    suffix = path.suffix.lower()
    kind = next((k for k, start in SIGNATURES.items() if re.match(start, content)), "")
    if suffix in SIGNATURES and kind != suffix:
        raise UserError(
            f"{path} is not a {suffix} archive, or is damaged from its first bytes on: rename it "
            "if it is plain text, else get it again"
        )
    if kind != suffix and kind:
        raise UserError(
            f"{path} is a {kind} archive: rename it to end in {kind} and it will be unpacked"
        )
    if member and kind != ".zip":
        raise UserError(f"{path} is no .zip archive, so it has no member {member!r}: leave it out")
    try:
        if kind == ".gz":
            content = gzip.decompress(content)
        elif kind == ".bz2":
            content = bz2.decompress(content)
        elif kind == ".xz":
            content = lzma.decompress(content)
        elif kind == ".zip":
            content = _unzip(path, content, member)
    except (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} is truncated or damaged ({str(error).rstrip('.') or type(error).__name__}): "
            "delete it and get it again"
        ) from error
    except (NotImplementedError, RuntimeError) as error:  # other compression, a password
        raise UserError(f"cannot unpack {path} ({error}): unpack it by other means") from error
    if not content:
        raise UserError(f"{path} is empty when unpacked: use a file with text in it")
    return content


def _unzip(path: Path, content: bytes, member: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [entry.filename for entry in archive.infolist() if not entry.is_dir()]
        if member and member not in members:
            raise UserError(f"{path} has no member {member!r}; it has {', '.join(members)}")
        if not member and len(members) != 1:
            raise UserError(
                f"{path} has {len(members)} members ({', '.join(members) or 'none'}): "
                f"choose one as {path}::MEMBER"
            )
        return archive.read(member or members[0])
