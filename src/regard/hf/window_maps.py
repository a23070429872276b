"""Maps of Swin over the whole image: its attention runs in windows, which are shifted in every second block."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.hf.capture.model_inputs import ModelInputs
from regard.maps import AttentionMap, DenseMap

#: Kinds of models whose blocks are those of Swin.
KINDS = ("swin", "donut-swin")
BLOCK = re.compile(r"layers\.(\d+)\.blocks\.(\d+)\.")
#: The largest map of a layer, in bytes: a map over the whole image has as many weights as pairs of patches.
LARGEST = 64 << 20


def is_windowed(config: Any) -> bool:
    """Whether the maps of this model are those of windows."""
    return getattr(config, "model_type", "") in KINDS


def stage_size(inputs: ModelInputs, name: str) -> tuple[int, int]:
    """The rows and columns of the patches of a block: every stage has half of those of the stage before it."""
    config, pixels = inputs.config, inputs.get("pixel_values")
    size = config.image_size if pixels is None else pixels.shape[-2:]
    rows, columns = (-(-side // patch) for side, patch in zip(sides(size), sides(config.patch_size), strict=True))
    for _ in range(_block(name)[0]):
        rows, columns = -(-rows // 2), -(-columns // 2)
    return rows, columns


def window_tokens(rows: int, columns: int, window: int, shift: int) -> Tensor:
    """The patches of every window, (windows, window * window), as row * columns + column; the image is rolled first.

    >>> window_tokens(4, 4, 2, shift=1)[0].tolist()  # the image is rolled by one row and one column
    [5, 6, 9, 10]
    """
    rolled = torch.arange(rows * columns).view(rows, columns).roll((-shift, -shift), (0, 1))
    cut = rolled.view(rows // window, window, columns // window, window).transpose(1, 2)
    return cut.reshape(-1, window * window)


def whole_map(inputs: ModelInputs, name: str, weights: AttentionMap, batch: int = 0) -> AttentionMap:
    """The map of a block over all patches of one image, (1, H, N, N), from its map of windows (windows, H, W, W).

    The weight of two patches in different windows is 0. All others are copied from the map of windows.
    """
    rows, columns = stage_size(inputs, name)
    _, block = _block(name)
    window = min(rows, columns, inputs.config.window_size)
    shift = window // 2 if block % 2 and window < min(rows, columns) else 0  # an image of one window is not shifted
    _check(name, rows, columns, window, weights.shape[1])
    tokens = window_tokens(rows, columns, window, shift).to(weights.device)
    image_windows = slice(batch * len(tokens), (batch + 1) * len(tokens))
    window_weights = weights.dense()[image_windows].transpose(0, 1)
    whole = window_weights.new_zeros(weights.shape[1], rows * columns, rows * columns)
    whole[:, tokens[:, :, None], tokens[:, None, :]] = window_weights
    return DenseMap(whole[None], False)


def _check(name: str, rows: int, columns: int, window: int, num_heads: int) -> None:
    """Refuse images that are padded to whole windows, and maps above `LARGEST` bytes in float32.

    `name` is the module, for the error. `rows` and `columns` count patches, and a window has `window` on each side.
    """
    if rows % window or columns % window:
        raise RegardError(
            f"show: {name} has {rows} x {columns} patches, which are padded to whole windows of {window} x {window}. "
            "Padding gets weight too, and is no part of the image. Give an image whose sides are whole windows."
        )
    size = num_heads * (rows * columns) ** 2 * 4
    if size > LARGEST:
        raise RegardError(
            f"show: the map of {name} over {rows} x {columns} patches takes {size / 2**20:,.0f} MiB; at most "
            f"{LARGEST >> 20} are shown. Watch later stages, which have fewer patches: "
            "watch(model, layers=['encoder.layers.1.*', 'encoder.layers.2.*', 'encoder.layers.3.*'])."
        )


def _block(name: str) -> tuple[int, int]:
    """The stage and the block of a module path."""
    match = BLOCK.search(f"{name}.")
    if match is None:
        raise RegardError(f"show: {name} is no block of Swin, so its place in the image is not known.")
    return int(match[1]), int(match[2])


def sides(size: Any) -> tuple[int, int]:
    """Height and width of an image or a patch, from one number or two."""
    return (int(size), int(size)) if isinstance(size, int | float) else (int(size[0]), int(size[1]))
