"""Models around the attention layers: a language model and an encoder, read from top to bottom."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linear_rope.arguments import DENOMINATORS, ROTATE, check_key_mask
from linear_rope.attention import DECAYS, GATE_BIAS, RotaryLinearAttention, SoftmaxAttention
from linear_rope.causal import BACKENDS
from linear_rope.feature_maps import FEATURE_MAPS, Hedgehog, RandomFeatures
from linear_rope.rotary import PAIRINGS, can_read, has_values, resolve_positions
from linear_rope.rotary_variants import LearnedRotary, make_rotary
from linear_rope.sampling import check_sampling, pick
from linear_rope.segments import resolve_segments
from linear_rope.states import ModelState

__all__ = ["Block", "Config", "Encoder", "LanguageModel"]

ATTENTION = ("linear", "softmax")
POSITIONS = ("none", "sinusoidal", "learned", "rotary")
EMBEDDING_STD = 0.02


@dataclass(frozen=True)
class Config:
    """Sizes and choices of a model; checked when it is made.

    Args:
        vocab_size, dim, layers, heads: sizes; `heads` divides `dim`.
        attention: "linear" (`RotaryLinearAttention`) or "softmax" (`SoftmaxAttention`).
        kv_heads, feature_map, features, redraw_interval, rotate, denominator, output_norm,
            qk_norm, decay, rotary_base, rotary_fraction, rotary_scaling, pairing, backend,
            chunk_size: see `RotaryLinearAttention`; rotary_scaling is a text or None here, so that
            a config can be saved.
        position: "rotary" (inside attention, as `rotate` says), "sinusoidal" or "learned" (added to
            the embeddings), or "none".
        max_length: rows of the table of position="learned"; nothing else has a longest length.
        mlp_ratio: hidden width of the feed-forward layer over `dim`.
        dropout: on embeddings, attention output and feed-forward output.
        bias: in the linear layers. tie_embeddings: the output layer is the embedding.
    """

    vocab_size: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    attention: str = "linear"
    feature_map: str = "elu+1"
    features: int | None = None
    redraw_interval: int | None = None
    position: str = "rotary"
    rotate: str = "after"
    denominator: str = "unrotated"
    output_norm: bool = False
    qk_norm: bool = False
    decay: str = "none"
    rotary_base: float = 10000.0
    rotary_fraction: float = 1.0
    rotary_scaling: str | None = None
    pairing: str = "interleaved"
    max_length: int | None = None
    mlp_ratio: float = 4.0
    dropout: float = 0.0
    bias: bool = False
    tie_embeddings: bool = True
    backend: str = "auto"
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "layers", "heads", "max_length"):
            value = getattr(self, name)
            if name == "max_length" and value is None:
                continue
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")
        known: tuple[tuple[str, Iterable[str]], ...] = (
            ("attention", ATTENTION),
            ("feature_map", FEATURE_MAPS),
            ("position", POSITIONS),
            ("rotate", ROTATE),
            ("denominator", DENOMINATORS),
            ("decay", DECAYS),
            ("pairing", PAIRINGS),
            ("backend", ("auto", *BACKENDS)),
        )
        for name, names in known:
            if getattr(self, name) not in names:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown; choose one of: {', '.join(names)}"
                )
        if self.dim % self.heads:
            raise ValueError(f"heads={self.heads} does not divide dim={self.dim}; choose a divisor")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} must be in [0, 1)")
        if int(self.dim * self.mlp_ratio) < 1:
            raise ValueError(
                f"mlp_ratio={self.mlp_ratio} must leave the feed-forward layer at least one unit"
            )
        if self.attention == "softmax" and self.decay != "none":
            raise ValueError(
                f"decay={self.decay!r} needs attention='linear'; softmax attention has no state"
            )
        given = [n for n in ("features", "redraw_interval") if getattr(self, n) is not None]
        if given and (self.attention == "softmax" or not self.feature_map.startswith("favor")):
            raise ValueError(
                f"{' and '.join(given)} only fit a random feature map (favor+, favor+relu), got "
                f"attention={self.attention!r} and feature_map={self.feature_map!r}; omit them"
            )
        if self.rotary_scaling is not None:
            if self.position != "rotary":
                raise ValueError(
                    f"rotary_scaling={self.rotary_scaling!r} needs position='rotary', got "
                    f"{self.position!r}; omit it"
                )
            if not isinstance(self.rotary_scaling, str):
                raise ValueError(
                    f"rotary_scaling={self.rotary_scaling!r} must be a text in a config, such as "
                    "'yarn:factor=4,original_length=2048'"
                )
            make_rotary(4, self.rotary_base, scaling=self.rotary_scaling)  # refuses what it must
        if self.position == "learned" and self.max_length is None:
            raise ValueError(
                "position='learned' needs max_length, the number of positions in its table"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """The config saved as a dict; unknown keys are refused by name."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"unknown config keys: {', '.join(unknown)}")
        return cls(**values)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)): the pre-norm block of GPT-2."""

    def __init__(self, config: Config, *, causal: bool = True) -> None:
        super().__init__()
        c = config
        rotate = c.rotate if c.position == "rotary" else "none"
        shared: dict[str, Any] = {
            "rotate": rotate,
            "rotary_base": c.rotary_base,
            "rotary_fraction": c.rotary_fraction,
            "rotary_scaling": c.rotary_scaling,
            "pairing": c.pairing,
            "kv_heads": c.kv_heads,
            "qk_norm": c.qk_norm,
            "output_norm": c.output_norm,
            "causal": causal,
            "dropout": c.dropout,
            "bias": c.bias,
        }
        self.attention: nn.Module
        if c.attention == "softmax":
            self.attention = SoftmaxAttention(c.dim, c.heads, **shared)
        else:
            self.attention = RotaryLinearAttention(
                c.dim,
                c.heads,
                feature_map=c.feature_map,
                features=c.features,
                redraw_interval=c.redraw_interval,
                denominator=c.denominator,
                decay=c.decay,
                backend=c.backend,
                chunk_size=c.chunk_size,
                **shared,
            )
        hidden = int(c.dim * c.mlp_ratio)
        self.attention_norm = nn.LayerNorm(c.dim, bias=c.bias)
        self.mlp_norm = nn.LayerNorm(c.dim, bias=c.bias)
        self.up = nn.Linear(c.dim, hidden, bias=c.bias)
        self.down = nn.Linear(hidden, c.dim, bias=c.bias)
        self.dropout = nn.Dropout(c.dropout)

    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        positions: Tensor | None = None,
        segment_ids: Tensor | None = None,
        state: Any = None,
        return_state: bool = False,
    ) -> Any:
        """(batch, time, dim) -> the same, and the layer's new state if asked for."""
        attended = self.attention(
            self.attention_norm(x),
            key_mask=key_mask,
            positions=positions,
            segment_ids=segment_ids,
            state=state,
            return_state=return_state,
        )
        after = None
        if return_state:
            attended, after = attended
        x = x + attended
        x = x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))
        return (x, after) if return_state else x


class _Stack(nn.Module):
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
        self.norm = nn.LayerNorm(c.dim, bias=c.bias)

    def initialize(self, seed: int) -> None:
        """Draw every parameter anew, each from a generator of its own seeded by (seed, its name).

        So two models that share a parameter's name and shape share its value, whatever else they
        have: what a comparison of methods needs. Linear layers: normal with standard deviation
        1/sqrt(fan in), the two that write into the residual stream divided by sqrt(2 layers)
        (GPT-2); embeddings 0.02; biases 0 but for the decay gate's (3); norms 1; random features
        from (seed, name) too; learned frequencies as fixed ones.
        """
        depth = math.sqrt(2 * self.config.layers)
        with torch.no_grad():
            for name, module in self.named_modules():
                if isinstance(module, RandomFeatures):
                    module.reset(_seed(seed, name))
                elif isinstance(module, nn.LayerNorm | nn.RMSNorm | LearnedRotary | Hedgehog):
                    module.reset_parameters()
                elif isinstance(module, nn.Linear | nn.Embedding):
                    std = EMBEDDING_STD
                    if isinstance(module, nn.Linear):
                        residual = name.endswith(("attention.out", "down"))
                        std = module.in_features**-0.5 / (depth if residual else 1.0)
                        if module.bias is not None:
                            module.bias.fill_(GATE_BIAS if name.endswith(".gate") else 0.0)
                    generator = torch.Generator().manual_seed(_seed(seed, name))
                    drawn = torch.randn(
                        module.weight.shape, generator=generator, dtype=torch.float32, device="cpu"
                    )
                    module.weight.copy_(drawn * std)

    def _initialize_at_construction(self) -> None:
        if not self.embedding.weight.is_meta:
            self.initialize(int(torch.randint(2**62, (), device="cpu")))

    def _positions(
        self,
        tokens: Tensor,
        positions: int | Tensor | None,
        key_mask: Tensor | None,
        documents: Tensor | None,
        state: ModelState | None,
    ) -> Tensor:
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
        return resolve_positions(
            tokens.shape[1],
            positions,
            start=None if state is None else state.position,
            key_mask=key_mask,
            documents=documents,
            batch=tokens.shape[0],
            device=tokens.device,
            axes=getattr(self.blocks[0].attention.rotary, "axes", 1),  # type: ignore[union-attr]
        )

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.position_embedding is not None:
            table = self.position_embedding
            if has_values(positions) and positions.numel():
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
        documents = None
        if segment_ids is not None or cu_seqlens is not None:
            documents = resolve_segments(
                tokens.shape[0], tokens.shape[1], segment_ids, cu_seqlens, tokens.device
            )
        at = self._positions(tokens, positions, key_mask, documents, state)
        x = self._embed(tokens, at)
        after: list[Any] = []
        for i, block in enumerate(self.blocks):
            x = block(
                x,
                key_mask=key_mask,
                positions=at,
                segment_ids=documents,
                state=None if state is None else state.layers[i],
                return_state=return_state,
            )
            if return_state:
                x, layer_state = x
                after.append(layer_state)
        return self.norm(x), ModelState(tuple(after)) if return_state else None


class LanguageModel(_Stack):
    """Causal language model: tokens (batch, time) -> logits (batch, time, vocab_size).

    With linear attention the state has a constant size, so `generate` and `stream` need the same
    memory for the millionth token as for the first.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config, causal=True)
        self.head = (
            None
            if config.tie_embeddings
            else nn.Linear(config.dim, config.vocab_size, bias=config.bias)
        )
        self._initialize_at_construction()

    def forward(
        self,
        tokens: Tensor,
        *,
        key_mask: Tensor | None = None,
        positions: int | Tensor | None = None,
        segment_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: ModelState | None = None,
        return_state: bool = False,
    ) -> Any:
        """Logits of the next token at every position, and the new state if asked for.

        Args:
            tokens: (batch, time) integers below vocab_size; any time from 0 up.
            key_mask: (batch, time) bool, True at real tokens (left or right padding).
            positions: see `linear_rope.rotary.resolve_positions`; default: count on from the state.
            segment_ids, cu_seqlens: several documents in a row, see `linear_attention`.
            state: as an earlier call returned it, to continue.
            return_state: return (logits, state).
        """
        x, after = self._run(
            tokens, key_mask, positions, segment_ids, cu_seqlens, state, return_state
        )
        logits = F.linear(x, self.embedding.weight) if self.head is None else self.head(x)
        return (logits, after) if return_state else logits

    @torch.no_grad()
    def prefill(
        self, prompt: Tensor, *, key_mask: Tensor | None = None
    ) -> tuple[Tensor, ModelState]:
        """Read prompts; returns the logits after each row's last real token and the state.

        Args:
            prompt: (batch, time), at least one real token a row.
            key_mask: (batch, time) bool, True at real tokens: prompts of different lengths, padded
                left or right. Pads leave no trace: each row goes on as if it had been alone.

        Returns:
            logits (batch, vocab_size), and the `ModelState` for `decode`.
        """
        if prompt.ndim != 2 or prompt.shape[1] < 1:
            raise ValueError(
                f"prompt must have shape (batch, time) with at least one token, got "
                f"{tuple(prompt.shape)}"
            )
        if key_mask is not None and can_read(key_mask) and not bool(key_mask.any(-1).all()):
            raise ValueError(
                "key_mask must leave at least one real token in each row of the prompt"
            )
        logits, state = self(prompt, key_mask=key_mask, return_state=True)
        if key_mask is None:
            return logits[:, -1], state
        order = torch.arange(prompt.shape[1], device=prompt.device)
        last = torch.where(key_mask, order, -1).amax(-1)
        return logits[torch.arange(prompt.shape[0], device=prompt.device), last], state

    @torch.no_grad()
    def decode(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """One more token a row, (batch,): its successor's logits (batch, vocab_size), new state."""
        logits, state = self(tokens[:, None], state=state, return_state=True)
        return logits[:, -1], state

    def stream(
        self,
        prompt: Tensor,
        *,
        key_mask: Tensor | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Yields one token after another, (batch,), without end. Arguments as in `generate`."""
        check_sampling(temperature, top_k, top_p)
        was_training = self.training
        self.eval()
        try:
            logits, state = self.prefill(prompt, key_mask=key_mask)
            while True:
                token = pick(logits, temperature, top_k, top_p, generator)
                yield token
                logits, state = self.decode(token, state)
        finally:
            self.train(was_training)

    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        *,
        key_mask: Tensor | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue a prompt; (batch, time) -> (batch, time + max_new_tokens).

        Args:
            prompt: (batch, time), at least one token.
            max_new_tokens: how many to add, at least 0.
            key_mask: (batch, time) bool, for prompts of different lengths; see `prefill`. The new
                tokens stand behind the padded prompt.
            temperature: divides the logits; 0 takes the most likely token.
            top_k: keep the k most likely tokens. top_p: keep the smallest set of the most likely
                tokens whose probabilities sum to at least p (nucleus sampling, arXiv 1904.09751).
            generator: the source of randomness; None is torch's global one.
        """
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={max_new_tokens} must not be negative")
        tokens = self.stream(
            prompt,
            key_mask=key_mask,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            generator=generator,
        )
        try:
            new = [token for _, token in zip(range(max_new_tokens), tokens, strict=False)]
        finally:
            tokens.close()  # type: ignore[attr-defined]
        return torch.cat([prompt, *(token[:, None] for token in new)], dim=1)


class Encoder(_Stack):
    """Non-causal stack: tokens (batch, time) -> hidden states (batch, time, dim), after a norm."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, causal=False)
        self._initialize_at_construction()

    def forward(
        self,
        tokens: Tensor,
        *,
        key_mask: Tensor | None = None,
        positions: int | Tensor | None = None,
        segment_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Every token sees every real one of its document; arguments as in `LanguageModel`."""
        return self._run(tokens, key_mask, positions, segment_ids, cu_seqlens, None, False)[0]


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


def _seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2  # 62 bits
