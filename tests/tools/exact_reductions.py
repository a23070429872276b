"""The reductions of a map, and the definition of each on all weights in float64."""

from __future__ import annotations

import torch

import regard as rg
from regard.maps.changed_map import Carried
from regard.maps.reductions import Pyramid
from regard.stats.statistics import NO_PATTERN, Agreement, Allowed, Offset, Offsets, SameToken, WeightOnKeys

#: Those that the kernels compute, one of each kind.
COMPILED = (
    rg.maps.Entropy(),
    rg.maps.TopLinks(3),
    rg.maps.KeyTotals(),
    rg.maps.Distance(),
    rg.maps.MassOn([0, 5, 7]),
    rg.maps.Pool(9, 13),
)


def membership(cells, num_cells):
    return (cells[:, None] == torch.arange(num_cells)).double()


def cell_sums(w, rows, columns):
    """Sums of weights in cells, for the cells of queries and keys."""
    return membership(rows, rows[-1] + 1).T @ w @ membership(columns, columns[-1] + 1)


def cell_maxima(w, rows, columns):
    maxima = torch.stack([w[:, :, rows == n].amax(2) for n in range(rows[-1] + 1)], 2)
    return torch.stack([maxima[..., columns == n].amax(-1) for n in range(columns[-1] + 1)], -1)


def check_links(links, w, tolerance):
    """The greatest weights, each at a key that has it; no key twice."""
    k = links.weights.shape[-1]
    torch.testing.assert_close(links.weights.double(), w.topk(k).values, rtol=tolerance, atol=1e-37)
    at_keys = w.gather(-1, links.keys.clamp_min(0)) * (links.keys >= 0)
    torch.testing.assert_close(links.weights.double(), at_keys, rtol=tolerance, atol=1e-37)
    places = links.keys.sort(-1).values
    assert ((places[..., 1:] > places[..., :-1]) | (places[..., 1:] < 0)).all()


def definitions(w, distance, reductions):
    """The tensors of the state of each reduction but `TopLinks`, from all weights in float64; (value, size of its
    terms).
    """
    B, H, I, J = w.shape
    entropy = -torch.xlogy(w, w) if any(isinstance(f, rg.maps.Entropy | WeightOnKeys) for f in reductions) else None
    for reduction in reductions:
        match reduction:
            case rg.maps.Entropy():
                yield reduction, entropy.sum(-1), entropy.sum(-1) + 2 * w.sum(-1)
            case rg.maps.Distance():
                yield reduction, (w * distance.abs()).sum(-1)
            case rg.maps.KeyTotals():
                yield reduction, w.sum(-2)
            case rg.maps.MassOn():
                yield reduction, (w * reduction.init((B, H, I, J), torch.device("cpu"))[1][:, None, None]).sum(-1)
            case Carried():
                yield reduction, (w * reduction.numbers[:, :, None]).sum(-1)
            case rg.maps.Pool():
                rows, columns = (
                    torch.arange(I) * min(reduction.rows, I) // I,
                    torch.arange(J) * min(reduction.cols, J) // J,
                )
                yield reduction, cell_sums(w, rows, columns)
            case Pyramid():
                cells = torch.arange(I) >> reduction.level, torch.arange(J) >> reduction.level
                yield reduction, (cell_sums(w, *cells), cell_maxima(w, *cells))
            case Offset():
                yield reduction, (w * (distance == reduction.by)).sum(-1)
            case Offsets():
                steps = range(reduction.first, reduction.last + 1)
                yield reduction, torch.stack([(w * (distance == step)).sum((-2, -1)) for step in steps], -1)
            case WeightOnKeys():
                keys = list(reduction.keys)
                values = w[..., keys].sum(-1), entropy[..., keys].sum(-1)
                yield reduction, values, (values[0], values[1] + values[0])
            case rg.maps.MassWhere():
                yield reduction, (w * (distance > 0)).sum(-1)
            case SameToken():
                equal = reduction.queries[:, None, :, None] == reduction.keys[:, None, None]
                yield reduction, (w * (equal & (distance != 0))).sum(-1)
            case rg.maps.Similarity():
                flat = w[:, :, :: reduction.every].flatten(2)
                yield reduction, flat @ flat.mT
            case Agreement():
                chosen = reduction.init((B, H, I, J), torch.device("cpu"))[2:]
                part = w * chosen[0][:, None] * chosen[1]
                yield reduction, (part.flatten(2) @ part.flatten(2).mT, part.sum(-2))
            case Allowed():
                mask, grid = reduction.weights.attention.mask, reduction.weights.grid
                pairs = torch.ones(1, dtype=torch.bool) if mask is None else mask.allowed(grid)
                yield reduction, pairs.expand(w.shape).sum(-1).double()
            case rg.maps.SignedMass():
                yield reduction, (w.clamp_min(0).sum(-1), w.clamp_max(0).sum(-1))


def cosines(rows):
    """Those of every two heads, for (B, H, numbers); of a row of zeros: 0."""
    directions = torch.nn.functional.normalize(rows, dim=-1, eps=1e-300)
    return directions @ directions.mT


def less_mean(w, reduction):
    """The chosen rows and columns of weights, before and after the mean row is subtracted; (B, H, numbers) each."""
    is_query, is_key = (x.bool() for x in reduction.init(tuple(w.shape), torch.device("cpu"))[2:])
    rows = w[:, :, is_query][..., is_key]
    return rows.flatten(2), (rows - rows.mean(2, keepdim=True)).flatten(2)


def finished(w, reduction, state):
    """The tensors of the result of a reduction, from all weights and the exact tensors of its state."""
    I = w.shape[2]
    match reduction:
        case rg.maps.Pool():
            return [state[0] / (torch.arange(I) * min(reduction.rows, I) // I).bincount()[:, None]]
        case Pyramid():
            return [state[0] / (torch.arange(I) >> reduction.level).bincount()[:, None], state[1]]
        case rg.maps.Similarity():
            return [cosines(w[:, :, :: reduction.every].flatten(2))]
        case Agreement():
            before, after = less_mean(w, reduction)
            squares = after.square().sum(-1), before.square().sum(-1)
            return [cosines(after * (squares[0] > NO_PATTERN * squares[1])[..., None])]
    return state


def sizes_of(w, distance, reduction, sizes):
    """The sizes of what is added to a result. Weights with signs were added to by terms of the size of the others."""
    if isinstance(reduction, rg.maps.Similarity):
        return [1.0]
    if isinstance(reduction, Agreement):
        (before, after), tiny = (x.norm(dim=-1) for x in less_mean(w, reduction)), 1e-30
        ratio = (before + tiny) / (after + tiny)
        return [ratio[:, :, None] * ratio[:, None]]
    if sizes is None:
        ((_, state, *_),) = definitions(w.abs().clamp_min(w.abs().mean()), distance, [reduction])
        sizes = [state[0]] * 2 if isinstance(reduction, rg.maps.SignedMass) else as_list(state)
    return finished(w, reduction, sizes)


def as_list(tensors):
    return list(tensors) if isinstance(tensors, tuple) else [tensors]


def wrong_results(found, w, distance, tolerance):
    """The reductions whose result, a tensor or a tuple of tensors, is not that of the definition: each with the error.

    `tolerance` is relative to the sum of the sizes of what is added; of cosines, absolute.
    """
    is_signed, wrong = bool((w < 0).any()), {}
    for reduction, state, *sizes in definitions(w, distance, [f for f in found if not is_top(f)]):
        sizes = None if is_signed else as_list(sizes[0] if sizes else state)
        exact = finished(w, reduction, as_list(state))
        for result, value, size in zip(
            as_list(found[reduction]), exact, sizes_of(w, distance, reduction, sizes), strict=True
        ):
            error = (result.double() - value).abs()
            if result.shape != value.shape or not (error <= 2 * tolerance * size + 1e-30).all():
                wrong[reduction] = f"{reduction} is off by {float(error.max())}"
    for reduction in filter(is_top, found):
        try:
            check_links(found[reduction], w, tolerance)
        except AssertionError as error:
            wrong[reduction] = f"{reduction}: {error}"
    return wrong


def is_top(reduction):
    return isinstance(reduction, rg.maps.TopLinks)


def check(states, w, distance, tolerance):
    for reduction, expected, *sizes in definitions(w, distance, [f for f in states if not is_top(f)]):
        expected = expected if isinstance(expected, tuple) else (expected,)
        terms = (sizes[0] if isinstance(sizes[0], tuple) else (sizes[0],)) if sizes else expected
        for found, exact, size in zip(states[reduction], expected, terms, strict=False):
            error = (found.double() - exact).abs()
            assert (error <= 2 * tolerance * size + 1e-30).all(), (reduction, float(error.max()))
    for reduction in filter(is_top, states):
        check_links(reduction.finish(states[reduction]), w, tolerance)


def some_reductions(B, H, I, J, seed=0):
    """Every kind of reduction, several of some."""
    numbers = torch.Generator().manual_seed(seed)
    special = tuple(torch.randint(0, min(I, J), (3,), generator=numbers).unique().tolist())
    return (
        *(rg.maps.Entropy(), rg.maps.Distance(), rg.maps.KeyTotals(), rg.maps.TopLinks(1 + seed % 9)),
        *(rg.maps.MassOn([0]), rg.maps.MassOn(torch.rand(B, J, generator=numbers) < 0.5), WeightOnKeys(special)),
        Carried(torch.rand(B, H, J, generator=numbers)),
        *(rg.maps.Pool(1 + seed % 37, 1 + seed % 23), Pyramid(1 + seed % 5)),
        *(Offset(-1), Offset(seed % 7 - 3), Offsets(-4, 2 + seed % 5)),
        *(
            rg.maps.MassWhere(~rg.causal()),
            SameToken(*(torch.randint(-1, 4, (B, n), generator=numbers) for n in (J, I))),
        ),
        *(rg.maps.Similarity(1 + seed % 3), Agreement(special, 1 + seed % 3)),
    )
