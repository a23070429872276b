"""Defaults: those of a paper or of a model of transformers, or they do nothing: 0 of a sum, 1 of a product, off."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

import transformers
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig

import regard as rg

T5, BIG_BIRD, LLAMA4 = transformers.T5Config(), transformers.BigBirdConfig(), Llama4TextConfig()
#: Numbers by class or function and option: of configurations, else of the papers that the pieces name.
OF_PAPERS = {
    ("T5Bias", "num_buckets"): T5.relative_attention_num_buckets,
    ("T5Bias", "max_distance"): T5.relative_attention_max_distance,
    ("bigbird", "block"): BIG_BIRD.block_size,
    ("bigbird", "num_random"): BIG_BIRD.num_random_blocks,
    ("bigbird", "window_blocks"): 3,
    ("bigbird", "global_blocks"): 1,
    ("PositionTemperature", "floor"): LLAMA4.floor_scale,
    ("PositionTemperature", "factor"): LLAMA4.attn_scale,
    ("PositionTemperature", "first"): 1,
    ("Softcap", "cap"): transformers.Gemma2Config().attn_logit_softcapping,
    ("QKNorm", "eps"): transformers.Qwen3Config().rms_norm_eps,
    ("LongRoPEScaling", "trained_length"): transformers.Phi3Config().original_max_position_embeddings,
    ("YaRNScaling", "fast"): 32.0,
    ("YaRNScaling", "slow"): 1.0,
    ("Llama3Scaling", "factor"): 8.0,
    ("Llama3Scaling", "low"): 1.0,
    ("Llama3Scaling", "high"): 4.0,
    ("Llama3Scaling", "trained_length"): 8192,
    **{(name, "base"): 10_000.0 for name in ("RoPE", "PoPE", "Sinusoidal", "TransformerXLBias")},
    ("AxialRoPE.sections", "base"): 10_000.0,
    ("AxialRoPE.grid", "base"): 10_000.0,
    ("AxialRoPE.grid", "num_axes"): 2,  # an image
    ("Cosine", "factor"): 10.0,
    ("FIREBias", "hidden"): 32,
    ("FIREBias", "threshold"): 512,
    ("RandomFeatures", "num_features"): 256,
    ("CompressedBlocks", "initial"): 1,
    ("CompressedBlocks", "local"): 2,
    ("BlockIndexer", "local"): 1,
    **{(name, side): 64 for name in ("AttentionMap.pool", "Pool") for side in ("rows", "cols")},
}
#: Options of which a bit or a token more, or a later place, is one more.
ZERO = {
    *("after", "before", "context", "initial", "rotary_dim", "sinks", "length", "whole", "used", "num_missing"),
    *("batch", "head", "first", "left", "top", "start", "seed", "dropout", "dropout_p"),
}
#: Options that multiply, divide or count something.
ONE = {
    *("dilation", "stride", "every", "factor", "extension", "temperature", "size", "rounds", "num_heads", "k", "count"),
}
#: Switches that are on unless they are turned off.
ON = {"bidirectional", "is_rounded", "learned", "unit", "masked"}
#: Room in memory, and how often something is timed: every number gives the same results.
FREE = {"budget", "times"}


def test_a_default_is_that_of_a_paper_or_does_nothing():
    found = {(name, option): default for name, option, default in defaults() if option not in FREE}
    for (name, option), default in found.items():
        neutral = 0 if option in ZERO else 1 if option in ONE else None
        right = option in ON if isinstance(default, bool) else OF_PAPERS.get((name, option), neutral)
        assert default == right, f"{name}({option}={default!r})"
    assert found.keys() >= OF_PAPERS.keys()


def defaults():
    """The numbers and switches that functions, methods and classes of the core have as defaults, each with its name."""
    folder = Path(rg.__file__).parent
    rooms = [path for room in ("engine", "pieces", "maps") for path in (folder / room).glob("[!_]*.py")]
    for path in (*rooms, *(folder / name for name in ("attention.py", "attention_output.py", "caches.py"))):
        module = import_module("regard." + ".".join(path.relative_to(folder).with_suffix("").parts))
        for name, own in vars(module).items():
            if getattr(own, "__module__", None) == module.__name__ and callable(own):
                methods = vars(own).items() if inspect.isclass(own) else ()
                inside = [(f"{name}.{key}".removesuffix(".__init__"), method) for key, method in methods]
                for qualified, method in ((name, own), *inside):
                    if inspect.isfunction(function := getattr(method, "__func__", method)):
                        for option, parameter in inspect.signature(function).parameters.items():
                            if isinstance(parameter.default, int | float):
                                yield qualified, option, parameter.default
