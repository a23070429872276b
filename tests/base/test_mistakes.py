"""A law over the public API: with any argument replaced by a wrong one, a call works or raises a RegardError."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch

import regard as rg
from public_names import named

q = torch.randn(2, 4, 6, 8)
MAP = rg.Attention()(q, q, q).weights
MAPS = {"layers.0": MAP, "layers.1": MAP}
TOKENS = list("abcdef")

#: What users pass by mistake: another type, another size, another library's habit.
WRONG = {
    "None": None,
    "True": True,
    "zero": 0,
    "minus one": -1,
    "seven": 7,
    "a half": 0.5,
    "NaN": math.nan,
    "infinity": math.inf,
    "a complex number": 1j,
    "an empty text": "",
    "a text": "heads",
    "bytes": b"heads",
    "an empty list": [],
    "texts": ["a", "b"],
    "numbers": [0.5, 2],
    "a negative": [-1],
    "a dict": {"a": 1},
    "an object": object(),
    "a class": rg.Dot,
    "a module": math,
    "a function": lambda *_: None,
    "a piece": rg.causal(),
    "a mechanism": rg.mechanism("longformer"),
    "an array": np.zeros((2, 3)),
    "a scalar": torch.tensor(3),
    "booleans": torch.ones(2, 3, dtype=torch.bool),
    "integers": torch.arange(3),
    "a float tensor": torch.zeros(2, 4, 6, 8),
    "half the width": torch.zeros(2, 4, 6, 4),
    "no rows": torch.zeros(2, 4, 0, 8),
    "complex numbers": torch.zeros(2, 4, 6, 8, dtype=torch.complex64),
    "another dtype": torch.zeros(2, 4, 6, 8, dtype=torch.float64),
    "no storage": torch.zeros(2, 4, 6, 8, device="meta"),
}


def used(slot):
    """Attend with a piece, and look: what is wrong with it may come to light only then."""

    def use(piece):
        weights = rg.Attention(**{slot: piece})(q, q, q).weights
        weights.entropy()
        weights[0, 1, 2:4]

    return use


def attended(module):
    module(torch.randn(2, 6, 8))


def cached(cache):
    rg.Attention(mask=rg.causal())(q, q, q, cache=cache)


def folded(reduction):
    MAP.summarize(reduction)


ATTEND = {
    "attention": rg.Attention(),
    "query": q,
    "key": q,
    "value": q,
    "mask": rg.causal(),
    "is_causal": True,
    "scale": 0.5,
    "dropout_p": 0.1,
    "layout": "bhld",
    "positions": rg.types.Positions.aligned_to_end(6, 6),
    "cache": None,
    "engine": "auto",
}
#: A right call of every public name that is called by users, and what is then done with its result.
CALLS = {
    "ALiBi": ({"num_heads": 4}, used("bias")),
    "Additive": ({"query_dim": 8, "key_dim": 8, "hidden": 4, "bias": True}, used("score")),
    "Bilinear": ({"query_dim": 8, "key_dim": 8}, used("score")),
    "LatentDot": (
        {"num_heads": 4, "content_dim": 7, "latent_dim": 7, "rotary_dim": 1},
        used("score"),
    ),
    "Concat": ({"query_dim": 8, "key_dim": 8, "hidden": 4, "bias": True}, used("score")),
    "Cosine": ({"factor": 2.0}, used("score")),
    "Dot": ({"scale": 0.5}, used("score")),
    "LearnedPositions": ({"length": 9, "embed_dim": 8}, used("position")),
    "RoPE": ({"head_dim": 8, "base": 100.0}, used("position")),
    "LinearScaling": ({"factor": 2.0}, None),
    "NTKScaling": ({"factor": 2.0}, None),
    "Llama3Scaling": ({"factor": 2.0, "low": 1.0, "high": 4.0, "trained_length": 16}, None),
    "Sinusoidal": ({"base": 100.0}, used("position")),
    "LearnedTable": ({"num_heads": 4, "reach": 3}, used("bias")),
    "ShawBias": ({"head_dim": 8, "reach": 3}, used("bias")),
    "Softcap": ({"cap": 5.0}, used("bias")),
    "T5Bias": ({"num_heads": 4, "num_buckets": 8, "max_distance": 16}, used("bias")),
    "TransformerXLBias": ({"num_heads": 4, "head_dim": 8}, used("bias")),
    "FeatureScore": ({"features": rg.scores.EluPlusOne()}, None),
    "RandomFeatures": ({"head_dim": 8, "num_features": 4, "seed": 1}, None),
    "Softmax": ({"temperature": 2.0, "sink": 0.5}, used("normalizer")),
    "LearnedSink": ({"num_heads": 4}, used("normalizer")),
    "TopK": ({"k": 2}, used("normalizer")),
    "window": ({"size": 2}, used("mask")),
    "dilated": ({"size": 2, "dilation": 2}, used("mask")),
    "prefix": ({"length": 2}, used("mask")),
    "block_local": ({"size": 2, "before": 1, "after": 1}, used("mask")),
    "padding": ({"real": [3, 2]}, used("mask")),
    "documents": ({"lengths": [4, 2], "key_lengths": [4, 2]}, used("mask")),
    "global_tokens": ({"positions": [1]}, used("mask")),
    "random_blocks": ({"size": 2, "count": 1, "length": 6, "seed": 1}, used("mask")),
    "tree": ({"parents": [-1, 0, 0, 1], "context": 2}, used("mask")),
    "shared_prefix": ({"prefix": 2, "lengths": [1, 3]}, used("mask")),
    "neighborhood": (
        {"shape": (2, 3), "size": (2, 1), "dilation": 1, "stride": 1, "is_causal": False},
        used("mask"),
    ),
    "sliding_tiles": ({"shape": (2, 3), "tile": (1, 3), "size": (2, 1)}, used("mask")),
    "bigbird": ({"length": 6, "block": 2, "window_blocks": 1, "num_random": 1}, used("mask")),
    "chosen_keys": (
        {"ids": torch.zeros(1, 2, 6, 3, dtype=torch.int64), "size": 2, "num_heads": 4, "start": 0},
        used("mask"),
    ),
    "TokenIndexer": ({"k": 2}, None),
    "BlockIndexer": ({"size": 2, "k": 2, "local": 1}, None),
    "HashBuckets": ({"num_buckets": 4, "rounds": 2, "seed": 1}, used("selection")),
    "BlockMeans": ({"size": 2, "k": 2}, used("selection")),
    "CompressedBlocks": ({"size": 2, "k": 2, "initial": 1, "local": 1}, used("selection")),
    "mask_mod": ({"predicate": lambda b, h, i, j: i >= j}, used("mask")),
    "mask_tensor": ({"tensor": torch.ones(6, 6, dtype=torch.bool)}, used("mask")),
    "GrowingCache": ({}, cached),
    "LatentCache": ({}, cached),
    "RecurrentCache": ({}, None),
    "RingCache": ({"size": 3, "sinks": 1}, cached),
    "MassOn": ({"keys": [1, 2]}, folded),
    "Pool": ({"rows": 2, "cols": 2}, folded),
    "Similarity": ({"every": 2}, folded),
    "TopLinks": ({"k": 2}, folded),
    "Agreement": ({"special": (1, 2), "every": 2}, None),
    "Offsets": ({"first": -2, "last": 2}, None),
    "SameToken": ({"keys": torch.arange(6)}, None),
    "Attention": (
        {
            "score": rg.Dot(),
            "position": rg.RoPE(8),
            "bias": rg.ALiBi(4),
            "mask": rg.causal(),
            "normalizer": rg.normalizers.Softmax(),
            "dropout": 0.1,
        },
        lambda attention: attention(q, q, q),
    ),
    "attend": (
        ATTEND | {"check": True},
        None,
    ),
    "plan": (
        ATTEND,
        str,
    ),
    "mechanism": ({"name": "longformer"}, None),
    "head_divergence": ({"maps": MAPS, "rows": [1, 2], "batch": 0}, None),
    "head_groups": ({"distance": torch.zeros(3, 3), "threshold": 0.5}, None),
    "head_map": ({"distance": torch.rand(4, 4), "dimensions": 2}, None),
    "layer_numbers": ({"names": ["layers.3"], "given": [4]}, None),
    "mask_findings": ({"maps": MAPS, "causal": False, "real": [6, 6], "numbers": [0, 1]}, None),
    "patterns": ({"weights": MAP, "segments": [2, 4], "batch": 0}, None),
    "prediction_findings": (
        {"model": lambda ids: torch.nn.functional.one_hot(ids, 9), "ids": torch.arange(7)[None]},
        None,
    ),
    "probe_tokens": ({"vocabulary": 9, "length": 6, "seed": 1}, None),
    "profile": (
        {"maps": MAPS, "tokens": TOKENS, "special": [0], "batch": 0, "num_links": 2, "numbers": [0, 1]},
        None,
    ),
    "roles": (
        {"maps": MAPS, "tokens": TOKENS, "null": MAPS, "null_tokens": TOKENS[::-1], "special": [0], "batch": 0},
        None,
    ),
    "rollout": ({"maps": MAPS, "rows": [1], "batch": 0, "residual": 0.5}, None),
    "sample_rows": ({"num_queries": 9, "count": 3, "seed": 1}, None),
    "shuffle_order": ({"tokens": TOKENS, "special": [0], "seed": 1}, None),
    "text_statistics": ({"tokens": TOKENS, "chosen": [1]}, None),
    "value_weighted": ({"map": MAP, "value": q, "projection": torch.randn(5, 32)}, None),
    "nn.MultiHeadAttention": (
        {"embed_dim": 8, "num_heads": 2, "num_key_value_heads": 1, "attention": rg.Attention(), "bias": True},
        attended,
    ),
    "nn.MultiHeadAttention of a tutorial": (
        {"embed_dim": 8, "num_heads": 2, "dropout": 0.1, "output_projection": False},
        attended,
    ),
    "nn.MultiHeadAttention with a gate": ({"embed_dim": 8, "num_heads": 2, "output_gate": True}, attended),
    "nn.MultiHeadLatentAttention": (
        {"embed_dim": 8, "num_heads": 2, "latent_dim": 4, "head_dim": 3, "rotary_dim": 2, "value_dim": 3},
        attended,
    ),
    "nn.FeedForward": ({"embed_dim": 8, "hidden": 4, "activation": "relu", "dropout": 0.0, "bias": False}, attended),
    "nn.PositionalEncoding": ({"embed_dim": 8, "dropout": 0.1, "position": rg.encodings.Sinusoidal()}, attended),
    "nn.Embedding": ({"size": 9, "embed_dim": 8, "dropout": 0.0, "std": 1.0, "padding": 0}, None),
    "nn.Dropout": ({"p": 0.1}, attended),
    "nn.Residual": ({"embed_dim": 8, "norm": "pre", "dropout": 0.0, "bias": False}, None),
    "nn.TransformerConfig": (
        {"embed_dim": 8, "num_heads": 2, "num_key_value_heads": 1, "norm": "pre", "positions": "rope"},
        None,
    ),
    "nn.RecurrentEncoder": ({"input_size": 8, "hidden_size": 8, "layers": 1, "cell": "gru", "dropout": 0.0}, None),
    "nn.Cells": ({"input_size": 8, "hidden_size": 4, "layers": 1, "kind": "lstm", "dropout": 0.0}, None),
    "nn.attention_for": ({"role": "encoder", "name": "full", "num_heads": 2, "head_dim": 8, "positions": "rope"}, None),
    "nn.select_rows": ({"value": torch.zeros(2, 3), "index": torch.tensor([1, 0])}, None),
    "lab.Search": ({"beam": 2, "length_penalty": 1.0, "n_best": 1, "max_length": 4, "no_repeat": 1}, None),
    "lab.build": ({"name": "transformer", "source_size": 9, "target_size": 9, "width": 8, "num_heads": 2}, None),
    "lab.find_system": ({"name": "none"}, None),
    "lab.score": ({"hypotheses": ["a b"], "references": ["a b"], "sources": ["a b"]}, None),
    "lab.data.synthetic_pairs": ({"task": "copy", "size": 5, "seed": 1}, None),
    "lab.data.split_pairs": (
        {"pairs": [rg.lab.data.Pair(f"a{n}", "b") for n in range(20)], "valid": 2, "test": 2, "seed": 1},
        None,
    ),
    "lab.data.train_tokenizer": ({"sentences": ["a b c", "b c"], "size": 6, "kind": "words"}, None),
    "lab.data.nearest_pairs": ({"train": ["a b", "c d"], "test": ["a"]}, None),
    "lab.data.load_tokenizer": ({"path": "nowhere"}, None),
    "map.__getitem__": ({"index": (0, 1, 2, 3)}, None),
    "map.tile": ({"batch": 0, "head": [1], "rows": slice(0, 2), "cols": [3], "budget": 10**6}, None),
    "map.top": ({"k": 2}, None),
    "map.mass": ({"keys": [1]}, None),
    "map.pool": ({"rows": 2, "cols": 2}, None),
    "map.similarity": ({}, None),
    "map.dense": ({"budget": 10**6}, None),
    "map.select": ({"batch": torch.tensor([0]), "head": torch.tensor([1])}, None),
    "map.summarize": ({"reductions": rg.maps.Entropy()}, None),
}


def called(name):
    path = name.partition(" ")[0]
    return getattr(MAP, path.removeprefix("map.")) if path.startswith("map.") else named(path)


CASES = [(name, argument) for name in CALLS for argument in CALLS[name][0]]


def call(name, arguments):
    function = called(name)
    if (
        any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(function).parameters.values())
        or name == "map.__getitem__"
    ):
        result = function(*arguments.values())
    else:
        result = function(**arguments)
    if inspect.isgenerator(result):
        list(result)
    if CALLS[name][1] is not None:
        CALLS[name][1](result)


@pytest.mark.parametrize("name", CALLS)
def test_the_right_call_is_right(name):
    if name == "lab.data.load_tokenizer":
        with pytest.raises(rg.RegardError):
            call(name, CALLS[name][0])
    else:
        call(name, CALLS[name][0])


@pytest.mark.parametrize(("name", "argument"), CASES, ids=lambda part: part)
def test_a_wrong_argument_works_or_is_refused(name, argument):
    raw = {}
    for mistake, value in WRONG.items():
        try:
            call(name, CALLS[name][0] | {argument: value})
        except rg.RegardError as error:
            if len(str(error)) < 20:
                raw[mistake] = f"says too little: {error}"
        except Exception as error:
            raw[mistake] = f"{type(error).__name__}: {str(error)[:120]}"
    assert not raw, "\n".join(f"{argument}={mistake}: {said}" for mistake, said in raw.items())


@pytest.mark.parametrize("name", [name for name in CALLS if CALLS[name][0] and name != "map.summarize"])
def test_an_argument_that_is_not_known_is_refused(name):
    with pytest.raises((rg.RegardError, TypeError), match=r"unexpected keyword|keyword arguments|no option"):
        called(name)(**CALLS[name][0], color=1)
