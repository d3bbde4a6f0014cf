"""Several processes that train one model: what accelerate leaves to its callers.

Whatever the processes share out (batches, or with FSDP2 the parameters too), a checkpoint is that
of one process: whole tensors under the same names, so that it can be read anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor, distribute_tensor

from linear_rope.model import Block

from .errors import UserError

__all__ = [
    "ends_with_others",
    "load_whole",
    "make_accelerator",
    "refuse_several",
    "together",
    "whole",
]


def refuse_several(command: str, instead: str = "start it without a launcher") -> None:
    """Raise a UserError if a launcher has started several processes of a command for one."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"{command} works in one process; {instead}")


def make_accelerator(cpu: bool, precision: str) -> Accelerator:
    """The engine that the environment asks for (torchrun, ``accelerate launch``).

    Without an accelerator at hand processes meet on the CPU, also without ``--cpu``.
    ``accelerate launch --use_fsdp --fsdp_version 2`` shards, there too, where accelerate by itself
    would ignore it.

    Raises:
        UserError: FSDP in its first version.
    """
    cpu = cpu or not torch.accelerator.is_available()
    accelerator = Accelerator(cpu=cpu, mixed_precision=precision)
    wanted = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if wanted and accelerator.distributed_type == DistributedType.MULTI_CPU:
        plugin = FullyShardedDataParallelPlugin()  # from the environment
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
        accelerator.state.fsdp_plugin = plugin
        for state in (AcceleratorState, PartialState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
    if accelerator.distributed_type == DistributedType.FSDP and not getattr(
        accelerator, "is_fsdp2", False
    ):
        raise UserError(
            "FSDP is asked for in version 1, whose checkpoints are in pieces; use accelerate "
            "launch --fsdp_version 2 (or FSDP_VERSION=2)"
        )
    return accelerator


def together(accelerator: Accelerator, module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """``accelerator.prepare``: model and optimizer as all processes use them together."""
    if accelerator.distributed_type == DistributedType.FSDP:
        plugin = accelerator.state.fsdp_plugin
        # All processes have the same initial values already, and to send them from one to the
        # others fails for buffers, such as random projections, which are not cut.
        plugin.cpu_ram_efficient_loading = False
        if plugin.auto_wrap_policy is None and any(isinstance(m, Block) for m in module.modules()):
            # A block's parameters are gathered, and let go, together.
            plugin.auto_wrap_policy = transformer_auto_wrap_policy
            vars(module)["_no_split_modules"] = [Block.__name__]  # where accelerate looks
    return accelerator.prepare(module, optimizer)


def whole(tree: Any) -> Any:
    """A state dict with whole tensors, where a process has parts: a task for all at once."""
    if isinstance(tree, DTensor):
        return tree.full_tensor().cpu()
    if isinstance(tree, Mapping):
        return {name: whole(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [whole(value) for value in tree]
    return tree


def load_whole(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    model_state: Mapping[str, Any],
    optimizer_state: Mapping[str, Any],
) -> None:
    """Load state dicts of whole tensors; each process takes its parts.

    Raises:
        RuntimeError, KeyError, ValueError: they are those of another model.
    """
    parts = module.state_dict()
    module.load_state_dict({name: _part(x, parts.get(name)) for name, x in model_state.items()})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = {
        i: {name: _part(x, parameters[i]) for name, x in entry.items()}
        for i, entry in optimizer_state["state"].items()
    }
    optimizer.load_state_dict({**optimizer_state, "state": moments})


def _part(value: Any, like: Any) -> Any:
    """What this process holds of a tensor, if it is cut as ``like`` is; scalars are not."""
    if isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape:
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value


@contextmanager
def ends_with_others() -> Iterator[None]:
    """Within it, the end of another process is one sentence instead of a network's error.

    Raises:
        UserError: another process of the run ended while this one waited for it.
    """
    try:
        yield
    except RuntimeError as error:
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if several and any(word in str(error).lower() for word in _LOST):
            raise UserError(
                "another process of this run has ended, so this one ends too; its message says "
                "why, and --resume goes on from the last checkpoint"
            ) from error
        raise


_LOST = ("connection", "timed out", "timeout", "broken pipe", "nccl", "peer")
