"""A sequence larger than one would hold in memory: from a file into a file, slice by slice."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from linear_rope import Rotary, linear_attention
from linear_rope.streaming import attend_in_pieces

TIME, HEADS, WIDTH = 65_536, 4, 32  # set TIME as high as your disk allows
torch.manual_seed(0)


def on_disk(path: Path) -> torch.Tensor:
    """A float32 file, time outermost, as (batch 1, head, time, width)."""
    flat = torch.from_file(str(path), shared=True, size=TIME * HEADS * WIDTH)
    return flat.view(1, TIME, HEADS, WIDTH).transpose(1, 2)


def anonymous() -> int:
    """KiB of memory in use that is not a mapped file (Linux)."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(x.split()[1]) for x in status.splitlines() if x.startswith("RssAnon")), 0)


with tempfile.TemporaryDirectory() as folder:
    q, k, v, out = (on_disk(Path(folder) / name) for name in ("q", "k", "v", "out"))
    for x in (q, k, v):
        for part in x.split(4096, dim=2):
            part.normal_()

    before = anonymous()
    state = attend_in_pieces(q, k, v, out, piece=2048, rotary=Rotary(WIDTH))
    extra = (anonymous() - before) / 1024
    size = out.numel() * out.element_size() / 2**20
    print(f"wrote {size:.0f} MiB with {extra:.0f} MiB of extra memory, in 32 slices")

    # The same as one call; rows far along the sequence are the test.
    whole = linear_attention(q, k, v, rotary=Rotary(WIDTH))
    error = ((out - whole).norm() / whole.norm()).item()
    print(f"against one call over all {TIME:,} tokens: relative difference {error:.1e}")
    assert error < 1e-5
    assert state.position.item() == TIME
