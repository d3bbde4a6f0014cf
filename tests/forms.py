"""The backends that can run here, for tests of them all; pytest's header names the others."""

from __future__ import annotations

import importlib.util

import linear_rope

# What makes tests of GPU kernels possible without a GPU.
HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_FLA = HAS_TRITON and importlib.util.find_spec("fla") is not None
REASONS = linear_rope.backends()
BACKENDS = tuple(name for name, reason in REASONS.items() if not reason)
