"""Regard: any attention mechanism, run fast, with every weight visible."""

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from regard.other_libraries import missing_here
from regard.upper_layers import importers
from regard.version import __version__ as __version__

#: Packages that are used by their own names: `regard.seq2seq.build`.
PACKAGES = ("data", "nn", "seq2seq", "viewer")

importers.update({name: partial(import_module, f"regard.{name}") for name in (*PACKAGES, "api")})
importers["attention"] = lambda: import_module("regard.attention_output")
importers["widget"] = lambda: import_module("regard.viewer.widget")
importers["drawing"] = lambda: import_module("regard.drawing")
importers["report"] = lambda: import_module("regard.viewer.report")


if TYPE_CHECKING:  # type checkers read the names; a `__getattr__` would make every misspelt name valid
    from regard import data as data
    from regard import nn as nn
    from regard import seq2seq as seq2seq
    from regard import viewer as viewer
    from regard.api import *  # noqa: F403
    from regard.attribution import *  # noqa: F403
    from regard.composites import *  # noqa: F403
    from regard.drawing import *  # noqa: F403
    from regard.edits import *  # noqa: F403
    from regard.hf import *  # noqa: F403 - mypy does not follow `__all__ += hf.__all__` of api
    from regard.maps import *  # noqa: F403
    from regard.pieces import *  # noqa: F403
    from regard.profiling import *  # noqa: F403
    from regard.stats import *  # noqa: F403
else:

    def __getattr__(name):
        """Load the public names at the first use: `regard --help` need not wait for torch."""
        if name in PACKAGES:
            return import_module(f"regard.{name}")
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module 'regard' has no attribute {name!r}")
        api = import_module("regard.api")
        globals().update({public: getattr(api, public) for public in api.__all__}, __all__=api.__all__)
        if name not in globals():
            raise missing_here("regard", name, api.__all__)
        return globals()[name]

    def __dir__():
        return sorted([*import_module("regard.api").__all__, *PACKAGES, "__version__"])
