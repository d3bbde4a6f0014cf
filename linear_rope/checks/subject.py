"""The module under test: copies of it, inputs for it, and how it is called."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from linear_rope.checks.report import Report, Skip, Tally, root_mean_square

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ARGUMENTS", "NEW_TOKENS", "Options", "Subject", "conduct"]

ARGUMENTS = ("positions", "key_mask", "segment_ids", "cu_seqlens", "state", "return_state")

# Splits such as [5, 7] and [4, 1, 1, 6] need some room.
SHORTEST = 8
# How many tokens follow after a padded call.
NEW_TOKENS = 3


class Options(TypedDict, total=False):
    """What all checks take, by keyword.

    batch: rows of the inputs, at least 2 (default 2: one row must not see another).
    length: time of the inputs, at least 8 (default 12). Go beyond the size of a block that the
        module computes in, to have its borders checked.
    call: `call(module, x, **arguments) -> output or (output, state)`, instead of
        `module(x, **arguments)`; which arguments it takes is read from its own parameters (all of
        them if it has **arguments).
    names: the module's words for the arguments, {"key_mask": "attention_mask"}; None for one that
        must not be used, {"positions": None}.
    max_length: how many positions the module has (a learned table, say); default None: no limit.
    explicit_positions: also pass `positions` where a state, a mask or documents are, for modules
        that count nothing themselves (default False: they must count).
    seed: of the inputs (default 0).
    """

    batch: int
    length: int
    call: Callable[..., Any] | None
    names: Mapping[str, str | None] | None
    max_length: int | None
    explicit_positions: bool
    seed: int


class Raised(Exception):
    """The module raised; the cause is what it raised."""


class Subject:
    """A float64 copy of a module in evaluation mode, with inputs that fit it.

    Args:
        module: what to check; it is copied, never called.
        example: an input that the module takes: floats (batch, time, width) or integers (batch,
            time). Width, size and vocabulary are read from it, its values are not used. None:
            from the first linear, embedding or norm layer of the module.
        options: see `Options`.

    Raises:
        ValueError: options that do not fit, a module that cannot be copied or that does not run on
            its input.
    """

    def __init__(
        self,
        module: nn.Module,
        example: Tensor | None = None,
        *,
        batch: int = 2,
        length: int = 12,
        call: Callable[..., Any] | None = None,
        names: Mapping[str, str | None] | None = None,
        max_length: int | None = None,
        explicit_positions: bool = False,
        seed: int = 0,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"module must be a torch.nn.Module, got {type(module).__name__}; wrap a function "
                "in a module whose forward calls it"
            )
        if batch < 2:
            raise ValueError(f"batch={batch} must be at least 2: rows are checked for leaks too")
        if length < SHORTEST:
            raise ValueError(f"length={length} must be at least {SHORTEST}, to be split")
        if max_length is not None and max_length < length + NEW_TOKENS:
            raise ValueError(
                f"max_length={max_length} must be at least length + {NEW_TOKENS} = "
                f"{length + NEW_TOKENS}, the positions that the checks use; give a smaller length="
            )
        self.original, self.batch, self.length = module, batch, length
        self.max_length = max_length
        self.explicit_positions, self.seed = explicit_positions, seed
        self.generator = torch.Generator().manual_seed(seed)
        self.call = call
        self.names = _accepted(module, call, names)
        first = next(iter([*module.parameters(), *module.buffers()]), None)
        self.device = torch.device("cpu") if first is None else first.device
        if self.device.type == "meta":
            raise ValueError("the module is on the meta device, without weights; load them first")
        if self.device.type == "mps":  # has no float64
            self.device = torch.device("cpu")
        self.vocabulary, self.width, self.size = _describe(module, example)
        self.module = self.copy(torch.float64)
        x = self.draw()
        try:
            with torch.no_grad():
                self.run(x)
        except Raised as error:
            hint = "give example=, an input that it takes, or call=, which calls it"
            raise ValueError(
                f"a float64 copy of the module does not run on {x.dtype} of shape "
                f"{tuple(x.shape)} ({error}); {hint}"
            ) from error.__cause__

    def copy(self, dtype: torch.dtype) -> nn.Module:
        """The module in another dtype and evaluation mode."""
        try:
            made = copy.deepcopy(self.original)
        except Exception as error:
            raise ValueError(f"the module cannot be copied: {error}") from error
        return made.to(device=self.device, dtype=dtype).eval()

    def draw(self, batch: int | None = None, length: int | None = None) -> Tensor:
        """A random input: float64 (batch, time, width) of the example's size, or tokens."""
        shape = (self.batch if batch is None else batch, self.length if length is None else length)
        if self.vocabulary:
            tokens = torch.randint(self.vocabulary, shape, generator=self.generator)
            return tokens.to(self.device)
        x = torch.randn(*shape, self.width, generator=self.generator, dtype=torch.float64)
        return (x * self.size).to(self.device)

    def other(self, x: Tensor, factor: float = 1.0) -> Tensor:
        """An input that differs from x at every token, `factor` times as large."""
        fresh = self.draw(x.shape[0], x.shape[1])
        if self.vocabulary:  # moved by 1 to vocabulary - 1
            return (x + 1 + fresh % (self.vocabulary - 1)) % self.vocabulary
        return fresh * factor

    def require(self, *arguments: str) -> None:
        """Skips the check if the module lacks one of the arguments."""
        lacking = [name for name in arguments if name not in self.names]
        if lacking:
            raise Skip(f"takes no {' and no '.join(lacking)} argument")

    def require_mixing(self, threshold: float) -> None:
        """Skips the check if no token reaches another: then all of them would pass."""
        x = self.draw()
        changed = torch.cat([self.other(x[:, :1]), x[:, 1:]], dim=1)
        want = self.run(x)
        moved = float((self.run(changed) - want)[:, 1:].abs().max())
        if moved <= threshold * root_mean_square(want):
            raise Skip("no output depends on another token (is a projection zero?)")

    def run(self, x: Tensor, *, module: nn.Module | None = None, **arguments: Any) -> Tensor:
        """The output, (batch, time, ...)."""
        return self._call(x, module, arguments)[0]

    def run_with_state(self, x: Tensor, **arguments: Any) -> tuple[Tensor, Any]:
        """The output and the state after it."""
        if "return_state" in self.names:
            arguments["return_state"] = True
        out, rest = self._call(x, None, arguments)
        if rest is None:
            raise Skip("takes a state argument but returns no state; see call=")
        return out, rest

    def reaches(self, position: int) -> bool:
        """Whether the module has that position."""
        return self.max_length is None or position < self.max_length

    def positions(self, positions: Tensor) -> dict[str, Any]:
        """`positions` as an argument, if they are to be explicit."""
        if not self.explicit_positions:
            return {}
        self.require("positions")
        return {"positions": positions.to(self.device)}

    def _call(
        self, x: Tensor, module: nn.Module | None, arguments: Mapping[str, Any]
    ) -> tuple[Tensor, Any]:
        module = self.module if module is None else module
        named = {self.names[name]: value for name, value in arguments.items()}
        try:
            result = module(x, **named) if self.call is None else self.call(module, x, **named)
        except NotImplementedError as error:
            raise Skip(f"not implemented by the module: {error}") from error
        except Exception as error:
            raise Raised(f"{type(error).__name__}: {error}") from error
        rest = None
        if isinstance(result, (tuple, list)) and len(result) > 1:
            result, rest = result[0], result[1]
        elif isinstance(result, (tuple, list)) and result:
            result = result[0]
        if not isinstance(result, Tensor) or result.shape[:2] != x.shape[:2]:
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(
                f"the module must return a tensor (batch, time, ...), or one and a state, for an "
                f"input {tuple(x.shape)}; got {got}; see call="
            )
        return result, rest


def conduct(
    name: str,
    body: Callable[[Subject, Tally], str],
    module: nn.Module,
    example: Tensor | None,
    tolerance: float,
    raises: bool,
    **options: Unpack[Options],
) -> Report:
    """Run one check: its body compares through the tally and returns what it tried.

    The global random state is put back; the module's gradients and modes are its copy's.
    """
    with torch.random.fork_rng(devices=_cuda_devices(module)):
        torch.default_generator.manual_seed(options.get("seed", 0))
        subject = Subject(module, example, **options)
        tally, cause = Tally(tolerance), None
        try:
            with torch.no_grad():
                report = tally.report(name, body(subject, tally))
        except Skip as skip:
            report = Report(name, False, "", skipped=str(skip))
        except Raised as raised:
            cause = raised.__cause__
            report = Report(name, False, "a call that raised", where=str(raised))
    if raises and not report.passed:
        raise AssertionError(str(report)) from cause
    return report


def _cuda_devices(module: nn.Module) -> list[torch.device]:
    devices = {p.device for p in module.parameters()} if isinstance(module, nn.Module) else set()
    return [device for device in devices if device.type == "cuda"]


def _accepted(
    module: nn.Module, call: Callable[..., Any] | None, names: Mapping[str, str | None] | None
) -> dict[str, str]:
    """Which arguments can be passed, and the words for them."""
    names = {} if names is None else names
    unknown = sorted(set(names) - set(ARGUMENTS))
    if unknown:
        raise ValueError(
            f"names has no use for {', '.join(unknown)}; its keys are: {', '.join(ARGUMENTS)}"
        )
    parameters = inspect.signature(module.forward if call is None else call).parameters
    # A call written for the checks says with **arguments that it takes all; a forward that has
    # **kwargs may drop what it does not know, and only its `names` can tell.
    anything = call is not None and any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )
    accepted = {}
    for argument in ARGUMENTS:
        word = names.get(argument, argument)
        if word is not None and (anything or word in parameters or argument in names):
            accepted[argument] = word
    return accepted


def _describe(module: nn.Module, example: Tensor | None) -> tuple[int, int, float]:
    """Vocabulary (0 for floats), width, and root mean square of what the module takes."""
    if example is not None:
        if example.is_floating_point() and example.ndim == 3:
            return 0, example.shape[-1], root_mean_square(example) or 1.0
        if example.dtype in (torch.int32, torch.int64) and example.ndim == 2:
            for layer in module.modules():
                if isinstance(layer, nn.Embedding):
                    return _vocabulary(layer.num_embeddings), 0, 1.0
            return _vocabulary(int(example.max()) + 1 if example.numel() else 0), 0, 1.0
        raise ValueError(
            "example must be floats (batch, time, width) or int64 tokens (batch, time), got "
            f"{example.dtype} of shape {tuple(example.shape)}"
        )
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            return _vocabulary(layer.num_embeddings), 0, 1.0
        if isinstance(layer, nn.Linear):
            return 0, layer.in_features, 1.0
        if isinstance(layer, nn.MultiheadAttention):
            return 0, layer.embed_dim, 1.0
        if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
            return 0, layer.normalized_shape[-1], 1.0
    raise ValueError(
        "the module has no linear, embedding or norm layer to read the input's width from; give "
        "example=, an input that it takes"
    )


def _vocabulary(size: int) -> int:
    if size < 2:
        raise ValueError(f"a vocabulary of {size} is too small: tokens must be able to differ")
    return size
