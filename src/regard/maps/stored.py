"""`save_map` and `load_map`: maps as files, with pieces as JSON and tensors as safetensors. Nothing is pickled.

A file has prepared queries and keys and the row statistics, so any tile can be computed from it. Maps whose pieces
cannot be named are stored weight by weight.
The header names the pieces: `{"piece": "regard.pieces.mask:window", "fields": {"size": 256}}`.
"""

from __future__ import annotations

import json
import math
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Attention, Prepared
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.spans import Spans
from regard.base.whole_files import whole_file
from regard.maps.attention_map import AttentionMap
from regard.maps.changed_map import QuerySample
from regard.maps.dense_map import DenseMap
from regard.maps.reductions import KeyTotals
from regard.maps.scored_map import ScoredMap
from regard.pieces.bias import Bias
from regard.pieces.contents import kind_of
from regard.pieces.feature_maps import FeatureMap
from regard.pieces.grid import Grid
from regard.pieces.mask import Mask
from regard.pieces.normalizer import Normalizer
from regard.pieces.position import Encoding, Scaling
from regard.pieces.score import Score

#: The version of the file format; files of later versions are refused.
VERSION = 3
#: Old names of modules, classes and fields in saved files -> new names.
RENAMED: dict[str, str] = {
    "regard.pieces.kernel": "regard.pieces.feature_maps",
    "regard.pieces.mask_data": "regard.pieces.data_masks",
    "regard.spans": "regard.base.spans",
    "KernelScore": "FeatureScore",
    "width": "head_dim",
    "query_width": "query_dim",
    "rotated_width": "rotary_dim",
}
#: A file may name objects of these classes, if they are defined in this package.
KINDS = (Score, Bias, Mask, Normalizer, Encoding, Scaling, FeatureMap, Spans)
#: The only module of another package that pieces contain.
LINEAR = "torch.nn:Linear"
SLOTS = ("score", "position", "bias", "mask", "normalizer")
#: The score of a map that versions 1 and 2 stored weight by weight: its queries are the weights.
TABLE = {"piece": "regard.maps.stored:Table", "fields": {}}
#: What a damaged file raises while its parts are read, and put together.
DAMAGE = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ImportError,
    RecursionError,
    RuntimeError,
    ArithmeticError,
    MemoryError,
)
#: The largest map, in bytes, that is stored weight by weight if its pieces cannot be named.
LARGEST_TABLE = 256 << 20


def save_map(path: str | os.PathLike[str], weights: AttentionMap) -> None:
    """Write a map to a safetensors file, completely or not at all; a map with a mask function is written as weights."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    try:
        header, tensors = _to_header(weights)
    except _Unnamed as reason:
        header, tensors = _of_weights(weights, reason)
    metadata = {"format": "regard map", "version": str(VERSION), "map": json.dumps(header, allow_nan=False)}
    try:
        with whole_file(path, "save_map") as draft:
            save_file(tensors, draft, metadata)
    except SafetensorError as error:  # such as a full disk
        raise RegardError(f"save_map: {path} cannot be written: {error}.") from error


def load_map(path: str | os.PathLike[str]) -> AttentionMap:
    """The map of a file that `save_map` wrote, on the CPU.

    >>> import tempfile, torch, regard as rg
    >>> seen = rg.Attention(mask=rg.causal())(*(torch.randn(1, 2, 5, 4) for _ in range(3)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_map(folder + "/map.safetensors", seen.weights)
    ...     again = load_map(folder + "/map.safetensors")
    >>> torch.equal(again[0, 1, 3], seen.weights[0, 1, 3])
    True
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        remedy = "It is truncated or damaged. Copy it again, or save the map again."
        missing = isinstance(error, FileNotFoundError)
        raise RegardError(f"load_map: {path} cannot be read: {error}.{'' if missing else f' {remedy}'}") from None
    if about.get("format") != "regard map" or about.get("version", "") not in [str(n) for n in range(1, VERSION + 1)]:
        raise RegardError(f"load_map: {path} is no map of version {VERSION} or earlier. Write maps with save_map.")
    try:
        weights = _from_header(json.loads(about["map"]), tensors)
        _check_readable(weights)
    except DAMAGE as error:
        raise RegardError(f"load_map: {path} is damaged: {error or type(error).__name__}.") from None
    return weights


@torch.no_grad()
def _check_readable(weights: AttentionMap) -> None:
    """Raise the error of a map whose parts do not fit each other: read its first and its last row in two ways."""
    if isinstance(weights, ScoredMap):
        (B, H, I, _), J, grid = weights._prepared.query.shape, weights._prepared.key.shape[2], weights.grid
        if (grid.batch.shape, grid.head.shape, grid.query.shape, grid.key.shape) != ((B,), (H,), (I,), (J,)):
            raise ValueError("the positions of its queries and keys do not fit its tensors")
        if any(number.shape[:3] != (B, H, I) for number in weights.row_statistic):
            raise ValueError("the numbers of its rows do not fit its tensors")
    if 0 not in weights.shape:
        rows = torch.tensor(sorted({0, weights.shape[2] - 1}))
        weights.tile(rows=rows)
        QuerySample(weights, rows).summarize(KeyTotals())


class _Unnamed(Exception):
    """A piece that cannot be written as JSON and tensors."""


def _of_weights(weights: AttentionMap, reason: Exception) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a map that is stored weight by weight, if it is small; `reason` says why it is."""
    size = math.prod(weights.shape) * 4
    if size > LARGEST_TABLE:
        raise RegardError(
            f"save_map: {reason}, and the weights take {size / 2**20:,.0f} MiB. Use masks and pieces of regard, "
            "regard.mask_tensor(tensor) for instance, or a shorter text."
        )
    tensors: dict[str, Tensor] = {}
    return {"dense": _encode(weights.dense().float(), tensors), "is_signed": weights.is_signed}, tensors


def _to_header(weights: AttentionMap) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header of a map of queries and keys, and the tensors that it names."""
    if type(weights) is not ScoredMap:
        raise _Unnamed(f"a {type(weights).__name__} computes its weights differently")
    prepared, grid, positions, tensors = weights._prepared, weights.grid, weights.positions, {}
    parts = (prepared.query, prepared.key, prepared.rows, prepared.cols, weights.row_statistic)
    where = (grid.batch, grid.head, grid.query, grid.key, positions.start, positions.keys)
    header = {
        "pieces": {slot: _encode(getattr(weights.attention, slot), tensors) for slot in SLOTS},
        "prepared": [_encode(part, tensors) for part in parts],
        "where": [_encode(part, tensors) for part in where],
    }
    return header, tensors


def _from_header(header: dict[str, Any], tensors: dict[str, Tensor]) -> AttentionMap:
    """The map of a file, from what `_to_header` or `_of_weights` wrote in this or an earlier version."""
    if "dense" in header:
        return DenseMap(_decode(header["dense"], tensors), bool(header["is_signed"]))
    if header["pieces"]["score"] == TABLE:
        # the normalizer of signed weights was the class UnchangedSigned, which no longer exists
        is_signed = header["pieces"]["normalizer"]["piece"].endswith("Signed")
        return DenseMap(_decode(header["prepared"][0], tensors), is_signed)
    pieces = {slot: _decode(header["pieces"][slot], tensors) for slot in SLOTS}
    query, key, rows, cols, row_statistic = (_decode(part, tensors) for part in header["prepared"])
    if not (isinstance(query, Tensor) and isinstance(key, Tensor)):
        raise ValueError("the queries or the keys are missing")
    *axes, start, keys = (_decode(part, tensors) for part in header["where"])
    attention = Attention(pieces.pop("score"), **pieces).eval()
    return ScoredMap(attention, Prepared(query, key, rows, cols), Positions(start, keys), Grid(*axes), row_statistic)


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A field of a map as JSON. Its tensors are added to `tensors`, and the JSON has their names.

    A piece is its class and its public fields; `_Unnamed` is raised for objects of other classes. A linear layer is the
    one class of torch, as a part of pieces.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        name = f"tensor_{len(tensors)}"
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, list | tuple):
        return [_encode(each, tensors) for each in value]
    kind = type(value)
    if kind is nn.Linear or (isinstance(value, KINDS) and kind.__module__.startswith("regard.")):
        inside = {name: _encode(each, tensors) for name, each in kind_of(kind).parts(value).items() if name[0] != "_"}
        return {"piece": LINEAR if kind is nn.Linear else f"{kind.__module__}:{kind.__name__}", "fields": inside}
    raise _Unnamed(f"{kind.__name__} cannot be stored by name")


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """What `_encode` wrote; lists are tuples."""
    if isinstance(value, list):
        return tuple(_decode(each, tensors) for each in value)
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "float" in value:
        return float(value["float"])
    inside = {str(RENAMED.get(name, name)): _decode(each, tensors) for name, each in value["fields"].items()}
    return _build(value["piece"], inside)


def _build(path: str, inside: dict[str, Any]) -> Any:
    """A piece of this package from its name and fields; a file can name no other class.

    `path` is "module:class", and `inside` are the fields by name.
    """
    module, _, name = (RENAMED.get(part, part) for part in path.partition(":"))
    kind = getattr(import_module(module), name, None) if module.startswith("regard.") else None
    kind = nn.Linear if path == LINEAR else kind
    if not (kind is nn.Linear or (isinstance(kind, type) and issubclass(kind, KINDS))):
        raise ValueError(f"there is no piece {path}")
    piece: Any = object.__new__(kind)
    if isinstance(piece, nn.Module):
        nn.Module.__init__(piece)
        for name, each in inside.items():
            piece.register_buffer(name, each) if isinstance(each, Tensor) else setattr(piece, name, each)
        return piece
    for name, each in inside.items():
        object.__setattr__(piece, name, each)
    return piece
