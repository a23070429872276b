"""`regard plan`: prints the plan of a mechanism of the catalog at a given size."""

from __future__ import annotations

import ast
import inspect
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from regard.attention import Attention
from regard.attention_output import plan
from regard.base.errors import RegardError, nearest
from regard.catalog import CatalogEntry, mechanism
from regard.composites import Composite
from regard.engine.ring import Ring

DTYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: Parameters of mechanisms that are filled in from the sizes of the problem.
FROM_HEADS = ("heads", "num_heads")
FROM_KEY_HEADS = ("key_heads", "num_key_value_heads")
FROM_WIDTH = ("query_dim", "key_dim", "value_dim", "head_dim")
FROM_LENGTH = ("length", "max_length", "queries", "keys", "num_queries", "num_keys", "num_positions")


def _sides(length: int) -> tuple[int, int]:
    """The sides of a picture of so many tokens, as square as possible."""
    rows = next(rows for rows in range(math.isqrt(length), 0, -1) if length % rows == 0) if length else 1
    return rows, max(length // rows, 1)


def _halves(length: int) -> list[int]:
    """Two parts of a length; one if it is 1."""
    return [part for part in (length - length // 2, length // 2) if part]


#: Values for required parameters that are no size: from the length and the width.
ARRANGEMENTS: dict[str, Callable[[int, int], Any]] = {
    "parents": lambda n, head_dim: [(token - 1) // 2 for token in range(n)],  # a binary tree, by depth
    "prefix": lambda n, head_dim: n // 2,
    "lengths": lambda n, head_dim: _halves(n - n // 2),
    "shape": lambda n, head_dim: _sides(n),
    "tile": lambda n, head_dim: [math.gcd(side, 8) for side in _sides(n)],
    "size": lambda n, head_dim: [min(3, side // math.gcd(side, 8)) for side in _sides(n)],
    "factor": lambda n, head_dim: 4.0,
    "trained_length": lambda n, head_dim: max(n // 4, 1),
    "factors": lambda n, head_dim: [4.0] * (head_dim // 2),
    "coordinates": lambda n, head_dim: torch.cartesian_prod(*map(torch.arange, _sides(n))).T,  # a picture
    "sections": lambda n, head_dim: [head_dim // 2 - head_dim // 4, head_dim // 4],
}


def print_plan(
    name: str,
    length: int,
    heads: int | None,
    key_heads: int | None,
    head_dim: int,
    dtype: str,
    settings: Sequence[str],
    ranks: int | None = None,
    layout: str = "contiguous",
) -> None:
    """Print the plan of the mechanism `name` for `length` queries and keys; with `ranks`, of training over ranks."""
    entry = mechanism(name)
    if dtype not in DTYPES:
        raise RegardError(f"plan: there is no dtype {dtype!r}. {nearest(dtype, DTYPES)}")
    heads = heads or entry.sizes.get("heads", 8)
    key_heads = key_heads or _key_heads(entry, heads)
    _check_memory(length, heads * head_dim * DTYPES[dtype].itemsize, ranks)
    attention = build(entry, length, heads, key_heads, head_dim, settings).to(DTYPES[dtype])
    if ranks is not None:
        zero = torch.zeros((), dtype=DTYPES[dtype], requires_grad=True)  # the plan needs only sizes
        query, key = (zero.expand(1, count, length, head_dim) for count in (heads, key_heads))
        shares = plan(query, key, key, attention=attention, engine=Ring(ranks=ranks, layout=layout))
        return Console().print(Text(str(shares)), soft_wrap=True)
    query = torch.zeros(1, heads, length, head_dim, dtype=DTYPES[dtype])
    key = query if key_heads == heads else torch.zeros(1, key_heads, length, head_dim, dtype=DTYPES[dtype])
    with torch.no_grad():
        tensors = entry.tensors(attention, query, key, key)
        Console().print(Text(str(plan(query, key, key, attention=attention, **tensors))))


def _check_memory(length: int, bytes_per_token: int, ranks: int | None) -> None:
    """Raise an error if queries, keys and values (over ranks: only positions) do not fit into memory."""
    needed = length * (3 * bytes_per_token if ranks is None else 8)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else needed
    if needed > total:
        raise RegardError(
            f"plan: {length:,} tokens need {needed / 1e9:,.0f} GB for their inputs alone, and this machine has "
            f"{total / 1e9:,.0f} GB. Give a smaller --length, or divide it with --ranks."
        )


def build(
    entry: CatalogEntry, length: int, heads: int, key_heads: int, head_dim: int, settings: Sequence[str] = ()
) -> Attention | Composite:
    """Build the mechanism at a size. Sizes are filled in; `settings` are "key=value"."""
    sizes = {
        **dict.fromkeys(FROM_HEADS, heads),
        **dict.fromkeys(FROM_KEY_HEADS, key_heads),
        **dict.fromkeys(FROM_WIDTH, head_dim),
        **dict.fromkeys(FROM_LENGTH, length),
    }
    parameters = inspect.signature(entry.build).parameters
    required = [name for name, p in parameters.items() if p.default is inspect.Parameter.empty]
    arranged = {name: make(length, head_dim) for name, make in ARRANGEMENTS.items() if name in required}
    arguments: dict[str, Any] = arranged | {name: sizes[name] for name in parameters if name in sizes}
    arguments |= _settings(entry, settings, list(parameters))
    missing = [name for name in required if name not in arguments]
    if missing:
        hint = " ".join(f"--set {name}={entry.tiny.get(name, '...')}" for name in missing)
        raise RegardError(f"plan: {entry.signature} needs {', '.join(missing)}. For example: {hint}")
    try:
        return entry.build(**arguments)
    except RegardError as error:
        options = "".join(f" --set {setting}" for setting in settings)
        raise RegardError(f"plan {entry.name}{options}: {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise RegardError(f"plan: {entry.signature} does not take {arguments}: {error}") from error


def _settings(entry: CatalogEntry, settings: Sequence[str], known: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise RegardError(f"plan: --set takes KEY=VALUE, got {setting!r}.")
        if name not in known:
            raise RegardError(f"plan: {entry.name} has no parameter {name!r}. {nearest(name, known)}")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = text
    return values


def _key_heads(entry: CatalogEntry, heads: int) -> int:
    """The number of key heads, with as many query heads per key head as in the example of the mechanism."""
    example_key_heads = entry.sizes.get("key_heads")
    if example_key_heads is None:
        return heads
    group_size = entry.sizes.get("heads", 4) // example_key_heads
    return 1 if example_key_heads == 1 or heads % group_size else heads // group_size
