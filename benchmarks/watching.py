"""The goals of watching: what seeing every weight of a model costs beside running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import regard as rg
from benchmarks.measure import Goal, added_memory, in_turn
from regard.stats import profile


def goals() -> Iterator[Goal]:
    """Every goal, measured as it is asked for."""
    yield from watching_costs_little()
    yield from statistics_beat_dense_weights()
    yield from a_long_text_fits()


def small_bert(length: int, backend: str = "sdpa") -> Any:
    """A BERT of MiniLM's shape with random weights, and positions for `length` tokens."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=length,
        vocab_size=1000,
        attn_implementation=backend,
    )
    return BertModel(config, add_pooling_layer=False).eval()


def long_llama() -> Any:
    """Two layers of 12 heads of width 64, random weights."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=768,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=12,
        intermediate_size=2048,
        vocab_size=1000,
        max_position_embeddings=32_768,
    )
    return LlamaModel(config).eval()


def tokens(length: int) -> Tensor:
    return torch.randint(0, 1000, (1, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def bare(model: Any, ids: Tensor) -> Any:
    return model(ids).last_hidden_state


@torch.no_grad()
def watched(model: Any, ids: Tensor) -> rg.hf.WatchedAttention:
    with rg.watch(model) as seen:
        model(ids)
    return seen


def profiled(model: Any, ids: Tensor) -> object:
    return profile(watched(model, ids).maps, [str(i) for i in ids[0].tolist()])


def watching_costs_little(n: int = 2048) -> Iterator[Goal]:
    model, ids = small_bert(n), tokens(n)
    ours, theirs = in_turn(partial(watched, model, ids), partial(bare, model, ids), rounds=9)
    yield Goal(f"watched forward, 6 layers, n = {n}", ours / theirs, 1.05, "x bare")
    plain, seen = (added_memory(prepare) for prepare in (prepare_bare, prepare_watched))
    yield Goal(f"memory that watching adds, 6 layers, n = {n}", seen - plain, 50, "MiB")


def prepare_bare() -> Callable[[], object]:
    model, ids = small_bert(2048), tokens(2048)
    bare(model, ids)
    return partial(bare, model, ids)


def prepare_watched() -> Callable[[], object]:
    model, ids = small_bert(2048), tokens(2048)
    watched(model, ids)
    return partial(watched, model, ids)


def statistics_beat_dense_weights(n: int = 4096) -> Iterator[Goal]:
    ids = tokens(n)
    fused, eager = small_bert(n), small_bert(n, "eager")
    ours, theirs = in_turn(partial(profiled, fused, ids), partial(dense_statistics, eager, ids), rounds=1)
    yield Goal(f"all statistics of 72 heads, n = {n}", theirs / ours, 3, "x faster", at_most=False)
    streamed, dense = (added_memory(prepare) for prepare in (prepare_profiled, prepare_dense))
    yield Goal(f"memory of the same, n = {n}", streamed / dense, 0.1, "x eager")


def prepare_profiled() -> Callable[[], object]:
    model = small_bert(4096)
    profiled(model, tokens(64))
    return partial(profiled, model, tokens(4096))


def prepare_dense() -> Callable[[], object]:
    model = small_bert(4096, "eager")
    dense_statistics(model, tokens(64))
    return partial(dense_statistics, model, tokens(4096))


@torch.no_grad()
def dense_statistics(model: Any, ids: Tensor) -> list[Tensor]:
    """What `profile` gives, by the plain formulas on the weights that eager attention returns."""
    found = []
    for w in model(ids, output_attentions=True).attentions:
        n = w.shape[-1]
        apart = (torch.arange(n)[:, None] - torch.arange(n)).abs()
        flat = torch.nn.functional.normalize(w.flatten(2), dim=-1)
        found += [
            -torch.xlogy(w, w).sum(-1),
            (w * apart).sum(-1),
            w[..., [0, -1]].sum(-1),
            *(w.diagonal(offset, -2, -1) for offset in (-1, 0, 1)),
            w.topk(8).values,
            w.sum(-2),
            flat @ flat.transpose(-1, -2),
        ]
    return found


def a_long_text_fits(n: int = 32_768) -> Iterator[Goal]:
    model, ids = long_llama(), tokens(n)
    whole, forward = in_turn(partial(profiled, model, ids), partial(bare, model, ids), rounds=1)
    yield Goal(f"forward and full table, 2 layers x 12 heads, n = {n}", whole / forward, 4, "x bare forward")
    yield Goal(f"memory of the same, n = {n}", added_memory(prepare_long), 2048, "MiB")


def prepare_long() -> Callable[[], object]:
    model, ids = long_llama(), tokens(32_768)
    profiled(model, tokens(64))
    return partial(profiled, model, ids)
