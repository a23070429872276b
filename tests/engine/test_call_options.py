"""The arguments of one call (mask, is_causal, scale, dropout_p, layout) beside the formula in float64 and torch."""

import cProfile
import functools
import operator
import pstats
import random
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import regard as rg
from regard.attention_output import attend_editors

ENGINES = ("auto", "dense", "blocked")


def formula(q, k, v, allowed=None, added=None, scale=None):
    """softmax(q k^T scale + added) v over allowed keys, in float64; rows without a key are 0."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if added is None else scores + added.double()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return weights @ v, weights


def inputs(batch=2, heads=4, key_heads=2, queries=5, keys=7, width=8, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    shapes = (heads, queries), (key_heads, keys), (key_heads, keys)
    return [torch.randn(batch, h, n, width, dtype=dtype) for h, n in shapes]


@st.composite
def calls(draw):
    """Sizes, and a tensor of four axes of which some are 1."""
    sizes = draw(st.integers(1, 3)), draw(st.sampled_from([2, 4])), draw(st.integers(0, 6)), draw(st.integers(0, 6))
    shape = [draw(st.sampled_from([1, size])) for size in sizes]
    batch, heads, queries, keys = sizes
    return inputs(batch, heads, 2, queries, keys, seed=draw(st.integers(0, 99))), shape


@given(calls(), st.sampled_from(ENGINES))
def test_a_boolean_mask_broadcasts_over_its_axes(call, engine):
    tensors, shape = call
    mask = torch.rand(shape) < 0.7
    if shape[2] == shape[3] > 1:
        mask |= torch.eye(shape[2], dtype=torch.bool)  # not the mask of nn.MultiheadAttention
    output, weights = rg.attend(*tensors, mask=mask, engine=engine)
    expected = formula(*tensors, mask)
    torch.testing.assert_close((output, weights.dense()), expected)


@given(calls(), st.sampled_from(ENGINES), st.booleans())
def test_numbers_are_added_with_gradients(call, engine, learned):
    tensors, shape = call
    bias = (3 * torch.randn(shape, dtype=torch.float64)).requires_grad_(learned)
    output, weights = rg.attend(*tensors, mask=bias, engine=engine)
    expected, exact = formula(*tensors, added=bias)
    torch.testing.assert_close((output, weights.dense()), (expected, exact))
    if learned and exact.numel():
        grad = torch.randn_like(output)
        torch.testing.assert_close(*(torch.autograd.grad(o, bias, grad)[0] for o in (output, expected)))


@pytest.mark.parametrize("hidden", [-torch.inf, -1e4, -1e9, torch.finfo(torch.float64).min])
@pytest.mark.parametrize("engine", ENGINES)
def test_very_negative_numbers_are_a_mask_and_others_beside_them_a_bias(hidden, engine):
    tensors = inputs()
    allowed = torch.rand(2, 1, 5, 7) < 0.7
    mask = torch.zeros(2, 1, 5, 7).double().masked_fill(~allowed, hidden)
    torch.testing.assert_close(rg.attend(*tensors, mask=mask, engine=engine).output, formula(*tensors, allowed)[0])
    if hidden < -1e300:
        bias = torch.randn(1, 4, 5, 7).double()
        output, weights = rg.attend(*tensors, mask=bias + mask, engine=engine)
        torch.testing.assert_close((output, weights.dense()), formula(*tensors, allowed, bias))


NUMBERS = {
    "a row of equal numbers": lambda: torch.full((5, 7), -2e4).double(),
    "near -2,000": lambda: torch.full((5, 7), -2e3).double() + torch.rand(5, 7),
    "a slope": lambda: -1e3 * (torch.arange(5)[:, None] - torch.arange(7)).abs().double(),
    "0 and -2,000": lambda: torch.zeros(5, 7).double().masked_fill(torch.rand(5, 7) < 0.5, -2e3),
    "a row without 0": lambda: torch.zeros(5, 7).double().masked_fill(torch.arange(5)[:, None] == 2, -1e9),
    "a row of the least number": lambda: torch.zeros(5, 7).masked_fill(torch.arange(5)[:, None] == 2, -3.4e38).double(),
    "a row of -inf beside a bias": lambda: torch.randn(5, 7).double().masked_fill(torch.rand(5, 7) < 0.5, -torch.inf),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("size", [1.0, 1e3])
@pytest.mark.parametrize("learned", [False, True])
def test_numbers_are_added_to_the_scores_as_torch_adds_them(name, size, learned):
    """Weights depend on differences within a row, so no single number says that its key is hidden."""
    q, k, v = inputs()
    mask = NUMBERS[name]()
    expected = F.scaled_dot_product_attention(size * q, *(x.repeat_interleave(2, 1) for x in (k, v)), attn_mask=mask)
    found = rg.attend(size * q, k, v, mask=mask.clone().requires_grad_(learned)).output
    torch.testing.assert_close(found, expected)
    found = rg.scaled_dot_product_attention(size * q, k, v, mask, enable_gqa=True)
    torch.testing.assert_close(found, expected)


def test_a_mask_of_two_axes_is_of_pairs_or_of_keys():
    tensors = inputs(batch=3)
    pairs, keys = torch.rand(5, 7) < 0.7, torch.rand(3, 7) < 0.7
    torch.testing.assert_close(rg.attend(*tensors, mask=pairs).output, formula(*tensors, pairs)[0])
    torch.testing.assert_close(rg.attend(*tensors, mask=keys).output, formula(*tensors, keys[:, None, None])[0])
    one = inputs(batch=1, queries=1)
    torch.testing.assert_close(rg.attend(*one, mask=keys[:1]).output, formula(*one, keys[:1])[0])


@pytest.mark.parametrize("engine", ENGINES)
def test_the_masks_of_the_call_and_of_the_attention_are_joined(engine):
    tensors = inputs(keys=5)
    real = torch.tensor([[True] * 5, [False, False, True, True, True]])
    attention = rg.Attention(mask=rg.window(3))
    near = (torch.arange(5)[:, None] - torch.arange(5)).abs() < 3
    tril = torch.ones(5, 5).tril().bool()
    for mask in (real, rg.padding(real)):
        output, weights = attention(*tensors, mask=mask, is_causal=True, engine=engine)
        torch.testing.assert_close((output, weights.dense()), formula(*tensors, near & tril & real[:, None, None]))
    assert attention.mask == rg.window(3)  # the attention itself is as it was


@pytest.mark.parametrize("scale", [0.3, 1.0, torch.tensor(0.7).double()])
def test_scale_is_the_factor_of_the_dot_product(scale):
    tensors = inputs()
    torch.testing.assert_close(rg.attend(*tensors, scale=scale).output, formula(*tensors, scale=float(scale))[0])


def test_dropout_of_a_call_drops_in_eval_mode_and_only_in_this_call():
    q = torch.zeros(1, 1, 64, 4)
    k, attention = torch.zeros(1, 1, 512, 4), rg.Attention().eval()
    value = torch.ones(1, 1, 512, 1)
    dropped = attention(q, k, value, dropout_p=0.25).output
    assert dropped.std() > 0 and abs(dropped.mean() - 1) < 0.05  # 32,768 weights, kept ones divided by 0.75
    torch.testing.assert_close(attention(q, k, value).output, torch.ones(1, 1, 64, 1))


@pytest.mark.parametrize("engine", ENGINES)
def test_with_the_layout_of_flash_attn_only_inputs_and_output_change(engine):
    tensors = inputs()
    swapped = [t.transpose(1, 2).contiguous() for t in tensors]
    output, weights = rg.attend(*swapped, layout="blhd", mask=rg.window(3), engine=engine)
    expected, same = rg.attend(*tensors, mask=rg.window(3), engine=engine)
    torch.testing.assert_close((output.transpose(1, 2), weights.dense()), (expected, same.dense()))
    assert rg.plan(*swapped, layout="blhd").cost.pairs == rg.plan(*tensors).cost.pairs


def test_a_mask_covers_the_keys_of_the_cache():
    q, k, v = inputs(heads=2, queries=6, keys=6)
    real = torch.rand(2, 6) < 0.6
    bias = torch.randn(2, 2, 6, 6).double()
    tril = torch.ones(6, 6).tril().bool()
    real = real[:, None, None]
    for mask, allowed, added in ((real, real & tril, None), (bias, tril, bias)):
        expected = formula(q, k, v, allowed, added)[0]
        cache, outputs = rg.GrowingCache(), []
        for start, stop in ((0, 1), (1, 4), (4, 6)):
            part = mask[..., :stop] if mask is real else mask[:, :, start:stop, :stop]
            new = [t[:, :, start:stop] for t in (q, k, v)]
            seen = rg.attend(*new, mask=part, is_causal=True, cache=cache)
            cache, outputs = seen.cache, [*outputs, seen.output]
        torch.testing.assert_close(torch.cat(outputs, 2), expected)


def test_the_result_unpacks_to_two_also_with_a_cache():
    q, k, v = inputs()
    output, weights = rg.attend(q, k, v, cache=rg.GrowingCache())
    torch.testing.assert_close(output, weights.dense() @ v.repeat_interleave(2, 1))


tensors = inputs(keys=5)
square = torch.ones(5, 5).triu(1).bool()
REFUSED = {
    "the attention first": (lambda: rg.attend(rg.Attention(), *tensors), "tensors come first: attention\\(query, key"),
    "the attention first, two tensors": (lambda: rg.attend(rg.Attention(), *tensors[:2]), "tensors come first"),
    "a plan with the attention first": (lambda: rg.plan(rg.Attention(), *tensors), "tensors come first"),
    "integers": (lambda: rg.attend(*tensors, mask=square.long()), "int64.*1 = may not attend"),
    "ones and zeros": (lambda: rg.attend(*tensors, mask=1 - square.float()), "float32.*1 = may attend"),
    "NaN": (lambda: rg.attend(*tensors, mask=torch.full((5, 5), torch.nan)), "NaN"),
    "torch's modules": (lambda: rg.attend(*tensors, mask=square), "mask=~mask"),
    "two meanings": (
        lambda: rg.attend(*(t.expand(5, -1, -1, -1) for t in inputs(batch=1, keys=5)), mask=~square),
        r"mask\[None, None\] for pairs, mask\[:, None, None\] for keys",
    ),
    "three axes": (lambda: rg.attend(*tensors, mask=torch.ones(2, 5, 5).bool()), r"mask\[:, None\]"),
    "another length": (lambda: rg.attend(*tensors, mask=torch.ones(5, 6).bool()), r"\(5, 6\).*Expected \(5, 5\)"),
    "a list": (lambda: rg.attend(*tensors, mask=[1, 2]), "got list"),
    "a function": (lambda: rg.attend(*tensors, mask=rg.causal), "the class causal"),
    "tensors with positions": (
        lambda: rg.attend(*tensors, mask=~square, positions=rg.types.Positions.of(3, 5, 5)),
        "positions of its own",
    ),
    "two alignments": (lambda: rg.attend(*inputs(), is_causal=True), "flash-attn.*as in torch.*Positions.of\\(0, 5, 7"),
    "a flag that is none": (lambda: rg.attend(*tensors, is_causal=1), "True or False, got int"),
    "two scales": (lambda: rg.Attention(rg.Dot(1.0))(*tensors, scale=1.0), "factor already"),
    "a scale of another score": (
        lambda: rg.Attention(rg.scores.Cosine())(*tensors, scale=1.0),
        "factor of a dot product",
    ),
    "a scale of NaN": (lambda: rg.attend(*tensors, scale=float("nan")), "scale.*nan.*finite number"),
    "a scale in words": (lambda: rg.attend(*tensors, scale="linear"), "a number, or a tensor, got str"),
    "a share": (lambda: rg.attend(*tensors, dropout_p=1.5), r"in \[0, 1\)"),
    "two shares": (lambda: rg.Attention(dropout=0.1)(*tensors, dropout_p=0.1), "dropout=0.1 already"),
    "a layout": (lambda: rg.attend(*tensors, layout="lbhd"), "flash-attn"),
    "a composite": (
        lambda: rg.mechanism("differential").example()[0](*rg.mechanism("differential").example()[1:], is_causal=True),
        r"is_causal=\.\.\.\): .* made of several attentions",
    ),
    "torch's name": (lambda: rg.attend(*tensors, attn_mask=square), "attn_mask: it is called mask"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_named_with_their_remedies(name):
    call, said = REFUSED[name]
    with pytest.raises(rg.RegardError, match=f"(?s){said}"):
        call()


# The function with torch's signature


@st.composite
def torch_calls(draw):
    lead = draw(st.sampled_from([(), (3,), (2, 4), (2, 1, 3)]))
    queries, keys = draw(st.integers(0, 5)), draw(st.integers(1, 6))
    torch.manual_seed(draw(st.integers(0, 99)))
    sizes = (queries, 8), (keys, 8), (keys, 6)
    given = [torch.randn(*lead, *size, dtype=torch.float64, requires_grad=True) for size in sizes]
    kind = draw(st.sampled_from(["none", "causal", "boolean", "float", "keys"]))
    options = {"scale": draw(st.sampled_from([None, 0.4]))}
    if kind == "causal":
        options["is_causal"] = True
    elif kind == "keys":
        options["attn_mask"] = torch.rand(1, keys) < 0.8
        options["attn_mask"][:, 0] = True
    elif kind != "none":
        allowed = (torch.rand(*lead[:-1], queries, keys) if len(lead) < 2 else torch.rand(queries, keys)) < 0.8
        allowed[..., 0] = True  # torch's kernels differ in rows without a key
        options["attn_mask"] = allowed if kind == "boolean" else torch.randn(queries, keys).double() - 9.0 * ~allowed
    return given, options


@given(torch_calls())
def test_scaled_dot_product_attention_is_torchs(call):
    tensors, options = call
    ours, theirs = (f(*tensors, **options) for f in (rg.scaled_dot_product_attention, F.scaled_dot_product_attention))
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn_like(ours)
    torch.testing.assert_close(*(torch.autograd.grad(output, tensors, grad) for output in (ours, theirs)))


class Causal(torch.nn.Module):
    def forward(self, q, k, v):
        return rg.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def test_torchs_function_is_seen_with_torchs_alignment():
    tensors = inputs()
    model = Causal()
    with rg.watch(model) as seen:
        output = model(*tensors)
    allowed = torch.ones(5, 7).tril().bool()
    torch.testing.assert_close((output, seen[0].dense()), formula(*tensors, allowed))


def test_fewer_key_heads_and_mistakes_of_torchs_function():
    q, k, v = inputs()
    ours = rg.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    with pytest.raises(rg.RegardError, match="enable_gqa=True"):
        rg.scaled_dot_product_attention(q, k, v)
    with pytest.raises(rg.RegardError, match="both given"):
        rg.scaled_dot_product_attention(q, k, v, torch.ones(5, 7).bool(), is_causal=True)
    with pytest.raises(rg.RegardError, match="does not broadcast"):
        rg.scaled_dot_product_attention(q, k, v, torch.ones(5, 6).bool(), enable_gqa=True)


@pytest.mark.parametrize("axes", [(), (3, 2)])
def test_fewer_key_heads_with_any_number_of_axes(axes):
    q, k, v = (torch.randn(*axes, heads, length, 8) for heads, length in ((4, 5), (2, 7), (2, 7)))
    mask = torch.randn(*axes, 4, 5, 7)
    calls = {"attn_mask": mask, "enable_gqa": True}, {"is_causal": True, "enable_gqa": True}
    for options in calls:
        ours, theirs = (
            f(q, k, v, **options) for f in (rg.scaled_dot_product_attention, F.scaled_dot_product_attention)
        )
        torch.testing.assert_close(ours, theirs)


def test_in_a_compiled_graph_it_is_torchs():
    compiled = torch.compile(
        lambda *x: rg.scaled_dot_product_attention(*x, is_causal=True), fullgraph=True, backend="eager"
    )
    tensors = inputs(key_heads=4)
    assert torch.equal(compiled(*tensors), F.scaled_dot_product_attention(*tensors, is_causal=True))


#: What may change between two calls with options, of the call or of the attention itself.
CHANGED_CALLS = {
    "causal": lambda attention, given: given.update(is_causal=True),
    "scale": lambda attention, given: given.update(scale=0.3),
    "an integer scale": lambda attention, given: given.update(scale=2),
    "a window": lambda attention, given: given.update(mask=rg.window(3)),
    "another window": lambda attention, given: given.update(mask=rg.window(4)),
    "a mask tensor": lambda attention, given: given.update(mask=torch.ones(6, 6, dtype=torch.bool).tril(2)),
    "another mask tensor": lambda attention, given: given.update(mask=torch.ones(6, 6, dtype=torch.bool).tril(1)),
    "a mask of its own": lambda attention, given: setattr(attention, "mask", rg.window(2)),
    "a temperature": lambda attention, given: setattr(attention, "normalizer", rg.normalizers.Softmax(2.0)),
    "a soft cap": lambda attention, given: setattr(attention, "bias", rg.biases.Softcap(0.5)),
}


def test_options_of_calls_in_any_order_agree_with_a_new_attention():
    """The attention of a call with options is made once, so each call must see what has changed since."""
    draw, alike = random.Random(3), torch.testing.assert_close
    attention, tensors = rg.Attention(), torch.randn(3, 1, 2, 6, 4)
    for _ in range(150):
        options = {}
        for name in draw.sample([*CHANGED_CALLS], 2):
            CHANGED_CALLS[name](attention, options)
        if draw.random() < 0.1:
            attention = rg.Attention()
        seen = rg.attend(*tensors, attention=attention, **options)
        score = rg.Dot(scale=options["scale"]) if "scale" in options else rg.Dot()
        masks = [m for m in (attention.mask, options.get("mask"), rg.causal() if "is_causal" in options else None)]
        masks = [rg.mask_tensor(m) if isinstance(m, torch.Tensor) else m for m in masks if m is not None]
        fresh = rg.Attention(score, bias=attention.bias, normalizer=attention.normalizer)
        fresh.mask = functools.reduce(operator.and_, masks) if masks else None
        alike(seen.output.double(), fresh(*tensors.double(), engine="reference").output, atol=1e-5, rtol=1e-5)


def test_a_repeated_call_with_options_makes_no_attention(monkeypatch):
    made, with_pieces = [], rg.Attention.with_pieces
    monkeypatch.setattr(
        rg.Attention, "with_pieces", lambda self, **given: made.append(given) or with_pieces(self, **given)
    )
    tensors, mask = torch.randn(3, 1, 2, 7, 4), torch.rand(7, 7) < 0.9
    for options in ({"is_causal": True}, {"scale": 0.7}, {"mask": mask}, {"mask": rg.window(5)}):
        for _ in range(5):
            rg.attend(*tensors, **options)
        made.clear()
        for _ in range(3):
            rg.attend(*tensors, **options)
        assert not made, options


#: Where the functions of Regard are: an environment may stand in a folder of the same name.
SOURCE = str(Path(rg.__file__).parent)
#: Most functions of Regard that a repeated call may call: time differs by machine, their number does not.
MOST_CALLS = {"causal": 70, "flag": 84, "mask": 94, "token": 95}


def test_a_repeated_call_calls_few_functions():
    tensors, attention, token = torch.randn(3, 1, 2, 192, 8), rg.Attention(mask=rg.causal()), torch.randn(3, 1, 2, 1, 8)
    mask = torch.rand(192, 192) < 0.9
    with torch.no_grad():
        cache = attention(*tensors, cache=rg.GrowingCache()).cache
        works = {
            "causal": lambda: attention(*tensors),
            "flag": lambda: rg.attend(*tensors, is_causal=True),
            "mask": lambda: rg.attend(*tensors, mask=mask),
            "token": lambda: attention(*token, cache=cache),
        }
        for name, work in works.items():
            for _ in range(4):
                work()
            profile = cProfile.Profile()
            profile.runcall(work)
            counts = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
            assert sum(row[1] for (file, *_), row in counts if file.startswith(SOURCE)) <= MOST_CALLS[name], name


def test_an_editor_of_calls_gets_all_that_the_caller_gave():
    given, tensors = [], torch.randn(3, 1, 2, 5, 4).unbind()
    attention, gates = rg.Attention(bias=rg.biases.ForgettingBias(), mask=rg.causal()), -torch.rand(1, 2, 5)
    options = {"positions": rg.types.Positions.aligned_to_end(5, 5), "engine": "dense", "check": True, "cache": None}
    with attend_editors.adding(lambda *tensors, **options: given.append((tensors, options))):
        attention(*tensors, log_forget=gates, **options)
    (edited, *of_editor), others = given[0]
    assert edited is attention and all(a is b for a, b in zip(of_editor, tensors, strict=True))
    assert others.pop("log_forget") is gates and others == options


@pytest.mark.parametrize("are_arrays", [*product([False, True], repeat=3)])
@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 5, 8)])
def test_each_of_the_inputs_may_be_an_array(shape, are_arrays):
    inputs = [torch.randn(shape) for _ in range(3)]
    given = [x.numpy() if is_array else x for x, is_array in zip(inputs, are_arrays, strict=True)]
    torch.testing.assert_close(rg.attend(*given).output, rg.attend(*inputs).output)
