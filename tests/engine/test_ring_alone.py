"""A ring of one process is attention: the same outputs, gradients, weights, statistics and refusals."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

import regard as rg
from cataloged import SINGLE, TRANSPORTED
from regard.catalog import mechanisms
from regard.engine.ring.digests import Contents
from regard.maps.ring_map import RingMap
from slopes import CLOSE, agree

MERGES = [name for name in SINGLE if mechanisms()[name].example()[0].normalizer.merge_refusal is None]


@pytest.fixture(scope="module", autouse=True)
def group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", MERGES)
def test_one_rank_is_one_process(name, layout):
    attention, *tensors = mechanisms()[name].example()
    ring, leaves = rg.Ring(layout=layout), [t.clone().requires_grad_() for t in tensors]
    seen, alone = (attention(*leaves, engine=engine) for engine in (ring, "dense"))
    agree(seen.output, alone.output, leaves)
    torch.testing.assert_close(seen.weights.dense(), alone.weights.dense(), **CLOSE)
    torch.testing.assert_close(seen.weights[1, 0, [2, 0], 1:4], alone.weights[1, 0, [2, 0], 1:4], **CLOSE)
    of_shares = (rg.maps.Entropy(), rg.maps.Distance(), rg.maps.MassOn([0, 3]), rg.maps.TopLinks(2))
    reductions = (rg.maps.KeyTotals(), rg.maps.Pool(3, 2), *(of_shares if seen.weights.has_shares else ()))
    for found, expected in zip(*(s.weights.summarize(*reductions) for s in (seen, alone)), strict=True):
        torch.testing.assert_close(tuple(found), tuple(expected), **CLOSE)


@pytest.mark.parametrize("wanted", ["v", "qkv", "kv"])
@pytest.mark.parametrize("frozen", [0, 1, None])
def test_biases_of_which_one_learns(frozen, wanted):
    """A bias that prepares tensors of its rows and one of distances, of which the `frozen` one gets no gradient."""
    biases = [rg.biases.ShawBias(16, 4), rg.biases.T5Bias(2)]
    for number, bias in enumerate(biases):
        bias.requires_grad_(number != frozen)
    attention, gradients = rg.Attention(bias=biases, mask=rg.causal()), []
    learned = [p for p in attention.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in learned:
            p.normal_()
    tensors = [torch.randn(1, 2, 1024, 16, requires_grad=name in wanted) for name in "qkv"]
    leaves = [*(t for t in tensors if t.requires_grad), *learned]
    for engine in ("ring", "dense"):
        gradients.append(torch.autograd.grad(attention(*tensors, engine=engine).output.square().sum(), leaves))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def masking(near):
    """A mask function whose number a function inside of it names."""
    namespace = {"near": near}
    exec(
        "def mask(batch, head, i, j):\n    is_near = lambda distance: distance < near\n    return is_near(i - j)",
        namespace,
    )
    return namespace["mask"]


def test_ranks_see_a_number_that_a_function_inside_of_a_mask_names():
    first, same, other = (Contents.of(masking(near)).digest for near in (3, 3, 4))
    assert first == same != other


@pytest.mark.parametrize(
    "attention", [rg.Attention(mask=rg.causal()), rg.Attention(transition=rg.transitions.Decay(-0.1))]
)
def test_weights_over_ranks_can_be_read_and_refuse_backward(attention):
    """A rank has only its part of the tensors. A constant would add nothing to a loss, without a word."""
    x = torch.randn(1, 2, 5, 4, requires_grad=True)
    weights, alone = (attention(x, x, x, engine=engine).weights for engine in ("ring", "auto"))
    pairs = [(w.dense(), w[0, 1, 2:], w.received(), w.shares().entropy()) for w in (weights, alone)]
    for read, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(read, expected)
        with pytest.raises(rg.RegardError, match="map over ranks has no gradients"):
            read.sum().backward()
    with torch.no_grad():
        assert not weights.received().requires_grad
    assert x.grad is None and not weights.detach().received().requires_grad


@pytest.mark.parametrize("name", [*TRANSPORTED, "forgetting"])
def test_one_rank_is_one_process_with_tensors_of_the_call(name):
    attention, *inputs = mechanisms()[name].example(queries=13)
    tensors = {n: t.requires_grad_() for n, t in mechanisms()[name].tensors(attention, *inputs).items()}
    leaves = [t.clone().requires_grad_() for t in inputs]
    seen, alone = (attention(*leaves, **tensors, engine=e) for e in ("ring", "auto"))
    agree(seen.output, alone.output, [*leaves, *tensors.values()])
    torch.testing.assert_close(seen.weights[1, 0, [2, 0], 1:4], alone.weights[1, 0, [2, 0], 1:4], **CLOSE)
    torch.testing.assert_close(seen.weights.received(), alone.weights.received())
    torch.testing.assert_close(seen.weights.dense(), alone.weights.dense(), **CLOSE)


@pytest.mark.parametrize(
    "attention", [rg.Attention(mask=rg.causal()), rg.Attention(transition=rg.transitions.Decay(-0.1))]
)
@pytest.mark.parametrize("name", ["query", "key"])
def test_vectors_of_all_tokens_are_refused_by_name(attention, name):
    x = torch.randn(1, 2, 5, 4)
    with pytest.raises(rg.RegardError, match=rf"weights\.{name}.* rank"):
        getattr(attention(x, x, x, engine="ring").weights, name)


def test_a_request_is_told_in_intervals():
    """What a rank asks for stands in the error of all ranks; neighbors are one interval."""
    x = torch.randn(1, 2, 9, 4)
    weights, told = rg.Attention()(x, x, x, engine="ring").weights, []
    weights._ring_call.exchange.agree = lambda what, request: told.append(request["look"])
    for rows, words in (([0, 1, 2, 7, 5, 6], "0-2, 7, 5-6"), ([3], "3"), ([4, 2], "4, 2")):
        weights.tile(rows=torch.tensor(rows))
        assert told[-1] == f"weights of batch 0, head 0-1, query {words}, key 0-8"
    next(weights.tiles())
    assert told[-1] == "tiles of the queries of each rank"


def test_other_threads_do_not_see_the_default_ring():
    found, ring = [], rg.Ring()
    with ring.as_default():
        thread = threading.Thread(target=lambda: found.append(rg.Ring.default()))
        thread.start()
        thread.join()
        assert rg.Ring.default() is ring
    assert found == [None] and rg.Ring.default() is None


LAYERS = rg.nn.PositionalEncoding(8, position=rg.encodings.LearnedPositions(9, 8)), rg.nn.MultiHeadAttention(8, 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's compiler reads it at a break of a graph
@pytest.mark.parametrize("layer", LAYERS, ids=("encoding", "heads"))
def test_compiled_modules_notice_the_default_ring(layer):
    """They are compiled before the block, where they count tokens from the first one and see all keys."""
    run = torch.compile(layer.eval(), backend="eager")

    def compiled(x):
        result = run(x)
        return getattr(result, "output", result)

    x = torch.randn(1, 5, 8)
    expected = compiled(x)
    with rg.Ring().as_default():
        if isinstance(layer, rg.nn.PositionalEncoding):
            with pytest.raises(rg.RegardError, match="as_default"):
                compiled(x)
        else:
            seen = []
            with rg.nn.listeners.to(SimpleNamespace(on_attention=lambda module, weights: seen.append(weights))):
                torch.testing.assert_close(compiled(x), expected)
            assert isinstance(seen[0], RingMap)
    torch.testing.assert_close(compiled(x), expected)


@pytest.mark.parametrize("queries", [5, 3])
@pytest.mark.parametrize(
    ("pieces", "has_positions"),
    [
        ({}, False),
        ({"mask": rg.padding([4])}, False),
        ({"mask": rg.causal()}, True),
        ({"bias": rg.ALiBi(2)}, True),
        ({"position": rg.RoPE(4)}, True),
    ],
    ids=str,
)
def test_a_start_is_refused_on_the_default_ring_where_positions_count(pieces, has_positions, queries):
    """Unless it is that of the whole sequence."""
    module, x = rg.nn.MultiHeadAttention(8, 2, attention=rg.Attention(**pieces)), torch.randn(1, 5, 8)
    query = x[:, :queries]
    with rg.Ring().as_default():
        expected = module(query, x).output
        for start in (0, 3):
            if has_positions and (start or queries < 5):
                with pytest.raises(rg.RegardError, match="Omit start"):
                    module(query, x, start=start)
            else:
                torch.testing.assert_close(module(query, x, start=start).output, expected)


def test_a_coarse_row_is_one_row_though_its_keys_come_in_parts():
    """Beside 2^20 float32 has steps of 1/8; the weights of a part may not be computed as if it were the row."""
    bias = rg.biases.LearnedTable(2, reach=3)
    torch.nn.init.constant_(bias.table, 2.0**20)
    real = torch.ones(1, 40, dtype=torch.bool)
    real[:, 10:30] = False  # the keys of the map come in two parts
    attention, x = rg.Attention(bias=bias, mask=rg.padding(real)), torch.zeros(1, 2, 40, 8)
    weights = attention(x, x, x, engine="ring").weights
    assert len(list(weights.tiles())) == 2
    torch.testing.assert_close(weights.received(), (real * 2.0).expand(1, 2, 40))
    torch.testing.assert_close(weights.summarize(rg.maps.KeyTotals())[0], weights.received())


def test_numbers_that_are_none_are_refused_by_name_where_asked():
    x = torch.randn(1, 2, 9, 4)
    for number, name in enumerate(("query", "key", "value")):
        tensors = [x.clone() for _ in range(3)]
        tensors[number][0, 1, 3, 2] = torch.nan
        rg.Attention()(*tensors, engine="ring")
        with pytest.raises(rg.RegardError, match=name):
            rg.Attention()(*tensors, engine="ring", check=True)


def test_a_map_outlives_its_group_and_does_not_keep_it():
    """Threads of gloo that still run while Python ends abort the process; only the end of the group ends them."""
    own, x = distributed.new_group([0]), torch.randn(1, 2, 9, 4, requires_grad=True)
    seen, group = rg.Attention()(x, x, x, engine=rg.Ring(group=own)), weakref.ref(own)
    seen.output.sum().backward()
    distributed.destroy_process_group(own)
    del own
    assert group() is None
    with pytest.raises(rg.RegardError, match="has been destroyed"):
        seen.weights.dense()
