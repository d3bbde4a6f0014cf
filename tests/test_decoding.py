"""The quick step for a single token equals the long way, and is taken only where it may be."""

import itertools
import logging

import judge
import pytest
import torch
import torch.nn.functional as F

import linear_rope.causal.native as native
import linear_rope.causal.native_steps as native_steps
import linear_rope.functional as functional
from linear_rope import FEATURE_MAPS, Rotary, linear_attention, make_feature_map
from linear_rope.causal import say_single_token
from linear_rope.functional import DENOMINATORS
from linear_rope.scaling import Yarn

D, E = 4, 3
QUICK = [name for name in FEATURE_MAPS if not FEATURE_MAPS[name].log_space]
ROTATIONS = {
    "none": lambda width: None,
    "interleaved": Rotary,
    "half": lambda width: Rotary(width, pairing="half"),
    "partial": lambda width: Rotary(width, fraction=0.5),
    "yarn": lambda width: Rotary(width, scaling=Yarn(factor=4.0, original_length=16)),
}


def inputs(dtype, time=1, batch=2, heads=3):
    return [torch.randn(batch, heads, time, width, dtype=dtype) for width in (D, D, E)]


def past(dtype, **options):
    q, k, v = inputs(dtype, 5)
    return linear_attention(q, k, v, return_state=True, **options)[1]


@pytest.fixture
def taken(count_calls):
    """How many times the quick step was taken."""
    return count_calls(functional, "decode_step")


@pytest.fixture
def native_taken(count_calls):
    """How many times the step was a call of the native kernels."""
    return count_calls(native_steps, "step")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("name", QUICK)
def test_it_equals_the_long_way(name, rotation, decay, dtype, taken):
    phi = make_feature_map(name, D).to(dtype)
    if rotation == "half" and "expand" in name:
        pytest.skip("the library refuses half pairing for expanded maps")
    for where, denominator in itertools.product(("after", "before"), DENOMINATORS):
        width = phi.feature_dim if where == "after" else D
        if "expand" in name and where == "before" and rotation == "partial":
            continue
        options = {
            "feature_map": phi,
            "rotary": ROTATIONS[rotation](width),
            "rotate": where,
            "denominator": denominator,
        }
        state = past(dtype, **options)
        q, k, v = inputs(dtype)
        g = F.logsigmoid(torch.randn(2, 3, 1, dtype=dtype)) if decay else None
        results = []
        for backend in ("auto", "reference"):
            leaves = [x.clone().requires_grad_() for x in (q, k, v, state.S)]
            out, after = linear_attention(
                *leaves[:3],
                log_decay=g,
                state=state._replace(S=leaves[3]),
                return_state=True,
                backend=backend,
                **options,
            )
            torch.manual_seed(1)
            loss = (out * torch.randn_like(out)).sum() + (after.S * torch.randn_like(after.S)).sum()
            results.append((out, *after[:4], *torch.autograd.grad(loss, leaves)))
        assert len(taken) == 1, "the quick step was not taken, or was taken by the reference"
        taken.clear()
        tolerance = 1e-12 if dtype == torch.float64 else 2e-5
        for got, want in zip(*results, strict=True):
            assert got.dtype == want.dtype
            assert judge.error(got, want) <= tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("heads", [(3, 3), (6, 3), (4, 1)])
@pytest.mark.parametrize("name", ["elu+1", "relu"])
def test_heads_in_groups_and_the_native_step(name, heads, rotation, dtype, taken, native_taken):
    """Without gradients one call of the native kernels does it all, where they are ready."""
    width, values = 20, 37  # not whole vectors
    options = {"feature_map": make_feature_map(name, width), "rotary": ROTATIONS[rotation](width)}

    def inputs(time):
        return [
            torch.randn(3, h, time, w, dtype=dtype)
            for h, w in zip((heads[0], heads[1], heads[1]), (width, width, values), strict=True)
        ]

    for denominator, decay, grad in itertools.product(DENOMINATORS, (False, True), (False, True)):
        options["denominator"] = denominator
        state = linear_attention(*inputs(5), return_state=True, **options)[1]
        state = state._replace(position=torch.tensor([5, 7, 10**6]))
        q, k, v = (x.requires_grad_(grad) for x in inputs(1))
        g = F.logsigmoid(torch.randn(3, heads[1], 1, dtype=dtype)) if decay else None
        kept = state.clone()
        rest = {"log_decay": g, "state": state, "return_state": True, **options}
        out, after = linear_attention(q, k, v, **rest)
        want = linear_attention(q, k, v, backend="reference", **rest)
        tolerance = 1e-12 if dtype == torch.float64 else 2e-5
        if denominator == "rotated":  # a sum of both signs, which may nearly cancel
            tolerance *= 1e3
        for got, right in zip((out, *after[:4]), (want[0], *want[1][:4]), strict=True):
            assert got.dtype == right.dtype and got.shape == right.shape
            assert judge.error(got, right) <= tolerance
        for now, then in zip(state, kept, strict=True):
            assert torch.equal(now, then), "a state was changed in place"
    assert len(taken) == 12 and len(native_taken) == (6 if native.is_ready() else 0)


def test_what_follows_a_tensor_is_not_lost(native_taken):
    """Forward derivatives, transforms and modes need operations that they can see."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.autograd import forward_ad

    state = past(torch.float64, rotary=Rotary(D))
    (q, k, v), tangent = inputs(torch.float64), torch.randn(2, 3, 1, E, dtype=torch.float64)

    def step(v, backend="auto", state=state):
        return linear_attention(q, k, v, state=state, rotary=Rotary(D), backend=backend)

    want = step(v + tangent, "reference") - step(v, "reference")  # linear in v
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(step(forward_ad.make_dual(v, tangent))).tangent
    assert judge.error(got, want) <= 1e-12
    assert judge.error(torch.func.jvp(step, (v,), (tangent,))[1], want) <= 1e-12
    assert judge.error(torch.func.vjp(step, v)[1](torch.ones_like(v))[0], 0 * v) > 0
    both = torch.func.vmap(step)(torch.stack([v, v + tangent]))
    assert judge.error(both[1] - both[0], want) <= 1e-12
    batched = torch.stack([state.S, 2 * state.S])
    got = torch.func.vmap(lambda S: step(v, state=state._replace(S=S)))(batched)
    assert judge.error(got[1], step(v, "reference", state._replace(S=batched[1]))) <= 1e-12
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert step(mode.from_tensor(v)).shape == v.shape
    assert not native_taken
    step(v)
    assert len(native_taken) == native.is_ready()


def test_a_name_is_taken_at_its_word(taken, native_taken, caplog):
    """ "recurrent" is plain torch, whatever is ready; "auto" says once what it is."""
    say_single_token.cache_clear()
    (q, k, v), state = inputs(torch.float64), past(torch.float64, rotary=Rotary(D))
    rest = {"rotary": Rotary(D), "return_state": True}
    want = linear_attention(q, k, v, state=state, backend="reference", **rest)
    with caplog.at_level(logging.INFO, logger="linear_rope"):
        for _ in range(2):
            got = linear_attention(q, k, v, state=state, backend="recurrent", **rest)
            assert judge.error(got[0], want[0]) <= 1e-12
        assert len(taken) == 2 and not native_taken and not caplog.records
        for _ in range(2):
            got = linear_attention(q, k, v, state=state, **rest)
            assert judge.error(got[0], want[0]) <= 1e-12
    assert len(taken) == 4 and len(native_taken) == 2 * native.is_ready()
    name = "native" if native.is_ready() else "recurrent"
    said = [record.getMessage() for record in caplog.records]
    assert said == [f'backend="auto" is {name} for single tokens on cpu']


@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("backend", ["auto", "recurrent"])
def test_the_step_has_second_derivatives(backend, denominator, taken, native_taken):
    state = past(torch.float64, rotary=Rotary(D))
    g = -torch.rand(2, 3, 1, dtype=torch.float64)

    def step(q, k, v, g, S, z):
        before = state._replace(S=S, z=z)
        options = {"denominator": denominator, "backend": backend, "rotary": Rotary(D)}
        out, after = linear_attention(
            q, k, v, log_decay=g, state=before, return_state=True, **options
        )
        return out, after.S

    leaves = [x.requires_grad_() for x in (*inputs(torch.float64), g, state.S, state.z)]
    assert torch.autograd.gradgradcheck(step, leaves, fast_mode=True, atol=1e-6)
    assert taken and not native_taken


def test_the_native_step_reads_what_is_not_dense(native_taken):
    x = torch.randn(4, 1, 3, 10)
    state = linear_attention(*torch.randn(3, 4, 3, 5, 10), return_state=True)[1]
    state = state._replace(S=state.S.mT.contiguous().mT, z=state.z.mT.contiguous().mT)
    rest = {"state": state, "rotary": Rotary(10), "positions": torch.tensor([[9], [8], [7], [6]])}
    q = k = v = x.transpose(1, 2)
    k = k.flip(1).transpose(0, 1).contiguous().transpose(0, 1)
    v = v[..., ::2]
    rest["state"] = state._replace(S=state.S[..., ::2])
    out = linear_attention(q, k, v, **rest)
    assert judge.error(out, linear_attention(q, k, v, backend="reference", **rest)) <= 2e-6
    assert len(native_taken) == native.is_ready()


def test_rows_may_stand_at_different_positions(taken):
    state = past(torch.float64, rotary=Rotary(D))._replace(position=torch.tensor([7, 10**6]))
    q, k, v = inputs(torch.float64)
    options = {"rotary": Rotary(D), "state": state, "return_state": True}
    out, after = linear_attention(q, k, v, **options)
    want, _ = linear_attention(q, k, v, backend="reference", **options)
    assert judge.error(out, want) <= 1e-12 and after.position.tolist() == [8, 10**6 + 1]
    given = torch.tensor([[3], [4]])
    out, after = linear_attention(q, k, v, positions=given, **options)
    want, _ = linear_attention(q, k, v, positions=given, backend="reference", **options)
    assert judge.error(out, want) <= 1e-12 and after.position.tolist() == [4, 5]
    assert len(taken) == 2


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-30])
def test_a_token_without_a_feature_has_output_0(eps, ready, grad, taken, monkeypatch):
    """relu without an eps to speak of: the denominator is 0, as it may be in one pass."""
    if not ready:
        monkeypatch.setattr(native, "is_ready", lambda: False)
    phi = make_feature_map("relu", D, eps=eps)
    q, k, v = -torch.ones(1, 1, 4, D), torch.ones(1, 1, 4, D), torch.ones(1, 1, 4, E)
    q[:, :, 1] = k[:, :, 3] = 1 - 2 * torch.arange(D).remainder(2)  # of both signs
    if eps:
        k[:, :, :3] = -1  # features of eps alone, whose products round to 0
    q.requires_grad_(grad)
    options = {"feature_map": phi, "rotary": Rotary(D)}
    want = linear_attention(q, k, v, backend="reference", **options)
    outs, state = [], None
    for t in range(4):
        token = (x[:, :, t : t + 1] for x in (q, k, v))
        out, state = linear_attention(*token, state=state, return_state=True, **options)
        outs.append(out)
    got = torch.cat(outs, dim=2)
    assert len(taken) == 3 and not want[:, :, 2].any() and want[:, :, 1].any()
    assert judge.error(got, want) <= 1e-5
    if grad:
        grads = [torch.autograd.grad(x.square().sum(), q)[0] for x in (got, want)]
        assert judge.error(*grads) <= 1e-5


def test_what_is_not_plain_takes_the_long_way(taken):
    state = past(torch.float32)
    q, k, v = inputs(torch.float32)
    run = {"state": state, "return_state": True}
    linear_attention(q, k, v, key_mask=torch.ones(2, 1, dtype=torch.bool), **run)
    linear_attention(q, k, v, segment_ids=torch.zeros(2, 1, dtype=torch.int64), **run)
    linear_attention(q, k, v, positions=3, **run)
    linear_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), **run)
    linear_attention(*inputs(torch.float32, time=2), **run)
    with torch.autocast("cpu", torch.bfloat16):
        linear_attention(q, k, v, **run)
    assert not taken


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_decay": torch.ones(2, 3, 1)}, "log_decay must be <= 0"),
        ({"positions": torch.tensor([[1], [-1]])}, "must not be negative"),
        ({"positions": torch.tensor([[1.0], [2.0]])}, "must be integers"),
        ({"rotate": "sideways"}, "rotate='sideways'"),
        ({"rotary": Rotary(D + 2)}, f"width {D + 2}"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
    ],
)
def test_the_quick_step_hides_no_refusal(change, message):
    state = past(torch.float32)
    q, k, v = inputs(torch.float32)
    with pytest.raises(ValueError, match=message):
        linear_attention(q, k, v, **({"state": state, "return_state": True} | change))


def test_the_tables_are_those_of_the_rotation():
    """Positions up to 10^9, where float32 angles would be far off."""
    from linear_rope.decoding import _turns, frequencies_of

    rotary, at = Rotary(64), torch.tensor([0, 1857, 10**9])
    theta = frequencies_of(rotary, at.device)
    turns = _turns(rotary, theta, at, torch.float32)[:, 0, 0]
    cos, sin = rotary.tables(at)
    torch.testing.assert_close(turns.real, cos, atol=1e-6, rtol=0)
    torch.testing.assert_close(turns.imag, sin, atol=1e-6, rtol=0)
