"""Regard: any attention mechanism, run fast, with every weight visible."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.display import importers
from regard.version import __version__ as __version__

if TYPE_CHECKING:
    from regard.api import *  # noqa: F403


#: Packages that are used by their own names: `regard.seq2seq.build`.
PACKAGES = ("data", "nn", "seq2seq")


importers["widget"] = lambda: import_module("regard.viewer.widget")
importers["report"] = lambda: import_module("regard.viewer.report")


def __getattr__(name: str) -> Any:
    """Load the public names at the first use: `regard --help` need not wait for torch."""
    if name in PACKAGES:
        return import_module(f"regard.{name}")
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    api = import_module("regard.api")
    globals().update({public: getattr(api, public) for public in api.__all__}, __all__=api.__all__)
    if name not in globals():
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return [*import_module("regard.api").__all__, "__version__"]
