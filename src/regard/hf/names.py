"""Names of projections, norms and numbers of heads in attention modules: the only list of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

#: Names under which models of transformers get and return their cache. From 5.24 on all have the first one.
CACHES = ("cache", "past_key_values", "cache_params", "past_buckets_states", "mems", "state")
#: A word in the name of a projection -> what it computes: "q" -> query. A "w" may stand before it, as in "Wqkv".
SIDES = {word: frozenset({side}) for side in ("query", "key", "value") for word in (side, side[0], f"{side}s")}
SIDES |= {"queries": SIDES["query"], "qk": SIDES["q"] | SIDES["k"], "kv": SIDES["k"] | SIDES["v"]}
ALL_SIDES = frozenset({"query", "key", "value"})
SIDES |= {"qkv": ALL_SIDES}
SIDES |= {f"w{word}": sides for word, sides in SIDES.items()}
#: Words that may stand beside such a word ("to_qkv", "W_q", "key_proj").
AROUND = frozenset(("w", "a", "b", "c", "to", "in", "input", "proj", "projection", "lin", "linear", "linears"))
AROUND |= frozenset(("layer", "fc", "attn"))
#: Names of projections to queries, keys and values that contain no such word.
PACKED = frozenset(("c_attn", "in_proj"))
#: Names of projections whose result is all queries, then all keys, then all values. The result of a query_key_value
#: (GPT-NeoX, Bloom, Falcon) is not: it has the query, key and value of each head one after the other.
IN_ORDER = ("c_attn", "qkv_proj", "in_proj", "Wqkv", "qkv", "to_qkv")
#: Names of a projection of values for one kind of tokens, such as value_global.
SOME_VALUES = re.compile(r"^values?_(?!out)\w+$")
#: Names of the projections of additive scores: W_a, U_a and v_a.
ADDITIVE = re.compile(r"(^|_)[wuv]_?a(_|$|\d)", re.IGNORECASE)
#: Names of output projections: of children of the attention module, and of a module next to it. The second and third
#: line have those of modules that people write by hand.
OUTPUTS = ("o_proj", "out_proj", "c_proj", "Wo", "out_lin", "o", "dense", "proj")
BY_HAND = ("W_o", "W_O", "w_o", "wo", "WO", "fc_out", "fc_o", "fc", "out", "output", "linear_out", "out_linear")
BY_HAND += ("to_out", "output_proj", "output_projection", "output_linear")
BESIDE = "output.dense"
#: Names of output projections for one of two sequences that attend to each other.
SOME_OUTPUTS = re.compile(r"^out(put)?_\w+_proj$")
#: Names of the number of heads, and of the width of a head.
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "num_attn_heads")
COUNTS_BY_HAND = ("n_head", "nhead", "num_head", "heads")
#: A name of the number of heads, or of the height of an image.
HEADS_OR_HEIGHT = "h"
WIDTHS = ("head_dim", "attention_head_size", "head_size", "d_k", "d_head", "dim_head")
#: Norms over all heads together, before the output projection (BitNet, Kosmos-2, MiniMax).
BETWEEN = ("attn_sub_norm", "inner_attn_ln", "norm")
#: Norms before the attention, beside the attention module. In other models such a norm may stand after it.
NORMS = ("input_layernorm", "ln_1", "ln1", "layernorm_before", "layer_norm1", "pre_attention_layernorm")


def sides_of(path: str) -> frozenset[str]:
    """Which of "query", "key" and "value" a projection computes, read from its name; empty if the name does not say it.

    >>> [sorted(sides_of(name)) for name in ("to_qkv", "W_q", "value_out", "linears.1")]
    [['key', 'query', 'value'], ['query'], [], []]
    """
    if path.rpartition(".")[2] in PACKED:
        return ALL_SIDES
    words = _words(path)
    side_words = words & SIDES.keys()
    return frozenset().union(*(SIDES[word] for word in side_words)) if words <= side_words | AROUND else frozenset()


def is_of_attention(name: str) -> bool:
    """Whether a module or a parameter of this name may be a projection of attention: a word of its name says so."""
    words = _words(name)
    return "attn" in words or bool(words & SIDES.keys()) or ADDITIVE.search(name) is not None


def is_of_values(name: str) -> bool:
    """Whether a projection of this name computes values, and nothing else."""
    return sides_of(name) == {"value"} or SOME_VALUES.match(name) is not None


def _words(path: str) -> set[str]:
    """The words of a module path in lower case, cut at dots, underscores and digits."""
    return {word for word in re.split(r"[._\d]+", path.lower()) if word}


def output_names(children: Mapping[str, nn.Module]) -> list[str]:
    """The name of the output projection among the children of an attention module, or its names for two sequences."""
    names = [name for name in (*OUTPUTS, *BY_HAND) if name in children]
    return names[:1] or [name for name in children if SOME_OUTPUTS.match(name)]


def cache_in(values: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a call, or among the values of its output; None if there is none.

    >>> cache_in({"input_ids": 1, "past_key_values": None, "cache_params": 2})
    2
    """
    return next((values[name] for name in CACHES if values.get(name) is not None), None)


def cached_length(cache: Any) -> int | None:
    """The number of tokens in a cache of transformers; None if it does not say."""
    length = getattr(cache, "get_seq_length", None)
    if length is None:
        return None
    try:
        return int(length())
    except (ValueError, TypeError, AttributeError, IndexError):  # a cache without attention layers
        return None
