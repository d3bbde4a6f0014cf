"""The backends that can run here, for tests of them all; pytest's header names the others."""

from __future__ import annotations

import linear_rope

REASONS = linear_rope.backends()
BACKENDS = tuple(name for name, reason in REASONS.items() if not reason)
