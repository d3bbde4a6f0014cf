"""Attention in pieces equals attention as a whole, whatever the pieces are."""

import pytest
import torch
import torch.nn.functional as F

from linear_rope import Rotary, linear_attention, make_feature_map
from linear_rope.streaming import attend_in_pieces


def inputs(time=23, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, time, 4, generator=generator, dtype=dtype) for _ in range(3))
    return q, k, v


@pytest.mark.parametrize("piece", [1, 5, 23, 100, None])
@pytest.mark.parametrize("feature_map", ["elu+1", "favor+"])
def test_pieces_equal_the_whole(piece, feature_map):
    q, k, v = inputs()
    decay = F.logsigmoid(torch.randn(2, 3, 23, dtype=torch.float64))
    real = torch.ones(2, 23, dtype=torch.bool)
    real[0, 7:12] = False
    phi = feature_map
    if feature_map == "favor+":
        phi = make_feature_map("favor+", 4, features=6).double()
    options = {
        "feature_map": phi,
        "rotary": Rotary(4 if feature_map == "elu+1" else 6),
        "log_decay": decay,
        "key_mask": real,
    }
    want, after = linear_attention(q, k, v, return_state=True, **options)
    out = torch.full_like(v, torch.nan)
    state = attend_in_pieces(q, k, v, out, piece=piece, **options)
    seen = real[:, None, :, None].expand_as(v)  # what a query at a pad sees is not defined
    torch.testing.assert_close(out[seen], want[seen], atol=1e-12, rtol=1e-12)
    for mine, theirs in zip(state, after, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)


def test_it_goes_on_from_a_state_and_into_a_file(tmp_path):
    q, k, v = inputs(40, torch.float32)
    want = linear_attention(q, k, v, rotary=Rotary(4))
    _, state = linear_attention(
        q[:, :, :9], k[:, :, :9], v[:, :, :9], rotary=Rotary(4), return_state=True
    )
    file = torch.from_file(str(tmp_path / "out"), shared=True, size=2 * 31 * 3 * 4)
    out = file.view(2, 31, 3, 4).transpose(1, 2)
    attend_in_pieces(
        q[:, :, 9:], k[:, :, 9:], v[:, :, 9:], out, piece=8, state=state, rotary=Rotary(4)
    )
    torch.testing.assert_close(out, want[:, :, 9:], atol=1e-5, rtol=1e-5)


def test_an_empty_sequence_has_a_state():
    q, k, v = inputs(0)
    state = attend_in_pieces(q, k, v, torch.empty_like(v), rotary=Rotary(4))
    assert state.position.tolist() == [0, 0]
    assert state.S.abs().max() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"piece": 0}, "piece=0"),
        ({"out": torch.empty(2, 3, 22, 4)}, "out must have shape"),
        ({"causal": False}, "causal cannot be used in pieces"),
        ({"positions": 3}, "positions cannot be used in pieces"),
        ({"segment_ids": torch.zeros(2, 23, dtype=torch.int64)}, "segment_ids cannot be used"),
    ],
)
def test_bad_arguments_are_named(change, message):
    q, k, v = inputs()
    arguments = {"q": q, "k": k, "v": v, "out": torch.empty_like(v)} | change
    with pytest.raises(ValueError, match=message):
        attend_in_pieces(**arguments)
