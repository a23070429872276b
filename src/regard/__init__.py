"""Regard: any attention mechanism, run fast, with every weight visible.

    output, weights = rg.attend(query, key, value, is_causal=True)       one call of any mechanism
    with rg.watch(model, tokenizer) as seen: model(**inputs)             the weights of your model
    rg.edit, rg.attribute, rg.check, rg.heatmap, rg.figure               what if, why, is it right, pictures

The names of `regard` are those that most programs use; `dir(regard)` lists them. All others are in rooms:

    masks scores encodings biases normalizers selections transitions     the pieces of an `Attention`
    composites caches maps edits stats hf types                          what is built of them, and results
    nn viewer lab                                                        modules, the page, the translation lab
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
