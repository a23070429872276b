"""Finds where the patches of images and videos are among the tokens of a vision or image-text model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.hf.capture.model_inputs import ModelInputs
from regard.hf.window_maps import is_windowed, sides, stage_size
from regard.stats.patch_roles import PatchGrid

#: Models whose attention sees the patches in another order or in parts, and why there is no picture.
WITHOUT_GRID = {
    "qwen2_5_vl": "its vision tower sorts the patches into windows",
    "qwen2_5_omni": "its vision tower sorts the patches into windows",
    "timesformer": "it attends over time and over space in turns, so a map holds only a part of the patches",
    "segformer": "its keys are merged patches",
    "pvt": "its keys are merged patches",
}


def image_grids(
    inputs: ModelInputs, name: str, num_keys: int, given: tuple[int, int] | PatchGrid | None = None, batch: int = 0
) -> list[PatchGrid]:
    """The grids of all images among the keys of a map; none if the keys are a text without images.

    `name` is the module path. `given` is (rows, columns), or a `PatchGrid` for layouts that no rule finds. In a model
    of images and texts it is the grid of the image tokens in the text; the vision tower has its own.
    """
    is_tower_of_text = is_vision(name) and inputs.get("input_ids") is not None
    if isinstance(given, PatchGrid) and not is_tower_of_text:
        return [_checked(given, name, num_keys)]
    given = None if is_tower_of_text or isinstance(given, PatchGrid) else given
    ids = _ids(inputs, num_keys, batch)
    if ids is not None and not is_vision(name):
        return _grids_in_text(inputs, ids, given)
    return _grids_of_tower(inputs, name, num_keys, given)


def leading_names(inputs: ModelInputs, grid: PatchGrid) -> list[str]:
    """Names of the tokens before the patches of a vision tower: the class token, registers."""
    registers = getattr(vision_config(inputs.config), "num_register_tokens", 0) or 0
    others = grid.start - registers
    first = ["[CLS]", "[DIST]"][:others] if 0 <= others <= 2 else [f"[{n}]" for n in range(others)]
    return [*first, *(f"[REG {n + 1}]" for n in range(registers))][: grid.start]


def patch_names(grid: PatchGrid) -> list[str]:
    """`r2 c5`: row 2, column 5, counted from 0; with `f1` for the frame of a video."""
    frames = (f"f{frame} " if grid.frames > 1 else "" for frame in range(grid.frames))
    return [f"{frame}r{row} c{col}" for frame in frames for row in range(grid.rows) for col in range(grid.columns)]


def vision_config(config: Any) -> Any:
    """The part of a configuration that describes the patches."""
    for name in ("vision_config", "encoder"):
        part = getattr(config, name, None)
        if part is not None and (hasattr(part, "patch_size") or hasattr(part, "tubelet_size")):
            return part
    return config


def is_vision(name: str) -> bool:
    """Whether a module path names the vision tower of a model that also reads text."""
    return any(part in name.lower() for part in ("vision", "visual", "image_encoder"))


def _ids(inputs: ModelInputs, num_keys: int, batch: int) -> Tensor | None:
    """The tokens (n,) of a text that the keys of a map contain; None if there is no such text."""
    ids = inputs.get("input_ids")
    if ids is None or ids.ndim != 2 or ids.shape[1] > num_keys or batch >= len(ids):
        return None
    return ids[batch]


def _checked(grid: PatchGrid, name: str, num_keys: int) -> PatchGrid:
    """The grid; a `RegardError` if a patch is behind the last key."""
    if max(grid.places) >= num_keys:
        raise RegardError(
            f"show(grid={grid}): the last patch is token {max(grid.places)}, and the map of {name} has {num_keys} keys."
        )
    return grid


# The images inside a text


def _grids_in_text(inputs: ModelInputs, ids: Tensor, given: tuple[int, int] | None) -> list[PatchGrid]:
    """The grids of the images and videos among the tokens `ids` (n,) of a text, in the order of the text.

    `given` is the (rows, columns) that the user gave for each, or None.
    """
    grids = []
    for kind in ("image", "video"):
        places = _places(inputs.config, ids, kind)
        if places:
            grids += list(_cut(places, _sizes_in_text(inputs, kind, places, given), kind))
    return sorted(grids, key=lambda grid: grid.places[0])


def _places(config: Any, ids: Tensor, kind: str) -> list[int]:
    """The places of the tokens of images or videos in a text."""
    number = getattr(config, f"{kind}_token_id", None)
    if number is None:
        number = getattr(config, f"{kind}_token_index", None)
    return [] if number is None else (ids == number).nonzero().flatten().tolist()


def _sizes_in_text(
    inputs: ModelInputs, kind: str, places: Sequence[int], given: tuple[int, int] | None
) -> list[tuple[int, int, int]]:
    """(frames, rows, columns) of the tokens of every image of a text.

    `kind` is "image" or "video". `places` are the tokens of all images, and `given` is the (rows, columns) of each.
    Else the inputs tell the sizes: `image_grid_thw` counts patches, of which merge x merge become one token.
    """
    thw = inputs.get(f"{kind}_grid_thw")
    if thw is not None:
        merge = getattr(vision_config(inputs.config), "spatial_merge_size", 1)
        return [(t, h // merge, w // merge) for t, h, w in thw.tolist()]
    if given is not None:
        count, rest = divmod(len(places), given[0] * given[1])
        if rest or not count:
            raise _wrong_grid(given, len(places), "image tokens in the text")
        return [(1, *given)] * count
    pixels = inputs.get("pixel_values")
    count = len(pixels) if pixels is not None and pixels.ndim == 4 else 1
    size = _pooled(inputs, len(places) // count) if len(places) % count == 0 else None
    if size is None:
        raise RegardError(
            f"show: the text has {len(places)} image tokens for {count} image{'s' * (count > 1)} of "
            f"{_patches_said(inputs)}, so the rows and columns of the tokens are not known (a model may cut an image "
            "into tiles, or add tokens between rows). Give grid=(rows, columns) of the tokens of one image, or a "
            "regard.viewer.PatchGrid with the token of every patch."
        )
    return [(1, *size)] * count


def _pooled(inputs: ModelInputs, num_tokens: int) -> tuple[int, int] | None:
    """The rows and columns of one image's tokens: the patches, or k x k patches in one token; None if neither fits."""
    patches = _patches(inputs)
    if patches is None or not num_tokens:
        return None
    _, rows, columns = patches
    if num_tokens == rows * columns + 1:  # a strategy that keeps the class token
        return rows, columns
    pooled = math.isqrt(rows * columns // num_tokens)
    fits = pooled >= 1 and rows % pooled == 0 and columns % pooled == 0
    size = (rows // pooled, columns // pooled) if fits else (0, 0)
    return size if size[0] * size[1] == num_tokens else None


def _cut(places: list[int], sizes: Sequence[tuple[int, int, int]], kind: str) -> Iterator[PatchGrid]:
    """The tokens of each image, in order. Of an image with one token more, the first is the class token.

    `places` are the indices of all tokens of images in the text, `sizes` the (frames, rows, columns) of each image, and
    `kind` is "image" or "video", for the error.
    """
    needed = sum(math.prod(size) for size in sizes)
    extra = 1 if len(places) == needed + len(sizes) else 0
    if len(places) != needed + extra * len(sizes):
        raise RegardError(
            f"show: the text has {len(places)} {kind} tokens, and its {kind}s of "
            f"{', '.join('x'.join(map(str, size)) for size in sizes)} (frames x rows x columns) need {needed}. "
            "Watch the call that read the whole prompt."
        )
    start = 0
    for frames, rows, columns in sizes:
        image_places = places[start + extra : start + extra + frames * rows * columns]
        start += extra + len(image_places)
        if image_places[-1] - image_places[0] == len(image_places) - 1:
            yield PatchGrid(rows, columns, image_places[0], frames)
        else:
            yield PatchGrid(rows, columns, image_places[0], frames, tuple(image_places))


# The vision tower


def _grids_of_tower(inputs: ModelInputs, name: str, num_keys: int, given: tuple[int, int] | None) -> list[PatchGrid]:
    """The grid of the patches of a vision tower, whose keys are leading tokens, the patches, and detection tokens.

    In this order: windows of Swin, the sizes of images that the inputs tell, the `given` (rows, columns), and the size
    of the image over that of a patch. If the number of keys does not fit, there is no picture.
    """
    kind = getattr(inputs.config, "model_type", "")
    if kind in WITHOUT_GRID and given is None:
        raise RegardError(f"show: there is no picture of {name}: {WITHOUT_GRID[kind]}.")
    if is_windowed(inputs.config) and given is None:
        return [PatchGrid(*stage_size(inputs, name))]
    thw = inputs.get("image_grid_thw")
    thw = inputs.get("video_grid_thw") if thw is None else thw
    if thw is not None:
        if len(thw) != 1:
            raise RegardError(f"show: {name} read {len(thw)} images; its picture needs a call with one image.")
        return [_merged_order(inputs, name, num_keys, *thw[0].tolist())]
    if given is not None:
        return [_given_grid(vision_config(inputs.config), name, num_keys, given)]
    return [_grid_of_patches(inputs, name, num_keys)]


def _given_grid(config: Any, name: str, num_keys: int, given: tuple[int, int]) -> PatchGrid:
    """The grid of (rows, columns) that a user gave; before the patches stand the tokens that the kind of model has.

    If the kind is not known, there may be one such token or none.
    """
    extra = _specials(config)
    leading = num_keys - given[0] * given[1] - getattr(config, "num_detection_tokens", 0)
    if leading != extra if extra is not None else leading not in (0, 1):
        raise _wrong_grid(given, num_keys - (extra or 0), f"patches in the map of {name}", extra or 0)
    return PatchGrid(*given, start=leading)


def _grid_of_patches(inputs: ModelInputs, name: str, num_keys: int) -> PatchGrid:
    """The grid of an image by its size and that of a patch; up to 8 tokens may stand before the patches.

    `name` is the path of a module of the tower, for errors, here and below.
    """
    config = vision_config(inputs.config)
    extra, found = _specials(config), _patches(inputs)
    if found is None:
        raise RegardError(
            f"show: the configuration of the model does not name the size of its patches, so the picture of {name} "
            f"needs grid=(rows, columns); its map has {num_keys} keys."
        )
    frames, rows, columns = found
    leading = num_keys - frames * rows * columns - getattr(config, "num_detection_tokens", 0)
    if leading < 0 or (extra is not None and leading != extra) or leading > 8:
        raise RegardError(
            f"show: the map of {name} has {num_keys} keys, and {_patches_said(inputs)} with {extra or 0} other tokens "
            "need another number: the model may drop, merge or move patches. Give grid=(rows, columns), or a "
            "regard.viewer.PatchGrid with the token of every patch."
        )
    return PatchGrid(rows, columns, leading, frames)


def _specials(config: Any) -> int | None:
    """The number of tokens before the patches: class tokens by the kind of model, and registers; None if not known."""
    registers = getattr(config, "num_register_tokens", 0) or 0
    kinds = {"vit": 1, "deit": 2, "dinov2": 1, "dinov2_with_registers": 1, "dinov3_vit": 1, "clip_vision_model": 1}
    kinds |= {"siglip_vision_model": 0, "siglip": 0, "videomae": 0, "vivit": 1, "beit": 1, "yolos": 1, "clip": 1}
    before = kinds.get(getattr(config, "model_type", ""))
    return None if before is None else before + registers


def _patches(inputs: ModelInputs) -> tuple[int, int, int] | None:
    """(frames, rows, columns) of the patches: the size of the image over that of a patch; None if one is unknown."""
    config = vision_config(inputs.config)
    tubelet = getattr(config, "tubelet_size", None)
    patch = getattr(config, "patch_size", None)
    if isinstance(tubelet, list | tuple):
        tubelet, *patch = tubelet
    if patch is None:
        return None
    height, width = sides(patch)
    size = _image_size(inputs, config)
    if size is None:
        return None
    frames = 1 if tubelet is None else _num_frames(inputs, config) // tubelet
    return frames, size[0] // height, size[1] // width


def _image_size(inputs: ModelInputs, config: Any) -> tuple[int, int] | None:
    """Height and width in pixels of the image that the model read, or else of those that it is made for."""
    pixels = inputs.get("pixel_values")
    if pixels is not None and pixels.ndim >= 4:
        return pixels.shape[-2], pixels.shape[-1]
    size = getattr(config, "image_size", None)
    return None if size is None else sides(size)


def _num_frames(inputs: ModelInputs, config: Any) -> int:
    pixels = inputs.get("pixel_values")
    return pixels.shape[1] if pixels is not None and pixels.ndim == 5 else config.num_frames


def _patches_said(inputs: ModelInputs) -> str:
    """The number of patches in words, for errors."""
    found = _patches(inputs)
    return "patches of unknown size" if found is None else f"{' x '.join(map(str, found[1:]))} patches"


def _merged_order(inputs: ModelInputs, name: str, num_keys: int, t: int, h: int, w: int) -> PatchGrid:
    """The grid of a vision tower of Qwen-VL: patches that one token of the text merges follow each other.

    The image has `t` frames of `h` x `w` patches. The token of each patch is listed row by row.
    """
    if t * h * w != num_keys:
        raise RegardError(
            f"show: the map of {name} has {num_keys} keys, and the image has {t} x {h} x {w} patches; a call with one "
            "image and one frame has them all."
        )
    merge = getattr(vision_config(inputs.config), "spatial_merge_size", 1)
    tokens = torch.arange(num_keys).view(t, h // merge, w // merge, merge, merge).transpose(2, 3).flatten()
    return PatchGrid(h, w, 0, t, tuple(tokens.tolist()))


def _wrong_grid(given: tuple[int, int], num_patches: int, where: str, specials: int = 0) -> RegardError:
    """The error for rows and columns that do not make `num_patches`, with the most square ones that do.

    `where` says which patches these are, and beside them are `specials` other tokens.
    """
    rows, columns = given
    pairs = [(n, num_patches // n) for n in range(1, num_patches + 1) if num_patches % n == 0]
    likely = sorted(pairs, key=lambda pair: max(pair) / min(pair))[:3]
    others = " or ".join(map(str, likely))
    beside = f" and {specials} other token{'s' * (specials > 1)}" if specials else ""
    return RegardError(
        f"show(grid=({rows}, {columns})): {rows} x {columns} are {rows * columns} patches, but there are "
        f"{num_patches} {where}{beside}. rows x columns must be the number of patches, such as {others}."
    )
