"""Statistics of weights, and the log-sum-exp of rows, by Triton kernels on a GPU: what they refuse, and their calls."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from regard.base.shapes import to_device
from regard.engine.kernel import KernelProblem
from regard.engine.kernel.engine import LARGEST_WIDTH, MASK_BYTES
from regard.engine.kernel.statistics import Parts
from regard.engine.kernel.structures import DTYPES
from regard.engine.problem import Problem
from regard.pieces.bias import is_shaw
from regard.pieces.data_masks import mask_mod
from regard.pieces.mask import Mask, leaves

#: Queries of a tile, and keys that are computed together; half as many keys if a vector has more bytes than WIDE.
QUERIES, KEYS, WIDE = 64, 64, 256
#: The largest k of `top_weights`: k numbers of each query stay in registers.
LARGEST_TOP = 64
#: The least side of a matrix product in Triton.
LEAST_SIDE = 16
#: The tensors of `Inputs` that the kernel computes with. The sink of a row is in its log-sum-exp.
KNOWN_INPUTS = {"query", "key", "value", "before", "after", "sink"}
#: The sizes of `blocks_of` that the log-sum-exp needs; the others are those of other statistics.
SCORE_BLOCKS = {"QUERIES", "KEYS", "WIDTH"}


def terms_of(problem: Problem) -> KernelProblem | None:
    """The problem as the kernel computes it, or None if it cannot.

    It can if the weights are a softmax of scaled dot products in float32 or less, with masks of this package, and a
    number for each distance j - i before and after one soft cap.
    """
    attention, query, key = problem.attention, problem.prepared.query, problem.prepared.key
    if problem.scale is None:
        return None
    if query.dtype != key.dtype or query.dtype not in DTYPES or query.shape[-1] > LARGEST_WIDTH:
        return None
    terms = KernelProblem(problem, QUERIES)
    if terms.unfit_bias() is not None or any(is_shaw(bias) for bias in attention.bias):
        return None
    return terms if _has_known_masks(attention.mask) and terms.mask_bytes <= MASK_BYTES else None


def _has_known_masks(mask: Mask | None) -> bool:
    """Whether all masks are of this package. Others may read tensors of the device, and tables are made on the host."""
    return all(type(leaf).__module__.startswith("regard.") and type(leaf) is not mask_mod for leaf in leaves(mask))


@cache
def is_installed() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def kernels() -> ModuleType:
    """The module of the kernels, which imports Triton."""
    return import_module("regard.engine.gpu.statistics_kernel")


def add_statistics(terms: KernelProblem, logsumexp: Tensor, wanted: Parts, queries: range | None = None) -> None:
    """Fill the tensors of `wanted` with the statistics of all weights, or of those of some queries.

    `logsumexp` (B, H, I) is that of the rows; the kernel reads inf for a row without keys, so that its weights are 0.
    """
    queries = range(terms.problem.sizes.I) if queries is None else queries
    scores = _scores(terms, logsumexp.float().masked_fill(logsumexp.isneginf(), torch.inf).contiguous())
    _launch("statistics_kernel", terms, queries, scores, _sums(wanted), blocks_of(terms, wanted))
    if "top_weights" in wanted:  # the kernel leaves them in no order
        order = wanted["top_weights"].sort(-1, descending=True)
        wanted["top_weights"].copy_(order.values)
        wanted["top_keys"].copy_(wanted["top_keys"].gather(-1, order.indices))


def logsumexp_of(terms: KernelProblem) -> Tensor:
    """The log-sum-exp of every row, (B, H, I) in float32; a sink is one more score of its row."""
    s, query = terms.problem.sizes, terms.problem.query
    logsumexp = torch.full((s.B, s.H, s.I), -torch.inf, dtype=torch.float32, device=query.device)
    blocks = {name: size for name, size in blocks_of(terms, {}).items() if name in SCORE_BLOCKS}
    _launch("logsumexp_kernel", terms, range(s.I), _scores(terms, None), logsumexp, blocks)
    return terms.problem.attention.normalizer.finish((logsumexp,))[0]


def _launch(
    name: str, terms: KernelProblem, queries: range, scores: tuple, result: tuple | Tensor, blocks: dict[str, int]
) -> None:
    """Run a kernel on the tiles of these queries: one program for each tile, head and batch entry.

    `name` is that of a function of statistics_kernel.py; `scores` and `result` are its first and its last argument.
    """
    s = terms.problem.sizes
    tiles = [n for n, tile in enumerate(terms.layout.tiles) if tile.first < queries.stop and tile.stop > queries.start]
    programs = len(tiles) * s.H * (1 if terms.layout.has_entries else s.B)
    if programs == 0:
        return
    sizes = kernels().KernelSizes(len(tiles), s.H, s.R, s.I, s.J, s.D, queries.start, queries.stop)
    with torch.cuda.device_of(terms.problem.query):  # Triton runs on the current device
        getattr(kernels(), name)[(programs,)](scores, _pattern(terms, tiles), sizes, result, **blocks)


def _scores(terms: KernelProblem, logsumexp: Tensor | None) -> tuple:
    """What the kernel computes scores from (`Scores`), and the log-sum-exp of the rows if it computes weights."""
    inputs, problem = terms.inputs(), terms.problem
    unknown = [name for name, t in inputs._asdict().items() if t is not None and name not in KNOWN_INPUTS]
    assert not unknown, f"the Triton kernel computes nothing with {unknown}"
    query, key = inputs.query, inputs.key
    before, after = (None if t is None else t.float().contiguous() for t in (inputs.before, inputs.after))
    strides = query.stride(), key.stride()
    return kernels().Scores(query, strides[0], key, strides[1], logsumexp, before, after, problem.scale, terms.cap)


def _pattern(terms: KernelProblem, tiles: list[int]) -> tuple:
    """The tables of the mask on the device, with some of the tiles, and the distances that it allows, [low, high).

    The kernel adds these ends to indices in 32 bits, so they are cut to the distances that the call has.
    """
    layout, device, s = terms.layout, terms.problem.query.device, terms.problem.sizes
    table, segments, allowed = layout.tables()
    head_stride = allowed.shape[1] if len(allowed) > 1 else 0
    tile_rows = table if len(tiles) == len(table) else table[tiles]
    flags = to_device(allowed, device) if layout.num_bytes else None
    ends = (min(max(end, -s.I - s.J), s.I + s.J) for end in (layout.low, layout.high))
    return kernels().Pattern(to_device(tile_rows, device), to_device(segments, device), flags, head_stride, *ends)


def _sums(wanted: Parts) -> tuple:
    """The tensors that the kernel adds to (`Sums`), None for those that are not wanted, and their sizes.

    Of `numbers`, the kernel takes one pair: numbers of keys that all heads share (B, 1, J), and their weighted sums.
    """
    rows, columns = wanted["cells"].shape[2:] if "cells" in wanted else (0, 0)
    numbers, mass = wanted["numbers"][0] if "numbers" in wanted else (None, None)
    flags = None if numbers is None else numbers[:, 0].float().contiguous()
    row_sums = wanted.get("entropy"), wanted.get("distance"), mass, flags
    others = (wanted.get(name) for name in ("received", "cells", "top_weights", "top_keys"))
    return kernels().Sums(*row_sums, *others, rows, columns, _num_links(wanted), wanted["shift"])


def _num_links(wanted: Parts) -> int:
    """The number of strongest links of a row, at least 1."""
    return wanted["top_weights"].shape[-1] if "top_weights" in wanted else 1


def blocks_of(terms: KernelProblem, wanted: Parts) -> dict[str, int]:
    """The sizes of blocks, powers of 2. They are constants of the Triton kernel: each combination is compiled once.

    A block of scores is QUERIES x KEYS, and a vector is padded to WIDTH channels. TOP is the room for the strongest
    links of a query. A block reaches into at most CELL_ROWS x CELL_COLUMNS cells of `wanted["cells"]`, whose `rows` x
    `columns` cells divide the map.
    """
    s, query = terms.problem.sizes, terms.problem.query
    width = max(LEAST_SIDE, _power_of_2(s.D))
    keys = KEYS if width * query.element_size() <= WIDE else KEYS // 2
    rows, columns = wanted["cells"].shape[2:] if "cells" in wanted else (0, 0)
    return {
        "QUERIES": QUERIES,
        "KEYS": keys,
        "WIDTH": width,
        "TOP": _power_of_2(_num_links(wanted)),
        "CELL_ROWS": _most_cells(QUERIES, rows, s.I),
        "CELL_COLUMNS": _most_cells(keys, columns, s.J),
    }


def _most_cells(tokens: int, num_cells: int, num_tokens: int) -> int:
    """The most cells that a block of consecutive tokens belongs to, rounded up to a side of a matrix product.

    `num_cells` cells divide `num_tokens` tokens.

    >>> _most_cells(64, 512, 8192), _most_cells(64, 8192, 8192), _most_cells(64, 3, 8192)
    (16, 64, 16)
    """
    return min(tokens, max(LEAST_SIDE, _power_of_2((tokens - 1) * num_cells // num_tokens + 2)))


def _power_of_2(number: int) -> int:
    """The least power of 2 that is not below a number.

    >>> _power_of_2(1), _power_of_2(9), _power_of_2(16)
    (1, 16, 16)
    """
    return 1 << (number - 1).bit_length()
