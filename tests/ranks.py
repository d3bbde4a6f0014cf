"""Real processes for the tests of the experiment, started as a launcher starts them."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate.state import AcceleratorState, GradientState, PartialState

from enwik8.interrupt import Interrupted
from enwik8.presets import Settings
from enwik8.run import Run
from enwik8.train import train

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def tiny(text: Path, **changes: Any) -> Settings:
    """A run of six steps that redraws its random features twice, checkpoints at 2, 4 and 6."""
    settings: dict[str, Any] = {
        **{"corpus": str(text), "layers": 2, "dim": 16, "heads": 2, "length": 32, "batch_size": 4},
        **{"steps": 6, "warmup": 2, "evaluate_every": 3, "validation_bytes": 500},
        **{"checkpoint_every": 2, "redraw_interval": 3, "cpu": True, "threads": 1},
    }
    return Settings(**{**settings, **changes})


def write_text(folder: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (20_000,), generator=generator, dtype=torch.uint8)
    path = folder / "text.txt"
    path.write_bytes(letters.numpy().tobytes())
    return path


def start(
    work: Callable[..., None], *given: Any, ends: tuple[int, ...] = (0, 0), limit: float = 300.0
) -> None:
    """Run work(rank, *given) in len(ends) processes; they must end with these codes, in time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=_child, args=(rank, len(ends), port, work, given))
        for rank in range(len(ends))
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + limit
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = tuple(process.exitcode for process in processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    assert codes == ends, f"the processes ended with {codes} (None: not in time), not {ends}"


def _child(rank: int, world: int, port: int, work: Callable[..., None], given: Any) -> None:
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in where.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    work(rank, *given)
    if dist.is_initialized():
        dist.destroy_process_group()  # as the command line does, or gloo can abort at exit


@contextmanager
def engine(**environment: str) -> Iterator[None]:
    """A fresh engine, which reads this environment, on the processes' old connection."""

    def reset() -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()

    reset()
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        reset()


@contextmanager
def before_step(step: int, action: Callable[[], None]) -> Iterator[None]:
    """Within it this process does something of its own before a training step."""
    plain = Run.train_step

    def watched(self: Any) -> Any:
        if self.step + 1 == step:
            action()
        return plain(self)

    Run.train_step = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        Run.train_step = plain  # type: ignore[method-assign]


def terminate_me() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def late_evaluation(rank: int, text: Path, arm: str, out: Path, **environment: str) -> None:
    """A run of which an evaluation is due first when it is resumed, since its interval has changed;
    a signal to the second process comes in the middle of that. Then the rest of it."""
    rarely = tiny(text, evaluate_every=100)
    stop = before_step(3, terminate_me if rank == 1 else lambda: None)
    with engine(**environment), stop, pytest.raises(Interrupted):
        train(rarely, arm, out)
    torch.distributed.barrier()  # the first one has written it
    plain, evaluated = Run.validate, []

    def validate(self: Run, interrupt: Any, report: Any) -> str:
        def signalled(share: float) -> None:
            report(share)
            if rank == 1 and not evaluated:
                terminate_me()
            evaluated.append(share)

        return plain(self, interrupt, signalled)

    Run.validate = validate  # type: ignore[method-assign]
    try:
        with engine(**environment), pytest.raises(Interrupted, match="after step 3 of 6"):
            train(tiny(text), arm, out, resume=True)
    finally:
        Run.validate = plain  # type: ignore[method-assign]
    assert len(evaluated) > 1 and evaluated[-1] == 1.0, evaluated  # to its end, on both
    torch.distributed.barrier()
    with engine(**environment):
        train(tiny(text), arm, out, resume=True)
