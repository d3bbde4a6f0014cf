"""Ctrl-C and SIGTERM that end a run cleanly, and a lock that keeps a second run out."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, BinaryIO

from .errors import UserError

__all__ = ["Interrupt", "Interrupted", "Lock"]


class Interrupted(Exception):
    """A run ended early because of a signal; everything needed to resume it is on the disk."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


class Interrupt:
    """Within ``with Interrupt() as interrupt``, the first SIGINT or SIGTERM sets ``signum`` only.

    The training loop looks at it between steps, so a step or a save is never cut in two. A second
    signal ends the process at once. Outside the main thread signals are left alone.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._old: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signum is not None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            os._exit(128 + signum)
        self.signum = signum
        # os.write: print could deadlock when the signal arrives inside another print.
        os.write(2, b"\nstopping after this step; once more to quit at once\n")

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._old[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for signum, old in self._old.items():
            signal.signal(signum, old)
        self._old.clear()


class Lock:
    """At most one process works in a folder. The system frees the lock when its holder ends.

    The lock is held on a file ``.lock``, which is removed at the end; one that a killed process
    left behind locks nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / ".lock"
        self._file: BinaryIO | None = None

    def __enter__(self) -> Lock:
        try:
            import fcntl
        except ImportError:  # Windows: no lock, the rest works.
            return self
        while True:
            try:
                file = open(self._path, "ab")
            except OSError as error:
                raise UserError(f"the folder {self._folder} cannot be written ({error})") from error
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                raise UserError(
                    f"another run is working in {self._folder}; wait for it or choose another --out"
                ) from None
            except OSError:  # A file system without locks (some network mounts): go on without.
                pass
            # Between our open and our lock, the last holder may have removed the file. A lock on
            # that one keeps nobody out, who would make and lock a new file: so do we.
            if self._still_there(file):
                self._file = file
                return self
            file.close()

    def _still_there(self, file: BinaryIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self._path))
        except FileNotFoundError:
            return False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            # Removed while it is locked: never a file that somebody else has locked since.
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._file.close()
            self._file = None
