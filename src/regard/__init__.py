"""Regard: see the attention weights of any PyTorch model, and run any attention mechanism. `import regard as rg`.

    output, weights = rg.attend(query, key, value, is_causal=True)
    with rg.watch(model, tokenizer) as seen: model(**inputs)

Attend:
    attend                        output and weights of one call, with the arguments of torch's function
    Attention                     a mechanism: pieces in slots; call it with query, key and value
    mechanism, mechanisms         a mechanism of the catalog by its name; all of them
    scaled_dot_product_attention  torch's function in every respect
    combine                       a weighted sum of several results, with its map
    plan                          which engine would run a call, why, and what it costs
    GrowingCache                  keys and values of earlier calls
    Ring                          one sequence over many processes

Pieces of an `Attention`:
    Dot                           the scaled dot product
    RoPE, ALiBi                   rotary positions; a penalty by distance
    causal, window, documents     masks: no later keys; near keys; packed documents
    padding                       a mask by lengths or by booleans
    mask_tensor, mask_mod         a mask from a tensor; from a function of positions

Weights of a model:
    watch                         capture every attention of a model while it runs
    load_model, TextReader        a model with its tokenizer; the same, to read texts
    register                      Regard as the backend of models of transformers
    AttentionMap                  weights of one attention: index it, or ask for statistics

Pictures:
    show                          the page with every weight, in a notebook or as a file
    heatmap, figure               a heatmap; a figure for a paper
    weight_table                  weights as text

Statistics:
    profile, profile_corpus       every head on a text; on a corpus
    roles                         what heads attend to, beside shuffled text
    findings                      warnings: uniform, collapsed or equal heads, sinks
    rollout                       attention over all layers

What if, and why:
    edit, Where, KnockOut         change weights while a model runs; which pairs; without them
    sweep                         an edit of each head in turn
    importance, prune             what the loss depends on; remove heads
    attribute, Target             which weights and tokens made a prediction; of which output
    faithfulness                  a test of an attribution, by deletion and insertion

Mistakes:
    check                         find the mistake in an attention function, module or piece
    RegardError                   a wrong argument: the operation, the shapes, the rule, the remedy

Rooms, with all other names, such as `rg.masks.dilated`:
    masks, scores, encodings      who may attend; how keys match; positions and norms
    biases, normalizers           what is added to scores; from scores to weights
    selections, transitions       keys that another score chooses; recurrent layers
    composites, caches            attentions made of several; ring, recurrent and latent caches
    maps, stats, types            reductions of maps; statistics of heads; results
    hf, edits                     models of transformers; all edits
    nn, viewer, lab               modules; the page; the translation lab
"""

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from regard.base.other_libraries import INNER_ROOMS, ROOMS, missing_here
from regard.base.upper_layers import importers
from regard.version import __version__ as __version__

importers.update({name: partial(import_module, f"regard.{name}") for name in (*ROOMS, *INNER_ROOMS, "api")})
importers["attention"] = lambda: import_module("regard.attention_output")
importers["widget"] = lambda: import_module("regard.viewer.widget")
importers["drawing"] = lambda: import_module("regard.drawing")


if TYPE_CHECKING:  # type checkers read the names; a `__getattr__` would make every misspelt name valid
    from regard import biases as biases
    from regard import caches as caches
    from regard import composites as composites
    from regard import edits as edits
    from regard import encodings as encodings
    from regard import hf as hf
    from regard import lab as lab
    from regard import maps as maps
    from regard import masks as masks
    from regard import nn as nn
    from regard import normalizers as normalizers
    from regard import scores as scores
    from regard import selections as selections
    from regard import stats as stats
    from regard import transitions as transitions
    from regard import types as types
    from regard import viewer as viewer
    from regard.api import *  # noqa: F403
else:

    def __getattr__(name):
        """Load the public names at the first use: `regard --help` need not wait for torch."""
        if name in ROOMS:
            return import_module(f"regard.{name}")
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module 'regard' has no attribute {name!r}")
        api = import_module("regard.api")
        globals().update({public: getattr(api, public) for public in api.__all__}, __all__=[*api.__all__, *ROOMS])
        if name not in globals():
            raise missing_here("regard", name, api.__all__)
        return globals()[name]

    def __dir__():
        return sorted([*import_module("regard.api").__all__, *ROOMS, "__version__"])
