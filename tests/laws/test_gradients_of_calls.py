"""Gradients belong to the forward pass, free what they need not keep, and are those of plain operations."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from hypothesis import given
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import drawn
import regard as rg
from kernels import needs_kernel
from regard.maps.scored_map import dot_tensors
from slopes import CLOSE, Model, agree, inputs, learned

pytestmark = [
    pytest.mark.usefixtures("small_blocks"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # torch's own, in forward mode
]
ENGINES_WITH_GRADIENTS = ("dense", "fused", pytest.param("kernel", marks=needs_kernel), "blocked", "linear")


# What belongs to the forward pass


@pytest.mark.parametrize("engine", ["dense", "blocked"])
def test_gradients_under_functional_call_are_those_of_the_given_parameters(engine):
    model, leaves = Model(), inputs()
    given = {name: torch.randn_like(p, requires_grad=True) for name, p in model.named_parameters()}
    output = functional_call(model, given, (engine, *leaves))
    along = torch.randn_like(output)
    mine = torch.autograd.grad(output, (*given.values(), *leaves), along)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(given[name].detach())
    theirs = torch.autograd.grad(model("dense", *leaves), (*model.parameters(), *leaves), along)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def exchange_normalizer(attention):
    attention.normalizer = rg.normalizers.LearnedSink(2).double()
    attention.normalizer.sink.data.fill_(3)


def exchange_parameter(attention):
    attention.bias_0.table = nn.Parameter(torch.randn_like(attention.bias_0.table))


def exchange_data(attention):
    attention.bias_0.table.data = torch.randn_like(attention.bias_0.table)


def change_data(attention):
    attention.bias_0.table.data.mul_(-3)
    attention.normalizer.sink.data.add_(2)


CHANGES = [exchange_normalizer, exchange_parameter, exchange_data, change_data]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_forward_pass_changes_no_gradient_and_no_map(change):
    leaves, along = inputs(), inputs(seed=3)[0].detach()
    model, other = Model(), Model()
    other.load_state_dict(model.state_dict())
    parameters = list(model.parameters())
    seen = model.attention(*leaves, engine="blocked")
    change(model.attention)
    mine = torch.autograd.grad(seen.output, (*parameters, *leaves), along)
    again = other.attention(*leaves, engine="dense")
    theirs = torch.autograd.grad(again.output, (*other.parameters(), *leaves), along)
    for one, another in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, another, **CLOSE)
    torch.testing.assert_close(seen.weights.dense(), again.weights.dense(), **CLOSE)


class Shifted(nn.Module, rg.biases.AdditiveBias):
    """A bias by a buffer, small or large."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(0, 1, numel))

    def term(self, grid, rows, cols):
        return self.shift[grid.j]


@pytest.mark.parametrize("numel", [9, 1 << 20])
def test_a_map_of_a_changed_buffer_is_right_or_refused(numel):
    attention = rg.Attention(bias=Shifted(numel))
    seen = attention(*inputs(learn=False))
    before = seen.weights.dense()
    attention.bias_0.shift.mul_(-5)
    if numel > 9:
        with pytest.raises(rg.RegardError, match="changed in place since attend ran"):
            seen.weights.dense()
    else:
        torch.testing.assert_close(seen.weights.dense(), before)


def test_a_predicate_that_closes_over_a_tensor_is_remembered_as_it_was():
    even = torch.arange(9) % 2 == 0
    seen = rg.Attention(mask=rg.mask_mod(lambda b, h, i, j: even[j]))(*inputs(), engine="blocked")
    before = seen.weights.dense()
    even.logical_not_()
    torch.testing.assert_close(seen.weights.dense(), before)
    assert (before[..., 1::2] == 0).all()


def test_every_look_at_a_map_of_changed_tensors_is_refused():
    q, k, v = inputs(learn=False)
    weights = rg.Attention()(q, k, v).weights
    weights.row_statistic, weights[0, 0, 0]  # what is known already must not answer
    q.mul_(2)
    for look in (lambda: weights[0, 0, 0], lambda: weights.select(0, 1), weights.dense, weights.entropy):
        with pytest.raises(rg.RegardError, match="changed in place"):
            look()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_a_map_has_its_weights(copied):
    attention, (q, k, v) = rg.Attention(bias=rg.biases.T5Bias(2)), inputs(learn=False)
    with torch.no_grad():
        for tensor in (q, attention.bias_0.table):
            tensor.mul_(2)  # tensors that were changed before they were looked at
    weights = attention(q, k, v).weights
    again = copied(weights)
    torch.testing.assert_close(again.dense(), weights.dense())
    q.mul_(2)
    again.dense()  # of its own tensors
    with pytest.raises(rg.RegardError, match="changed in place"):
        copied(weights)


def test_a_piece_may_be_exchanged_for_one_that_is_a_module_or_none():
    """As by assignment; parameters are then those of the pieces that are there."""
    attention, tensors = (
        rg.Attention(bias=rg.biases.T5Bias(2, 8), normalizer=rg.normalizers.LearnedSink(2)),
        inputs(learn=False),
    )
    exchanged = {
        "score": rg.scores.Bilinear(4, 4),
        "normalizer": rg.normalizers.Softmax(),
        "position": rg.RoPE(4),
        "mask": rg.causal(),
    }
    for name, piece in exchanged.items():
        setattr(attention, name, piece)
    attention.bias = rg.biases.LearnedTable(2, 3)
    attention.double()
    assert {name for name, _ in attention.named_parameters()} == {"score.weight", "bias_0.table"}
    made = rg.Attention(bias=[attention.bias[0]], **exchanged)
    torch.testing.assert_close(attention(*tensors).output, made(*tensors).output)
    attention.score, attention.bias, attention.position, attention.mask = rg.Dot(), (), None, None
    assert not list(attention.parameters())
    torch.testing.assert_close(attention(*tensors).output, rg.Attention()(*tensors).output)
    for name, piece in {"score": rg.causal(), "mask": "causal", "normalizer": None, "bias": [rg.Dot()]}.items():
        with pytest.raises(rg.RegardError, match=f"Attention\\({name}=...\\): expected a"):
            setattr(attention, name, piece)
    attention.normalizer = rg.normalizers.SumNormalizer()
    with pytest.raises(rg.RegardError, match="needs scores that are not negative"):
        attention(*tensors)


def test_with_mask_leaves_the_pieces_in_their_mode():
    score = rg.scores.Additive(4, 4, 4).eval()
    whole = rg.Attention(score)
    assert whole.training and not whole.with_mask(rg.causal()).score.training
    assert not score.training
    assert not whole.eval().with_mask(None).training


def test_plan_counts_dropout():
    attention, x = rg.Attention(mask=rg.causal(), dropout=0.1), torch.zeros(1, 2, 16, 8)
    state = torch.get_rng_state()
    plan = rg.plan(x, x, x, attention=attention)
    assert torch.equal(state, torch.get_rng_state())  # to plan draws nothing
    assert plan.engine != "fused" and "fused" in plan.refused
    assert rg.plan(x, x, x, attention=attention.eval()).engine == "fused"


# Memory


def precise(engine):
    """An input in the widest dtype that an engine computes in, and how close its gradients are."""
    x = inputs()[0]
    return (x, CLOSE) if engine != "kernel" else (x.detach().float().requires_grad_(), {"rtol": 1e-4, "atol": 1e-5})


def causal_attention(engine):
    """A causal attention that this engine runs."""
    if engine == "linear":
        return rg.Attention(rg.scores.FeatureScore(), mask=rg.causal(), normalizer=rg.normalizers.SumNormalizer())
    return rg.Attention(mask=rg.causal())


@pytest.mark.parametrize("engine", ENGINES_WITH_GRADIENTS)
def test_activation_checkpointing_frees_what_is_inside_and_gives_the_same_gradients(engine):
    attention = causal_attention(engine)
    (x, close), held = precise(engine), []

    def layer(x):
        q, k, v = x * 1.5, x.sin(), x.cos()
        held.extend(map(weakref.ref, (q, k, v)))
        return attention(q, k, v, engine=engine).output

    output = checkpoint(layer, x, use_reentrant=False)
    gc.collect()
    assert all(tensor() is None for tensor in held)
    along = torch.randn_like(output)
    mine = torch.autograd.grad(output, x, along)
    torch.testing.assert_close(mine, torch.autograd.grad(layer(x), x, along), **close)


@pytest.mark.parametrize("engine", ENGINES_WITH_GRADIENTS)
def test_saved_tensors_can_be_kept_elsewhere(engine):
    """Everything large that backward needs passes the hooks for saved tensors."""
    attention = causal_attention(engine)
    (x, close), packed = precise(engine), []

    def pack(tensor):
        packed.append(tensor.clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda number: packed[number]):
        q, k, v = x * 1.5, x.sin(), x.cos()
        output = attention(q, k, v, engine=engine).output
    held = [weakref.ref(t) for t in (q, k, v)]
    del q, k, v
    gc.collect()
    assert all(tensor() is None for tensor in held)
    along = torch.randn_like(output)
    mine = torch.autograd.grad(output, x, along)
    again = attention(x * 1.5, x.sin(), x.cos(), engine="dense").output
    torch.testing.assert_close(mine, torch.autograd.grad(again, x, along), **close)


def test_a_learned_scale_decodes_as_it_was_trained():
    inner = rg.Attention(rg.Dot(scale=learned(2, 1, 1)), mask=rg.causal())
    attention = rg.nn.MultiHeadAttention(8, 2, attention=inner).double()
    x = inputs(width=8, heads=1, learn=False)[0][:, 0]
    past, outputs = None, []
    for token in x.split(1, dim=1):
        output, past = attention.advance(token, past)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), attention(x).output, **CLOSE)


@pytest.mark.parametrize("score", [rg.Dot, rg.scores.Cosine])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_factor_for_each_head_belongs_to_its_head_wherever_one_looks(score, dtype):
    x = torch.randn(2, 3, 5, 4, dtype=dtype)
    factors = torch.tensor([0.1, 3.0, -2.0], dtype=torch.float64).view(3, 1, 1).requires_grad_()
    weights = rg.Attention(score(factors))(x, x, x).weights
    unit = F.normalize(x, dim=-1) if score is rg.scores.Cosine else x
    by_definition = (factors * (unit @ unit.mT).double()).softmax(-1).to(dtype)
    for index in ((0, 2), (1, [2, 0], 3), (slice(None), 1)):
        torch.testing.assert_close(weights[index], by_definition[index].detach(), rtol=1e-5, atol=1e-5)
    chosen = weights.select([1], [2])
    torch.testing.assert_close(chosen.received()[0, 0], by_definition[1, 2].detach().sum(0).float())
    query, key, row = dot_tensors(chosen)
    torch.testing.assert_close((query @ key.mT - row[..., None]).exp()[0], chosen[0, 0].float())


class Borrowed(rg.scores.Score):
    """A score of the user that reads a tensor which it does not hold."""

    def check(self, sizes, key_dim):
        """Any size is right."""

    def tile(self, query, key, grid):
        return query @ key.mT * LENT["factor"]


LENT = {}


@pytest.mark.parametrize("learns", [False, True])
def test_a_tensor_that_a_piece_borrows_gets_its_gradient_or_the_engine_refuses(learns):
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    LENT["factor"] = torch.tensor(0.7, dtype=torch.float64, requires_grad=learns)
    plan = rg.plan(x, x, x, attention=rg.Attention(Borrowed()))
    assert ("blocked" in plan.refused) == learns
    with torch.no_grad():
        assert "blocked" not in rg.plan(x, x, x, attention=rg.Attention(Borrowed())).refused
    if learns:
        output = rg.Attention(Borrowed())(x, x, x).output
        expected = (x @ x.mT * LENT["factor"]).softmax(-1) @ x
        found, exact = (torch.autograd.grad(y.square().sum(), LENT["factor"])[0] for y in (output, expected))
        torch.testing.assert_close(found, exact)


# Gradients through every engine


def plain(q, k, v, scale=None):
    """Softmax attention over all keys in plain operations, with shared key heads."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return (q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)).softmax(-1) @ v


@pytest.mark.parametrize("engine", ["dense", "fused", "blocked"])
@pytest.mark.parametrize("scale", [None, 1.0, 0.3, 0.0, -0.5])
def test_gradients_of_grouped_heads_without_a_mask(engine, scale):
    q, k, v = (torch.randn(2, heads, 9, 5, dtype=torch.float64, requires_grad=True) for heads in (6, 2, 2))
    output = rg.Attention(rg.Dot(scale=scale))(q, k, v, engine=engine).output
    agree(output, plain(q, k, v, scale), (q, k, v))


@pytest.mark.parametrize("engine", ["dense", "fused", "blocked", "auto"])
@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-42, 1e-60])
@pytest.mark.parametrize("key_heads", [2, 6])
def test_a_scale_that_is_not_positive_keeps_the_causal_mask(engine, scale, key_heads):
    """torch's kernel multiplies the hidden scores, which are -inf, by the scale: its causal flag would give NaN."""
    q, k, v = (
        torch.randn(2, heads, 9, 5, dtype=torch.float64, requires_grad=True) for heads in (6, key_heads, key_heads)
    )
    output = rg.Attention(rg.Dot(scale=scale), mask=rg.causal())(q, k, v, engine=engine).output
    keys, values = (t.repeat_interleave(6 // key_heads, 1) for t in (k, v))
    hidden = torch.ones(9, 9).triu(1).bool()
    agree(output, (q @ keys.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1) @ values, (q, k, v))


def linear_attention(q, k, v, is_causal):
    """Katharopoulos et al. 2020, eq. 4, pair by pair."""
    scores = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    if is_causal:
        scores = scores.tril(k.shape[2] - q.shape[2])
    return scores / scores.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize("is_causal", [True, False])
def test_gradients_pass_through_the_state_of_recurrent_decoding(is_causal):
    mask = rg.causal() if is_causal else None
    attention, leaves = (
        rg.Attention(rg.scores.FeatureScore(), mask=mask, normalizer=rg.normalizers.SumNormalizer()),
        inputs(n=11),
    )
    cache, outputs = rg.caches.RecurrentCache(), []
    for part in (slice(0, 6), slice(6, 10), slice(10, 11)):
        seen = attention(*(t[:, :, part] for t in leaves), cache=cache)
        cache = seen.cache
        outputs.append(seen.output)
    q, k, v = leaves
    stops = ((0, 6), (6, 10), (10, 11))
    expected = [linear_attention(q[:, :, a:b], k[:, :, :b], v[:, :, :b], is_causal) for a, b in stops]
    agree(torch.cat(outputs, 2), torch.cat(expected, 2), leaves)
    agree(outputs[-1], expected[-1], leaves)  # earlier keys reach it through the state alone


PLAIN = {"scores": {"dot": drawn.SCORES["dot"]}, "normalizers": {"softmax": drawn.NORMALIZERS["softmax"]}}


@drawn.examples(40)
@given(problem=drawn.problems(longest=20, biases={"softcap": drawn.BIASES["softcap"]}, learned=False, **PLAIN))
def test_gradients_of_every_engine_are_those_of_plain_operations(problem):
    attention, positions, leaves = problem.attention, problem.positions, drawn.leaves(problem)
    q, k, v = leaves
    if attention.position is not None:
        at = positions.query(slice(0, q.shape[2])), positions.key()
        q, k = (attention.position.encode(x, place) for x, place in zip((q, k), at, strict=True))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    for bias in attention.bias:
        scores = bias.cap * (scores / bias.cap).tanh()
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if attention.mask is not None:
        allowed = attention.mask.allowed(problem.grid).expand(scores.shape)
    empty = ~allowed.any(-1, keepdim=True)
    weights = scores.masked_fill(~allowed & ~empty, -torch.inf).softmax(-1).masked_fill(empty, 0.0)
    expected = weights @ v
    for engine in {"dense", "fused", "blocked"} - set(
        rg.plan(*leaves, attention=attention, positions=positions).refused
    ):
        output = attention(*leaves, positions=positions, engine=engine).output
        agree(output, expected, leaves, **drawn.CLOSE)
