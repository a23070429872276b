"""Every reduction that the kernels compute, by its definition on float64 weights."""

from __future__ import annotations

import torch

import regard as rg
from regard.maps.changed_map import Carried
from regard.maps.reductions import Pyramid
from regard.stats.statistics import Agreement, Offset, Offsets, SameToken, WeightOnKeys


def membership(cells, num_cells):
    return (cells[:, None] == torch.arange(num_cells)).double()


def expected_cells(w, rows, columns):
    """Sums of weights in cells, and maxima, for the cells of queries and keys."""
    sums = membership(rows, rows[-1] + 1).T @ w @ membership(columns, columns[-1] + 1)
    maxima = torch.stack([w[:, :, rows == n].amax(2) for n in range(rows[-1] + 1)], 2)
    return sums, torch.stack([maxima[..., columns == n].amax(-1) for n in range(columns[-1] + 1)], -1)


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
    entropy = -torch.xlogy(w, w)
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
                yield reduction, expected_cells(w, rows, columns)[0]
            case Pyramid():
                yield (
                    reduction,
                    expected_cells(w, torch.arange(I) >> reduction.level, torch.arange(J) >> reduction.level),
                )
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


def check(states, w, distance, tolerance):
    for reduction, expected, *sizes in definitions(
        w, distance, [f for f in states if not isinstance(f, rg.maps.TopLinks)]
    ):
        expected = expected if isinstance(expected, tuple) else (expected,)
        terms = (sizes[0] if isinstance(sizes[0], tuple) else (sizes[0],)) if sizes else expected
        for found, exact, size in zip(states[reduction], expected, terms, strict=False):
            error = (found.double() - exact).abs()
            assert (error <= 2 * tolerance * size + 1e-30).all(), (reduction, float(error.max()))
    for reduction in states:
        if isinstance(reduction, rg.maps.TopLinks):
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
