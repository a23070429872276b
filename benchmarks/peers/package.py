"""`Package`: a package of a peer, its version, and whether it is installed."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class Package:
    """A package of the package index, and the module that is imported from it."""

    name: str
    module: str
    install: str = "pip install 'regard[bench]'"

    def __str__(self) -> str:
        try:
            return f"{self.name} {version(self.name)}"
        except PackageNotFoundError:
            return self.name

    @property
    def missing(self) -> str:
        """Why the package cannot be used, with a remedy; "" if it can."""
        return _missing(self)


@cache
def _missing(package: Package) -> str:
    try:
        with quiet():
            importlib.import_module(package.module)
    except ImportError as error:
        absent = (error.name or package.module).split(".")[0] == package.module.split(".")[0]
        why = "is not installed" if absent else f"cannot be imported ({error})"
        return f"{package.name} {why}: {package.install}"
    except Exception as error:  # an import of a package may raise any error
        return f"{package.name} cannot be imported ({type(error).__name__}: {error})"
    return ""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress output and warnings of packages while they are imported and built."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


TORCH = Package("torch", "torch")
TRANSFORMERS = Package("transformers", "transformers")
LOCAL = Package("local-attention", "local_attention")
LINEAR_TRANSFORMER = Package(
    "linear-attention-transformer", "linear_attention_transformer.linear_attention_transformer"
)
PERFORMER = Package("performer-pytorch", "performer_pytorch.performer_pytorch")
X_TRANSFORMERS = Package("x-transformers", "x_transformers")
KERAS = Package("keras", "keras")
FLA = Package(
    "flash-linear-attention",
    "fla.ops.linear_attn.naive",
    "pip install --no-deps flash-linear-attention==0.6.0 fla-core==0.6.0 triton",
)
JOEY = Package(
    "joeynmt",
    "joeynmt.attention",
    "pip install --no-deps joeynmt==2.3.0 subword-nmt==0.3.8 importlib_metadata==8.7.0 zipp==3.23.0",
)
#: All packages that a report may name.
PACKAGES = (TORCH, TRANSFORMERS, LOCAL, LINEAR_TRANSFORMER, PERFORMER, X_TRANSFORMERS, KERAS, FLA, JOEY)
