"""Cases of rings.py: tensors of a call travel with their keys, and the memory of a transition from rank to rank."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

import regard as rg
from cataloged import TRANSPORTED
from regard.catalog import mechanisms
from ring_tools import CASES, CLOSE, LAYOUTS, case, cut, laid, raises, some


def check_call(attention, inputs, tensors, ring, share=None):
    """Output, weights and all gradients of the ring against those of one process; the tokens are axis 2 or the last."""
    share = share or ring.share
    attention.zero_grad()
    one = [t.clone().requires_grad_() for t in inputs]
    of_one = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    whole = attention(*one, **of_one)
    up = some(*whole.output.shape, seed=7)
    whole.output.backward(up)
    slopes = [p.grad for p in attention.parameters()]
    attention.zero_grad()
    own = [laid(share(t), number) for number, t in enumerate(inputs)]
    of_own = {name: share(t).requires_grad_(t.is_floating_point()) for name, t in tensors.items()}
    seen = attention(*own, **of_own, engine=ring)
    seen.output.backward(share(up))
    torch.testing.assert_close(seen.output, share(whole.output), **CLOSE)
    for mine, theirs in zip((*own, *of_own.values()), (*one, *of_one.values()), strict=True):
        if mine.is_floating_point():
            torch.testing.assert_close(mine.grad, share(theirs.grad), **CLOSE)
    for parameter, slope in zip(attention.parameters(), slopes, strict=True):
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, slope, **CLOSE)
    torch.testing.assert_close(seen.weights.dense(), whole.weights.dense(), **CLOSE)
    torch.testing.assert_close(seen.weights.received(), whole.weights.received(), rtol=1e-5, atol=1e-5)


def gates(n, heads=4, seed=5):
    return torch.nn.functional.logsigmoid(2 * some(2, heads, n, seed=seed))


def transported(name):
    entry = mechanisms()[name]

    def run():
        attention, *inputs = entry.example(queries=13)
        for layout in LAYOUTS:
            check_call(attention, inputs, entry.tensors(attention, *inputs), rg.Ring(layout=layout))

    return run


for _name in TRANSPORTED:
    CASES[f"the memory of {_name}"] = transported(_name)


@case
def sums_over_keys_reach_over_ranks():
    """Forgetting gates with other pieces, in shares of any length, with one gate for several heads."""
    for layout, normalizer in itertools.product(
        LAYOUTS, (rg.normalizers.LearnedSink(4), rg.normalizers.Sigmoid(offset=1.0))
    ):
        n = 15
        inputs = some(2, 4, n, 6), some(2, 2, n, 6, seed=1), some(2, 2, n, 5, seed=2)
        attention = rg.Attention(
            bias=(rg.biases.ForgettingBias(), rg.biases.TransformerXLBias(4, 6)),
            position=rg.RoPE(6),
            mask=rg.causal() & rg.window(9),
            normalizer=normalizer,
        ).double()
        for parameter in attention.parameters():
            dist.broadcast(parameter.detach(), 0)
        check_call(attention, inputs, {"log_forget": gates(n)}, rg.Ring(layout=layout))
    lengths = [1, 9, 4, 2][: dist.get_world_size()]
    x = some(2, 4, sum(lengths), 6)
    attention = rg.Attention(bias=rg.biases.ForgettingBias(), mask=rg.causal())
    check_call(attention, [x] * 3, {"log_forget": gates(sum(lengths))}, rg.Ring(), lambda t: cut(t, lengths))
    ring, shared = rg.Ring(), gates(sum(lengths), heads=1)
    own = [cut(x, lengths)] * 3
    seen = attention(*own, log_forget=cut(shared, lengths), engine=ring).output
    torch.testing.assert_close(seen, cut(attention(x, x, x, log_forget=shared).output, lengths), **CLOSE)


@case
def coordinates_stay_with_their_tokens():
    n = 12
    inputs = some(2, 4, n, 8), some(2, 2, n, 8, seed=1), some(2, 2, n, 5, seed=2)
    places = torch.randint(0, 5, (2, 2, n), generator=torch.Generator().manual_seed(0))
    attention = rg.Attention(position=rg.encodings.AxialRoPE.grid(None, 8), mask=rg.causal())
    for layout in LAYOUTS:
        check_call(attention, inputs, {"coordinates": places}, rg.Ring(layout=layout))
    q, k = cut(inputs[0], [n // dist.get_world_size()] * dist.get_world_size()), inputs[1]
    raises(
        ["AxialRoPE needs the queries and keys of the same tokens"],
        lambda: attention(q, k, k, coordinates=places, engine="ring"),
    )


@case
def each_rank_chooses_the_keys_of_its_queries():
    """The tensors of an indexer have their tokens on several axes; the ring sends only chosen keys."""
    n, places = 15, {"index_query": 2, "index_key": 2, "index_weights": 1}
    inputs = some(2, 4, n, 6), some(2, 2, n, 6, seed=1), some(2, 2, n, 5, seed=2)
    index = {"index_query": some(2, 3, n, 4, seed=3), "index_key": some(2, 1, n, 4, seed=4)}
    for layout, size in itertools.product(LAYOUTS, (1, 2)):
        ring = rg.Ring(layout=layout)
        if size == 1:
            selection, given = rg.selections.TokenIndexer(4), index | {"index_weights": some(2, n, 3, seed=5)}
        else:
            selection, given = rg.selections.BlockIndexer(size, 2), index | {"index_query": index["index_query"][:, :2]}
        mask = rg.causal() if size == 1 else rg.causal() & rg.documents([6, 9])  # blocks begin anew at 6
        attention = rg.Attention(position=rg.RoPE(6), mask=mask, selection=selection)
        one, own = [t.clone().requires_grad_() for t in inputs], [ring.share(t).requires_grad_() for t in inputs]
        whole = attention(*one, **given)
        shared = {name: ring.share(t, axis=places[name]) for name, t in given.items()}
        seen = attention(*own, **shared, engine=ring)
        up = some(*whole.output.shape, seed=7)
        whole.output.backward(up)
        seen.output.backward(ring.share(up))
        torch.testing.assert_close(seen.output, ring.share(whole.output), **CLOSE)
        torch.testing.assert_close(seen.weights.dense(), whole.weights.dense(), **CLOSE)
        torch.testing.assert_close(seen.weights.entropy(), whole.weights.entropy(), rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(own, one, strict=True):
            torch.testing.assert_close(mine.grad, ring.share(theirs.grad), **CLOSE)


class PerHead(rg.biases.AdditiveBias):
    """A number of the call for each head."""

    needs = {"level": "H"}  # noqa: RUF012 - a test

    def prepare(self, query, key, positions, level):
        rows = level.view(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[2], 1)
        return rows, None

    def term(self, grid, rows, cols):
        return rows * grid.distance


class ReadsKeys(rg.biases.AdditiveBias):
    """A bias that reads keys beside a tensor of the call."""

    needs = {"log_forget": "B H J"}  # noqa: RUF012 - a test

    def prepare(self, query, key, positions, log_forget):
        return None, log_forget[..., None] * key.mean(-1, keepdim=True)

    def term(self, grid, rows, cols):
        return cols.mT


@case
def ranks_that_differ_are_told():
    """In the transition, in the selection, and in the tensors of the call."""
    x, last = some(1, 2, 6, 4), dist.get_rank() == dist.get_world_size() - 1
    rates = [torch.full((2,), -0.1 - n / 2) for n in (0, 1)]
    raises(
        ["differ in the contents of the transition"],
        lambda: rg.Attention(transition=rg.transitions.Decay(rates[last]))(x, x, x, engine="ring"),
    )
    raises(
        ["differ in the pieces", "Delta"],
        lambda: rg.Attention(transition=rg.transitions.Delta(unit=not last))(
            x, x, x, beta=torch.ones(1, 2, 6), engine="ring"
        ),
    )
    level = rg.Attention(bias=PerHead(), mask=rg.causal())
    raises(
        ["differ in the contents of the tensor level"],
        lambda: level(x, x, x, level=torch.full((2,), float(last)), engine="ring"),
    )
    forgets = rg.Attention(bias=rg.biases.ForgettingBias(), mask=rg.causal())
    for given in (gates(6)[:1, :2].to(torch.float32 if last else torch.float64), gates(6)[:1, :2].requires_grad_(last)):
        raises(["the ranks differ in the"], lambda g=given: forgets(x, x, x, log_forget=g, engine="ring"))
    raises(["log_forget"], lambda: forgets(x, x, x, **({} if last else {"log_forget": gates(6)}), engine="ring"))
    raises(
        ["compares queries with all keys"],
        lambda: rg.Attention(selection=rg.selections.BlockMeans(2, 2))(x, x, x, engine="ring"),
    )
    raises(
        ["ReadsKeys reads keys"],
        lambda: rg.Attention(bias=ReadsKeys(), mask=rg.causal())(x, x, x, log_forget=gates(6)[:1, :2], engine="ring"),
    )
    raises(
        ["same tokens on each rank"],
        lambda: rg.Attention(transition=rg.transitions.Decay(-0.1))(x[:, :, :3], x, x, engine="ring"),
    )
    raises(
        ["no cost model of a transition"],
        lambda: rg.plan(x, x, x, attention=rg.Attention(transition=rg.transitions.Decay(-0.1)), engine="ring"),
    )


@case
def a_map_of_a_transition_is_read_by_all():
    ring, own = rg.Ring(), [rg.Ring().share(some(1, 2, 12, 4, seed=n)) for n in range(3)]
    with torch.no_grad():
        weights = rg.Attention(transition=rg.transitions.Decay(-0.1))(*own, engine=ring).weights
        own[1].add_(1)
    raises(["changed in place"], lambda: weights[0, 0, 3])
