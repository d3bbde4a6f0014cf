"""What the models share: embeddings, positions and blocks, read from top to bottom."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from linear_rope.arguments import check_key_mask, check_tensors
from linear_rope.block import Block, make_norm
from linear_rope.config import Config
from linear_rope.initialization import EMBEDDING_STD, initialize
from linear_rope.positions import can_read, resolve_positions
from linear_rope.segments import resolve_segments
from linear_rope.states import ModelState

__all__ = ["Stack", "sinusoidal"]


class Stack(nn.Module):
    """Embeddings, positions and blocks, shared by the language model and the encoder."""

    def __init__(self, config: Config, *, causal: bool) -> None:
        super().__init__()
        c = config
        self.config = config
        self.embedding = nn.Embedding(c.vocab_size, c.dim)
        self.position_embedding = (
            nn.Embedding(c.max_length or 1, c.dim) if c.position == "learned" else None
        )
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(Block(c, causal=causal) for _ in range(c.layers))
        self.norm = make_norm(c)

    def initialize(self, seed: int, features_seed: int | None = None) -> None:
        """Draw every parameter anew, each from a generator of its own seeded by (seed, its name).

        So two models that share a parameter's name and shape share its value, whatever else they
        have: what a comparison of methods needs. Linear layers: normal with standard deviation
        `init_std`, or 1/sqrt(fan in) without one, the two that write into the residual stream
        divided by sqrt(2 layers) (GPT-2); embeddings 0.02; biases 0 but for learned decays' (their
        time-scales); norms 1; random features from (features_seed, name), or (seed, name) without
        one; learned frequencies as fixed ones; learned feature maps, convolutions and token shifts
        the identity; selective rotations as they say.
        """
        c = self.config
        initialize(self, seed, c.layers, features_seed, c.init_std)

    def _initialize_at_construction(self) -> None:
        if not self.embedding.weight.is_meta:
            self.initialize(int(torch.randint(2**62, (), device="cpu")))

    def _check(self, tokens: Tensor, key_mask: Tensor | None, state: ModelState | None) -> None:
        check_tensors(tokens=tokens)
        if tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                "tokens must be integers (int64 or int32; convert with .long()) of shape "
                f"(batch, time), got {tokens.dtype} of shape {tuple(tokens.shape)}"
            )
        if can_read(tokens) and tokens.numel():
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(
                    f"tokens must be in [0, vocab_size={self.config.vocab_size}), got "
                    f"{low if low < 0 else high}"
                )
        check_key_mask(key_mask, (tokens.shape[0], tokens.shape[1]), tokens.device)
        if state is not None:
            layers = state.layers if isinstance(state, ModelState) else ()
            if len(layers) != len(self.blocks):
                raise ValueError(
                    f"state must be a ModelState of {len(self.blocks)} layers, as an earlier call "
                    f"returned it, got {type(state).__name__} of {len(layers)}"
                )
            for block, entry in zip(self.blocks, layers, strict=True):
                block.attention.check_state(entry, tokens.shape[0])  # type: ignore[operator,union-attr]

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.position_embedding is not None:
            table = self.position_embedding
            if can_read(positions) and positions.numel():
                last = int(positions.max())
                if last >= table.num_embeddings:
                    raise ValueError(
                        f"position {last} is beyond max_length={table.num_embeddings} of the "
                        "learned position table; rotary and sinusoidal positions have no such limit"
                    )
            x = x + table(positions)
        elif self.config.position == "sinusoidal":
            x = x + sinusoidal(positions, self.config.dim).to(x.dtype)
        return self.dropout(x)

    def _run(
        self,
        tokens: Tensor,
        key_mask: Tensor | None,
        positions: int | Tensor | None,
        segment_ids: Tensor | None,
        cu_seqlens: Tensor | None,
        state: ModelState | None,
        return_state: bool,
    ) -> tuple[Tensor, ModelState | None]:
        self._check(tokens, key_mask, state)
        batch, length = tokens.shape
        documents = resolve_segments(
            batch, length, segment_ids, cu_seqlens, tokens.device, key_mask
        )
        at = resolve_positions(
            length,
            positions,
            start=None if state is None else state.position,
            key_mask=key_mask,
            documents=documents,
            batch=batch,
            device=tokens.device,
            axes=getattr(self.blocks[0].attention.rotary, "axes", 1),  # type: ignore[union-attr]
        )
        x = self._embed(tokens, at)
        after: list[Any] = []
        for i, block in enumerate(self.blocks):
            x = block(
                x,
                key_mask=key_mask,
                positions=at if length else positions,
                segment_ids=documents,
                state=None if state is None else state.layers[i],
                return_state=return_state,
            )
            if return_state:
                x, layer_state = x
                after.append(layer_state)
        return self.norm(x), ModelState(tuple(after)) if return_state else None


def sinusoidal(positions: Tensor, dim: int) -> Tensor:
    """Fixed sinusoids (arXiv 1706.03762, section 3.5), (..., dim), float32, angles in float64.

    Scaled to the root mean square of the embeddings at the start (0.02), so that neither drowns the
    other.
    """
    work = torch.device("cpu") if positions.device.type == "mps" else positions.device
    j = torch.arange(0, dim, 2, dtype=torch.float64, device=work)
    angles = positions.to(work, torch.float64).unsqueeze(-1) * 10000.0 ** (-j / dim)
    table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :dim]
    return (table * (EMBEDDING_STD * math.sqrt(2))).to(positions.device, torch.float32)
