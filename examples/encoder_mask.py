"""An encoder over rows of different length: padding changes nothing, whatever stands in it."""

from __future__ import annotations

import torch

from linear_rope import Config, Encoder

torch.manual_seed(0)
encoder = Encoder(Config(vocab_size=100, dim=64, layers=2, heads=4)).double().eval()
rows = [torch.randint(100, (length,)) for length in (9, 4, 6)]


def pad(rows: list[torch.Tensor], side: str, filler: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (rows, longest) and the key mask: True at real tokens."""
    longest = max(map(len, rows))
    tokens = torch.full((len(rows), longest), filler)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        where = slice(len(row)) if side == "right" else slice(longest - len(row), None)
        tokens[i, where], mask[i, where] = row, True
    return tokens, mask


with torch.no_grad():
    alone = torch.cat([encoder(row[None])[0] for row in rows])  # no padding at all: (19, 64)
    for side in ("right", "left"):
        for filler in (0, 57):
            tokens, mask = pad(rows, side, filler)
            padded = encoder(tokens, key_mask=mask)[mask]  # the real tokens, row after row
            difference = (padded - alone).abs().max().item()
            print(f"pads on the {side}, filled with {filler:2d}: difference {difference:.1e}")
            assert difference < 1e-10

    # What the mask is for: without it, pads are words like any others.
    wrong = (encoder(tokens)[mask] - alone).abs().max().item()
    print(f"without the mask: difference {wrong:.1e}")
    assert wrong > 0.1
