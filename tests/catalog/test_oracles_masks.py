"""Oracles of masks: jax, transformers' layers, and masks asked pair by pair from the words of the papers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import BigBirdConfig, LongformerConfig
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

import regard as rg
from oracles import EXACT, FLOAT32, Says, agree, by_jax, by_torch, close, flat, heads, oracle, pairs
from regard.catalog import mechanism


@oracle("sliding_window", FLOAT32)
def test_sliding_window_is_jax_local_window(attention, q, k, v):
    """jax counts the neighbors of the query, regard the query as well: 5 here is 4 there."""
    return by_jax(q, k, v, local_window_size=(4, 0), is_causal=True)


@oracle("sliding_window", FLOAT32, {"size": 5, "is_causal": False})
def test_sliding_window_on_both_sides_is_jax_local_window(attention, q, k, v):
    return by_jax(q, k, v, local_window_size=4)


@oracle("sliding_window")
def test_sliding_window_is_the_mask_of_mistral(attention, q, k, v):
    theirs = sliding_window_causal_mask_function(5)
    return by_torch(q, k, v, mask=pairs(24, 24, lambda i, j: theirs(0, 0, torch.tensor(i), torch.tensor(j))))


@oracle("longformer")
def test_longformer_pair_by_pair(attention, q, k, v):
    chosen = {0, 13}
    return by_torch(q, k, v, pairs(24, 24, lambda i, j: abs(i - j) <= 3 or i in chosen or j in chosen))


class SaysOfGlobals(nn.Module):
    """Longformer's projection of the queries of global tokens alone, (num_global, B, H D)."""

    def __init__(self, x, positions):
        super().__init__()
        self.x = flat(x).transpose(0, 1)[list(positions)]

    def forward(self, hidden):
        return self.x.clone()


@oracle("longformer", FLOAT32)
def test_longformer_is_that_of_transformers(attention, q, k, v):
    """With the projections of global tokens equal to those of all; 3 keys on each side are a window of 6 there."""
    config = LongformerConfig(
        hidden_size=32, num_attention_heads=4, attention_window=[6], attention_probs_dropout_prob=0.0
    )
    layer, first = LongformerSelfAttention(config, layer_id=0).eval(), lambda x: Says(x, length_first=True)
    layer.query, layer.key, layer.value = first(q), first(k), first(v)
    layer.query_global, layer.key_global, layer.value_global = SaysOfGlobals(q, (0, 13)), first(k), first(v)
    is_global = torch.zeros(2, 24, dtype=torch.bool)
    is_global[:, [0, 13]] = True
    (output,) = layer(flat(q), is_global * 10_000.0, torch.zeros(2, 24, dtype=torch.bool), is_global, True)
    return heads(output, 4)


def in_bigbird(i, j, drawn):
    """Blocks of 4: one's own and both neighbors, the first for all and by all, and those drawn."""
    mine, theirs = i // 4, j // 4
    return abs(mine - theirs) <= 1 or mine == 0 or theirs == 0 or theirs in drawn[mine]


@oracle("bigbird")
def test_bigbird_pair_by_pair(attention, q, k, v):
    drawn = attention.mask.right.table.tolist()
    return by_torch(q, k, v, pairs(24, 24, lambda i, j: in_bigbird(i, j, drawn)))


@torch.no_grad()
def test_bigbird_is_that_of_transformers():
    """With the blocks that Hugging Face draws when training, and its last block global too; one head."""
    block, length, drawn_per_block = 4, 64, 2
    config = BigBirdConfig(
        hidden_size=8, num_attention_heads=1, block_size=block, num_random_blocks=drawn_per_block,
        max_position_embeddings=length,
    )  # fmt: skip
    layer = BigBirdBlockSparseAttention(config, seed=3).train()
    drawn = []
    draw = layer._bigbird_block_rand_mask_with_head
    layer._bigbird_block_rand_mask_with_head = lambda **sizes: drawn.append(draw(**sizes)) or drawn[0]

    q, k, v = torch.randn(3, 2, 1, length, 8, dtype=torch.float64)
    layer.query, layer.key, layer.value = Says(q), Says(k), Says(v)
    blocked, band, rows, cols = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(2, length).double(), block)
    output, weights = layer(flat(q), band, rows, cols, blocked, blocked)

    mask = rg.masks.bigbird(length, block, num_random=drawn_per_block) | rg.masks.global_tokens(
        range(length - block, length)
    )
    random = mask.left.right
    assert isinstance(random, rg.masks.random_blocks)
    table = torch.from_numpy(np.concatenate(drawn[0])).long()
    random.__dict__["table"] = F.pad(table, (0, 0, 1, 1))
    agree(rg.Attention(mask=mask), q, k, v, (heads(output, 1), weights), EXACT)


@pytest.mark.parametrize("seed", range(5))
def test_random_blocks_are_as_many_as_asked_distinct_and_the_same_at_every_call(seed):
    """Read off the mask itself: 10 blocks of 6 tokens, the last one short, 3 drawn for each."""
    grid = rg.types.Grid.whole(rg.types.Positions.of(0, 57, 57), 1, 1, 57)
    mask = rg.masks.random_blocks(6, 3, 57, seed)
    allowed = mask.allowed(grid)[0, 0].numpy()
    edges = np.arange(0, 57, 6)
    full = np.minimum(edges + 6, 57) - edges
    keys = np.add.reduceat(allowed.astype(int), edges, axis=1)
    assert (((keys == full) | (keys == 0)).all()) and ((keys > 0).sum(1) == 3).all()
    assert all((allowed[start : start + 6] == allowed[start]).all() for start in edges)
    assert (rg.masks.random_blocks(6, 3, 57, seed).allowed(grid)[0, 0].numpy() == allowed).all()
    assert (rg.masks.random_blocks(6, 3, 57, seed + 1).allowed(grid)[0, 0].numpy() != allowed).any()


def test_random_blocks_are_drawn_evenly():
    """Each of 8 blocks is drawn by each with chance 3 / 8: 400 seeds stay within 5 standard errors."""
    counts = sum(F.one_hot(rg.masks.random_blocks(1, 3, 8, seed).table, 8).sum(1) for seed in range(400))
    error = (400 * 3 / 8 * 5 / 8) ** 0.5
    assert (counts - 400 * 3 / 8).abs().max() < 5 * error


@oracle("block_local", queries=25)
def test_block_local_is_attention_within_each_block(attention, q, k, v):
    """Blocks become a batch axis, and each is attended by itself."""
    q, k, v = (x.unflatten(2, (5, 5)) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).flatten(2, 3)


@oracle("block_local")
def test_block_local_with_a_short_last_block(attention, q, k, v):
    outputs = [by_torch(*(x[:, :, start : start + 5] for x in (q, k, v)))[0] for start in range(0, 24, 5)]
    return torch.cat(outputs, 2)


@oracle("block_local", arguments={"size": 4, "before": 1, "after": 0, "is_causal": True})
def test_block_local_with_the_block_before(attention, q, k, v):
    return by_torch(q, k, v, pairs(24, 24, lambda i, j: j <= i and j // 4 in (i // 4 - 1, i // 4)))


@oracle("dilated")
def test_dilated_is_a_window_over_every_third_token(attention, q, k, v):
    """Tokens of equal remainder form a sequence of their own, and are seen through a plain window."""
    output, near = torch.empty_like(v), pairs(8, 8, lambda i, j: abs(i - j) <= 2)
    for rest in range(3):
        output[:, :, rest::3], _ = by_torch(*(x[:, :, rest::3] for x in (q, k, v)), near)
    return output


@oracle("dilated", arguments={"size": 3, "dilation": 2, "is_causal": True})
def test_dilated_pair_by_pair(attention, q, k, v):
    return by_torch(q, k, v, pairs(24, 24, lambda i, j: j in (i, i - 2, i - 4)))


@pytest.mark.parametrize("shape", [(5, 7), (1, 1, 5, 7), (1, 3, 5, 7), (2, 1, 5, 7), (2, 3, 5, 7)])
@pytest.mark.parametrize("engine", ["reference", "dense", "blocked"])
def test_a_given_mask_broadcasts_as_that_of_torch(shape, engine):
    mask, (q, k, v) = torch.rand(shape) < 0.7, (torch.randn(2, 3, n, 4).double() for n in (5, 7, 7))
    mask[..., 0] = True
    seen = rg.Attention(mask=rg.mask_tensor(mask))(q, k, v, engine=engine)
    output, weights = by_torch(q, k, v, mask.expand(2, 3, 5, 7))
    close(seen.output, output)
    close(seen.weights.dense(), weights)


def test_masks_of_a_few_tokens_by_hand():
    """Drawn on paper: rows are queries, X may attend."""
    drawn = {
        rg.causal(): "X.... XX... XXX.. XXXX. XXXXX",
        rg.window(2): "XX... XXX.. .XXX. ..XXX ...XX",
        rg.masks.dilated(2, 2): "X.X.. .X.X. X.X.X .X.X. ..X.X",
        rg.masks.prefix(2): "XX... XX... XX... XX... XX...",
        rg.causal() | rg.masks.prefix(2): "XX... XX... XXX.. XXXX. XXXXX",
        rg.masks.block_local(2): "XX... XX... ..XX. ..XX. ....X",
        rg.masks.block_local(2, before=1): "XX... XX... XXXX. XXXX. ..XXX",
        rg.masks.block_local(2, after=1): "XXXX. XXXX. ..XXX ..XXX ....X",
        rg.masks.global_tokens([1]): ".X... XXXXX .X... .X... .X...",
        rg.documents([2, 3]): "XX... XX... ..XXX ..XXX ..XXX",
        rg.padding([3]): "XXX.. XXX.. XXX.. XXX.. XXX..",
        ~rg.causal(): ".XXXX ..XXX ...XX ....X .....",
    }
    grid = rg.types.Grid.whole(rg.types.Positions.of(0, 5, 5), 1, 1, 5)
    for (mask, picture), (i, j) in itertools.product(drawn.items(), np.ndindex(5, 5)):
        allowed = torch.broadcast_to(mask.allowed(grid), (1, 1, 5, 5))
        assert bool(allowed[0, 0, i, j]) == (picture.split()[i][j] == "X"), (mask, i, j)


def test_bigbird_of_the_catalog_asks_for_a_length_it_was_made_for():
    attention, q, k, v = mechanism("bigbird").example(queries=41)
    with pytest.raises(rg.RegardError, match="random_blocks: covers queries 0 to 39"):
        attention(q, k, v)
