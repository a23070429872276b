"""What the tests of the kernel engine share: its levels, drawn problems, and how far rounding may move a gradient."""

from __future__ import annotations

import copy
import os
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st

import drawn
import regard as rg
from regard.attention import scores
from regard.base.shapes import Sizes
from regard.engine.kernel import library
from regard.engine.problem import Problem
from regard.reference import reference
from rounding import FLOAT32, score_errors, unit_roundoff


def _levels():
    """The levels that this machine can run, lowest first; none where the library is not built."""
    with mock.patch.dict(os.environ):
        os.environ.pop(library.SETTING, None)
        found = library.load()
        return () if found is None else library.LEVELS[: found.level + 1], library.reason()


VARIANTS, REASON = _levels()
#: Those that have every function.
LEVELS = tuple(name for name in VARIANTS if name in library.VECTORS)
needs_kernel = pytest.mark.skipif(not LEVELS, reason=REASON)
every_level = pytest.mark.parametrize(
    "level",
    [
        pytest.param(name, marks=pytest.mark.skipif(name not in LEVELS, reason=REASON or f"this machine has no {name}"))
        for name in library.VECTORS
    ],
)


@contextmanager
def at_level(name):
    """The kernels run at this level."""
    with mock.patch.dict(os.environ, {library.SETTING: name}):
        yield


# Problems that the kernels take


def additive(query_dim, key_dim, hidden, size=1.0):
    """An additive score. With a size of 100 exponentials of some projections are too far from 1 to be packed."""
    score = rg.scores.Additive(query_dim, key_dim, hidden, bias=True)
    for layer in (score.query, score.key):
        layer.weight.data *= size
    return score


#: Sizes beside the multiples of register tiles, panels, tiles of queries, and blocks of keys.
EDGES = sorted(
    {unit * n + d for unit in (6, 8, 12, 16, 32, 96, 256) for n in (1, 2) for d in (-1, 0, 1)} - {511, 512, 513}
)
WIDTHS = [1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 40, 64, 65, 96, 127, 128, 200, 256]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def lengths():
    return st.one_of(st.integers(1, 20), st.sampled_from([n for n in EDGES if n <= 300]), st.integers(1, 300))


def masks(B, H, I, J, depth=2):
    """Masks of any kind, also with axes for heads and with wide windows, joined by &, | and ~."""
    simple = st.one_of(
        drawn.masks(B, I, J, 0),
        st.builds(rg.window, st.integers(1, 300)),
        st.builds(rg.masks.dilated, st.integers(1, 60), st.integers(1, 9)),
        st.builds(rg.masks.block_local, st.integers(1, 100), st.integers(0, 2), st.integers(0, 2)),
        st.builds(
            lambda seed, b, h: rg.mask_tensor(drawn.coins(seed, b, h, I, J)),
            st.integers(0, 2**31),
            st.sampled_from([1, B]),
            st.sampled_from([1, H]),
        ),
        st.just(rg.mask_mod(lambda b, h, i, j: j % (h + 2) != b)),
    )
    if not depth:
        return simple
    deeper = masks(B, H, I, J, depth - 1)
    both, either = st.builds(rg.masks.Mask.__and__, deeper, deeper), st.builds(rg.masks.Mask.__or__, deeper, deeper)
    return st.one_of(simple, both, either, deeper.map(lambda m: ~m))


BIASES = {
    "alibi": rg.ALiBi,
    "t5": lambda H: rg.biases.T5Bias(H, num_buckets=8, max_distance=64),
    "table": lambda H: rg.biases.LearnedTable(H, reach=20),
}
NORMALIZERS = {
    "softmax": lambda H: rg.normalizers.Softmax(),
    "warm": lambda H: rg.normalizers.Softmax(temperature=3.0),
    "sharp": lambda H: rg.normalizers.Softmax(temperature=0.7, sink=0.5),
    "sink": rg.normalizers.LearnedSink,
}


@st.composite
def biases(draw, H, D):
    names = draw(st.lists(st.sampled_from(sorted(BIASES)), max_size=2))
    found = [BIASES[name](H) for name in names]
    if draw(st.booleans()):
        found.insert(draw(st.integers(0, len(found))), rg.biases.Softcap(draw(st.sampled_from([0.5, 2.0, 30.0]))))
    if draw(st.booleans()):  # before a cap
        found.insert(0, rg.biases.ShawBias(D, reach=draw(st.sampled_from([0, 1, 7, 50, 1000]))))
    return found


@st.composite
def choices(draw, B, H, I, J, start):
    """Chosen keys of each query, or chosen blocks: some of them twice, some behind the last key, some rows without."""
    assume(start >= 0)
    size = draw(st.sampled_from([1, 1, 1, 2, 7, 23, 24, 32, 45, 64, 300]))
    heads = draw(st.sampled_from([n for n in range(1, H + 1) if H % n == 0]))
    count = draw(st.sampled_from([0, 1, 2, 5, 16, 40, 270])) if size == 1 else draw(st.integers(0, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = draw(st.sampled_from([1, B])), heads, I, count
    ids = torch.randint(-1, (start + J) // size + 2, shape, generator=generator)
    ids = ids.masked_fill(torch.rand(*shape[:3], 1, generator=generator) < 0.1, -1)
    return rg.masks.chosen_keys(ids, size=size, num_heads=H, start=start)


@st.composite
def problems(draw, dtypes=DTYPES, chooses=False):
    """A problem in float64 whose numbers `dtype` holds, and this dtype. If it `chooses`, its mask has chosen keys, and
    it has no biases.
    """
    B, G, R = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    D, E, I, J = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from(WIDTHS)), draw(lengths()), draw(lengths())
    assume(B * G * R * I * J * (D + E) < 2e7)
    torch.manual_seed(draw(st.integers(0, 2**31)))
    dtype, H, positions = draw(st.sampled_from(dtypes)), G * R, draw(drawn.placings(I, J))
    has_gaps = len(positions.keys.intervals) > 1  # then a bias is no vector of distances, which the kernels need
    mask = draw(st.none() | masks(B, H, I, J))
    if chooses:
        chosen = draw(choices(B, H, I, J, positions.start))
        mask = chosen if mask is None else draw(st.sampled_from([chosen & mask, mask & chosen]))
    attention = rg.Attention(
        rg.Dot(draw(st.sampled_from([None, None, 0.3, -0.1]))),
        position=draw(st.sampled_from([None, None, rg.RoPE(D)])) if D % 2 == 0 else None,
        bias=[] if has_gaps or chooses else draw(biases(H, D)),
        mask=mask,
        normalizer=draw(st.sampled_from(sorted(NORMALIZERS)).map(lambda name: NORMALIZERS[name](H))),
    )
    for parameter in attention.parameters():
        parameter.data.normal_()
    attention = copy.deepcopy(attention.to(dtype)).double().requires_grad_(draw(st.booleans()))
    shapes = (B, H, I, D), (B, G, J, D), (B, G, J, E)
    q, k, v = (drawn.LAYOUTS[draw(drawn.layouts())](torch.randn(shape, dtype=dtype)) for shape in shapes)
    exact = [t.double() for t in (q, k, v)]
    problem = Problem(attention, *exact, positions, Sizes.of(q, k, v))
    try:
        attention.check(problem.sizes, positions, D)
    except rg.RegardError:  # a mask of a given length, drawn with positions beyond it
        assume(False)
    return problem, (q, k, v)


# How far rounding may move a gradient


def gradient_budget(problem, along, dtype):
    """A bound of the error of each gradient: of query, key and value, and of each parameter.

    A gradient is a sum over pairs of w_ij |dO_i| (|v_j| + sum_n w_in |v_n|) or less, times the size of a vector. So
    each of its terms is off by a share: by the errors of weights, by the rounding of sums, and of inputs and outputs.
    The output o_i itself is no bound: values may cancel in it, and their errors do not.
    """
    s, u = problem.sizes, unit_roundoff(dtype)
    weights = torch.from_numpy(reference(problem)[1])
    share = (weight_errors(problem, u) + (2 * s.J + 2 * s.R * s.I + s.D + s.E + 40) * FLOAT32 + 8 * u) * weights
    share = share + torch.finfo(torch.float32).tiny  # a smaller weight is 0
    values, rows = (t.norm(dim=-1) for t in (heads_of(problem.value, s), along))
    products = share * rows[..., None] * (values[:, :, None] + weights @ values[..., None])
    of_value = grouped((share * rows[..., None]).sum(-2)[..., None], s)
    (of_query, of_key), of_parameters = vector_bounds(problem, products), parameter_bounds(problem, products)
    bounds = [of_query, of_key, of_value, *of_parameters]
    return [bound.detach() + 8 * torch.finfo(dtype).tiny for bound in bounds]


def statistic_budget(problem, along, dtype):
    """The same for `along` = gradients of the entropy and of the distance, (B, H, I) each; without the value.

    The gradient of a score is w_ij times a term minus the mean of all terms: -log w_ij, and |j - i|. The logarithm is
    off by as much as the share of the weight.
    """
    s, u = problem.sizes, unit_roundoff(dtype)
    w = torch.from_numpy(reference(problem)[1])
    share = weight_errors(problem, u) + (2 * s.J + 2 * s.R * s.I + s.D + 40) * FLOAT32 + 8 * u
    sizes = (-w.clamp_min(torch.finfo(torch.float32).tiny).log(), problem.grid.distance.abs().double())
    terms = [size + (w * size).sum(-1, keepdim=True) + 3 for size in sizes]
    products = sum(g.abs()[..., None] * term for g, term in zip(along, terms, strict=True))
    products = (share * w + torch.finfo(torch.float32).tiny) * products
    bounds = [*vector_bounds(problem, products), *parameter_bounds(problem, products)]
    return [bound.detach() + 8 * torch.finfo(dtype).tiny for bound in bounds]


def vector_bounds(problem, products):
    """Of query and key: scores whose gradients are off by `products` are products of these vectors."""
    s, attention, scale = problem.sizes, problem.attention, abs(problem.scale)
    q, k = problem.prepared.query.norm(dim=-1), heads_of(problem.prepared.key, s).norm(dim=-1)
    of_query = scale * (products @ k[..., None])
    for bias in (bias for bias in attention.bias if isinstance(bias, rg.biases.ShawBias)):
        longest = bias.keys.norm(dim=-1).max() * bias.scale / attention.normalizer.temperature
        of_query = of_query + longest * products.sum(-1, keepdim=True)
    return of_query, grouped(scale * (products * q[..., None]).sum(-2)[..., None], s)


def parameter_bounds(problem, products):
    parameters = [x for x in problem.attention.named_parameters() if x[1].requires_grad]
    return [parameter_bound(problem, name, parameter, products) for name, parameter in parameters]


def weight_errors(problem, u):
    """Of each row: how far its weights may be off, as a share of them."""
    s = scores(problem.attention, problem.prepared, problem.grid)
    errors = score_errors(problem, u).expand_as(s).masked_fill(s == -torch.inf, 0.0).amax(-1, keepdim=True)
    temperature = problem.attention.normalizer.temperature
    logsumexp = s.div(temperature).logsumexp(-1, keepdim=True).abs()
    return torch.expm1(2 * errors / temperature) + 2 * FLOAT32 * logsumexp.masked_fill(logsumexp.isinf(), 0.0)


def parameter_bound(problem, name, parameter, products):
    """Of a bias: each of its numbers is added to some scores. Of a sink: to the row."""
    temperature = problem.attention.normalizer.temperature
    if name.startswith("normalizer"):
        return products.sum((0, 2, 3))
    nothing = torch.zeros_like(products)
    bias = problem.attention.bias[int(name.split(".")[0].removeprefix("bias_"))]
    if isinstance(bias, rg.biases.ShawBias):  # query i adds its own share to the vector of each distance
        vectors = torch.ones(2 * bias.reach + 1, dtype=torch.float64, requires_grad=True)
        rows = problem.prepared.query.norm(dim=-1, keepdim=True).detach() * abs(bias.scale) * vectors
        return torch.autograd.grad(bias.term(problem.grid, rows, None), vectors, products / temperature)[0][:, None]
    added = bias.transform(nothing, problem.grid, None, None)
    return torch.autograd.grad(added, parameter, products / temperature)[0]


def heads_of(x, sizes):
    return x.repeat_interleave(sizes.R, 1)


def grouped(x, sizes):
    """The sum over the heads that share a key."""
    return x.unflatten(1, (sizes.G, sizes.R)).sum(2)


def in_dtype(problem, tensors):
    """The problem in the dtype of its tensors, with leaves in their layouts and parameters of its own."""
    attention = copy.deepcopy(problem.attention).to(tensors[0].dtype)
    return attention, [t.detach().requires_grad_() for t in tensors]


def within(found, expected, bound):
    """No element is off by more than its bound."""
    off = (found.double() - expected).abs()
    assert (off <= bound).all(), f"off by {float((off / bound).nan_to_num(torch.inf).max()):.3g} times the bound"
