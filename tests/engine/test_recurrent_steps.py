"""Single tokens after the state of a recurrent cache, without a plan: outputs, states, maps, gradients and refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard as rg
from drawn import examples
from regard.engine.decoding import RecurrentStep
from regard.transitions import ChannelDecay, Decay, Delta, GatedDelta, KimiDelta

CHANNELS = (GatedDelta, KimiDelta, ChannelDecay)


@pytest.fixture
def steps(monkeypatch):
    """Counts the tokens that ran without a plan."""
    ran, run = [], RecurrentStep.run
    monkeypatch.setattr(RecurrentStep, "run", lambda self, *given: ran.append(self) or run(self, *given))
    return ran


def drawn_tensors(kind, B, H, n, D, generator):
    """Decays below 0 and betas from 0 to 2, with the axes that the transition asks for."""
    axes = {"B": B, "H": H, "J": n, "D": D}
    drawn = {}
    for name, letters in kind().needs.items():
        x = torch.rand(*(axes[letter] for letter in letters.split()), generator=generator, dtype=torch.float64)
        drawn[name] = -3 * x if name == "log_decay" else 2 * x
    return drawn


def memory(kind, query, key, value, log_decay=None, beta=None):
    """Outputs of all tokens and the last state in float64, from the recurrence as the docstrings write it."""
    query, key, value = query.double(), key.double(), value.double()
    H = query.shape[1]
    key, value = (t.repeat_interleave(H // t.shape[1], 1) for t in (key, value))
    if issubclass(kind, Delta | GatedDelta | KimiDelta):
        query, key = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (query, key))
    state, outputs = query.new_zeros(*query.shape[:2], query.shape[3], value.shape[3]), []
    for t in range(query.shape[2]):
        if log_decay is not None:
            decay = log_decay[:, :, t].exp()
            state = state * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
        written = value[:, :, t]
        if beta is not None:
            read = (key[:, :, t, :, None] * state).sum(2)
            written = beta[:, :, t, None] * (written - read)
        state = state + key[:, :, t, :, None] * written[:, :, None]
        outputs.append((query[:, :, t, :, None] * state).sum(2) * query.shape[3] ** -0.5)
    return torch.stack(outputs, 2), state


@examples(150)
@given(
    st.sampled_from([Decay, ChannelDecay, Delta, GatedDelta, KimiDelta]),
    st.sampled_from([(1, 2, 2, 8, 8), (2, 4, 2, 8, 5), (1, 3, 1, 4, 9)]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(1, 6),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_tokens_agree_with_the_recurrence_in_float64(kind, sizes, dtype, num_tokens, grad, strided, seed):
    """The first call has two tokens, and each later call one."""
    (B, H, G, D, E), generator = sizes, torch.Generator().manual_seed(seed)
    n = 2 + num_tokens
    query, key, value = (
        torch.randn(B, heads, n, width, generator=generator).to(dtype) for heads, width in ((H, D), (G, D), (G, E))
    )
    if strided:
        query, key, value = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value))
    exact = drawn_tensors(kind, B, H, n, D, generator)
    tensors = {name: t.to(dtype) for name, t in exact.items()}
    expected, state = memory(kind, query, key, value, **{name: t.double() for name, t in tensors.items()})
    attention, cache, outputs = rg.Attention(transition=kind()), rg.caches.RecurrentCache(), []
    with torch.set_grad_enabled(grad):
        for part in (slice(0, 2), *(slice(t, t + 1) for t in range(2, n))):
            of_part = {name: t[:, :, part] for name, t in tensors.items()}
            seen = attention(query[:, :, part], key[:, :, part], value[:, :, part], cache=cache, **of_part)
            cache = seen.cache
            outputs.append(seen.output)
    tolerance = 1e-10 if dtype is torch.float64 else 1e-4
    scale = 1 + float(expected.abs().max())
    torch.testing.assert_close(torch.cat(outputs, 2).double(), expected, atol=tolerance * scale, rtol=0)
    torch.testing.assert_close(cache.state.double(), state, atol=tolerance * (1 + float(state.abs().max())), rtol=0)
    assert cache.length == n
    assert seen.weights.positions == rg.types.Positions(n - 1, rg.types.Spans(((n - 1, n),)))


def token(H=2, D=4, n=1):
    x = torch.randn(3, 1, H, n, D)
    return (*x, -torch.rand(1, H, n), torch.rand(1, H, n))


def after_one(attention, **options):
    q, k, v, decay, beta = token(**options)
    return attention(q, k, v, log_decay=decay, beta=beta, cache=rg.caches.RecurrentCache()).cache


def test_repeated_tokens_run_without_a_plan(steps):
    attention = rg.Attention(transition=GatedDelta())
    cache = after_one(attention)
    for _ in range(5):
        q, k, v, decay, beta = token()
        seen = attention(q, k, v, log_decay=decay, beta=beta, cache=cache)
        weight = seen.weights.dense()
        expected = (q * k).sum(-1) / (q.norm(dim=-1) * k.norm(dim=-1)) * beta / 2
        torch.testing.assert_close(weight[..., 0], expected, atol=1e-4, rtol=1e-4)
        cache = seen.cache
    assert len(steps) == 5 and cache.length == 6


def test_gradients_of_single_tokens_are_those_of_one_call(steps):
    attention, leaves = rg.Attention(transition=GatedDelta()), [t.requires_grad_() for t in token(n=3)]
    q, k, v, decay, beta = leaves
    whole = attention(q, k, v, log_decay=decay, beta=beta).output
    expected = torch.autograd.grad(whole.square().sum(), leaves)
    cache, outputs = rg.caches.RecurrentCache(), []
    for t in range(3):
        one = slice(t, t + 1)
        tensors = {"log_decay": decay[:, :, one], "beta": beta[:, :, one]}
        seen = attention(q[:, :, one], k[:, :, one], v[:, :, one], cache=cache, **tensors)
        cache = seen.cache
        outputs.append(seen.output)
    found = torch.autograd.grad(torch.cat(outputs, 2).square().sum(), leaves)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert len(steps) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: {**t, "beta": t["beta"][:, :1, :, None]}, "needs beta of shape"),
        (lambda t: {"log_decay": t["log_decay"]}, "needs a tensor for each call"),
        (lambda t: {**t, "gamma": t["beta"]}, "unexpected keyword argument 'gamma'"),
        (lambda t: {**t, "beta": torch.rand(1, 3, 1)}, "needs beta of shape"),
    ],
)
def test_wrong_tensors_of_a_later_token_are_refused(change, said):
    attention = rg.Attention(transition=GatedDelta())
    cache = after_one(attention)
    q, k, v, decay, beta = token()
    tensors = {"log_decay": decay, "beta": beta}
    attention(q, k, v, cache=cache, **tensors)
    with pytest.raises(rg.RegardError, match=said):
        attention(q, k, v, cache=cache, **change(tensors))


@pytest.mark.parametrize("axis", [0, 1])
def test_tensors_for_all_heads_or_entries_are_repeated(axis):
    """One decay for all: the step leaves such a call to the plan."""
    attention = rg.Attention(transition=GatedDelta())
    q, k, v, *tensors = (torch.cat(pair) for pair in zip(token(), token(), strict=True))
    decay, beta = (t.narrow(axis, 0, 1) for t in tensors)
    state = torch.randn(2, 2, 4, 4)
    shared = attention(q, k, v, log_decay=decay, beta=beta, cache=rg.caches.RecurrentCache(state, 3))
    of_each = {"log_decay": decay.expand(2, 2, 1).clone(), "beta": beta.expand(2, 2, 1).clone()}
    expected = attention(q, k, v, cache=rg.caches.RecurrentCache(state, 3), **of_each)
    torch.testing.assert_close(shared.output, expected.output)
    torch.testing.assert_close(shared.cache.state, expected.cache.state)


def test_listeners_are_told_of_each_token():
    attention, heard = rg.Attention(transition=GatedDelta()), []
    cache = after_one(attention)

    class Ear:
        def on_attention(self, module, weights):
            heard.append(weights.shape)

    q, k, v, decay, beta = token()
    with rg.nn.listeners.to(Ear()), rg.attention_output.attend_listeners.to(Ear()):
        attention(q, k, v, log_decay=decay, beta=beta, cache=cache)
    assert heard == [(1, 2, 1, 1)]


def test_a_linear_attention_keeps_its_plan():
    """A cache of sums over keys belongs to feature scores too, which have no transition."""
    attention = rg.Attention(rg.scores.FeatureScore(), mask=rg.causal(), normalizer=rg.normalizers.SumNormalizer())
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    cache, outputs = rg.caches.RecurrentCache(), []
    for t in range(6):
        one = slice(t, t + 1)
        seen = attention(q[:, :, one], k[:, :, one], v[:, :, one], cache=cache)
        cache = seen.cache
        outputs.append(seen.output)
    torch.testing.assert_close(torch.cat(outputs, 2), attention(q, k, v).output, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [Decay, Delta, GatedDelta])
def test_a_kept_step_reads_any_layout_and_sign(steps, monkeypatch, request, kind):
    """Values that torch stores negated, a state with other strides; at the last token no compiled kernel runs."""
    generator = torch.Generator().manual_seed(5)
    query, key, value = torch.randn(3, 1, 2, 5, 8, generator=generator)
    tensors = {name: t.float() for name, t in drawn_tensors(kind, 1, 2, 5, 8, generator).items()}
    exact, last = memory(kind, query, key, value, **{name: t.double() for name, t in tensors.items()})
    negated = torch.complex(torch.zeros_like(value), -value).conj().imag
    assert negated.is_neg() and torch.equal(negated, value)
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.float64)  # the buffers of the kernels are of float32 all the same
    attention, cache, outputs = rg.Attention(transition=kind()), rg.caches.RecurrentCache(), []
    for t in range(5):
        of_token = {name: x[:, :, t : t + 1] for name, x in tensors.items()}
        seen = attention(
            query[:, :, t : t + 1], key[:, :, t : t + 1], negated[:, :, t : t + 1], cache=cache, **of_token
        )
        outputs.append(seen.output)
        cache = rg.caches.RecurrentCache(seen.cache.state.mT.contiguous().mT, t + 1)
        if t == 3:
            monkeypatch.setenv("REGARD_KERNEL", "off")
    assert torch.allclose(torch.cat(outputs, 2).double(), exact, atol=1e-5)
    assert torch.allclose(cache.state.double(), last, atol=1e-5)
    assert len(steps) == 4 and steps[-1].compiled is None
