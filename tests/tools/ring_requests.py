"""Cases of rings.py: the handshake, in which the ranks compare their requests and the contents of their pieces."""

from __future__ import annotations

import copy
import functools

import torch
import torch.distributed as dist

import regard as rg
from regard.engine.ring import digests, exchange
from ring_tools import case, check, raises, some


@case
def a_rank_that_differs_is_named():
    last = dist.get_world_size() - 1
    odd = dist.get_rank() == last
    x = some(1, 2, 6, 4)

    def call(attention, *inputs, ring=None):
        return lambda: attention(*inputs, engine=ring or rg.Ring())

    plain, who = rg.Attention(), f"rank {last}"
    if dist.get_world_size() > 2:
        masks = rg.window(3) if odd else rg.window(4)
        raises([who, "mask", "window(size=3)", "window(size=4)"], call(rg.Attention(mask=masks), x, x, x))
        raises(
            ["batch size", f"2 on {who}", "1 on ranks 0, 1"], call(plain, *[x.expand(2 if odd else 1, -1, -1, -1)] * 3)
        )
        learns = x.clone().requires_grad_(odd)
        raises(["gradients", f"q on {who}", "none on ranks"], call(plain, learns, x, x))
        raises(
            ["layout", f"zigzag on {who}"], call(plain, x, x, x, ring=rg.Ring(layout="zigzag" if odd else "contiguous"))
        )
        raises([who, "float32"], call(plain, *[x.float() if odd else x] * 3))
        raises([who, "pieces", "ALiBi"], call(rg.Attention(bias=rg.ALiBi(2)) if odd else plain, x, x, x))
    held = torch.ones(6 * (last + 1), 6 * (last + 1), dtype=torch.bool)
    held[0, 1] = not odd
    raises(["contents of the mask"], call(rg.Attention(mask=rg.mask_tensor(held)), x, x, x))
    raises(
        ["the mask", "odd_mask", "even_mask"], call(rg.Attention(mask=rg.mask_mod((even_mask, odd_mask)[odd])), x, x, x)
    )
    wrong = [x[:, :, : 5 if odd else 6]] * 3
    raises(["holds", "zigzag", "gives it", "ring.share"], call(plain, *wrong, ring=rg.Ring(layout="zigzag")))
    words = ["query heads cannot share"] if odd else [who, "refused its share", "query heads cannot share"]
    raises(words, call(plain, x, some(1, 3, 6, 4) if odd else x, some(1, 3, 6, 4) if odd else x))
    check(plain, *[some(1, 2, 14, 4)] * 3, rg.Ring())  # and all can go on


def odd_mask(b, h, i, j, extra=0):
    return (i + j) % 2 == 1


def even_mask(b, h, i, j, extra=0):
    return j % 2 == i % 2


class Near:
    """A predicate that is an object."""

    def __init__(self, reach):
        self.reach, self.rank = reach, dist.get_rank()

    def __call__(self, b, h, i, j):
        return self.near(i, j)

    def near(self, i, j):
        return (i - j).abs() <= self.reach


def by_method(near):
    return lambda b, h, i, j: near.near(i, j)


def told_apart(make):
    """Attention that is made of another number on the last rank: all are told, and go on where it is the same."""
    x = some(1, 2, 6, 4)
    last = dist.get_world_size() - 1
    number = int(dist.get_rank() == last)
    raises(["attend: the ranks differ in the", f"on rank {last}"], lambda: make(number)(x, x, x, engine="ring"))
    make(0)(x, x, x, engine="ring")


@case
def hidden_contents_are_compared():
    numbers = [torch.zeros(2000).index_fill(0, torch.tensor([1000]), n) for n in (0, 1)]
    arrays = [n.numpy() for n in numbers]
    half = lambda f: functools.partial(f, extra=1)  # noqa: E731
    shaw = rg.biases.ShawBias(4, reach=3).double()

    def shaw_of(n):
        piece = copy.deepcopy(shaw)
        with torch.no_grad():
            next(piece.parameters())[0, 0] += n
        return piece

    told_apart(lambda n: rg.Attention(mask=rg.mask_mod(lambda b, h, i, j: numbers[n][i] >= 0)))
    told_apart(lambda n: rg.Attention(mask=rg.mask_mod(lambda b, h, i, j, held=numbers[n]: held[i] >= 0)))
    told_apart(lambda n: rg.Attention(mask=rg.mask_mod(lambda b, h, i, j: i >= int(arrays[n][0]) - 1)))
    told_apart(lambda n: rg.Attention(mask=rg.mask_mod(Near(n + 1))))
    told_apart(lambda n: rg.Attention(mask=rg.mask_mod(Near(n + 1).__call__)))
    told_apart(lambda n: rg.Attention(mask=rg.mask_mod(by_method(Near(n + 1)))))
    told_apart(lambda n: rg.Attention(mask=rg.mask_mod(half((odd_mask, even_mask)[n]))))
    told_apart(lambda n: sink_of(float(n)))
    told_apart(lambda n: rg.Attention(bias=shaw_of(n)))


def sink_of(value):
    attention = rg.Attention(normalizer=rg.normalizers.LearnedSink(2))
    torch.nn.init.constant_(next(attention.parameters()), value)
    return attention


@case
def learned_values_are_compared_once():
    """A step of an optimizer costs no hashing; tensors that were hashed before are hashed again only after a change."""
    x, attention = some(1, 2, 6, 4), sink_of(0.5)
    held = torch.ones(6 * dist.get_world_size(), 6 * dist.get_world_size(), dtype=torch.bool)
    attention = rg.Attention(normalizer=attention.normalizer, mask=rg.mask_tensor(held))
    hashed, digest = [], digests.tensor_digest
    digests.tensor_digest = lambda t: hashed.append(t) or digest(t)
    try:
        attention(x, x, x, engine="ring")
        assert len(hashed) == 2
        with torch.no_grad():
            next(attention.parameters()).add_(1)
        attention(x, x, x, engine="ring")
        assert len(hashed) == 2
    finally:
        digests.tensor_digest = digest


@case
def looking_is_compared():
    """Ranks that ask for different weights, statistics or in another order are told who asks for what."""
    rank, W = dist.get_rank(), dist.get_world_size()
    own = [some(1, 2, 6, 4, seed=10 * n + rank) for n in range(3)]
    one, other = (rg.Attention(mask=mask)(*own, engine="ring").weights for mask in (None, rg.causal()))
    raises(["weights: the ranks differ in the look", "head 0", "head 1", "on rank"], lambda: one[0, rank % 2, 3])
    raises(["query 3", "query 2", "on rank 0"], lambda: one[0, 0, 2 + (rank > 0)])
    raises(["query 0-2", "query 0-3"], lambda: one.tile(rows=range(3 + (rank > 0))))
    raises(["Entropy()", "KeyTotals()"], lambda: one.received() if rank else one.entropy())
    raises(["MassOn("], lambda: one.mass([rank]))
    raises(["weights of", "statistics"], lambda: one.entropy() if rank else one[0, 0, 3])
    raises(["map", "that of attend number"], lambda: (other if rank else one).entropy())
    raises(["operation", "weights", "attend"], lambda: rg.Attention()(*own, engine="ring") if rank else one[0])
    words = ["refused its share", "out of range"] if rank else ["out of range"]
    raises(words, lambda: one[0, 0, 3 if rank else 99])
    words = ["refused its share", "has 4 axes"] if rank else ["has 4 axes"]
    raises(words, lambda: one[0, 0, 3] if rank else one[0, 0, 3, 0, 0])
    raises(["the ranks differ in the shape"], lambda: rg.Ring().gather(own[0] if rank else own[0][:, :1]))
    for weights in (one, other):
        torch.testing.assert_close(weights[0, 1].sum(-1), torch.ones(6 * W, dtype=torch.float64))
        assert all(tile.weights.isfinite().all() for tile, _ in zip(weights.tiles(), range(1 + rank), strict=False))
    torch.testing.assert_close(one.received().sum(-1), torch.full((1, 2), 6.0 * W))


@case
def backward_is_compared():
    """Gradients of two calls that one rank asks for in the other order."""
    own = [some(1, 2, 6, 4, seed=n).requires_grad_() for n in range(3)]
    calls = [rg.Attention()(*own, engine="ring").output.sum() for _ in range(2)]
    raises(["backward: the ranks differ in the attend"], lambda: calls[int(dist.get_rank() == 0)].backward())


@case
def a_group_of_devices_shakes_hands_on_the_host():
    """Where a group carries no tensors of the CPU, one of the same ranks beside it does: no device is waited for."""
    backends, used = exchange._backends, []
    devices = dist.new_group(list(range(dist.get_world_size())))
    door = dist.all_gather
    try:
        exchange._backends = lambda group: {"cuda": "nccl"} if group is devices else backends(group)
        dist.all_gather = lambda rows, mine, group: (
            used.append((group, mine.device.type)) or door(rows, mine, group=group)
        )
        numbers = [exchange.Exchange(devices).agree("attend", {"mask": "None"}).number for _ in range(2)]
        raises(
            ["mask", "on rank 0"],
            lambda: exchange.Exchange(devices).agree("attend", {"mask": str(dist.get_rank() > 0)}),
        )
        x = some(1, 2, 6, 4)
        raises(["sends only tensors of cuda"], lambda: rg.Attention()(x, x, x, engine=rg.Ring(devices)))
    finally:
        exchange._backends, dist.all_gather = backends, door
    assert numbers == [1, 2] and len({id(group) for group, _ in used}) == 1
    assert all(group is not devices and kind == "cpu" for group, kind in used)


@case
def a_device_that_the_group_cannot_carry():
    x = some(1, 2, 6, 4).to("meta")
    raises(
        ["the tensors are on meta", "gloo", "sends only tensors of cpu"],
        lambda: rg.Attention()(x, x, x, engine="ring"),
    )
