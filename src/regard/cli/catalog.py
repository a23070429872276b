"""`regard list`, `info` and `plan`: print the catalog, a mechanism with its weights, or how it would run at a size."""

from __future__ import annotations

import ast
import inspect
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import Tensor

from regard.attention import Mechanism
from regard.attention_output import plan
from regard.base.errors import RegardError, nearest
from regard.catalog import CatalogEntry, mechanism, mechanisms
from regard.engine.ring import Ring
from regard.maps import AttentionMap

#: Characters from weight 0 to the strongest weight.
SHADES = " ░▒▓█"
#: The character of a pair that the mask forbids.
FORBIDDEN = "·"
#: The most rows and columns. A cell is two characters wide, so it is about square.
LARGEST = 32


def drawn_size(weights: AttentionMap, columns: int) -> tuple[int, int]:
    """Numbers of rows and columns of weights that `columns` characters have room for."""
    largest = max(1, min(LARGEST, columns // 2))
    return min(weights.shape[2], largest), min(weights.shape[3], largest)


def draw(weights: AttentionMap, columns: int = 2 * LARGEST, batch: int = 0, head: int = 0) -> Text:
    """The first rows and columns of one head as shaded cells. A darker cell is a larger weight; a dot is forbidden."""
    size = drawn_size(weights, columns)
    tile = weights.tile(batch, head, slice(0, size[0]), slice(0, size[1]))[0, 0]
    allowed = _allowed(weights, batch, head, size)
    strongest = float(tile.max()) or 1.0
    picture = Text(no_wrap=True)
    for row, allowed_row in zip(tile.tolist(), allowed.tolist(), strict=True):
        pairs = zip(row, allowed_row, strict=True)
        cells = [_shade(weight / strongest) if is_allowed else FORBIDDEN + " " for weight, is_allowed in pairs]
        picture.append("".join(cells).rstrip(" ") + "\n")
    # a 25th of the strongest weight has the lightest shade
    picture.append(f"█ {strongest:.2f}   {SHADES[1]} {strongest / 25:.2f}   {FORBIDDEN} masked", "dim")
    return picture


def _shade(share: float) -> str:
    """The shade of the square root of a share, so that small weights are visible."""
    return SHADES[min(4, round(4 * max(share, 0.0) ** 0.5))] * 2


def _allowed(weights: AttentionMap, batch: int, head: int, size: tuple[int, int]) -> Tensor:
    """Whether each pair of the first rows and columns may attend, a boolean for each (`size`)."""
    mask = weights.attention.mask
    if mask is None:
        return torch.ones(size, dtype=torch.bool)
    head_map = weights.select(torch.tensor([batch]), torch.tensor([head]))
    grid = head_map.grid.tile(slice(0, size[0]), slice(0, size[1]))
    return mask.allowed(grid).expand(1, 1, *size)[0, 0]


#: Characters before each row of the picture of `regard info`.
INDENT = 2
#: Printed below the list: the meaning of the letters.
LETTERS = (
    "Costs: H query heads, G key/value heads, I queries, J keys (n if both are equal), D and E the widths of a "
    "head's keys and values, D' the width of keys if it differs from that of queries; words are parameters."
)


def list_mechanisms() -> None:
    """Print each mechanism with its summary, its cost, its family and year, and models that have it."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for name, entry in mechanisms().items():
        table.add_row(name, Text.assemble(entry.summary, "\n", (f"{entry.cost}\n{_origin(entry)}", "dim")))
    console = Console()
    console.print(table)
    console.print()
    console.print(Text(LETTERS, style="dim"))


def _origin(entry: CatalogEntry) -> str:
    """Family and year of a mechanism, and some models that have it."""
    models = f"; in {', '.join(entry.used_by)}" if entry.used_by else ""
    return f"{entry.family}, {entry.year}{models}"


def show_mechanism(name: str) -> None:
    """Print the entry of one mechanism, and its weights on a small random problem."""
    entry = mechanism(name)
    console = Console()
    console.print(Text(entry.name, style="bold"), Text(entry.summary), sep="\n")
    console.print()
    console.print(_facts(entry))
    attention, query, key, value = entry.example()
    with torch.no_grad():
        weights = attention(query, key, value, **entry.tensors(attention, query, key, value)).weights
    _, H, I, J = weights.shape
    console.print()
    width = console.width - INDENT
    size = drawn_size(weights, width)
    rows, columns = (f"{m}" if m == n else f"the first {m} of {n}" for m, n in zip(size, (I, J), strict=True))
    console.print(Text(f"Weights of head 0 of {H}: {rows} rows of queries, {columns} columns of random keys:"))
    console.print(Padding(draw(weights, width), (0, 0, 0, INDENT)))


def _facts(entry: CatalogEntry) -> Table:
    """The entry of a mechanism as a table without the facts that it lacks."""
    attention = entry.example()[0]
    facts = {
        "also called": ", ".join(entry.also_called),
        "formula": entry.formula,
        "paper": entry.paper,
        "family, year": f"{entry.family}, {entry.year}",
        "some models": ", ".join(entry.used_by),
        "parameters": entry.signature.split(" -> ")[0],
        "cost": entry.cost,
        "other libraries": entry.disagree,
        "small example": repr(attention),
    }
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        if fact:
            table.add_row(name, Text(fact))
    return table


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
    """Print the plan of the mechanism `name` for `length` queries and keys; with `ranks`, of training over ranks.

    Without `heads` and `key_heads` their numbers are those of the catalog. `head_dim` is the width of a head, `dtype` a
    name such as "float32", and `settings` are arguments of the mechanism, "key=value". `layout` is that of the ranks.
    """
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
    """Refuse a length whose queries, keys and values do not fit into memory.

    `bytes_per_token` are those of the queries. A plan over ranks has one number in place of each tensor, so only
    positions, 8 bytes each, take memory.
    """
    needed = length * (3 * bytes_per_token if ranks is None else 8)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else needed
    if needed > total:
        raise RegardError(
            f"plan: {length:,} tokens need {needed / 1e9:,.0f} GB for their inputs alone, and this machine has "
            f"{total / 1e9:,.0f} GB. Give a smaller --length, or divide it with --ranks."
        )


def build(
    entry: CatalogEntry, length: int, heads: int, key_heads: int, head_dim: int, settings: Sequence[str] = ()
) -> Mechanism:
    """Build the mechanism at a size. Its arguments of sizes are filled in; `settings` are further ones, "key=value".

    `length` is the number of queries and of keys, and `head_dim` the width of a head.
    """
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
    """The values of --set by name. Each is read as a literal of Python, such as 4 or [1, 2]; others are texts.

    `known` are the parameters of the mechanism.
    """
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
    """The number of key heads, with as many query heads per key head as in the example of the mechanism.

    1 if `heads` is no multiple of these query heads, and for a mechanism with one key head.
    """
    example_key_heads = entry.sizes.get("key_heads")
    if example_key_heads is None:
        return heads
    group_size = entry.sizes.get("heads", 4) // example_key_heads
    return 1 if example_key_heads == 1 or heads % group_size else heads // group_size
