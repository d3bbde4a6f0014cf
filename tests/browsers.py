"""A browser to look at pages with, if there is one."""

from __future__ import annotations

import os
import shutil

# The small one without a window, Debian, Fedora, Google's own packages, macOS.
NAMES = (
    *("chromium-headless-shell", "headless_shell", "chromium", "chromium-browser"),
    *("google-chrome", "google-chrome-stable", "chrome"),
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
WANTED = f"no browser: neither $CHROMIUM nor any of {', '.join(NAMES)} is there"


def find() -> str | None:
    """The path of a Chromium of any kind: what CHROMIUM says, else the first on the path."""
    found = (shutil.which(name) for name in (os.environ.get("CHROMIUM", ""), *NAMES) if name)
    return next((path for path in found if path), None)
