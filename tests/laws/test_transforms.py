"""Derivatives of other kinds, torch.func, export, compilation and the meta device: right, or refused in words."""

from __future__ import annotations

import copy
import functools
import importlib

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, gradcheck
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.nn import functional as F

import regard as rg
from cataloged import SINGLE
from regard.catalog import mechanisms
from regard.engine import ENGINES
from regard.engine.flash import flash
from regard.engine.kept_plans import kept_plans
from regard.engine.transforms import uncompiled
from regard.pieces.contents import LONG, is_small, learned_parts, split_tensors, tensor_snapshot
from slopes import CLOSE, Model, agree, inputs

pytestmark = [
    pytest.mark.usefixtures("small_blocks"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # torch's own, in forward mode
]


def example(engine: str) -> rg.Attention:
    if engine == "linear":
        return rg.Attention(rg.scores.FeatureScore(), mask=rg.causal(), normalizer=rg.normalizers.SumNormalizer())
    return rg.Attention(mask=rg.causal(), bias=rg.ALiBi(2))


@pytest.mark.parametrize("engine", ["fused", "blocked", "linear"])
def test_a_second_derivative_is_refused_where_it_would_be_wrong(engine):
    leaves = inputs()
    output = example(engine)(*leaves, engine=engine).output
    first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
    with pytest.raises(rg.RegardError, match="engine='dense'"):
        torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    with pytest.raises(rg.RegardError, match="engine='dense'"):  # of a sum, whose own gradient is constant
        output = example(engine)(*leaves, engine=engine).output
        torch.autograd.grad(torch.autograd.grad(output.sum(), leaves[0], create_graph=True)[0].sum(), leaves[0])


def test_first_derivatives_may_keep_their_graph():
    leaves = inputs()
    for engine in ("fused", "blocked"):
        output = example(engine)(*leaves, engine=engine).output
        kept = torch.autograd.grad(output.sum(), leaves, create_graph=True)
        plain = torch.autograd.grad(example(engine)(*leaves, engine="dense").output.sum(), leaves)
        for one, other in zip(kept, plain, strict=True):
            torch.testing.assert_close(one, other, **CLOSE)


def test_second_derivatives_of_the_dense_engine_are_slopes_of_the_first():
    leaves = inputs(n=4, heads=1, width=2)

    def first(*leaves):
        output = rg.Attention(mask=rg.causal())(*leaves, engine="dense").output
        return torch.autograd.grad(output.square().sum(), leaves, create_graph=True)

    assert gradcheck(first, leaves)


@pytest.mark.parametrize("engine", ["fused", "blocked", "linear"])
def test_transforms_of_torch_func_are_refused_by_engines_with_gradients_of_their_own(engine):
    (q, k, v), attention = inputs(learn=False), example(engine)

    def output(q):
        return attention(q, k, v, engine=engine).output

    for transform in (
        lambda: grad(lambda q: output(q).sum())(q),
        lambda: jacrev(output)(q),
        lambda: jvp(output, (q,), (q,)),
    ):
        with pytest.raises(rg.RegardError, match="only the dense engine"):
            transform()
    with forward_ad.dual_level(), pytest.raises(rg.RegardError, match="only the dense engine"):
        output(forward_ad.make_dual(q, torch.ones_like(q)))


FUNCTIONAL = {
    "alibi": lambda: rg.Attention(mask=rg.causal(), bias=rg.ALiBi(2)),
    "t5": lambda: rg.Attention(mask=rg.causal() & rg.window(3), bias=rg.biases.T5Bias(2, num_buckets=8)).double(),
    "transformer-xl": lambda: rg.Attention(bias=rg.biases.TransformerXLBias(2, 4)).double(),
    "bahdanau": lambda: rg.Attention(rg.scores.Additive(4, 4, 5), mask=rg.padding([9, 4])).double(),
    "sink": lambda: rg.Attention(position=rg.RoPE(4), normalizer=rg.normalizers.LearnedSink(2)).double(),
    "entmax": lambda: rg.Attention(normalizer=rg.normalizers.Entmax15()),
    "linear": lambda: rg.Attention(
        rg.scores.FeatureScore(), mask=rg.causal(), normalizer=rg.normalizers.SumNormalizer()
    ),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_derivatives_by_torch_func_are_those_of_autograd(name):
    attention, (q, k, v) = FUNCTIONAL[name](), inputs(n=9)

    def output(q):
        return attention(q, k.detach(), v.detach()).output

    along = torch.randn_like(q)
    (expected,) = torch.autograd.grad(attention(q, k, v, engine="dense").output, q, along)
    q = q.detach()
    torch.testing.assert_close(grad(lambda q: (output(q) * along).sum())(q), expected, **CLOSE)
    torch.testing.assert_close(vjp(output, q)[1](along)[0], expected, **CLOSE)
    by_rows = jacrev(lambda q: output(q)[0, 0, -1])(q)
    torch.testing.assert_close(by_rows, torch.autograd.functional.jacobian(lambda q: output(q)[0, 0, -1], q), **CLOSE)
    _, forwards = jvp(lambda q: output(q)[0, 0, -1], (q,), (along,))
    torch.testing.assert_close(forwards, (by_rows * along).flatten(1).sum(1), **CLOSE)


def test_forward_derivatives_reach_the_pieces():
    model, (q, k, v) = Model(), inputs(learn=False)
    given = {name: p.detach() for name, p in model.named_parameters()}
    along = {name: torch.randn_like(p) for name, p in given.items()}

    def output(given):
        return functional_call(model, given, ("auto", q, k, v)).square().sum()

    _, forwards = jvp(output, (given,), (along,))
    backwards = grad(output)(given)
    torch.testing.assert_close(forwards, sum((backwards[name] * along[name]).sum() for name in along), **CLOSE)


# Where numbers cannot be read


NAMES = SINGLE


class Alone(nn.Module):
    """One attention as a model."""

    def __init__(self, attention, **options):
        super().__init__()
        self.attention, self.options = attention, options

    def forward(self, q, k, v):
        return self.attention(q, k, v, **self.options).output


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_attention_under_vmap_is_that_of_each_entry(name):
    attention, *tensors = mechanisms()[name].example(batch=1)
    model = Alone(attention)
    several = [torch.stack((t, t.flip(2), 2 * t)) for t in tensors]
    expected = torch.stack([model(*(t[n] for t in several)) for n in range(3)])
    torch.testing.assert_close(vmap(model)(*several), expected)


def test_gradients_of_each_sample():
    model, (q, k, v) = Model(), inputs(learn=False)
    given = {name: p.detach() for name, p in model.named_parameters()}

    def loss(given, *tensors):
        return functional_call(model, given, ("auto", *(t[None] for t in tensors))).square().sum()

    by_sample = vmap(grad(loss), in_dims=(None, 0, 0, 0))(given, q, k, v)
    for n in range(2):
        alone = grad(loss)(given, q[n], k[n], v[n])
        for name in given:
            torch.testing.assert_close(by_sample[name][n], alone[name], **CLOSE)


def test_gradients_of_each_sample_by_torch_func():
    attention, (q, k, v) = rg.Attention(mask=rg.causal(), position=rg.RoPE(4)), inputs(learn=False)

    def loss(*vectors):
        return attention(*(x[None] for x in vectors)).output.sin().sum()

    theirs = torch.autograd.grad(attention(q.requires_grad_(), k, v).output.sin().sum(), q)[0]
    torch.testing.assert_close(vmap(grad(loss))(q.detach(), k, v), theirs, **CLOSE)


@pytest.mark.parametrize(
    "mask", [rg.masks.random_blocks(2, 2, 9), rg.mask_tensor(torch.ones(9, 9).bool().tril())], ids=repr
)
def test_a_mask_that_is_first_used_in_a_transform_keeps_nothing_of_it(mask):
    mask, (q, k, v) = copy.deepcopy(mask), inputs(learn=False)
    vmap(grad(lambda x: rg.Attention(mask=mask)(x[None], k[:1], v[:1]).output.sum()))(q)
    copied = copy.deepcopy(mask)
    outputs = [rg.Attention(mask=m)(q, k, v, engine="blocked").output for m in (mask, copied)]
    torch.testing.assert_close(*outputs)


def test_hessians_by_torch_func_are_those_of_autograd():
    q, k, v = inputs(n=4, heads=1, width=2, learn=False)

    def loss(q):
        return rg.Attention(mask=rg.causal(), bias=rg.ALiBi(1))(q, k, v, engine="auto").output.square().sum()

    def dense(q):
        return rg.Attention(mask=rg.causal(), bias=rg.ALiBi(1))(q, k, v, engine="dense").output.square().sum()

    torch.testing.assert_close(hessian(loss)(q), torch.autograd.functional.hessian(dense, q), **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_on_meta_tensors_sizes_are_answered(name):
    attention, *tensors = mechanisms()[name].example()
    nowhere = [t.to("meta") for t in tensors]
    here, there = (
        rg.plan(*x, attention=a) for a, x in ((attention, tensors), (copy.deepcopy(attention).to("meta"), nowhere))
    )
    assert there.cost.pairs > 0 or here.cost.pairs == 0
    assert "floating-point operations" in str(there)
    output = copy.deepcopy(attention).to("meta")(*nowhere).output
    assert output.device.type == "meta" and output.shape == attention(*tensors).output.shape


def _numbers_of(seen):
    """The output, some rows, and statistics; entropy is that of shares, where weights have signs."""
    weights = seen.weights
    entropy = (weights if weights.has_shares else weights.shares()).entropy()
    return [seen.output, weights[0, 0, 1:3], entropy, weights.received(), weights.pool(2, 2)]


def _numbers_in_one_pass(seen):
    weights, sums = seen.weights, (rg.maps.KeyTotals(), rg.maps.Pool(2, 2))
    if weights.has_shares:
        entropy, *found = weights.summarize(rg.maps.Entropy(), *sums)
    else:
        entropy, found = weights.shares().entropy(), weights.summarize(*sums)
    return [seen.output, weights[0, 0, 1:3], entropy, *found]


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_default_device_does_not_matter(name):
    """What pieces and engines need on the host they make there, also where torch makes tensors on another device."""
    attention, *tensors = mechanisms()[name].example(dtype=torch.float32)
    for engine in set(ENGINES) - {"flex", *rg.plan(*tensors, attention=attention).refused}:
        expected = attention(*tensors, engine=engine)
        kept_plans.clear()
        with torch.device("meta"):
            seen = attention(*tensors, engine=engine)
            found = _numbers_of(seen)
        for one, other in zip(found, _numbers_in_one_pass(expected), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning", "ignore::torch.jit.TracerWarning"
)
def test_torch_jit_trace_is_refused_where_it_would_keep_numbers_as_constants():
    q, k, v = (t.float() for t in inputs(learn=False))
    for attention in (rg.Attention(mask=rg.causal()), rg.Attention(bias=rg.ALiBi(2))):
        with pytest.raises(rg.RegardError, match=r"attend: torch.jit.trace would record.*torch.export"):
            torch.jit.trace(lambda q, attention=attention: attention(q, k, v).output, (q,))
    rope, positions = rg.RoPE(4), torch.arange(q.shape[2])
    traced = torch.jit.trace(lambda q: rope.encode(q, positions), (q,))
    torch.testing.assert_close(traced(2 * q + 1), rope.encode(2 * q + 1, positions))


NORMALIZERS = [
    rg.normalizers.Softmax(),
    rg.normalizers.Sparsemax(),
    rg.normalizers.Entmax15(),
    rg.normalizers.TopK(2),
    rg.normalizers.Hardmax(),
]


@pytest.mark.parametrize("normalizer", NORMALIZERS, ids=lambda n: type(n).__name__)
def test_normalizers_work_where_their_scores_are(normalizer):
    x = torch.empty(1, 1, 3, 4, device="meta")
    assert rg.Attention(normalizer=normalizer)(x, x, x).output.device == x.device


@pytest.mark.parametrize(
    "bias", [rg.ALiBi(2), rg.biases.T5Bias(2), rg.biases.ShawBias(4, 2), rg.biases.TransformerXLBias(2, 4)], ids=repr
)
@pytest.mark.parametrize("intervals", [((0, 6),), ((0, 2), (5, 9)), ((0, 1), (3, 5), (8, 11))], ids=len)
def test_biases_know_their_distances_from_the_host(bias, intervals):
    """On meta tensors nothing can be read from the device, as on a GPU nothing should be."""
    keys = rg.types.Spans(intervals)
    q, k = torch.empty(1, 2, 4, 4, device="meta"), torch.empty(1, 2, len(keys), 4, device="meta")
    attention = copy.deepcopy(rg.Attention(bias=bias)).to("meta")
    for engine in ("dense", "blocked"):
        output = attention(q, k, k, positions=rg.types.Positions(3, keys), engine=engine).output
        assert output.shape == (1, 2, 4, 4)


def test_a_backward_pass_on_meta_tensors_has_shapes():
    for engine in ("dense", "fused", "blocked"):
        leaves = [t.detach().to("meta").requires_grad_() for t in inputs()]
        output = rg.Attention(mask=rg.causal(), bias=rg.ALiBi(2))(*leaves, engine=engine).output
        for slope, leaf in zip(torch.autograd.grad(output.sum(), leaves), leaves, strict=True):
            assert slope.shape == leaf.shape


EXPORTED = (
    "alibi",
    "bahdanau",
    "bigbird",
    "grouped_query",
    "learned_positions",
    "linear",
    "rope",
    "sinks",
    "sliding_window",
    "t5",
    "top_k",
)


@pytest.mark.parametrize("name", EXPORTED)
@torch.no_grad()
def test_an_exported_attention_is_that_of_other_inputs_of_its_sizes(name):
    attention, *tensors = mechanisms()[name].example()
    if name == "sinks" and not exports_logsumexp():
        attention, tensors = attention.float(), [t.float() for t in tensors]
    model, others = Alone(attention), [t.flip(2) * 1.5 for t in tensors]
    torch.testing.assert_close(torch.export.export(model, tuple(tensors)).module()(*others), model(*others))


def exports_logsumexp():
    """Whether torch knows the type of a log-sum-exp of float64; torch 2.8 exports float32, and raises at the call."""
    x = torch.empty(1, 1, 2, 8, dtype=torch.float64, device="meta")
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[1].dtype == torch.float64


def test_random_blocks_that_were_first_used_in_an_export_are_the_same_as_ever():
    mask, (q, k, v) = rg.masks.random_blocks(2, 2, 9), inputs(learn=False)
    torch.export.export(Alone(rg.Attention(mask=mask)), (q, k, v))
    again = rg.Attention(mask=rg.masks.random_blocks(2, 2, 9))(q, k, v, engine="blocked").output
    torch.testing.assert_close(rg.Attention(mask=mask)(q, k, v, engine="blocked").output, again)


def test_an_exported_attention_in_blocks():
    attention = rg.Attention(mask=rg.causal() & rg.window(3))
    tensors, others = inputs(learn=False), inputs(learn=False, seed=5)
    exported = torch.export.export(Alone(attention, engine="blocked"), tuple(tensors)).module()
    torch.testing.assert_close(exported(*others), Alone(attention, engine="dense")(*others))


def test_a_compiled_model_breaks_its_graph_at_attend_and_says_why_without_a_break():
    leaves, model = inputs(), Alone(rg.Attention(mask=rg.causal(), bias=rg.biases.T5Bias(2, num_buckets=8)).double())
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="plans by sizes and masks in Python"):
        torch.compile(model, backend="eager", fullgraph=True)(*leaves)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    agree(compiled(*leaves), model(*leaves), [*leaves, *model.parameters()])
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="plans by sizes and masks in Python"):
        torch.compile(model, backend="eager", fullgraph=True)(*leaves)  # also once a call was left out of a graph
    torch._dynamo.reset()


def test_empty_rows_are_told_where_no_number_can_be_read(monkeypatch):
    """While torch traces, the mask alone tells them: log-sum-exp -inf, of which no weight is left."""
    monkeypatch.setattr("regard.engine.flash.has_numbers", lambda tensor: False)
    q, k, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8)
    mask = torch.zeros(4, 2).masked_fill(~torch.ones(4, 2, dtype=torch.bool).tril(-2), -torch.inf)
    output, logsumexp = flash(q, k, v, scale=0.5, mask=mask[None, None])
    assert not output[:, :, :2].any() and logsumexp[:, :, :2].isneginf().all()
    torch.testing.assert_close(logsumexp[:, :, 2:], (q @ k.mT / 2 + mask).logsumexp(-1)[:, :, 2:])


def test_empty_rows_are_zero_also_where_torch_has_no_kernel_with_a_statistic(monkeypatch):
    monkeypatch.setattr("regard.engine.flash._cpu_kernel", lambda: None)
    q, k, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    mask = torch.zeros(4, 3).masked_fill(~torch.ones(4, 3, dtype=torch.bool).tril(-1), -torch.inf)[None, None]
    output, logsumexp = flash(q, k, v, scale=0.5, mask=mask)
    assert logsumexp is None and not output[:, :, 0].any()
    torch.testing.assert_close(output[:, :, 1:], ((q @ k.mT / 2 + mask).softmax(-1) @ v)[:, :, 1:])


def test_functions_of_torch_and_of_this_package_are_not_foreign_code():
    for function, is_foreign in ((F.elu, False), (rg.attend, False), (lambda x: F.elu(x), True)):
        assert split_tensors(function)[1].is_foreign == is_foreign


def test_tensors_of_up_to_64_kilobytes_are_copied():
    """docs: a map answers with earlier numbers only of tensors that it copied."""
    for size, is_copied in ((64 << 10, True), ((64 << 10) + 1, False)):
        tensor = torch.zeros(size, dtype=torch.uint8)
        assert is_small(tensor) is is_copied is (tensor_snapshot(tensor).data_ptr() != tensor.data_ptr())


def test_a_parameter_that_a_function_closes_over_is_not_registered():
    """It belongs to whoever wrote the function; only pieces hold parameters of an attention."""
    number = torch.nn.Parameter(torch.zeros(()))
    attention = rg.Attention(mask=rg.mask_mod(lambda b, h, i, j: j > number))
    assert not list(attention.parameters()) and not list(attention.children())


def test_a_partial_function_keeps_its_keywords_around_other_tensors():
    number = torch.tensor(3.0)
    tensors, template = split_tensors(functools.partial(torch.addcmul, number, value=2.0, tensor1=number))
    assert tensors[0] is number
    again = template.around([torch.tensor(5.0)])
    assert again.keywords == {"value": 2.0, "tensor1": torch.tensor(5.0)}
    assert again(tensor2=torch.tensor(4.0)) == 5 + 2 * 5 * 4


def test_long_lists_of_numbers_are_not_searched():
    """A list of more than LONG items is taken apart only if its first item is a tensor or a piece."""
    number = torch.nn.Parameter(torch.zeros(()))
    for count, is_found in ((LONG, True), (LONG + 1, False)):
        items = [0.0] * (count - 1) + [number]
        assert bool(split_tensors(items)[0]) is is_found
        assert bool(learned_parts("items", items)) is is_found
        assert split_tensors(items[::-1])[0] and learned_parts("items", items[::-1])


def test_a_function_that_calls_itself_comes_apart_and_together():
    number = torch.tensor(3.0)

    def power(exponent):
        return number * power(exponent - 1) if exponent else torch.tensor(1.0)

    tensors, template = split_tensors(power)
    assert tensors[0] is number and template.around([torch.tensor(2.0)])(1) == 2


def test_a_function_outside_of_compiled_graphs_runs_as_ever_once_the_compiler_is_loaded():
    importlib.import_module("torch._dynamo")
    double = uncompiled(lambda x: 2 * x)
    assert (double(3), double(4)) == (6, 8)
