"""One sequence over two processes, which exchange states: the result, and the gradients, of one.

Each process holds a piece of the text (of another length), reads it, and trains on it. What goes
from one to the other is a state a layer, whose size does not depend on the length.
"""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from linear_rope import Config, LanguageModel
from linear_rope.parallel import sequence_parallel

CONFIG = Config(vocab_size=50, dim=32, layers=2, heads=4, feature_map="favor+", decay="fixed")
LENGTH = 3000
PIECES = (slice(0, 1000), slice(1000, LENGTH))


def setup() -> tuple[nn.Module, Tensor, Tensor]:
    """The model and the text, the same in every process."""
    model = LanguageModel(CONFIG)
    model.initialize(seed=0)
    text = torch.randint(50, (1, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return model, text[:, :-1], text[:, 1:]


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def process(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=len(PIECES))
    model, tokens, targets = setup()
    mine = PIECES[rank]
    with sequence_parallel(model):
        logits = model(tokens[:, mine])
    summed = nn.functional.cross_entropy(logits[0], targets[0, mine], reduction="sum")
    (summed / LENGTH).backward()  # this piece's share of the mean over the text
    for p in model.parameters():
        dist.all_reduce(p.grad)  # of what all share, each has a part of the gradient

    model_alone, _, _ = setup()
    whole = model_alone(tokens)
    nn.functional.cross_entropy(whole[0], targets[0]).backward()
    whole = whole.detach()
    off = float((logits.detach() - whole[:, mine]).abs().max() / whole.abs().max())
    g = gradients(model_alone)
    off_gradient = float((gradients(model) - g).abs().max() / g.abs().max())
    print(
        f"rank {rank}: {logits.shape[1]:,} tokens; off by {off:.0e}, gradients {off_gradient:.0e}"
    )
    assert off < 1e-4 and off_gradient < 1e-4
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(process, (port,), nprocs=len(PIECES))
