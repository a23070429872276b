"""What drawn tests draw from: masks, pieces, problems, and every way a tensor may lie in memory."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st

import regard as rg
from regard.base.shapes import Sizes
from regard.engine.problem import Problem
from regard.pieces.same_group import groups_mask

CLOSE = {"rtol": 1e-8, "atol": 1e-9}


def examples(usual):
    """Settings of a drawn test; REGARD_EXAMPLES asks for more examples than the usual number."""
    return settings(
        max_examples=int(os.environ.get("REGARD_EXAMPLES", str(usual))),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


# Layouts: the same shape (B, H, n, D), other strides


def _among(x, axis):
    """Every second place of `axis`, with NaN between."""
    wide = torch.full([size * (2 if n == axis else 1) for n, size in enumerate(x.shape)], torch.nan, dtype=x.dtype)
    places = tuple(slice(None, None, 2 if n == axis else 1) for n in range(x.ndim))
    wide[places] = x
    return wide[places]


def _permuted(x, *order):
    """The axes lie in memory in another order."""
    back = [order.index(axis) for axis in range(x.ndim)]
    return x.permute(order).contiguous().permute(back)


def _overlapping(x):
    """Each vector begins one number after the one before, in every axis."""
    return x.flatten()[: sum(x.shape) - x.ndim + 1].as_strided(x.shape, (1,) * x.ndim)


def _sliding(x):
    """Each token begins one number after the one before; heads and batch entries lie apart."""
    *_, length, width = x.shape
    return x.flatten(2)[..., : length + width - 1].unfold(-1, width, 1)


def _sliding_heads(x):
    """Each head begins one number after the one before; tokens and batch entries lie apart."""
    _, _, length, width = x.shape
    return x.flatten().as_strided(x.shape, (length * width, 1, width, 1))


def _sliding_batch(x):
    """Each batch entry begins one number after the one before; tokens and heads lie apart."""
    _, _, length, width = x.shape
    return x.flatten().as_strided(x.shape, (1, length * width, width, 1))


def _offset(x):
    return torch.cat((x.new_full((3,), torch.nan), x.flatten()))[3:].view(x.shape)


#: Layouts that keep the numbers of a tensor.
KEEPING = {
    "contiguous": lambda x: x.contiguous(),
    "offset": _offset,
    "transposed": lambda x: _permuted(x, 0, 1, 3, 2),
    "channels last": lambda x: _permuted(x, 0, 2, 3, 1),
    "heads inside": lambda x: _permuted(x, 0, 2, 1, 3),
    "batch inside": lambda x: _permuted(x, 1, 2, 3, 0),
    "every second channel": lambda x: _among(x, 3),
    "every second token": lambda x: _among(x, 2),
    "unbound": lambda x: torch.stack((x, torch.full_like(x, torch.nan)), -1).unbind(-1)[0],
}
#: Layouts in which places share a number.
SHARING = {
    "one token": lambda x: x[:, :, :1].expand_as(x),
    "one head": lambda x: x[:, :1].expand_as(x),
    "one channel": lambda x: x[..., :1].expand_as(x),
    "one number": lambda x: x[:1, :1, :1, :1].expand_as(x),
    "overlapping": _overlapping,
    "sliding": _sliding,
    "sliding heads": _sliding_heads,
    "sliding batch": _sliding_batch,
}
LAYOUTS = KEEPING | SHARING


def layouts(chosen=LAYOUTS):
    """The name of a layout."""
    return st.sampled_from(list(chosen))


# Masks and positions


def masks(B, I, J, depth=2):
    """Any mask that fits, with &, | and ~ to the given depth."""
    simple = st.one_of(*simple_masks(B, I, J).values())
    if not depth:
        return simple
    deeper = masks(B, I, J, depth - 1)
    both, either = st.builds(rg.masks.Mask.__and__, deeper, deeper), st.builds(rg.masks.Mask.__or__, deeper, deeper)
    return st.one_of(simple, both, either, deeper.map(lambda m: ~m))


def simple_masks(B, I, J):
    """Masks without &, | and ~ that fit, by kind; the last kinds know the positions from 0 to J - 1 only."""
    length, seeds = max(I, J), st.integers(0, 2**31)
    kinds = {
        "causal": st.just(rg.causal()),
        "window": st.builds(rg.window, st.integers(1, 9)),
        "dilated": st.builds(rg.masks.dilated, st.integers(1, 4), st.integers(1, 4)),
        "prefix": st.builds(rg.masks.prefix, st.integers(0, J)),
        "block_local": st.builds(rg.masks.block_local, st.integers(1, 7), st.integers(0, 2), st.integers(0, 2)),
        "global_tokens": st.builds(rg.masks.global_tokens, st.lists(st.integers(0, length), max_size=3)),
        "lengths": st.lists(st.integers(0, J), min_size=B, max_size=B).map(rg.padding),
        "real keys": seeds.map(lambda seed: rg.padding(coins(seed, B, J))),
        "tensor": st.builds(lambda seed, b: rg.mask_tensor(coins(seed, b, 1, I, J)), seeds, st.sampled_from([1, B])),
        "predicate": st.just(rg.mask_mod(lambda b, h, i, j: (i + j + h) % 3 != b)),
        "documents": cuts(I, J),
    }
    if I > J:
        return kinds
    blocks = st.builds(rg.masks.random_blocks, st.integers(1, 5), st.just(1), st.just(J), st.integers(0, 99))
    kinds |= {"random_blocks": blocks, "tree": trees(J), "grid": grids(J)}
    return kinds | {"groups": groups(B, J), "chosen_keys": choices(B, I, J)}


def coins(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.7


def cuts(I, J):
    """Packed documents whose lengths add up to those of queries and keys."""
    if min(I, J) < 2:
        return st.just(rg.documents([I], [J]))
    at = st.integers(1, min(I, J) - 1)
    return at.map(lambda n: rg.documents([n, I - n], [n, J - n]))


@st.composite
def groups(draw, B, length):
    """Numbers of groups, with gaps and with tokens in no group, which may differ between entries."""
    numbers = torch.randint(-1, 3, (draw(st.sampled_from([1, B])), length), generator=seeded(draw))
    return groups_mask(numbers.sort(1).values if draw(st.booleans()) else numbers)


@st.composite
def choices(draw, B, I, J):
    """Keys, or blocks of keys, that were chosen for each query; some are named twice, some rows have none."""
    size, num_ids = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    shape = draw(st.sampled_from([1, B])), 1, I, num_ids
    ids = torch.randint(-1, -(-J // size) + 1, shape, generator=seeded(draw))
    return rg.masks.chosen_keys(ids, size, start=J - I)


def seeded(draw):
    return torch.Generator().manual_seed(draw(st.integers(0, 2**31)))


@st.composite
def trees(draw, length):
    """A tree of tokens in any order of parents before children after a context, or a packed shared prefix."""
    context = draw(st.integers(0, length - 1))
    if draw(st.booleans()):
        middle = draw(st.integers(context + 1, length))
        return rg.masks.shared_prefix(context, [n for n in (middle - context, length - middle) if n])
    return rg.masks.tree([draw(st.integers(-1, token - 1)) for token in range(length - context)], context)


@st.composite
def grids(draw, length, gaps=True):
    """A neighborhood or sliding tiles over a line, an image or a video of so many points."""
    rows = draw(st.sampled_from([n for n in range(1, length + 1) if length % n == 0]))
    shape = draw(st.sampled_from([(length,), (rows, length // rows), (1, length // rows, rows)]))
    if draw(st.booleans()):
        sides = [draw(st.sampled_from([side for side in range(1, n + 1) if n % side == 0])) for n in shape]
        return rg.masks.sliding_tiles(
            shape, sides, [draw(st.integers(1, n // m)) for n, m in zip(shape, sides, strict=True)]
        )
    sizes = [draw(st.integers(1, n)) for n in shape]
    dilation = [draw(st.integers(1, n // size if gaps else 1)) for n, size in zip(shape, sizes, strict=True)]
    steps = [draw(st.integers(1, size)) for size in sizes]
    return rg.masks.neighborhood(shape, sizes, dilation, steps, [draw(st.booleans()) for _ in shape])


@st.composite
def placings(draw, I, J):
    """Where queries and keys stand: aligned to the end, or anywhere, with a gap among the keys."""
    if draw(st.booleans()):
        return rg.types.Positions.aligned_to_end(I, J)
    before, gap = draw(st.integers(0, J)), draw(st.integers(0, 9))
    keys = rg.types.Spans.of((0, before), (before + gap, J + gap))
    return rg.types.Positions(draw(st.integers(0, J + gap + 5)), keys)


# Pieces: of so many heads and vectors of so many channels


def learned_number(value):
    return torch.nn.Parameter(torch.tensor(value, dtype=torch.float64))


SCORES = {
    "dot": lambda H, D: rg.Dot(),
    "unscaled": lambda H, D: rg.Dot(scale=1.0),
    "scaled": lambda H, D: rg.Dot(scale=torch.rand(H, 1, 1, dtype=torch.float64) + 0.1),
    "cosine": lambda H, D: rg.scores.Cosine(3.0),
    "learned": lambda H, D: rg.Dot(scale=learned_number(0.5)),
    "scaled_cosine": lambda H, D: rg.scores.Cosine(torch.tensor(3.0, dtype=torch.float64)),
    "bilinear": lambda H, D: rg.scores.Bilinear(D, D, num_heads=H),
    "additive": lambda H, D: rg.scores.Additive(D, D, 3, bias=True),
    "concat": lambda H, D: rg.scores.Concat(D, D, 3, bias=True),
}
BIASES = {
    "alibi": lambda H, D: rg.ALiBi(H),
    "t5": lambda H, D: rg.biases.T5Bias(H, num_buckets=8, max_distance=16),
    "shaw": lambda H, D: rg.biases.ShawBias(D, reach=3),
    "transformer_xl": lambda H, D: rg.biases.TransformerXLBias(H, D),
    "softcap": lambda H, D: rg.biases.Softcap(1.5),
    "learned_softcap": lambda H, D: rg.biases.Softcap(learned_number(1.5)),
    "scaled_shaw": lambda H, D: rg.biases.ShawBias(D, reach=3, scale=learned_number(0.5)),
    "table": lambda H, D: rg.biases.LearnedTable(H, reach=4),
}
NORMALIZERS = {
    "softmax": lambda H: rg.normalizers.Softmax(),
    "warm": lambda H: rg.normalizers.Softmax(temperature=3.0, sink=0.5),
    "learned_warm": lambda H: rg.normalizers.Softmax(temperature=learned_number(3.0), sink=0.5),
    "sink": lambda H: rg.normalizers.LearnedSink(H),
    "sparsemax": lambda H: rg.normalizers.Sparsemax(),
    "entmax": lambda H: rg.normalizers.Entmax15(),
    "top_k": lambda H: rg.normalizers.TopK(3),
    "hardmax": lambda H: rg.normalizers.Hardmax(),
}
POSITIONS = {
    "none": lambda D: None,
    "rope": lambda D: rg.RoPE(D),
    "interleaved": lambda D: rg.RoPE(2, interleaved=True),
    "partial": lambda D: rg.RoPE(2),
    "ntk": lambda D: rg.RoPE(D, scaling=rg.encodings.NTKScaling(4.0)),
    "sinusoidal": lambda D: rg.encodings.Sinusoidal(),
}
WIDTHS = (2, 4, 6, 8, 16)


def piece(draw, pieces, *sizes):
    """The first of the pieces half the time: the plain ones together are what the fused kernel runs."""
    first = draw(st.booleans())
    return pieces[next(iter(pieces)) if first else draw(st.sampled_from(sorted(pieces)))](*sizes)


def drawn_tensor(draw, *shape, chosen=LAYOUTS, dtype=torch.float64):
    """Random numbers in a drawn layout."""
    return chosen[draw(layouts(chosen))](torch.randn(shape, dtype=dtype))


@st.composite
def problems(
    draw, kernel=False, longest=40, equal=False, scores=SCORES, biases=BIASES, normalizers=NORMALIZERS, learned=None
):
    """Any pieces, sizes, positions and layouts that fit together, in float64."""
    B, G, R = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    D, E = draw(st.sampled_from(WIDTHS)), draw(st.integers(1, 9))
    I = draw(st.integers(1, longest))
    J = I if equal else draw(st.integers(1, longest))
    H = G * R
    torch.manual_seed(draw(st.integers(0, 2**31)))
    mask = draw(st.none() | masks(B, I, J))
    if kernel:
        features = draw(st.sampled_from([rg.scores.EluPlusOne(), rg.scores.RandomFeatures(D, 16)]))
        simple = st.sampled_from([None, rg.causal(), rg.padding([J // 2] * B), rg.masks.prefix(J // 2)])
        mask = draw(st.one_of(st.just(mask), simple, simple.map(lambda m: m if m is None else m & rg.causal())))
        attention = rg.Attention(rg.scores.FeatureScore(features), mask=mask, normalizer=rg.normalizers.SumNormalizer())
    else:
        attention = rg.Attention(
            piece(draw, scores, H, D),
            position=piece(draw, POSITIONS, D),
            bias=[biases[name](H, D) for name in draw(st.lists(st.sampled_from(sorted(biases)), max_size=2))],
            mask=mask,
            normalizer=piece(draw, normalizers, H),
        )
    positions = rg.types.Positions.aligned_to_end(I, J) if equal else draw(placings(I, J))
    choosing = isinstance(
        attention.normalizer, rg.normalizers.TopK | rg.normalizers.Hardmax
    )  # of equal scores, rounding chooses one
    q, v = drawn_tensor(draw, B, H, I, D), drawn_tensor(draw, B, G, J, E)
    k = drawn_tensor(draw, B, G, J, D, chosen=KEEPING if choosing else LAYOUTS)
    learned = draw(st.booleans()) if learned is None else learned
    problem = Problem(attention.double().requires_grad_(learned), q, k, v, positions, Sizes.of(q, k, v))
    try:
        attention.check(problem.sizes, problem.positions, D)
    except rg.RegardError:  # a mask of a given length, drawn with positions beyond it
        assume(False)
    return problem


def leaves(problem):
    """Query, key and value as leaves of a graph, in the layouts that were drawn."""
    return [t.detach().requires_grad_() for t in (problem.query, problem.key, problem.value)]
