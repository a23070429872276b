"""Selections: the keys that another score chooses, against loops over pairs, transformers' indexers and the laws."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import regard as rg
from regard.diagnosis.laws import LAWS
from regard.pieces import selection as selection_file
from regard.pieces.chosen import NO_ID, chosen_keys
from regard.pieces.key_blocks import KeyBlocks
from regard.pieces.selection import CandidateKeys, best

B, H, G, N = 2, 4, 2, 20
close = torch.testing.assert_close


def inputs(n=N, keys=None, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    shapes = ((B, H, n, 8), (B, G, keys or n, 8), (B, G, keys or n, 6))
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def index_tensors(n=N, heads=3, dtype=torch.float64, keys=None, weights=True):
    torch.manual_seed(7)
    found = {
        "index_query": torch.randn(B, heads, n, 5, dtype=dtype),
        "index_key": torch.randn(B, 1, keys or n, 5, dtype=dtype),
    }
    return found | ({"index_weights": torch.randn(B, n, heads, dtype=dtype)} if weights else {})


#: Each selection, and the tensors that it needs for n tokens.
SELECTIONS = {
    "tokens": (rg.selections.TokenIndexer(5), index_tensors),
    "blocks by an index": (rg.selections.BlockIndexer(3, 2), lambda n: index_tensors(n, G, weights=False)),
    "blocks by means": (rg.selections.BlockMeans(3, 3), lambda n: {}),
    "compressed blocks": (rg.selections.CompressedBlocks(3, 3, local=1), lambda n: {}),
    "buckets": (rg.selections.HashBuckets(4, 2), lambda n: {}),
}
every_selection = pytest.mark.parametrize("name", SELECTIONS)


def seen_by(name, n=N, engine="auto", mask=None, seed=0):
    selection, tensors = SELECTIONS[name]
    q, k, v = inputs(n, seed=seed)
    attention = rg.Attention(mask=rg.causal() if mask is None else mask, selection=selection)
    return attention(q, k, v, engine=engine, **tensors(n)), (q, k, v)


# The choice, pair by pair


def first_best(scores, k):
    """Columns of the k greatest scores above -inf, of equal ones the first."""
    order = np.argsort(-scores, kind="stable")[:k]
    return sorted(int(j) for j in order if scores[j] > -math.inf)


@pytest.mark.parametrize(
    "mask", [rg.causal(), None, rg.causal() & rg.window(4), rg.causal() & rg.padding([9, 20])], ids=str
)
def test_an_indexer_chooses_the_greatest_sums_of_its_heads(mask):
    """Every second index key is the key before it, so scores are equal, and most are 0 after relu."""
    q, k, v = inputs()
    index = index_tensors()
    index["index_key"][:, :, 1::2] = index["index_key"][:, :, ::2]
    index["index_weights"].abs_()
    seen = rg.Attention(mask=mask, selection=rg.selections.TokenIndexer(5))(q, k, v, **index)
    a, b, w = (index[name].numpy() for name in ("index_query", "index_key", "index_weights"))
    allowed = np.ones((B, 1, N, N), bool) if mask is None else np.broadcast_to(mask.dense(N).numpy(), (B, 1, N, N))
    chosen = torch.zeros(B, 1, N, N, dtype=torch.bool)
    for entry, i in np.ndindex(B, N):
        scores = [sum(w[entry, i, n] * max(0.0, a[entry, n, i] @ b[entry, 0, j]) for n in range(3)) for j in range(N)]
        chosen[entry, 0, i, first_best(np.where(allowed[entry, 0, i], np.round(scores, 9), -np.inf), 5)] = True
    dense = rg.Attention(mask=rg.mask_tensor(chosen))(q, k, v, engine="dense")
    close(seen.output, dense.output)
    close(seen.weights.dense(), dense.weights.dense())


def by_blocks(q, k, size, count, score, always):
    """Blocks chosen by a score of (entry, head, query, block), where a block must not be behind the query."""
    chosen = torch.zeros(B, H, N, N, dtype=torch.bool)
    for entry, head, i in np.ndindex(B, H, N):
        scores = np.full(-(-N // size), -np.inf)
        for block in range(i // size + 1):
            scores[block] = math.inf if always(i // size, block) else score(entry, head, i, block)
        for block in first_best(scores, count):
            chosen[entry, head, i, block * size : min((block + 1) * size, i + 1)] = True
    return chosen


def test_moba_chooses_by_the_mean_of_each_block_and_always_the_own():
    seen, (q, k, v) = seen_by("blocks by means")

    def score(entry, head, i, block):
        return float(q[entry, head, i] @ k[entry, head // 2, block * 3 : block * 3 + 3].mean(0))

    chosen = by_blocks(q, k, 3, 3, score, lambda own, block: own == block)
    close(seen.output, rg.Attention(mask=rg.mask_tensor(chosen))(q, k, v, engine="dense").output)


def test_a_block_that_the_mask_cuts_has_the_mean_of_its_visible_keys():
    """Each query sees another part of each block, from one key to all; blocks without a visible key are not chosen."""
    torch.manual_seed(3)
    (q, k, v), visible = inputs(12), torch.rand(12, 12) < 0.4
    visible.fill_diagonal_(True)
    attention = rg.Attention(mask=rg.mask_tensor(visible), selection=rg.selections.BlockMeans(4, 2))
    chosen = torch.zeros(B, H, 12, 12, dtype=torch.bool)
    for entry, head, i in np.ndindex(B, H, 12):
        keys = [[j for j in range(4 * block, 4 * block + 4) if visible[i, j]] for block in range(3)]
        means = [k[entry, head // 2, of_block].mean(0) for of_block in keys]
        scores = [
            float(q[entry, head, i] @ mean) if of_block else -np.inf for mean, of_block in zip(means, keys, strict=True)
        ]
        scores[i // 4] = np.inf  # the own block
        chosen[entry, head, i, [j for block in first_best(np.array(scores), 2) for j in keys[block]]] = True
    assert {len([j for j in range(4) if row[j]]) for row in visible} >= {1, 2}
    close(attention(q, k, v).output, rg.Attention(mask=rg.mask_tensor(chosen))(q, k, v, engine="dense").output)


def test_the_block_of_each_query_is_that_of_its_position_and_none_before_the_first():
    grid = rg.types.Grid.whole(rg.types.Positions.of(0, 9, 9), 1, 1, 9)
    blocks = KeyBlocks.of(4, None, grid)
    assert blocks.of_queries(torch.tensor([-2, -1, 0, 1, 3, 4, 8])).tolist() == [[-1, -1, 0, 0, 0, 1, 2]]


@given(seed=st.integers(0, 999), size=st.sampled_from([1, 3]), begin=st.integers(0, 4), batch=st.integers(1, 2))
def test_the_spans_of_chosen_keys_are_those_of_the_rows_up_to_short_gaps(seed, size, begin, batch):
    """Also for rows before the first query and after the last, which have chosen nothing."""
    ids = torch.randint(-1, 4, (batch, 2, 5, 3), generator=torch.Generator().manual_seed(seed))
    mask = rg.masks.chosen_keys(ids, size=size, num_heads=4, start=begin)
    for start, stop in [(0, begin + 5), (begin, begin + 1), (begin + 1, begin + 4), (begin + 3, begin + 7), (0, begin)]:
        rows = [
            set(row) - {-1} for row in ids[:, :, max(start - begin, 0) : max(stop - begin, 0)].flatten(0, 2).tolist()
        ]
        some, every = set().union(*rows), set.intersection(*rows) if rows else set()
        is_inside = begin <= start and stop <= begin + 5
        keys = [size * block + n for block in (every if is_inside else ()) for n in range(size)]
        assert mask.all_allowed(start, stop).tensor().tolist() == sorted(keys)
        hull = range(size * min(some), size * max(some) + size) if some else range(0)
        assert mask.any_allowed(start, stop).tensor().tolist() == list(hull)  # each gap is short


def test_a_chosen_key_has_a_position_that_a_sequence_can_have():
    assert rg.masks.chosen_keys(torch.tensor([[[[(1 << 27) - 1]]]])).any_allowed(0, 1).intervals[0][1] == 1 << 27
    with pytest.raises(rg.RegardError, match=f"{1 << 27} is no position of a key"):
        rg.masks.chosen_keys(torch.tensor([[[[1 << 27]]]]))


def test_the_rows_of_one_random_block_see_the_same_keys_and_those_of_two_no_common_ones_that_are_told():
    mask = rg.masks.random_blocks(6, 2, 57, seed=1)
    for start, stop in [(0, 6), (6, 12), (7, 9), (11, 12), (54, 57)]:
        assert mask.all_allowed(start, stop) == mask.any_allowed(start, stop) != rg.types.Spans()
    assert mask.all_allowed(5, 7) == mask.all_allowed(0, 57) == rg.types.Spans()


@given(size=st.integers(1, 5), stride=st.integers(1, 5), num_keys=st.integers(0, 14))
def test_mean_groups_are_as_many_as_they_say_and_end_inside(size, stride, num_keys):
    groups, x = rg.composites.MeanGroups(size, stride), torch.arange(float(num_keys)).reshape(1, 1, -1, 1)
    starts = [start for start in range(0, num_keys, stride) if start + size <= num_keys]
    assert groups.count(num_keys) == len(starts)
    assert groups.keys(x).flatten().tolist() == [start + (size - 1) / 2 for start in starts]


class NearestOfVectors(rg.selections.Selection):
    """A selection that says nothing of what it reads."""

    def choose(self, query, key, positions, mask):
        rows = positions.query(slice(0, query.shape[2]))
        return rg.masks.chosen_keys(torch.stack((rows, rows * 0), -1)[None, None], start=positions.start)


def test_a_selection_that_says_nothing_may_read_all_keys_so_a_ring_refuses_it():
    with pytest.raises(rg.RegardError, match="NearestOfVectors"):
        rg.plan(*inputs(), attention=rg.Attention(selection=NearestOfVectors()), engine=rg.Ring(ranks=2))


def test_nsa_chooses_by_the_weights_on_mean_keys_summed_over_the_heads_of_a_group():
    seen, (q, k, v) = seen_by("compressed blocks")
    means = torch.stack([k[:, :, block : block + 3].mean(2) for block in range(0, N, 3)], 2)

    def score(entry, head, i, block):
        done = (i + 1) // 3
        if block >= done:
            return 0.0
        group = range(head // 2 * 2, head // 2 * 2 + 2)
        rows = torch.stack([q[entry, h, i] @ means[entry, head // 2, :done].mT / 8**0.5 for h in group])
        return float(rows.softmax(-1)[:, block].sum())

    chosen = by_blocks(q, k, 3, 3, score, lambda own, block: block in (0, own))
    close(seen.output, rg.Attention(mask=rg.mask_tensor(chosen))(q, k, v, engine="dense").output)


# transformers


@torch.no_grad()
def test_deepseek_sparse_attention_is_that_of_transformers():
    """The eager module of DeepSeek-V3.2 whole; its own indexer gives our index tensors, its projections q, k, v.

    With 16 index heads no score is 0 in all of them: of equal scores torch's topk would take any.
    """
    from transformers import AttentionInterface, DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, DeepseekV32RotaryEmbedding

    torch.manual_seed(0)
    config = DeepseekV32Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=12,
        qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=5, index_n_heads=16, index_head_dim=8, index_topk=6,
        attn_implementation="eager",
    )  # fmt: skip
    module = DeepseekV32Attention(config, 0).eval()
    hidden, places = torch.randn(2, 15, 32), torch.arange(15)[None]
    rotation = DeepseekV32RotaryEmbedding(config)(hidden, places)
    mask = torch.full((15, 15), -torch.inf).triu(1).expand(2, 1, 15, 15)
    kept = {}

    def keep(_, query, key, value, *__, scaling, **___):
        kept.update(query=query, key=key, value=value, scaling=scaling)
        return query.new_zeros(2, 15, 4, 5), None

    theirs, weights = module(hidden, rotation, mask)
    module.config._attn_implementation = "kept"
    AttentionInterface.register("kept", keep)
    module(hidden, rotation, mask)
    index = index_of(module.indexer, hidden, module.q_a_layernorm(module.q_a_proj(hidden)), rotation)
    attention = rg.Attention(rg.Dot(kept["scaling"]), mask=rg.causal(), selection=rg.selections.TokenIndexer(6))
    seen = attention(kept["query"], kept["key"], kept["value"], **index)
    close(seen.weights.dense(), weights, rtol=1e-5, atol=1e-6)
    close(module.o_proj(seen.output.transpose(1, 2).flatten(2)), theirs, rtol=1e-4, atol=1e-5)
    assert (seen.weights.dense() > 0).sum(-1).max() == 6


def index_of(indexer, hidden, q_resid, rotation):
    """What the projections of an indexer of DeepSeek give, seen at its one product of queries and keys."""
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as code

    pairs = []
    matmul, code.torch.matmul = torch.matmul, lambda a, b: pairs.append((a, b)) or matmul(a, b)
    try:
        indexer(hidden, q_resid, rotation, torch.zeros(1, hidden.shape[1], hidden.shape[1]), None)
    finally:
        code.torch.matmul = matmul
    (query, key), (weights, _) = pairs
    return {
        "index_query": query.transpose(1, 2),
        "index_key": key.mT,
        "index_weights": weights.squeeze(-2),
    }


@torch.no_grad()
@pytest.mark.parametrize("local", [1, 2])
def test_block_indexer_is_that_of_minimax(local):
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "index_head_dim": 8, "index_n_heads": 2, "index_block_size": 4, "rms_norm_eps": 1e-6}
    config = SimpleNamespace(**sizes, index_topk_blocks=3, index_local_blocks=local, num_attention_heads=4)
    indexer, hidden = MiniMaxM3VLIndexer(config, 0), torch.randn(2, 22, 16)
    places, flat = torch.arange(22)[None], (torch.ones(1, 22, 8), torch.zeros(1, 22, 8))
    ids = indexer(hidden, flat, None, places.expand(2, -1))
    expected = indexer.build_block_mask(ids, None, 22, torch.float32, hidden.device, places.expand(2, -1)) == 0
    index_query = indexer.q_norm(indexer.q_proj(hidden).view(2, 22, 2, 8)).transpose(1, 2)
    index_key = indexer.k_norm(indexer.k_proj(hidden).view(2, 22, 1, 8)).transpose(1, 2)
    q, k, v = torch.randn(2, 4, 22, 8), torch.randn(2, 2, 22, 8), torch.randn(2, 2, 22, 8)
    attention = rg.Attention(mask=rg.causal(), selection=rg.selections.BlockIndexer(4, 3, local))
    seen = attention(q, k, v, index_query=index_query, index_key=index_key)
    assert (seen.weights.dense() > 0).equal(expected)


# Laws


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", ["blocks by means", "compressed blocks", "buckets"])
def test_the_laws_hold_of_selections(law, name):
    LAWS[law](lambda: (rg.Attention(mask=rg.causal(), selection=SELECTIONS[name][0]), *inputs(14)))


@every_selection
def test_every_engine_and_every_tile_has_the_same_choice(name):
    """Weights x values, tiles, and gradients of q, k and v: those of dense with the chosen keys as a tensor."""
    seen, tensors = seen_by(name)
    chosen = seen.weights.dense() > 0
    leaves = [t.requires_grad_() for t in tensors]
    dense = rg.Attention(mask=rg.mask_tensor(chosen))(*leaves, engine="dense")
    toward = torch.randn_like(dense.output)
    expected = torch.autograd.grad(dense.output, leaves, toward)
    close(seen.output, dense.output.detach())
    close(seen.weights[1, 2, 3:9, 4:12], dense.weights.dense()[1, 2, 3:9, 4:12])
    close(seen.weights[..., [7, 2, 2]], dense.weights.dense()[..., [7, 2, 2]])
    picked = seen.weights.select(torch.tensor([1, 0]), torch.tensor([3, 1]))
    close(picked.dense(), dense.weights.dense()[[1, 0]][:, [3, 1]])
    selection, needed = SELECTIONS[name]
    for engine in ("blocked", "dense"):
        again = rg.Attention(mask=rg.causal(), selection=selection)(*leaves, engine=engine, **needed(N))
        close(again.output, dense.output)
        for found, right in zip(torch.autograd.grad(again.output, leaves, toward), expected, strict=True):
            close(found, right)


@every_selection
@pytest.mark.parametrize("chunk", [1, 7])
def test_decoding_chooses_as_one_call_does(name, chunk):
    """Index keys stand in the cache beside the keys."""
    seen, (q, k, v) = seen_by(name)
    selection, needed = SELECTIONS[name]
    attention, cache, tensors = rg.Attention(mask=rg.causal(), selection=selection), rg.GrowingCache(), needed(N)
    for start in range(0, N, chunk):
        part = slice(start, start + chunk)
        now = {n: t[:, part] if n == "index_weights" else t[:, :, part] for n, t in tensors.items()}
        step = attention(q[:, :, part], k[:, :, part], v[:, :, part], cache=cache, **now)
        cache = step.cache
        close(step.output, seen.output[:, :, part])
        close(step.weights.dense(), seen.weights[:, :, part, : step.weights.shape[3]])


@every_selection
def test_a_second_call_chooses_anew(name):
    """No kept plan has the choice of an earlier call."""
    for seed in (1, 2, 1):
        seen, tensors = seen_by(name, seed=seed)
        chosen = rg.mask_tensor(seen.weights.dense() > 0)
        close(seen.output, rg.Attention(mask=chosen)(*tensors, engine="dense").output)
    first, second = (seen_by("blocks by means", seed=seed)[0].weights.dense() > 0 for seed in (1, 2))
    assert not first.equal(second)


@every_selection
@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (1, 1), (2, 0), (0, 3), (3, 1)])
def test_short_calls(name, queries, keys):
    selection, _ = SELECTIONS[name]
    q, k, v = (t[:, :, :n] for t, n in zip(inputs(5), (queries, keys, keys), strict=True))
    index = index_tensors(5, G)
    given = {n: index[n][:, :keys] if n == "index_weights" else index[n] for n in selection.needs}
    given = {
        n: (t[:, :queries] if n == "index_weights" else t[:, :, : keys if n == "index_key" else queries])
        for n, t in given.items()
    }
    if "index_weights" in given:
        given["index_weights"] = index["index_weights"][:, :queries]
    seen = rg.Attention(selection=selection)(q, k, v, **given)
    assert seen.output.shape == (B, H, queries, 6) and seen.weights.dense().shape == (B, H, queries, keys)
    if (queries, keys) == (1, 1):
        close(seen.output, v.repeat_interleave(2, 1))


@every_selection
def test_a_choice_of_all_keys_is_plain_attention(name):
    q, k, v = inputs()
    kind = type(SELECTIONS[name][0])
    if kind is rg.selections.HashBuckets:
        pytest.skip("it chooses no number of keys")
    selection = kind(99) if kind is rg.selections.TokenIndexer else kind(3, 99)
    seen = rg.Attention(mask=rg.causal(), selection=selection)(q, k, v, **SELECTIONS[name][1](N))
    close(seen.output, rg.Attention(mask=rg.causal())(q, k, v).output)


@settings(max_examples=100)
@given(st.data())
def test_the_best_are_those_of_a_stable_sort(data):
    """With the compiled kernel and without."""
    rows = data.draw(
        st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.5, -math.inf]), min_size=6, max_size=6), min_size=1)
    )
    k = data.draw(st.integers(0, 8))
    found = best(torch.tensor(rows), k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection_file, "_ranking", None)
        assert best(torch.tensor(rows), k).equal(found) and found.dtype == torch.int32
    assert [[j for j in row if j != NO_ID] for row in found.tolist()] == [first_best(np.array(row), k) for row in rows]


def test_an_encoding_of_positions_comes_before_the_choice():
    q, k, v = inputs(dtype=torch.float64)
    rope, selection = rg.RoPE(8), rg.selections.BlockMeans(3, 3)
    seen = rg.Attention(position=rope, mask=rg.causal(), selection=selection)(q, k, v)
    q, k = (rope.encode(x, torch.arange(N)) for x in (q, k))
    close(seen.output, rg.Attention(mask=rg.causal(), selection=selection)(q, k, v).output)


def test_memory_is_that_of_the_ids():
    """4,096 tokens: no tensor of all pairs is made, as the limit of the scores of one block shows."""
    mask = rg.Attention(mask=rg.causal(), selection=rg.selections.TokenIndexer(16))
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 4096, 4)
    index = {"index_query": torch.randn(1, 1, 4096, 4), "index_key": torch.randn(1, 1, 4096, 4)}
    seen = mask(q, k, v, **index, index_weights=torch.ones(1, 4096, 1), engine="blocked")
    ids = seen.weights.attention.mask.right.ids
    assert ids.shape == (1, 1, 4096, 16) and ids.dtype == torch.int32
    assert (seen.weights[0, 0, 4000] > 0).sum() == 16


# The mask of ids


@settings(max_examples=60)
@given(st.data())
def test_the_mask_of_ids_is_its_definition_and_its_spans_bound_it(data):
    heads, size = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 3))
    start, I, K = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 6)), data.draw(st.integers(0, 4))
    seed = data.draw(st.integers(0, 999))
    ids = torch.randint(
        -1, 8, (data.draw(st.sampled_from([1, 2])), heads, I, K), generator=torch.Generator().manual_seed(seed)
    )
    mask = rg.masks.chosen_keys(ids, size, 4, start)
    positions = rg.types.Positions(start, rg.types.Spans.of((0, 5), (7, 12)))
    allowed = mask.allowed(rg.types.Grid.whole(positions, 2, 4, I)).expand(2, 4, I, 10)
    for b, h, i, column in np.ndindex(2, 4, I, 10):
        expected = positions.key()[column] // size in ids[b % len(ids), h // (4 // heads), i]
        assert allowed[b, h, i, column] == expected
    some, every = (positions.columns(ask(start, start + I)) for ask in (mask.any_allowed, mask.all_allowed))
    rows = allowed.flatten(0, 2)
    assert set(some.tensor().tolist()) >= set(rows.any(0).nonzero().flatten().tolist())
    assert set(every.tensor().tolist()) == set(rows.all(0).nonzero().flatten().tolist())
    entry = torch.tensor([1, 0, 1])
    selected = mask.select(entry).allowed(rg.types.Grid.whole(positions, 3, 4, I)).expand(3, 4, I, 10)
    assert selected.equal(allowed[entry])
    alone = mask.of_entry(1).allowed(rg.types.Grid.whole(positions, 2, 4, I).entries(slice(1, 2))).expand(1, 4, I, 10)
    assert alone.equal(allowed[1:])


def test_long_gaps_are_skipped_and_short_ones_are_not():
    ids = torch.tensor([[[[0, 60, 500], [70, 2, 501]]]])
    assert rg.masks.chosen_keys(ids).any_allowed(0, 2) == rg.types.Spans.of((0, 71), (500, 502))
    assert rg.masks.chosen_keys(ids, size=100).any_allowed(0, 1).intervals[-1] == (50_000, 50_100)
    assert not rg.masks.chosen_keys(ids[..., :0]).any_allowed(0, 2)


ONE = torch.zeros(1, 1, 1, 1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rg.masks.chosen_keys(torch.zeros(2, 2)), "expected integers.*float32"),
        (lambda: rg.masks.chosen_keys(ONE[0]), r"got \(1, 1, 1\).*ids\[:, None\]"),
        (lambda: rg.masks.chosen_keys(ONE.expand(1, 2, 1, 1), num_heads=3), "2 heads of ids for 3 query heads"),
        (lambda: rg.masks.chosen_keys(ONE + (1 << 30)), "is no position of a key"),
        (lambda: rg.masks.chosen_keys(ONE).dense(2), "has ids for 1 queries from position 0 on; this call has 2"),
        (lambda: rg.selections.TokenIndexer(0), "k=0"),
        (lambda: rg.selections.HashBuckets(3), "buckets come in pairs"),
        (lambda: rg.Attention(selection=rg.causal()), r"Attention\(selection=...\): expected a Selection"),
        (lambda: attend(rg.selections.TokenIndexer(3)), "TokenIndexer needs a tensor for each call.*index_query"),
        (lambda: attend(rg.selections.BlockMeans(3, 3), index_key=ONE), "unexpected keyword argument 'index_key'"),
        (
            lambda: attend(rg.selections.TokenIndexer(3), **index_tensors() | {"index_weights": torch.ones(B, N, 2)}),
            "index_query has 3 heads on axis 1, index_weights 2 on axis 2",
        ),
        (
            lambda: attend(rg.selections.TokenIndexer(3), **index_tensors() | {"index_key": torch.ones(B, 1, N, 4)}),
            "index_query has width 5, index_key 4",
        ),
        (
            lambda: attend(rg.selections.TokenIndexer(3), **index_tensors() | {"index_key": torch.ones(B, 1, 3, 5)}),
            r"needs index_key of shape .*got \(2, 1, 3, 5\)",
        ),
        (
            lambda: attend(rg.selections.BlockIndexer(3, 3), **index_tensors(weights=False)),
            r"BlockIndexer needs index_query of shape \(B, G, I, W\) = \(2, 2, 20, W\), got \(2, 3, 20, 5\)",
        ),
        (
            lambda: rg.plan(
                *inputs(), attention=rg.Attention(selection=rg.selections.BlockMeans(3, 3)), engine=rg.Ring(ranks=2)
            ),
            "BlockMeans compares queries with all keys",
        ),
        (
            lambda: attend(rg.selections.BlockMeans(3, 3), engine="linear"),
            "linear.*Engines that can",
        ),
        (
            lambda: rg.Attention(transition=rg.transitions.Delta(), selection=rg.selections.BlockMeans(3, 3)),
            "transition computes no single weights.*BlockMeans",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(rg.RegardError, match=message):
        make()


def test_a_choice_needs_numbers():
    attention = rg.Attention(mask=rg.causal(), selection=rg.selections.BlockMeans(3, 3))
    nowhere = [x.to("meta") for x in inputs()]
    for call in (rg.attend, rg.plan):
        with pytest.raises(rg.RegardError, match="BlockMeans chooses keys by their numbers"):
            call(*nowhere, attention=attention)


def attend(selection, engine="auto", **tensors):
    return rg.Attention(mask=rg.causal(), selection=selection)(*inputs(), engine=engine, **tensors)


def test_a_choice_that_is_no_mask_is_refused():
    class Ids(rg.selections.Selection):
        def choose(self, query, key, positions, mask):
            return ONE

    with pytest.raises(rg.RegardError, match=r"Ids\.choose must return a mask"):
        attend(Ids())


@pytest.mark.parametrize("mask", [None, rg.causal(), rg.causal() & rg.documents([7, 13]), rg.window(4)], ids=str)
def test_a_block_counts_its_visible_keys_and_asks_the_mask_only_where_rows_differ(mask, monkeypatch):
    positions, asked, allowed = rg.types.Positions.aligned_to_end(N, N), [], CandidateKeys.allowed
    candidates = CandidateKeys.of(torch.randn(1, H, N, 4), positions, mask)
    blocks = KeyBlocks.of(3, mask, candidates.grid)
    monkeypatch.setattr(CandidateKeys, "allowed", lambda self, *given: asked.append(given[1]) or allowed(self, *given))
    pairs = torch.ones(N, N, dtype=torch.bool) if mask is None else mask.dense(N)
    inside = F.one_hot(blocks.of_keys[0], blocks.count)
    for start, stop in ((0, 1), (1, 5), (5, 9), (9, N)):
        asked.clear()
        rows = pairs[start:stop]
        counts = candidates.visible_keys(slice(start, stop), blocks, heads=1)
        assert counts.expand(1, 1, stop - start, -1)[0, 0].equal((rows.long() @ inside).int())
        differ = (rows.any(0) & ~rows.all(0)).nonzero().flatten().tolist()
        differ = [] if mask in (rg.causal(), rg.window(4)) else differ  # ranges of distances are counted without a look
        assert [columns.tolist() for columns in asked] == ([differ] if differ else [])


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_key_is_a_candidate_of_a_head_if_some_query_head_of_it_may_see_the_key(heads):
    mask = rg.mask_mod(lambda b, h, i, j: (i + j) % 4 == h) & rg.causal()
    positions = rg.types.Positions.aligned_to_end(N, N)
    candidates = CandidateKeys.of(torch.randn(2, 4, N, 8), positions, mask)
    pairs = mask.dense(N, batch_size=2, num_heads=4)
    for rows, columns in ((slice(0, N), slice(0, N)), (slice(3, 5), torch.tensor([4, 0, 2]))):
        found = candidates.allowed(rows, columns, heads)
        expected = pairs[:, :, rows][..., columns].unflatten(1, (heads, -1)).any(2)
        assert found.expand(expected.shape).equal(expected)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_table_of_blocks_is_kept_only_where_blocks_begin_anew(size):
    """Without documents and padding, the block of a position is known without a table."""
    grid = rg.types.Grid.whole(rg.types.Positions.of(0, 9, 9), 1, 1, 9)
    for mask in (None, rg.causal(), rg.window(2)):
        assert KeyBlocks.of(size, mask, grid).irregular is None
    for mask in (rg.documents([4, 5]), rg.padding(torch.arange(9)[None] > 3)):
        blocks = KeyBlocks.of(size, mask, grid)
        is_regular = torch.equal(blocks.table[0], torch.arange(9) // size)
        assert (blocks.irregular is None) is is_regular


@pytest.mark.parametrize(("bytes_at_once", "size"), [(0, 1), (2 * 4 * 5 * 3, 3), (2 * 4 * 5 * 3 - 1, 2), (1 << 30, 7)])
def test_as_many_rows_are_compared_at_once_as_fit_in_memory(bytes_at_once, size, monkeypatch):
    """Two batch entries, and five numbers of 4 bytes for each row."""
    monkeypatch.setattr("regard.pieces.selection.BLOCK_BYTES", bytes_at_once)
    candidates = CandidateKeys.of(torch.randn(2, 1, 7, 4), rg.types.Positions.of(0, 7, 7), None)
    rows = candidates.rows(5)
    assert [(part.start, part.stop) for part in rows] == [(n, min(n + size, 7)) for n in range(0, 7, size)]
    assert candidates.rows(0) == ([slice(0, 7)] if bytes_at_once >= 7 else [slice(n, n + 1) for n in range(7)])


@given(seed=st.integers(0, 999), batch=st.integers(1, 3))
def test_chosen_blocks_of_a_table_are_those_of_each_entry(seed, batch):
    """For entries in any order and more than once; the blocks may begin anew in each entry."""
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.rand(batch, 1, 5, 4, generator=numbers).argsort(-1)[..., :2].sort(-1).values.int()
    blocks = torch.randint(0, 2, (batch, 6), generator=numbers).cumsum(1)
    entries, keys = torch.randint(0, batch, (4,), generator=numbers), torch.tensor([5, 0, 2, 3])
    mask = rg.masks.chosen_keys.of_sorted(ids, 1, 2, 0, blocks)
    allowed = mask.allowed(rg.types.Grid(entries, torch.arange(2), torch.arange(5), keys)).expand(4, 2, 5, 4)
    expected = (ids[:, 0, :, None, :] == blocks[:, None, :, None]).any(-1)  # (entries, queries, keys)
    assert torch.equal(allowed, expected[entries][:, None, :, keys].expand(4, 2, 5, 4))
    for start, stop in ((0, 5), (1, 2), (3, 5)):
        rows, (some, every) = expected[:, start:stop].flatten(0, 1), (mask.any_allowed, mask.all_allowed)
        assert {*rows.any(0).nonzero().flatten().tolist()} <= {*some(start, stop).tensor().tolist()}
        assert {*every(start, stop).tensor().tolist()} <= {*rows.all(0).nonzero().flatten().tolist()}


@pytest.mark.parametrize(("mask", "has_pairs"), [(rg.causal(), False), (rg.padding([150, 200]), True)])
def test_blocks_that_a_mask_may_cut_need_room_for_a_row_of_pairs(mask, has_pairs, monkeypatch):
    q, k, _ = inputs(200)
    best, floats = selection_file.best_blocks, []
    monkeypatch.setattr(selection_file, "best_blocks", lambda *given: floats.append(given[-1]) or best(*given))
    rg.selections.BlockMeans(20, 2).choose(q, k, rg.types.Positions.of(0, 200, 200), mask)
    assert floats[0] >= H * 200 if has_pairs else floats[0] < H * 200


@given(seed=st.integers(0, 999), entries=st.sampled_from([1, 2]), start=st.integers(0, 4), stop=st.integers(1, 5))
def test_the_spans_of_chosen_blocks_of_any_keys_bound_what_each_query_may_see(seed, entries, start, stop):
    """Documents give each entry its own blocks, which have no size in common."""
    seeded = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 3, (entries, 7), generator=seeded)
    ids = torch.randint(-1, 3, (entries, 1, 5, 2), generator=seeded).int()
    ids = torch.where(ids < 0, NO_ID, ids).sort(-1).values
    ids[..., 1:].masked_fill_(ids.diff() == 0, NO_ID)
    mask = chosen_keys.of_sorted(ids, 1, 2, 0, blocks)
    named = [[{n for n in row if n != NO_ID} for row in entry[0]] for entry in ids.tolist()]
    expected = torch.tensor(
        [[[block in row for block in blocks[entry].tolist()] for row in named[entry]] for entry in range(entries)]
    )
    dense = mask.allowed(rg.types.Grid.whole(rg.types.Positions.of(0, 5, 7), entries, 2, 5))
    assert dense.expand(entries, 2, 5, 7).equal(expected[:, None].expand(-1, 2, -1, -1))
    rows = expected[:, start:stop].flatten(0, 1)
    some, every = ({j for j in range(7) if j in ask(start, stop)} for ask in (mask.any_allowed, mask.all_allowed))
    if start < stop:
        assert set(rows.any(0).nonzero().flatten().tolist()) <= some
        common = set.intersection(*(row for entry in named for row in entry[start:stop]))
        assert every == {j for j in range(7) if common.issuperset(blocks[:, j].tolist())}
        assert every <= set(rows.all(0).nonzero().flatten().tolist())
