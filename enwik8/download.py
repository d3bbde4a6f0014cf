"""A downloader for pooch that goes on where a cut connection left off.

pooch verifies and places a file, but begins each download anew; this one keeps what has arrived in
a ``.part`` file beside the target and asks for the rest with an HTTP range request (RFC 9110,
section 14). pooch checks the hash of the whole file afterwards, so a wrong part is never cached.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any


class ResumableDownloader:
    """``pooch.retrieve(..., downloader=ResumableDownloader(part))``.

    Args:
        part: where the unfinished download lies; on the target's file system.
        attempts: connections before giving up; each goes on where the last one ended.
        progressbar: show a tqdm bar on stderr.
        timeout: (connect, read) seconds without an answer.
        wait: seconds before the second connection, doubled before each further one.

    Raises (when called):
        requests.RequestException: no complete answer; what arrived stays in ``part``.
        OSError: ``part`` cannot be written.
    """

    def __init__(
        self,
        part: Path,
        *,
        attempts: int = 4,
        progressbar: bool = True,
        timeout: tuple[float, float] = (10.0, 30.0),
        wait: float = 1.0,
    ) -> None:
        self.part = part
        self.attempts = attempts
        self.progressbar = progressbar
        self.timeout = timeout
        self.wait = wait

    def __call__(self, url: str, output_file: str, pooch: Any = None) -> None:
        """Fetch ``url`` into the path ``output_file`` (pooch's temporary file)."""
        import requests

        for attempt in range(self.attempts):
            before = self._size()
            try:
                self._fetch(url)
                break
            except (requests.ConnectionError, requests.Timeout, _Cut) as failure:
                # Without a single new byte there is nothing to go on with: most likely no network.
                if attempt == self.attempts - 1 or self._size() <= before:
                    if isinstance(failure, _Cut):
                        raise requests.ConnectionError(str(failure)) from failure
                    raise
                time.sleep(self.wait * 2**attempt)
        os.replace(self.part, output_file)

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _fetch(self, url: str) -> None:
        """One connection: append to the part what it lacks."""
        import requests
        from tqdm import tqdm

        have = self._size()
        # "identity": a byte range means bytes of the file, not of a compressed transfer.
        headers = {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
        with requests.get(url, headers=headers, stream=True, timeout=self.timeout) as answer:
            if answer.status_code == 416:  # the part is as long as the file, or longer
                if answer.headers.get("Content-Range") == f"bytes */{have}":
                    return
                self.part.unlink()
                return self._fetch(url)
            answer.raise_for_status()
            resumed = answer.status_code == 206
            if resumed:
                span = re.match(
                    r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("Content-Range", "")
                )
                if span is None or int(span.group(1)) != have:
                    raise requests.RequestException(f"{url} answered with another range than asked")
                total = None if span.group(2) == "*" else int(span.group(2))
            else:  # a server without ranges sends all of it again
                have = 0
                length = answer.headers.get("Content-Length")
                total = None if length is None else int(length)
            with tqdm(
                total=total,
                initial=have,
                unit="B",
                unit_scale=True,
                desc=self.part.stem,
                disable=not self.progressbar,
            ) as bar:
                self._append(answer, "ab" if resumed else "wb", bar)
        if total is not None and self._size() != total:
            raise _Cut(f"the connection to {url} ended after {self._size():,} of {total:,} bytes")

    def _append(self, answer: Any, mode: str, bar: Any) -> None:
        import requests

        # The length is checked by the caller; checked in there, the last bytes would be lost.
        answer.raw.enforce_content_length = False
        file = None
        try:
            # The part is opened with the first chunk only: without one, nothing is left behind.
            for chunk in answer.iter_content(chunk_size=1 << 16):
                file = file or open(self.part, mode)  # noqa: SIM115
                file.write(chunk)
                bar.update(len(chunk))
        except requests.RequestException as failure:
            raise _Cut(str(failure)) from failure
        finally:
            if file is not None:
                file.close()


class _Cut(Exception):
    """The connection ended before the file did."""
