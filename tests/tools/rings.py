"""What each rank of a ring runs: test_ring.py starts `serve` in processes that are told what torchrun tells.

Every rank runs the cases that the test names, in the same order, and answers what it found. No case depends on another.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import regard as rg
import ring_modules  # noqa: F401 - its cases
import ring_parts  # noqa: F401 - its cases
import ring_requests  # noqa: F401 - its cases
import ring_tensors  # noqa: F401 - its cases
from cataloged import SINGLE
from regard.catalog import mechanisms
from regard.engine.ring.kv_chunk import KVChunk
from ring_tools import (
    BIASES,
    CASES,
    CLOSE,
    LAYOUTS,
    LOOSE,
    MASKS,
    NORMALIZERS,
    POSITIONS,
    Sent,
    case,
    check,
    cut,
    laid,
    raises,
    some,
)

MERGES = [name for name in SINGLE if mechanisms()[name].example()[0].normalizer.merge_refusal is None]


def lost_memory_is_nan():
    """Memory that nobody wrote must not pass for an answer."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        make = getattr(owner, name)

        def poisoned(*args, make=make, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() and not tensor.requires_grad else tensor

        setattr(owner, name, poisoned)


def mechanism(name, layout):
    entry = mechanisms()[name]

    def run():
        sizes = {} if {"queries", "key_heads"} & set(entry.sizes) else {"queries": 23}
        grouped = {} if "heads" in entry.sizes or "key_heads" in entry.sizes else {"key_heads": 2}
        check(*entry.example(**sizes, **grouped), rg.Ring(layout=layout))

    return run


for _name, _layout in itertools.product(MERGES, LAYOUTS):
    CASES[f"{_name}-{_layout}"] = mechanism(_name, _layout)


@case
def any_pieces_together():
    drawn = random.Random(0)
    for layout, mask in itertools.product(LAYOUTS, MASKS):
        n = drawn.randrange(2 * dist.get_world_size(), 22)
        pieces = [kind[drawn.choice(list(kind))] for kind in (BIASES, POSITIONS, NORMALIZERS)]
        heads = drawn.choice((1, 2, 4))
        torch.manual_seed(n)
        bias, position, normalizer = (make() for make in pieces)
        attention = rg.Attention(bias=bias, position=position, normalizer=normalizer, mask=MASKS[mask](n)).double()
        q, k, v = some(2, 4, n, 6), some(2, heads, n, 6, seed=1), some(2, heads, n, 5, seed=2)
        try:
            check(attention, q, k, v, rg.Ring(layout=layout))
        except AssertionError as error:
            raise AssertionError(f"{layout} {attention} n={n} heads={heads}: {error}") from error


@case
def shares_of_any_length():
    W = dist.get_world_size()
    lengths, key_lengths = [1, 9, 4, 2][:W], [3, 8, 1, 5][:W]
    q, k, v = (
        some(1, 2, sum(lengths), 4),
        some(1, 2, sum(key_lengths), 4, seed=1),
        some(1, 2, sum(key_lengths), 3, seed=2),
    )
    for mask in (None, rg.causal(), rg.window(3)):
        attention = rg.Attention(mask=mask, position=rg.RoPE(4))
        check(attention, q, k, v, rg.Ring(), lambda x: cut(x, lengths), lambda x: cut(x, key_lengths))


@case
def as_many_ranks_as_tokens():
    W = dist.get_world_size()
    x = some(1, 1, W, 4)
    for layout in LAYOUTS:
        check(rg.Attention(mask=rg.causal()), x, x, x, rg.Ring(layout=layout))
    raises(["too few for"], lambda: rg.Ring().share(x[:, :, :1]))


@case
def positions_that_start_elsewhere():
    q, k, v = (some(1, 2, 12, 4, seed=n) for n in range(3))
    attention = rg.Attention(mask=rg.causal() & rg.window(6), position=rg.RoPE(4), bias=rg.ALiBi(2))
    for start, first in ((3, 0), (100, 97)):
        positions = rg.types.Positions(start, rg.types.Spans(((first, first + 12),)))
        check(attention, q, k, v, rg.Ring(layout="zigzag"), positions=positions)


@case
def kernels_are_merged_by_their_sums():
    q, k, v = (some(2, 4, 21, 6, seed=n) for n in range(3))
    for mask in (rg.causal(), rg.window(4), rg.padding([0, 9])):
        attention = rg.Attention(rg.scores.FeatureScore(), normalizer=rg.normalizers.SumNormalizer(), mask=mask)
        check(attention, q, k, v, rg.Ring(layout="zigzag"))


@case
def half_precision_stays_close():
    q, k, v = (some(2, 4, 64, 16, seed=n).bfloat16() for n in range(3))
    ring, attention = rg.Ring(layout="zigzag"), rg.Attention(mask=rg.causal())
    whole = attention(q.double(), k.double(), v.double()).output
    mine = attention(*(ring.share(t) for t in (q, k, v)), engine=ring).output
    assert mine.dtype == torch.bfloat16
    torch.testing.assert_close(mine.double(), ring.share(whole), rtol=2**-7, atol=2**-7)


@case
def no_gradients_where_none_are_wanted():
    q, k, v = (some(1, 2, 12, 4, seed=n) for n in range(3))
    ring, attention = rg.Ring(), rg.Attention(mask=rg.causal())
    own = [ring.share(t) for t in (q, k, v)]
    assert not attention(*own, engine="ring").output.requires_grad
    own[2].requires_grad_()
    with Sent() as sent:
        attention(*own, engine=ring).output.sum().backward()
    assert own[0].grad is None and own[1].grad is None
    plan = rg.plan(*own, attention=attention, engine=ring)
    assert plan.gradient_bytes == 2 * 4 * 8 and plan.key_bytes == 2 * plan.gradient_bytes
    assert sent.bytes == 2 * plan.sent(dist.get_rank()) + plan.returned(dist.get_rank())


@case
def bytes_are_sent_as_planned():
    rank = dist.get_rank()
    for (what, mask), layout in itertools.product(MASKS.items(), LAYOUTS):
        ring, n = rg.Ring(layout=layout), 26
        attention = rg.Attention(
            rg.scores.Bilinear(6, 6), mask=mask(n), bias=rg.biases.TransformerXLBias(4, 6)
        ).double()
        inputs = some(2, 4, n, 6), some(2, 2, n, 6, seed=1), some(2, 2, n, 5, seed=2)
        own = [ring.share(t).requires_grad_() for t in inputs]
        plan = rg.plan(*own, attention=attention, engine=ring)
        with Sent() as forward:
            output = attention(*own, engine=ring).output
        with Sent() as backward:
            output.sum().backward()
        about = f"{what} {layout}"
        assert forward.bytes == plan.sent(rank), f"{about}: {forward.bytes} bytes, {plan.sent(rank)} planned"
        assert forward.to == set(plan.partners(rank)), about
        assert backward.bytes == plan.sent(rank) + plan.returned(rank), about


@case
def nobody_gets_what_he_does_not_need():
    """Bytes by hand: float64, 2 key heads, width 4: 128 bytes a key with its value."""
    rank, W = dist.get_rank(), dist.get_world_size()
    n = 8 * W

    def sent(mask, layout="contiguous"):
        ring = rg.Ring(layout=layout)
        own = [ring.share(some(1, 2, n, 4, seed=seed)) for seed in range(3)]
        with Sent() as found:
            rg.Attention(mask=mask)(*own, engine=ring)
        return found.bytes // 128, found.to

    later = set(range(rank + 1, W))
    assert sent(None) == (8 * (W - 1), set(range(W)) - {rank})
    assert sent(rg.causal()) == (8 * len(later), later)
    assert sent(rg.causal() & rg.window(4)) == ((3, {rank + 1}) if rank + 1 < W else (0, set()))
    assert sent(rg.documents([8] * W)) == (0, set())
    assert sent(rg.documents([4] + [8] * (W - 1) + [4])) == (
        4 * len({rank - 1, rank + 1} & set(range(W))),
        {rank - 1, rank + 1} & set(range(W)),
    )
    early, late = 4 * (W - 1), 4 * rank  # zigzag: the early piece goes to all, the late one to those with later ones
    assert sent(rg.causal(), "zigzag")[0] == early + late


@case
def a_zigzag_shares_the_work():
    x = some(1, 1, 64 * dist.get_world_size(), 4)
    for layout in LAYOUTS:
        ring = rg.Ring(layout=layout)
        plan = rg.plan(*[ring.share(x)] * 3, attention=rg.Attention(mask=rg.causal()), engine=ring)
        pairs = [plan.cost(rank).pairs for rank in range(plan.ranks)]
        assert (max(pairs) > 1.5 * min(pairs)) == (layout == "contiguous"), pairs


@case
def any_weight_on_demand():
    n = 21
    for layout, mask in itertools.product(LAYOUTS, ("prefix", "documents", "empty")):
        attention = rg.Attention(
            mask=MASKS[mask](n), position=rg.RoPE(6), bias=rg.biases.TransformerXLBias(4, 6)
        ).double()
        for parameter in attention.parameters():
            dist.broadcast(parameter.detach(), 0)
        q, k, v = some(2, 4, n, 6), some(2, 2, n, 6, seed=1), some(2, 2, n, 5, seed=2)
        ring = rg.Ring(layout=layout)
        whole = attention(q, k, v).weights
        mine = attention(*(ring.share(t) for t in (q, k, v)), engine=ring).weights
        assert mine.shape == whole.shape
        for index in ((0, 3, n // 2), (slice(None), [1, 0], -1, slice(3, 15)), (1, 2, [7, 7, 0], [20, 0, 3]), ...):
            torch.testing.assert_close(mine[index], whole[index], **CLOSE)
        reductions = (
            rg.maps.Entropy(),
            rg.maps.KeyTotals(),
            rg.maps.Distance(),
            rg.maps.MassOn([0, 4]),
            rg.maps.Pool(4, 5),
            rg.maps.Similarity(),
        )
        for one, other in zip(mine.summarize(*reductions), whole.summarize(*reductions), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # reductions add up in float32
        torch.testing.assert_close(mine.top(2).weights, whole.top(2).weights)
        torch.testing.assert_close(ring.gather(mine.row_statistic[0]), whole.row_statistic[0], **CLOSE)


@case
def scores_whose_sum_no_number_holds():
    """Beside 2^60 float64 has steps of 256, so the log of a number of keys is lost, and all keys weigh the same."""
    n = 21
    q, k, v = some(2, 4, n, 6), some(2, 2, n, 6, seed=1), some(2, 2, n, 5, seed=2)
    sinks = rg.normalizers.Softmax(sink=0.0), rg.normalizers.LearnedSink(4), rg.normalizers.Softmax(sink=2.0**60)
    for offset, mask, normalizer in itertools.product(
        (2.0**60, -(2.0**60)), ("none", "prefix"), (rg.normalizers.Softmax(), *sinks)
    ):
        bias = rg.biases.LearnedTable(4, reach=3)
        torch.nn.init.constant_(bias.table, offset)
        attention = rg.Attention(mask=MASKS[mask](n), bias=bias, normalizer=normalizer).double()
        ring = rg.Ring()
        check(attention, q, k, v, ring)
        with torch.no_grad():
            mine = attention(*(ring.share(t) for t in (q, k, v)), engine=ring).weights
            allowed = torch.ones(n, n) if mask == "none" else attention(q, k, v).weights.dense()[0, 0] != 0
            sink = normalizer.sink if isinstance(normalizer, rg.normalizers.Softmax) else 0.0
            beside = 0.0 if sink is None or sink < offset else torch.inf if sink > offset else 1.0
            expected = (1 / (allowed.double().sum(-1) + beside)).expand(2, 4, n)
            torch.testing.assert_close(mine[..., 0], expected * allowed[:, 0], **CLOSE)
            total = expected * allowed.sum(-1)
            torch.testing.assert_close(mine.dense().sum(-1), total, **CLOSE)
            received = mine.summarize(rg.maps.KeyTotals())[0]
            torch.testing.assert_close(received.sum(-1).double(), total.sum(-1), rtol=1e-5, atol=1e-5)


@case
def weights_of_changed_tensors_are_refused():
    ring = rg.Ring()
    own = [ring.share(some(1, 2, 12, 4, seed=n)) for n in range(3)]
    seen = rg.Attention()(*own, engine=ring)
    own[1].add_(1)
    raises(["changed in place"], lambda: seen.weights[0, 0, 3])
    raises(["select is not available"], lambda: seen.weights.select(torch.tensor([0]), torch.tensor([0])))
    raises(["budget"], lambda: seen.weights.dense(budget=100))


@case
def what_cannot_be_merged_is_refused():
    x = some(1, 2, 6, 4)
    for normalizer in (
        rg.normalizers.Sparsemax(),
        rg.normalizers.Entmax15(),
        rg.normalizers.TopK(2),
        rg.normalizers.Hardmax(),
    ):
        attention = rg.Attention(normalizer=normalizer)
        raises(
            [repr(normalizer), "all scores of a row", "blocked"],
            lambda a=attention: a(x, x, x, engine="ring"),
        )
    odd = rg.Attention(dropout=0.1).train(dist.get_rank() > 0)
    raises(["dropout", "0.1", "none on rank 0"], lambda: odd(x, x, x, engine="ring"))
    torch.manual_seed(4)  # one rank alone has drawn a seed
    raises(["no cache"], lambda: rg.Attention()(x, x, x, engine="ring", cache=rg.GrowingCache()))
    bad = x.clone()
    bad[0, 0, 0, 0] = torch.nan
    raises(["NaN"], lambda: rg.Attention()(bad, x, x, engine="ring", check=True))
    raises(["the group has"], lambda: rg.Attention()(x, x, x, engine=rg.Ring(ranks=77)))
    raises(["expected a process group"], lambda: rg.Attention()(x, x, x, engine=rg.Ring(group="all")))
    short = rg.Attention(position=rg.encodings.LearnedPositions(6 * dist.get_world_size() - 1, 4)).double()
    raises(["LearnedPositions: has positions"], lambda: short(x, x, x, engine="ring"))
    raises(["documents"], lambda: rg.Attention(mask=rg.documents([5, 5]))(x, x, x, engine="ring"))


@case
def maps_of_many_ranks_are_tensors():
    q, k, v = (some(1, 2, 12, 4, seed=n) for n in range(3))
    for attention in (
        rg.Attention(mask=rg.causal()),
        rg.Attention(mask=rg.causal(), normalizer=rg.normalizers.Sigmoid(offset=-2.0)),
    ):
        ring, dense = rg.Ring(), attention(q, k, v).weights.dense()
        weights = attention(*(ring.share(t) for t in (q, k, v)), engine=ring).weights
        for dim in (None, 1, 2, 3, (0, 3)):
            torch.testing.assert_close(weights.mean(dim), dense.mean(dim), **CLOSE)
            torch.testing.assert_close(weights.amin(dim), dense.amin(dim or ()), **CLOSE)
        torch.testing.assert_close(weights.max(-1).values, dense.max(-1).values, **CLOSE)
        torch.testing.assert_close(weights @ v, dense @ v, **CLOSE)
        torch.testing.assert_close(weights[0, [0, 1], [5, 11], None], dense[0, [0, 1], [5, 11], None], **CLOSE)


@case
def meshes_and_groups_are_rings():
    W = dist.get_world_size()
    q, k, v = (some(1, 2, 12, 4, seed=n) for n in range(3))
    attention = rg.Attention(mask=rg.causal())
    mesh = dist.device_mesh.init_device_mesh("cpu", (W // 2, 2), mesh_dim_names=("data", "sequence"))
    raises(["mesh['sequence']"], lambda: attention(q, k, v, engine=rg.Ring(group=mesh)))
    ring = rg.Ring(group=mesh["sequence"], layout="zigzag")
    q = q + mesh["data"].get_local_rank()  # each ring has a sequence of its own
    whole = attention(q, k, v)
    mine = attention(*(ring.share(t) for t in (q, k, v)), engine=ring)
    torch.testing.assert_close(mine.output, ring.share(whole.output), **CLOSE)
    torch.testing.assert_close(ring.gather(mine.output), whole.output, **CLOSE)
    torch.testing.assert_close(mine.weights[0, 1, 5], whole.weights[0, 1, 5], **CLOSE)


class Learner(torch.nn.Module):
    """A projection and an attention over a ring."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.project = torch.nn.Linear(8, 8).double()
        self.attention = rg.Attention(
            rg.scores.Bilinear(4, 4, num_heads=2), mask=rg.causal(), bias=rg.biases.T5Bias(2)
        ).double()

    def forward(self, x, engine):
        q = self.project(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return self.attention(q, q, q, engine=engine).output


@case
def gradients_of_parameters_are_those_that_ddp_expects():
    x, ring, one = some(1, 14, 8), rg.Ring(layout="zigzag"), Learner()
    one(x, "auto").square().sum().backward()
    many = DistributedDataParallel(Learner())
    own = ring.share(x, axis=1)
    many(own, ring).square().sum().backward()
    for mine, whole in zip(many.parameters(), one.parameters(), strict=True):  # DDP takes the mean over ranks
        torch.testing.assert_close(mine.grad * dist.get_world_size(), whole.grad, **CLOSE)


class Tempered(rg.scores.Score):
    """Dot products over a temperature, which is a tensor of a piece that is no module."""

    def __init__(self, temperature):
        self.temperature = temperature

    def check(self, sizes, key_dim):
        """Any size is right."""

    def tile(self, query, key, grid):
        return query @ key.mT / self.temperature


@case
def gradients_belong_to_the_forward_pass_and_reach_tensors_of_pieces():
    inputs, ring = [some(1, 2, 12, 4, seed=n) for n in range(3)], rg.Ring()
    temperature = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    score = Tempered(temperature)
    attention = rg.Attention(score, mask=rg.causal())
    whole = attention(*inputs, engine="dense")
    (expected,) = torch.autograd.grad(whole.output.square().sum(), temperature)
    own = [ring.share(t).requires_grad_() for t in inputs]
    seen = attention(*own, engine=ring)
    score.temperature = torch.tensor(9.0, dtype=torch.float64)
    mine, *_ = torch.autograd.grad(seen.output.square().sum(), (temperature, *own))
    dist.all_reduce(mine)  # gradients of what pieces hold are a rank's own part
    torch.testing.assert_close(mine, expected, **CLOSE)
    torch.testing.assert_close(seen.weights.dense(), whole.weights.dense(), **CLOSE)


@case
def gradients_reach_the_shares_of_a_gathered_tensor():
    rank, W = dist.get_rank(), dist.get_world_size()
    x = some(2, 3, 5 * W + 1, 4)
    weights = [some(*x.shape, seed=r) for r in range(W)]  # of the loss of each rank
    for layout, dtype in itertools.product(LAYOUTS, (torch.float64, torch.bfloat16)):
        ring = rg.Ring(layout=layout)
        own = laid(ring.share(x).to(dtype), 2)
        whole = ring.gather(own)
        torch.testing.assert_close(whole, x.to(dtype))
        (whole.double().square() * weights[rank]).sum().backward()
        expected = ring.share(2 * x.to(dtype).double() * sum(weights))
        torch.testing.assert_close(own.grad.double(), expected, **(CLOSE if dtype == torch.float64 else LOOSE))
    own = cut(x, [1] * (W - 1) + [x.shape[2] - W + 1]).requires_grad_()
    (rg.Ring().gather(own) * weights[0]).sum().backward()
    torch.testing.assert_close(own.grad, W * cut(weights[0], [1] * (W - 1) + [x.shape[2] - W + 1]), **CLOSE)
    with torch.no_grad():
        assert not rg.Ring().gather(own).requires_grad
    raises(["gradients", "wanted", "none"], lambda: rg.Ring().gather(own if rank else own.detach()))


@case
def gradients_pass_through_attention_and_gathering():
    """The loss of the whole output on every rank: with a loss divided by the ranks, gradients are those of one."""
    inputs = [some(1, 2, 13, 4, seed=n).requires_grad_() for n in range(3)]
    attention, ring = rg.Attention(mask=rg.causal()), rg.Ring(layout="zigzag")
    attention(*inputs).output.square().sum().backward()
    own = [ring.share(t.detach()).requires_grad_() for t in inputs]
    whole = ring.gather(attention(*own, engine=ring).output)
    (whole.square().sum() / dist.get_world_size()).backward()
    for mine, one in zip(own, inputs, strict=True):
        torch.testing.assert_close(mine.grad, ring.share(one.grad), **CLOSE)


@case
def a_second_derivative_is_refused():
    own = [rg.Ring().share(some(1, 2, 12, 4, seed=n)).requires_grad_() for n in range(3)]
    output = rg.Attention(mask=rg.causal())(*own, engine="ring").output
    first = torch.autograd.grad(output.square().sum(), own, create_graph=True)
    raises(["engine='dense'"], lambda: torch.autograd.grad(sum(g.sum() for g in first), own))
    own = [t.detach() for t in own]

    def loss(query):
        return rg.Attention()(query, *own[1:], engine="ring").output.sum()

    raises(["torch.func", "dense engine"], lambda: torch.func.grad(loss)(own[0]))


@case
def a_plan_says_who_asked():
    ring = rg.Ring()
    x = some(1, 2, 6, 4)
    told = str(rg.plan(x, x, x, attention=rg.Attention(mask=rg.causal()), engine=ring)).split("\n")
    assert sum("*" in line for line in told) == 1 and f"{dist.get_rank()}*" in told[3 + dist.get_rank()]


def told(group):
    """After how many seconds this rank is told that another is lost, and in which words."""
    own = [some(1, 2, 6, 4, seed=n).requires_grad_() for n in range(3)]
    start = time.monotonic()
    try:  # the keys of the lost rank may have come before it was lost, but no gradients will
        rg.Attention()(*own, engine=rg.Ring(group=group)).output.sum().backward()
    except rg.types.RankLost as error:
        return time.monotonic() - start, str(error)
    raise AssertionError("nobody noticed")


def lose(last):
    """In the middle of a call."""
    KVChunk.attend = lambda part: last()
    told(None)


def losses():
    """A rank that hangs, then one that is killed; the error of rank 0."""
    slow = dist.new_group(timeout=timedelta(seconds=2))
    rg.Attention()(*[some(1, 2, 6, 4)] * 3, engine=rg.Ring(group=slow))
    if dist.get_rank() == 1:
        dist.barrier()
        lose(lambda: os.kill(os.getpid(), signal.SIGKILL))
    hung = told(slow)
    dist.barrier()
    return {"hung": hung, "killed": told(None)}


def run(name):
    torch.manual_seed(0)
    try:
        CASES[name]()
    except BaseException:
        return traceback.format_exc()
    return "ok"


def cases(ranks):
    """The catalog runs in both layouts on 2 ranks; on 4, in the one that cuts it into more pieces."""
    return [name for name in CASES if ranks == 2 or not name.endswith("-contiguous")]


def join_group(told):
    os.environ |= told
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    lost_memory_is_nan()


def serve(told, asked):
    """Run the cases that are asked for, until None is."""
    join_group(told)
    for name in iter(asked.recv, None):
        asked.send(run(name))
    dist.destroy_process_group()


def lose_ranks(told, asked):
    """Answer with what this rank is told of others that are lost."""
    join_group(told)
    asked.send(losses())
