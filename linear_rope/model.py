"""Models around the attention layers: a language model and an encoder, read from top to bottom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linear_rope.arguments import check_key_mask, check_tensors
from linear_rope.block import Block
from linear_rope.config import Config
from linear_rope.counts import check_counts
from linear_rope.decoding import is_plain_state
from linear_rope.losses import linear_cross_entropy, next_tokens
from linear_rope.modes import evaluating
from linear_rope.positions import can_read
from linear_rope.sampling import check_sampling, pick
from linear_rope.segments import unpack
from linear_rope.stack import Stack
from linear_rope.states import ModelState
from linear_rope.stepping import Run, Steps, is_watched, make_steps, run_steps, trains

__all__ = ["Block", "Config", "Encoder", "LanguageModel"]


class LanguageModel(Stack):
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
        targets: Tensor | None = None,
        key_mask: Tensor | None = None,
        positions: int | Tensor | None = None,
        segment_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: ModelState | None = None,
        return_state: bool = False,
        last_only: bool = False,
    ) -> Any:
        """Logits of the next token at every position, and the new state if asked for.

        Args:
            tokens: (batch, time) integers below vocab_size; any time from 0 up.
            targets: (batch, time) int64: return their `loss` in place of logits.
            key_mask: (batch, time) bool, True at real tokens (left or right padding).
            positions: see `linear_rope.positions.resolve_positions`; default: count on from the
                state.
            segment_ids, cu_seqlens: several documents in a row, see `linear_attention`.
            state: as an earlier call returned it, to continue.
            return_state: return (logits, state).
            last_only: form only the logits after each row's last real token, (batch, vocab_size).
        """
        if last_only and targets is not None:
            raise ValueError("last_only=True needs logits: leave out targets")
        x, after = self._run(
            tokens, key_mask, positions, segment_ids, cu_seqlens, state, return_state
        )
        if targets is not None:
            out = self._loss(x, targets)
        else:
            out = self._logits(_last(x, key_mask) if last_only else x)
        return (out, after) if return_state else out

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        positions: int | Tensor | None = None,
        segment_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: ModelState | None = None,
        return_state: bool = False,
    ) -> Any:  # Tensor, or (Tensor, ModelState) with return_state
        """Mean cross entropy in nats, with the logits of a piece of the sequence at a time.

        Hooks of the model are called. A wrapper's are not (DistributedDataParallel adds gradients
        up in its own): call the wrapper with `targets`, which is the same.

        Args:
            tokens: (batch, time).
            targets: (batch, time) int64, -100 where none counts; default: each token's successor
                in `tokens`, whose last one is then only a target. Pads have none and are none, and
                neither does the first token of a document follow the one before.
            key_mask, segment_ids, cu_seqlens: as in a call. With the default targets they may
                leave out the last token, which then is as the one before it: a pad or none, and of
                its document.
            positions, state: as in a call, for what is read (with the default targets: all but the
                last token).
            return_state: return (loss, state), the state after what is read. For truncated
                backpropagation `detach()` it; with the default targets the next piece begins with
                the token that was only a target.
        """
        if targets is None:
            self._check(tokens, None, None)
            targets, key_mask, segment_ids = next_tokens(tokens, key_mask, segment_ids, cu_seqlens)
            tokens, cu_seqlens = tokens[:, :-1], None
        return self(
            tokens,
            targets=targets,
            key_mask=key_mask,
            positions=positions,
            segment_ids=segment_ids,
            cu_seqlens=cu_seqlens,
            state=state,
            return_state=return_state,
        )

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        head = self.embedding if self.head is None else self.head
        if self.head is not None and (
            type(head).forward is not nn.Linear.forward or is_watched(head)
        ):
            # A head that is more than its weight (quantized, adapted) forms its logits itself.
            return F.cross_entropy(self._logits(x).flatten(0, -2), targets.flatten())
        bias = None if self.head is None else self.head.bias
        return linear_cross_entropy(x, head.weight, targets, bias=bias)

    @torch.no_grad()
    def prefill(
        self,
        prompt: Tensor,
        *,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: ModelState | None = None,
    ) -> tuple[Tensor, ModelState]:
        """Read prompts; returns the logits after each row's last real token and the state.

        There is no gradient (a call of the model itself has one), and no logits but those.

        Args:
            prompt: (batch, time), at least one real token a row.
            key_mask: (batch, time) bool, True at real tokens: prompts of different lengths, padded
                left or right. Pads leave no trace: each row goes on as if it had been alone.
            cu_seqlens: (prompts + 1,) the limits of several prompts in one flat row (batch 1),
                each of at least one token. They become the rows of a padded batch.
            state: what each row has read before, such as the beginning of a prompt that is long.

        Returns:
            logits (batch or prompts, vocab_size), and the `ModelState` for `decode`.
        """
        if cu_seqlens is not None:
            _check_prompt(prompt)
            prompt, key_mask = unpack(prompt, cu_seqlens, key_mask)
        _check_prompt(prompt, key_mask)
        return self(  # type: ignore[no-any-return]
            prompt, key_mask=key_mask, state=state, last_only=True, return_state=True
        )

    @torch.no_grad()
    def decode(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """One more token a row, (batch,): its successor's logits (batch, vocab_size), new state.

        There is no gradient; a call of the model with that one token has one.
        """
        check_tensors(tokens=tokens)
        steps = self._steps(tokens.device)
        if steps is not None:
            self._check(tokens[:, None], None, state)
            dtype = self.embedding.weight.dtype
            if not all(is_plain_state(x, len(tokens), dtype) for x in state.layers):
                steps = None  # a state may be wider, or narrower, or not be one
        return self._decode(tokens, state, steps)

    def _steps(self, device: torch.device) -> Steps | None:
        """Quick steps through the blocks, if the model is plain and computes as in evaluation."""
        if self.training or trains(self._modules.values()):
            return None
        added = self.position_embedding is not None or self.config.position == "sinusoidal"
        return None if added else make_steps(self, self.blocks, device)

    @torch.no_grad()
    def _decode(
        self, tokens: Tensor, state: ModelState, steps: Steps | None
    ) -> tuple[Tensor, ModelState]:
        """`steps` take tokens and a state that are known to fit."""
        if steps is None:
            logits, state = self(tokens[:, None], state=state, return_state=True)
            return logits[:, -1], state
        x, layers = run_steps(steps, self.embedding(tokens[:, None]), state.layers)
        return self._logits(self.norm(x))[:, 0], ModelState(layers)

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    def stream(
        self,
        prompt: Tensor,
        *,
        key_mask: Tensor | None = None,
        state: ModelState | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Yields one token after another, (batch,), without end. Arguments as in `generate`.

        Between two tokens the model is in the mode that the caller gave it.
        """
        check_sampling(temperature, top_k, top_p)
        self._check_first(prompt, key_mask, state)
        first = (prompt, key_mask, state)
        return self._stream(first, (temperature, top_k, top_p, generator), alone=False)

    def _check_first(
        self, prompt: Tensor, key_mask: Tensor | None, state: ModelState | None
    ) -> None:
        """What `prefill` would refuse, before the first token is asked for."""
        _check_prompt(prompt, key_mask)
        self._check(prompt, key_mask, state)

    def _stream(self, first: Any, options: Any, *, alone: bool) -> Iterator[Tensor]:
        """`alone`: nobody can change the model between two tokens, unless hooks do, and it is in
        evaluation mode."""
        prompt, key_mask, state = first
        with nullcontext() if alone else evaluating(self):
            logits, state = self.prefill(prompt, key_mask=key_mask, state=state)
        alone = alone and not any(is_watched(module) for module in self.modules())
        run: Run | None = None
        steps: Steps | None = None
        sure = False  # that the model is as it was
        while True:
            token = pick(logits, *options)
            yield token  # and the caller may do anything to the model meanwhile
            if not sure:
                steps, sure = self._steps(prompt.device), alone
            # A model with steps computes as in evaluation mode, and to look at all its parts takes
            # longer than a token does.
            with nullcontext() if sure or steps is not None else evaluating(self) as trained:
                if trained:
                    steps = self._steps(prompt.device)
                if run is not None and run.steps is not steps:
                    state, run = ModelState(run.states), None
                if run is None and steps is not None:
                    run = Run(steps, len(token), state.layers)
                if run is None:
                    logits, state = self._decode(token, state, None)
                else:
                    logits = self._next(token, run)

    @torch.no_grad()
    def _next(self, token: Tensor, run: Run) -> Tensor:
        return self._logits(self.norm(run(self.embedding(token[:, None]))))[:, 0]

    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        *,
        key_mask: Tensor | None = None,
        state: ModelState | None = None,
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
            state: what each row has read before the prompt, as `prefill` and `decode` return it.
            temperature: divides the logits; 0 takes the most likely token.
            top_k: keep the k most likely tokens. top_p: keep the smallest set of the most likely
                tokens whose probabilities sum to at least p (nucleus sampling, arXiv 1904.09751).
            generator: the source of randomness; None is torch's global one.
        """
        check_counts(0, max_new_tokens=max_new_tokens)
        check_sampling(temperature, top_k, top_p)
        self._check_first(prompt, key_mask, state)
        options = (temperature, top_k, top_p, generator)
        with evaluating(self):
            tokens = self._stream((prompt, key_mask, state), options, alone=True)
            new = list(islice(tokens, max_new_tokens))
        return torch.cat([prompt, *(token[:, None] for token in new)], dim=1)


class Encoder(Stack):
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


def _check_prompt(prompt: Any, key_mask: Tensor | None = None) -> None:
    check_tensors(prompt=prompt)
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(
            f"prompt must have shape (batch, time) with at least one token, got "
            f"{tuple(prompt.shape)}"
        )
    check_key_mask(key_mask, (prompt.shape[0], prompt.shape[1]), prompt.device)
    if key_mask is not None and can_read(key_mask) and not bool(key_mask.any(-1).all()):
        raise ValueError("key_mask must leave at least one real token in each row of the prompt")


def _last(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """x at each row's last real token: (batch, time, dim) -> (batch, dim)."""
    if key_mask is None:
        return x[:, -1]
    order = torch.arange(x.shape[1], device=x.device)
    last = torch.where(key_mask, order, -1).amax(-1)
    return x[torch.arange(x.shape[0], device=x.device), last]
