"""Convolution, token shift, gate and local attention: against loops, padded, packed, streamed."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linear_rope.local_attention import WindowCache, local_attention
from linear_rope.mixing import OutputGate, ShortConvolution, TokenShift

CHANNELS = 6
IDS = torch.tensor([[4, 4, 4, 1, 1, 7, 7, 7, 7, 7, 7], [2, 3, 3, 3, 3, 3, 3, 3, 3, 9, 9]])


def randomize(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return module.double()


class Local(nn.Module):
    """`local_attention` on (batch, time, channels), so that all cases share their tests."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, x: Tensor, **options: Any) -> Any:
        q = x.unflatten(-1, (2, 3)).transpose(1, 2)  # two heads, one key head
        k, v = q[:, :1] * 1.5 - 0.2, torch.cat([q[:, 1:], q[:, :1, :, :2]], dim=-1)
        got = local_attention(q, k, v, self.window, **options)
        out, *state = got if isinstance(got, tuple) else (got,)
        out = out.transpose(1, 2).flatten(2)
        return (out, *state) if state else out


MODULES: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: randomize(ShortConvolution(CHANNELS)),
    "convolution, silu, width 2": lambda: randomize(
        ShortConvolution(CHANNELS, 2, activation="silu")
    ),
    "convolution, width 1": lambda: randomize(ShortConvolution(CHANNELS, 1)),
    "shift": lambda: randomize(TokenShift(CHANNELS)),
    "local, window 4": lambda: Local(4),
    "local, window 1": lambda: Local(1),
    "local, window 20": lambda: Local(20),
}
every_module = pytest.mark.parametrize("name", MODULES)


def inputs(batch: int = 2, time: int = 11, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, time, CHANNELS, generator=generator, dtype=torch.float64)


def close(got: Tensor, want: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def loop(name: str, module: nn.Module, x: Tensor) -> Tensor:
    """One row, (time, channels), token by token: the definition."""
    out = []
    for t in range(len(x)):
        earlier = [x[t - j] if t >= j else torch.zeros_like(x[0]) for j in range(20)]
        if name == "shift":
            out.append((1 - module.mu) * earlier[0] + module.mu * earlier[1])
        elif isinstance(module, ShortConvolution):
            terms = [w * past for w, past in zip(module.weight.T.flip(0), earlier, strict=False)]
            y = sum(terms[1:], terms[0])
            out.append(y * y.sigmoid() if "silu" in name else y)
        else:
            first = max(0, t - module.window + 1)
            heads = []
            for head in range(2):
                q = x[t, 3 * head : 3 * head + 3]
                k = x[first : t + 1, :3] * 1.5 - 0.2
                v = torch.cat([x[first : t + 1, 3:], x[first : t + 1, :2]], dim=-1)
                heads.append(((k @ q) / 3**0.5).softmax(0) @ v)
            out.append(torch.cat(heads))
    return torch.stack(out) if out else x.new_zeros(0, 10 if isinstance(module, Local) else 6)


def grads(module: nn.Module, out: Tensor, x: Tensor) -> list[Tensor]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=out.dtype)
    return list(torch.autograd.grad((out * weight).sum(), [x, *module.parameters()]))


@every_module
@pytest.mark.parametrize("time", [0, 1, 2, 11, 90])
def test_outputs_and_gradients_are_those_of_the_loop(name: str, time: int) -> None:
    module, x = MODULES[name](), inputs(time=time).requires_grad_()
    got, want = module(x), torch.stack([loop(name, module, row) for row in x])
    close(got, want)
    if time:
        for one, other in zip(grads(module, got, x), grads(module, want, x), strict=True):
            close(one, other)


@every_module
def test_gradcheck(name: str) -> None:
    module, x = MODULES[name](), inputs(time=5).requires_grad_()
    _, state = module(inputs(time=7, seed=1), return_state=True)
    mask = torch.tensor([[True, False, True, True, False], [False, True, True, True, True]])
    assert torch.autograd.gradcheck(
        lambda y, *_: module(y, key_mask=mask, state=state),
        (x, *module.parameters()),
        fast_mode=True,
    )


MASKS = {
    "left": torch.arange(11) >= 4,
    "right": torch.arange(11) < 7,
    "middle": torch.tensor([1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 1]).bool(),
    "none real": torch.zeros(11, dtype=torch.bool),
}


@every_module
@pytest.mark.parametrize("side", MASKS)
def test_pads_leave_no_trace(name: str, side: str) -> None:
    module, real = MODULES[name](), MASKS[side]
    x = inputs()
    x[1, ~real] = torch.nan  # anything can stand there
    mask = torch.stack([torch.ones(11, dtype=torch.bool), real])
    x.requires_grad_()
    got, state = module(x, key_mask=mask, return_state=True)
    alone = x[1:, real].detach().requires_grad_()
    want, alone_state = module(alone, return_state=True)
    close(got[1:, real], want)
    assert not got[1, ~real].any()
    close(got[:1], module(x[:1]))
    for one, other in zip(tensors(state), tensors(alone_state), strict=True):
        close(one[1:], other)
    gradient = torch.autograd.grad(got[1].square().sum(), x)[0]
    assert not gradient[1, ~real].any()
    if real.any():
        close(gradient[1:, real], torch.autograd.grad(want.square().sum(), alone)[0])
    # What follows goes on as if the pads had never been there.
    more = inputs(time=3, seed=9)
    close(module(more, state=state)[1:], module(more[1:], state=alone_state))


def tensors(state: Any) -> list[Tensor]:
    """The parts of a state whose values count: keys that are not there may be anything."""
    if isinstance(state, Tensor):
        return [state]
    there = state.mask[:, None, :, None]
    return [state.k.masked_fill(~there, 0), state.v.masked_fill(~there, 0), state.mask]


@every_module
def test_the_parts_equal_the_whole(name: str) -> None:
    module, x = MODULES[name](), inputs().requires_grad_()
    want, want_state = module(x, return_state=True)
    want_gradient = torch.autograd.grad(want.square().sum(), x)[0]
    for cuts in ([11], [4, 7], [1] * 11, [0, 3, 0, 8], [10, 1]):
        state, parts = None, []
        for part in x.split(cuts, dim=1):
            out, state = module(part, state=state, return_state=True)
            parts.append(out)
        close(torch.cat(parts, dim=1), want)
        for one, other in zip(tensors(state), tensors(want_state), strict=True):
            close(one, other)
        gradient = torch.autograd.grad(torch.cat(parts, dim=1).square().sum(), x)[0]
        close(gradient, want_gradient)


@every_module
@pytest.mark.parametrize("padded", [False, True])
def test_documents_do_not_see_each_other(name: str, padded: bool) -> None:
    module, x = MODULES[name](), inputs().requires_grad_()
    real = MASKS["middle"] if padded else torch.ones(11, dtype=torch.bool)
    _, past = module(inputs(time=6, seed=1), return_state=True)
    got, state = module(
        x,
        segment_ids=IDS,
        key_mask=real.expand(2, 11) if padded else None,
        state=past,
        return_state=True,
    )
    for row in range(2):
        documents = IDS[row].unique_consecutive().tolist()
        for i, document in enumerate(documents):
            of = (IDS[row] == document) & real
            start = select(past, row) if i == 0 else None
            want, after = module(x[row : row + 1, of], state=start, return_state=True)
            close(got[row : row + 1, of], want)
            if i == len(documents) - 1:
                for one, other in zip(tensors(select(state, row)), tensors(after), strict=True):
                    close(one, other)
        last = (IDS[row] == documents[-1]) & real
        gradient = torch.autograd.grad(got[row, last].sum(), x, retain_graph=True)[0]
        assert not gradient[row, ~last].any() and gradient[row, last].any()


def select(state: Any, row: int) -> Any:
    return (
        state.index_select(0, torch.tensor([row]))
        if isinstance(state, Tensor)
        else (state.index_select(torch.tensor([row])))
    )


def test_a_state_neither_changes_nor_keeps_the_sequence_alive() -> None:
    x = inputs(time=50)
    for name in ("convolution", "shift", "local, window 4"):
        module = MODULES[name]()
        _, state = module(x, return_state=True)
        before = [part.clone() for part in (state if isinstance(state, tuple) else (state,))]
        module(x, state=state, return_state=True)
        for part, copy in zip(state if isinstance(state, tuple) else (state,), before, strict=True):
            assert torch.equal(part, copy)
            assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


def test_both_filters_start_as_the_identity() -> None:
    x = inputs().float()
    assert torch.equal(ShortConvolution(CHANNELS)(x), x)
    assert torch.equal(TokenShift(CHANNELS)(x), x)
    convolution = ShortConvolution(CHANNELS, 4)
    nn.init.normal_(convolution.weight)
    convolution.reset_parameters()
    assert convolution.weight.tolist() == [[0.0, 0.0, 0.0, 1.0]] * CHANNELS


def test_the_convolution_takes_weights_of_a_torch_one() -> None:
    theirs = nn.Conv1d(CHANNELS, CHANNELS, 4, groups=CHANNELS, bias=False).double()
    ours = ShortConvolution(CHANNELS).double()
    ours.weight.data.copy_(theirs.weight[:, 0])
    x = inputs()
    close(ours(x), theirs(F.pad(x.mT, (3, 0))).mT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_in_float32(dtype: torch.dtype) -> None:
    x = inputs().to(dtype)
    for name in MODULES:
        module = MODULES[name]()
        want = module(x.double())
        got = module.to(dtype)(x)
        assert got.dtype == dtype
        tolerance = 4 * torch.finfo(dtype).eps * float(want.detach().abs().max())
        if name.startswith("local"):
            tolerance *= 4  # the inputs are rounded in the test's own arithmetic too
        assert float((got.double() - want).detach().abs().max()) <= tolerance
    # 100 + 1e-3 - 100: lost in bfloat16, kept in float32.
    convolution = ShortConvolution(1, 3)
    convolution.weight.data.copy_(torch.tensor([[1.0, 1.0, -1.0]]))
    x = torch.tensor([100.0, 1e-3, 100.0]).view(1, 3, 1).to(torch.bfloat16)
    assert convolution(x)[0, 2, 0].item() == x[0, 1, 0].item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert convolution(x)[0, 2, 0].item() == x[0, 1, 0].item()
    # Autocast narrows neither inputs nor weights.
    for name in ("convolution", "shift"):
        module, x = MODULES[name]().float(), inputs().float()
        want = module(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(module(x), want)


def test_the_gate_is_silu_of_a_projection() -> None:
    gate = OutputGate(3, 2).double()
    gate.weight.data.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 2.0]]))
    heads = torch.tensor([[[5.0, 7.0]]], dtype=torch.float64)
    x = torch.tensor([[[1.0, 9.0, -0.5]]], dtype=torch.float64)
    # silu(1) = 1 / (1 + 1/e) = 0.731059, silu(-1) = -1 / (1 + e) = -0.268941
    close(gate(heads, x), torch.tensor([[[5 * 0.731059, 7 * -0.268941]]]).double(), 1e-5)
    assert gate.bias is None and list(gate.state_dict()) == ["weight"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gate.float()(heads.float(), x.float()).dtype == torch.float32


def test_a_window_of_keys_by_hand() -> None:
    """Keys of 0: the mean of the values in the window, of all that are there at first."""
    v = torch.arange(1.0, 8.0).view(1, 1, 7, 1)
    zeros = torch.zeros(1, 1, 7, 2)
    assert local_attention(zeros, zeros, v, 3).flatten().tolist() == pytest.approx(
        [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0]
    )


def test_a_wide_window_is_plain_causal_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 90, 8, generator=generator) for _ in range(3))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for window in (90, 200):
        close(local_attention(q, k, v, window), want, 1e-5)
    assert not torch.allclose(local_attention(q, k, v, 89), want, atol=1e-5)


def test_long_sequences_need_memory_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    plain = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, *args: Any, **options: Any) -> Tensor:
        sizes.append(q.shape[0] * q.shape[2] * k.shape[2])
        return plain(q, k, *args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    for time in (1000, 10_000):
        x = torch.zeros(1, 1, time, 2)
        local_attention(x, x, x, 16)
    assert sizes[1] <= 11 * sizes[0] and sizes[1] < 10_000 * 100


def test_no_query_is_left_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel makes of such a row is its own affair."""
    masks = []
    plain = F.scaled_dot_product_attention

    def spy(*args: Any, attn_mask: Tensor, **options: Any) -> Tensor:
        masks.append(attn_mask)
        return plain(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    Local(4)(inputs(time=100), key_mask=torch.zeros(2, 100, dtype=torch.bool))
    assert masks and all(bool(mask.any(-1).all()) for mask in masks)


def test_one_document_is_none_at_all() -> None:
    """Two ways to compute a convolution: with documents and without."""
    module, x = MODULES["convolution"](), inputs(time=70).requires_grad_()
    got, want = (module(x, segment_ids=ids) for ids in (torch.zeros(2, 70).long(), None))
    close(got, want)
    for one, other in zip(grads(module, got, x), grads(module, want, x), strict=True):
        close(one, other)


def test_a_cache_is_saved_and_reordered() -> None:
    x = inputs()
    _, cache = Local(3)(x, return_state=True)
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, WindowCache)
    rows = torch.tensor([1, 1, 0])
    for one, other, kept in zip(cache, loaded.index_select(rows), cache.detach(), strict=True):
        assert torch.equal(one[rows], other) and torch.equal(one, kept)
    narrow = cache.clone().to(torch.float32)
    assert narrow.k.dtype == torch.float32 and narrow.mask.dtype == torch.bool


X = torch.zeros(2, 5, CHANNELS)
Q, K = torch.zeros(2, 4, 5, 3), torch.zeros(2, 2, 5, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ShortConvolution(0), "channels=0 and width=4"),
        (lambda: ShortConvolution(4, 0), "width=0"),
        (lambda: ShortConvolution(4, activation="relu"), "activation='relu' is unknown"),
        (lambda: TokenShift(0), "channels=0"),
        (lambda: OutputGate(4, 0), "width=0"),
        (lambda: OutputGate(CHANNELS, 3)(torch.zeros(2, 5, 4), X), r"heads must have shape \(2, 5"),
        (lambda: ShortConvolution(4)(X), r"x must be .* \(batch, time, 4\)"),
        (lambda: TokenShift(CHANNELS)(X.long()), "x must be floating-point"),
        (lambda: TokenShift(CHANNELS)(X, key_mask=torch.ones(2, 4).bool()), "key_mask must be"),
        (lambda: TokenShift(CHANNELS)(X, key_mask=torch.ones(2, 5)), "key_mask must be bool"),
        (lambda: TokenShift(CHANNELS)(X, segment_ids=torch.zeros(2, 5)), "segment_ids must be int"),
        (
            lambda: ShortConvolution(CHANNELS)(X, state=X),
            r"state must be the tensor of shape \(2, 3",
        ),
        (lambda: ShortConvolution(CHANNELS)(X, state=(X,)), "got tuple"),
        (lambda: local_attention(Q, K, K, 0), "window=0"),
        (lambda: local_attention(Q, K, K[..., :4, :], 2), "q, k and v must have shapes"),
        (lambda: local_attention(Q[:, :3], K, K, 2), "multiple of key heads"),
        (lambda: local_attention(Q, K.double(), K, 2), "share dtype"),
        (lambda: local_attention(Q, K, K, 3, state=(K, K, K)), "state.k must have shape"),
        (
            lambda: local_attention(Q, K, K, 3, state=WindowCache(K, K, torch.ones(2, 5).bool())),
            r"state.k must have shape \(2, 2, 2, 3\)",
        ),
    ],
)
def test_bad_arguments_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
