"""Loads the compiled kernels, chooses their variant for this processor, and says why if they cannot run.

The library is part of the wheel, beside this file; `make kernels` or an editable installation builds it from kernels/.
Without it everything runs on the other engines.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from regard.base.errors import RegardError, nearest
from regard.engine.kernel.layouts import INTERFACE_VERSION as VERSION

#: Variants of the kernels that have every function; each has other vectors.
VECTORS = ("baseline", "avx2", "avx512")
#: All variants; the place in the list is the level that `regard_level` of kernels/dispatch.c returns. The last one has
#: some functions of its own (OWN_SOURCES of scripts/build_kernels.py), and the others of the level before it.
LEVELS = (*VECTORS, "avx512bf16")
#: Lowest level that is chosen: without AVX2 torch's kernel is faster.
LOWEST_LEVEL = 1
#: The environment variable that lowers the level, or turns the kernels off.
SETTING = "REGARD_KERNEL"
PATH = Path(__file__).with_name("libregard" + {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so"))
REMEDY = "Run `make kernels` in a copy of the repository, or install Regard again."


class Library:
    """The loaded library, and the variant of its functions that runs.

    `level` is 0 for the baseline of the processor's family (SSE2 on x86-64, NEON on AArch64), 1 for AVX2 with FMA, 2
    for AVX-512, and 3 for AVX-512 with products of bfloat16. `level_name` is its name in the environment variable
    REGARD_KERNEL, `vectors` the one of VECTORS whose vectors it has.
    """

    def __init__(self, functions: ctypes.CDLL, level: int) -> None:
        self._functions = functions
        self.level = level
        self.level_name = LEVELS[level]
        self.vectors = VECTORS[min(level, len(VECTORS) - 1)]
        self._found: dict[str, Any] = {}  # ctypes searches the library again for each name that it lacks

    def __repr__(self) -> str:
        return f"Library(level_name={self.level_name!r})"

    @cached_property
    def run_member(self) -> ctypes.c_void_p:
        """The address of the function that every thread of a team calls (kernels/team.c)."""
        return ctypes.cast(self._functions.regard_run_member, ctypes.c_void_p)

    def function(self, name: str) -> Any:
        """The function `regard_NAME_VARIANT` of the library; the caller declares its arguments."""
        found = self._found.get(name)
        if found is None:
            own = getattr(self._functions, f"regard_{name}_{self.level_name}", None)
            found = self._found[name] = own or getattr(self._functions, f"regard_{name}_{self.vectors}")
        return found

    def has(self, name: str) -> bool:
        """Whether the library has this function; a library that was built before has not all of them."""
        return hasattr(self._functions, f"regard_{name}_{self.vectors}")


def load() -> Library | None:
    """The library, or None if it cannot run; `reason` says why. REGARD_KERNEL is read at every call."""
    library = _chosen(PATH, os.environ.get(SETTING, ""))
    return library if isinstance(library, Library) else None


def load_fast() -> Library | None:
    """The library if its level is at least LOWEST_LEVEL, so that "auto" may choose it; else None."""
    library = load()
    return None if library is None or library.level < LOWEST_LEVEL else library


def reason() -> str:
    """Why `load` returns None, as a sentence; an empty text if the library is loaded."""
    refusal = _chosen(PATH, os.environ.get(SETTING, ""))
    return refusal if isinstance(refusal, str) else ""


def described() -> str:
    """One sentence about the compiled kernels here: the variant that runs, or why none does."""
    library = load()
    return f"No compiled kernel ran. {reason()}" if library is None else f"Compiled kernels ran: {library.level_name}."


@lru_cache
def _chosen(path: Path, setting: str) -> Library | str:
    """The library at the level that the setting asks for, or the reason why there is none."""
    if setting not in ("", "off", *LEVELS):
        raise RegardError(f"{SETTING}={setting}: no such setting. {nearest(setting, ('off', *LEVELS))}")
    if setting == "off":
        return f"{SETTING}=off turns the compiled kernels off."
    functions = _opened(path)
    if isinstance(functions, str):
        return functions
    highest = functions.regard_level()
    level = LEVELS.index(setting) if setting else highest
    if level > highest:
        raise RegardError(
            f"{SETTING}={setting}: this processor cannot run that variant of the kernels. Its highest is "
            f"{LEVELS[highest]}; {SETTING} may name it or a lower one of {', '.join(LEVELS)}."
        )
    return Library(functions, level)


@lru_cache
def _opened(path: Path) -> ctypes.CDLL | str:
    """The file as a library of the version that this package expects, or the reason why it is none."""
    if not path.exists():
        return f"The library of the kernels was not built ({path.name} is missing). {REMEDY}"
    try:
        functions = ctypes.CDLL(str(path))
        version = functions.regard_version()
    except (OSError, AttributeError) as error:
        return f"The library of the kernels cannot be loaded here ({error}). {REMEDY}"
    if version != VERSION:
        return f"The library of the kernels has version {version}, and this Regard needs version {VERSION}. {REMEDY}"
    return functions
