"""The texts of a page for a model that read an image, a video or a sound: one text for each size of map.

`picture` is what the page needs to show weights over an image, the frames of a video, or a spectrogram.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from regard.base.errors import MissingPackage, RegardError
from regard.hf.capture.model_inputs import ModelInputs
from regard.hf.image_grids import image_grids, is_vision, leading_names, patch_names, vision_config
from regard.hf.window_maps import is_windowed, whole_map
from regard.maps import AttentionMap
from regard.stats import PatchGrid, patch_roles
from regard.stats.roles import RoleTable
from regard.stats.text_reading import TextReading
from regard.viewer.sheet import Sheet, page_reductions

if TYPE_CHECKING:
    from regard.hf.capture.model_maps import WatchedAttention

#: The longest side of one image of the page, and of a frame of a video, in pixels.
LONGEST, FRAME = 768, 320
#: The quality of a JPEG, of 100.
QUALITY = 88
#: What an image may be, for errors.
RULE = (
    "An image is a PIL image, an array (height, width, 3) or (height, width), or a tensor that may also be "
    "(3, height, width), with values 0 to 255, or 0 to 1 if they are floats."
)


def as_bytes(image: Any) -> np.ndarray:
    """An image as an array (height, width, 3) of bytes.

    >>> import torch
    >>> as_bytes(np.ones((2, 4))).shape, as_bytes(torch.zeros(3, 2, 4)).max()
    ((2, 4, 3), np.uint8(0))
    """
    if hasattr(image, "convert"):  # a PIL image
        return np.asarray(image.convert("RGB"))
    if not isinstance(image, np.ndarray | Tensor):
        raise RegardError(f"show(image={type(image).__name__}): {RULE}")
    if isinstance(image, np.ndarray):
        array = image
    else:
        array = (image.float() if image.is_floating_point() else image).detach().cpu().numpy()
    if array.ndim == 3 and isinstance(image, Tensor) and array.shape[0] in (1, 3) and array.shape[2] not in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        raise RegardError(f"show(image=...): the image has shape {tuple(image.shape)}. {RULE}")
    return _to_bytes(np.broadcast_to(array[:, :, :3], (*array.shape[:2], 3)))


def _to_bytes(array: np.ndarray) -> np.ndarray:
    """The values of an image (height, width, 3) as bytes 0 to 255. Values of at most 1 are shares, except integers."""
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 255):
        raise RegardError(f"show(image=...): the values of the image reach from {low:.4g} to {high:.4g}. {RULE}")
    is_share = high <= 1 and not np.issubdtype(array.dtype, np.integer)
    return (array * (255 if is_share else 1)).round().astype(np.uint8)


def stretched(pixels: Tensor) -> np.ndarray:
    """Pixel values (3, height, width) as a model reads them, stretched to bytes: their normalization is not known."""
    pixels = pixels.detach().float().cpu().nan_to_num()
    low, high = pixels.min(), pixels.max()
    shares = ((pixels - low) / (high - low).clamp_min(1e-12)).expand(3, *pixels.shape[1:])
    return as_bytes(shares)


def data_url(array: np.ndarray, longest: int = LONGEST, lossless: bool = False) -> str:
    """An array (height, width, 3) of bytes as a data URL: JPEG, or PNG if `lossless`; `longest` bounds its sides."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise MissingPackage("show", "pillow", "view") from None
    picture = Image.fromarray(array)
    picture.thumbnail((longest, longest), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    kind = "png" if lossless else "jpeg"
    picture.save(buffer, kind, **({} if lossless else {"quality": QUALITY}))
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def as_list(images: Any) -> list[np.ndarray]:
    """One image, a list of images, or an array of frames (frames, height, width, 3), as arrays of bytes."""
    if isinstance(images, Sequence) and not isinstance(images, str | bytes):
        return [as_bytes(image) for image in images]
    if isinstance(images, np.ndarray | Tensor) and images.ndim == 4:
        return [as_bytes(image) for image in images]
    return [as_bytes(images)]


def spectrogram(features: Tensor) -> np.ndarray:
    """Log-mel features (bins, frames) as a gray image (bins, frames, 3): loud is dark, low sounds are at the bottom.

    The ground is light, so that shade over it can be seen.
    """
    return 255 - stretched(features[None].flip(1))


#: Seconds of one frame of log-mel features: hop of 160 samples at 16,000 a second (Whisper and most others).
MEL_SECONDS = 0.01


def picture(grids: Sequence[PatchGrid], images: Sequence[np.ndarray]) -> dict[str, Any]:
    """The picture of a text of the page: a panel for every image or frame, with the token of each patch.

    `images` has one array for each frame of each grid, in order.
    """
    frames = [(grid, frame) for grid in grids for frame in range(grid.frames)]
    if len(images) != len(frames):
        raise RegardError(
            f"show(image=...): {len(images)} image{'s' * (len(images) != 1)} were given, and the tokens show "
            f"{len(frames)}. Give one image for each image of the text, or one for each frame of a video."
        )
    longest = LONGEST if len(frames) == 1 else FRAME
    panels = [_panel(grid, frame, array, longest) for (grid, frame), array in zip(frames, images, strict=True)]
    is_video = any(grid.frames > 1 for grid in grids)
    return {"kind": "video" if is_video else "image", "panels": panels}


def _panel(grid: PatchGrid, frame: int, array: np.ndarray, longest: int) -> dict[str, Any]:
    """One frame of a grid with its image as JSON: rows, columns, size in pixels, and the token of its first patch.

    `frame` is its number, `array` the image, and `longest` the most pixels of a side.
    If its patches are not consecutive tokens, the panel has the token of each.
    """
    size = grid.rows * grid.columns
    tokens = list(grid.places[frame * size : (frame + 1) * size])
    panel = {"rows": grid.rows, "columns": grid.columns, "width": array.shape[1], "height": array.shape[0]}
    panel |= {"image": data_url(array, longest), "start": tokens[0]}
    return panel if tokens == list(range(tokens[0], tokens[0] + size)) else panel | {"tokens": tokens}


def sound(features: Tensor, num_keys: int) -> dict[str, Any]:
    """The picture of a sound: the spectrogram (bins, frames), with `num_keys` tokens along the time."""
    bins, frames = features.shape
    # a pixel for each frame of a long sound, up to twice the width of a photo
    image = data_url(spectrogram(features), max(LONGEST, min(frames, 2 * LONGEST)), lossless=True)
    panel = {"rows": 1, "columns": num_keys, "width": frames, "height": bins, "image": image, "start": 0}
    return {"kind": "sound", "panels": [panel], "seconds": MEL_SECONDS * frames / num_keys}


def images_of(inputs: ModelInputs, grids: Sequence[PatchGrid], given: Any, batch: int) -> list[np.ndarray]:
    """The image of every frame of every grid: those that were given, or those that the model read.

    `batch` is the entry of the batch that is shown.
    """
    num_frames = sum(grid.frames for grid in grids)
    images = _read(inputs, grids, batch) if given is None else as_list(given)
    is_video = any(grid.frames > 1 for grid in grids)
    if is_video and len(images) > num_frames and len(images) % num_frames == 0:
        images = images[
            :: len(images) // num_frames
        ]  # a token shows several frames of a video; the first stands for all
    return images


def _read(inputs: ModelInputs, grids: Sequence[PatchGrid], batch: int) -> list[np.ndarray]:
    """The images that the model read, stretched to bytes.

    A tensor of pixels has one of three shapes: packed patches (patches, values); images (N, channels, height, width);
    or the images or frames of each batch entry (B, N, channels, height, width). In the second form N are the images of
    one text, or one for each batch entry.
    """
    for name in ("pixel_values", "pixel_values_videos"):
        pixels = inputs.get(name)
        if pixels is None:
            continue
        if pixels.ndim == 2:
            return _unpacked(inputs, name, pixels)
        if pixels.ndim == 4:
            chosen = pixels[batch : batch + 1] if len(grids) == 1 and len(pixels) > 1 else pixels
            return [stretched(image) for image in chosen]
        if pixels.ndim == 5:
            return [stretched(image) for image in pixels[batch]]
    raise RegardError("show: the model was not called with an image here. Give it: seen.show(image=...).")


def _unpacked(inputs: ModelInputs, name: str, pixels: Tensor) -> list[np.ndarray]:
    """The images of Qwen-VL, whose patches stand in rows: (patches, channels x time x height x width).

    `name` is the argument of the model that holds the `pixels`. Patches are in blocks of merge x merge, which become
    one token. Of the frames of a patch the first is taken.
    """
    config = vision_config(inputs.config)
    thw = inputs.get("image_grid_thw" if name == "pixel_values" else "video_grid_thw")
    merge, size, time = config.spatial_merge_size, config.patch_size, config.temporal_patch_size
    images, at = [], 0
    for t, h, w in [] if thw is None else thw.tolist():
        patches = pixels[at : at + t * h * w]
        at += t * h * w
        blocks = patches.reshape(t, h // merge, w // merge, merge, merge, -1, time, size, size)[:, :, :, :, :, :, 0]
        frames = torch.einsum("tabmnchw->tcamhbnw", blocks).reshape(t, -1, h * size, w * size)
        images += [stretched(frame) for frame in frames]
    return images


#: How a text is called, by the part of the model and whether its keys are patches only.
TITLES = {"encoder": "Image", "decoder": "Image and text", "cross": "Text to image"}
SOUNDS = {"encoder": "Sound", "decoder": "Text", "cross": "Text to sound"}


@dataclass(eq=False)
class _Group:
    """Maps of one size in one part of the model, by module path. They are one text of the page.

    `batch` is the batch entry to show.
    """

    part: str
    num_queries: int
    num_keys: int
    batch: int
    maps: dict[str, AttentionMap] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The path of the first module."""
        return next(iter(self.maps))


@dataclass(frozen=True, eq=False)
class _Request:
    """What `picture_sheets` was asked for: its arguments, and the name of the model."""

    tokens: Sequence[str] | None
    targets: Sequence[str] | None
    batch: int
    image: Any
    grid: tuple[int, int] | PatchGrid | None
    model: str
    null: WatchedAttention | None


def picture_sheets(
    seen: WatchedAttention,
    tokens: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
    batch: int = 0,
    image: Any = None,
    grid: tuple[int, int] | PatchGrid | None = None,
    null: WatchedAttention | None = None,
) -> list[Sheet]:
    """The texts of the page for a watched model that read an image, a video or a sound, with the picture under the
    weights. `write_page(path, picture_sheets(seen))` writes them as one file; the arguments are those of `seen.show`.

    `null` is a watch of the same model on the image with its patches shuffled (`regard.stats.shuffle_patches`). With
    it, heads get roles on the grid: same row, same column, neighbors (`regard.stats.patch_roles`).

    >>> import torch, transformers, regard as rg
    >>> sizes = {"image_size": 8, "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = transformers.ViTModel(transformers.ViTConfig(**sizes, intermediate_size=8)).eval()
    >>> with rg.watch(model) as seen:
    ...     _ = model(torch.rand(1, 3, 8, 8))
    >>> (sheet,) = rg.viewer.picture_sheets(seen)
    >>> sheet.about["tokens"], [(panel["rows"], panel["columns"]) for panel in sheet.about["picture"]["panels"]]
    (['[CLS]', 'r0 c0', 'r0 c1', 'r1 c0', 'r1 c1'], [(2, 2)])
    """
    request = _Request(tokens, targets, batch, image, _checked_grid(grid), seen.model, null)
    sheets, reasons = [], []
    for group in _groups(seen, request):
        try:
            pictured = _pictured(seen.inputs, group, request)
        except RegardError as reason:
            reasons.append(reason)
            pictured = _Pictured(_base_tokens(seen.inputs, group, request))
        sheets.append(_sheet(group, pictured, request, is_sound=seen.inputs.get("input_features") is not None))
    if not any(sheet.about["picture"] for sheet in sheets):
        raise (
            reasons[0]
            if reasons
            else RegardError(
                "show(image=...): no map of this model has patches of an image among its keys. Watch the call "
                "that reads the image."
            )
        )
    return sorted(map(_titled, sheets), key=_rank) if is_windowed(seen.inputs.config) else sorted(sheets, key=_rank)


@dataclass(frozen=True, eq=False)
class _Pictured:
    """The tokens of a text, its picture, the special tokens before the patches, and the first query to show."""

    tokens: list[str]
    picture: dict[str, Any] | None = None
    special: list[int] | None = None
    query: int | None = None
    grid: PatchGrid | None = None


def _rank(sheet: Sheet) -> int:
    """Words over an image come first, then patches alone, then texts without a picture."""
    if sheet.about["picture"] is None:
        return 2
    return int(sheet.about["title"] == TITLES["encoder"] or sheet.about["title"] == SOUNDS["encoder"])


def _titled(sheet: Sheet) -> Sheet:
    """The text of one stage of Swin, with its number of patches in the title."""
    panel = sheet.about["picture"]["panels"][0]
    title = f"{sheet.about['title']}, {panel['rows']} x {panel['columns']} patches"
    return Sheet(sheet.about | {"title": title}, sheet.maps, sheet.ready)


def _checked_grid(grid: Any) -> tuple[int, int] | PatchGrid | None:
    """The grid as a `PatchGrid` or (rows, columns); None if the user gave none."""
    is_pair = isinstance(grid, tuple | list) and len(grid) == 2
    if grid is None or isinstance(grid, PatchGrid):
        return grid
    if not is_pair or not all(isinstance(size, int) and size >= 1 for size in grid):
        raise RegardError(
            f"show(grid={grid!r}): grid is (rows, columns) of the patches, two numbers of at least 1, such as (14, 14)."
        )
    return int(grid[0]), int(grid[1])


def _groups(seen: WatchedAttention, request: _Request) -> list[_Group]:
    """The maps of a model by part and size, for example a vision tower and a text that contains its patches.

    Maps of windows (Swin) become maps of the whole image, of one batch entry.
    """
    groups: dict[tuple[bool, str, int, int], _Group] = {}
    for part in TITLES:
        for name in getattr(seen, part).names:
            weights = _call(seen.calls(name), request.tokens)
            batch = request.batch
            if is_windowed(seen.inputs.config):
                weights, batch = whole_map(seen.inputs, name, weights, batch), 0
            sizes = (part, *weights.shape[2:])
            groups.setdefault((is_vision(name), *sizes), _Group(*sizes, batch)).maps[name] = weights
    return list(groups.values())


def _call(calls: list[AttentionMap], tokens: Sequence[str] | None) -> AttentionMap:
    """The last call with these tokens; without tokens the last call that reads a whole text, or the last call."""
    whole = [weights for weights in calls if weights.shape[2] == weights.shape[3]]
    same = [weights for weights in calls if tokens is not None and weights.shape[3] == len(tokens)]
    return (same or whole or calls)[-1]


def _pictured(inputs: ModelInputs, group: _Group, request: _Request) -> _Pictured:
    """The picture of a group; one without picture if its keys are a text."""
    tokens = _base_tokens(inputs, group, request)
    features = inputs.get("input_features")
    if features is not None:
        if group.part == "decoder" or features.ndim != 3:
            return _Pictured(tokens)
        shown = sound(features[request.batch], group.num_keys)
        times = [f"{shown['seconds'] * frame:.2f} s" for frame in range(group.num_keys)]
        return _Pictured(times, shown)
    grids = image_grids(inputs, group.name, group.num_keys, request.grid, request.batch)
    if not grids:
        return _Pictured(tokens)
    shown = picture(grids, images_of(inputs, grids, request.image, request.batch))
    if not _has_text(inputs, group):
        leading = leading_names(inputs, grids[0])
        tokens = [*leading, *(str(n) for n in range(len(leading), group.num_keys))]
        named = _with_patches(tokens, grids)
        query = 0 if leading else grids[0].token(grids[0].rows // 2, grids[0].columns // 2)
        return _Pictured(named, shown, list(range(len(leading))), query, grids[0])
    return _Pictured(_with_patches(tokens, grids), shown)


def _has_text(inputs: ModelInputs, group: _Group) -> bool:
    """Whether the keys of a group are a text that contains patches, not patches alone."""
    ids = inputs.get("input_ids")
    return ids is not None and group.num_keys >= ids.shape[1] and not is_vision(group.name)


def _with_patches(tokens: list[str], grids: Sequence[PatchGrid]) -> list[str]:
    """The tokens, with the patches of these grids, one for each image, named by image, row and column."""
    named = list(tokens)
    for number, grid in enumerate(grids):
        which = f"i{number} " if len(grids) > 1 else ""
        for place, name in zip(grid.places, patch_names(grid), strict=True):
            named[place] = f"{which}{name}"
    return named


def _base_tokens(inputs: ModelInputs, group: _Group, request: _Request) -> list[str]:
    """The given tokens if they are those of the keys, the ids of the text, or numbers."""
    if request.tokens is not None and len(request.tokens) == group.num_keys:
        return list(request.tokens)
    ids = inputs.get("input_ids")
    is_text = ids is not None and ids.shape[1] == group.num_keys and not is_vision(group.name)
    return [str(n) for n in (ids[request.batch].tolist() if ids is not None and is_text else range(group.num_keys))]


def _sheet(group: _Group, pictured: _Pictured, request: _Request, is_sound: bool) -> Sheet:
    """The sheet of a group, with the picture under its weights if there is one."""
    queries = _queries(group, request)
    title = (SOUNDS if is_sound else TITLES)[group.part]
    if not is_sound and group.part != "cross":
        # special tokens are set for patches alone, so a text without them has words too
        title = TITLES["decoder" if pictured.special is None else "encoder"]
    reading = TextReading.of(
        title if pictured.picture else "Text", group.maps, pictured.tokens, pictured.special, queries=queries,
        batch=group.batch, also=page_reductions, model=request.model,
    )  # fmt: skip
    sheet = Sheet.of(replace(reading, roles=_roles(group, pictured, request)))
    if pictured.picture is None:
        return sheet
    about = sheet.about | {"picture": pictured.picture}
    about["start"] = _start(reading, pictured, group)
    return Sheet(about, sheet.maps, sheet.ready)


def _roles(group: _Group, pictured: _Pictured, request: _Request) -> RoleTable | None:
    """The roles on the grid, if the maps of shuffled patches are there and patches attend to patches."""
    null, grid = request.null, pictured.grid
    if null is None or grid is None or group.num_queries != group.num_keys:
        return None
    return patch_roles(group.maps, grid, null={name: null[name] for name in group.maps}, batch=group.batch)


def _queries(group: _Group, request: _Request) -> list[str] | None:
    """The tokens of the queries, if they are not the keys."""
    if group.part == "cross":
        for tokens in (request.targets, request.tokens):
            if tokens is not None and len(tokens) == group.num_queries:
                return list(tokens)
        return [f"step {n}" for n in range(group.num_queries)]
    return None


def _start(reading: TextReading, pictured: _Pictured, group: _Group) -> dict[str, Any]:
    """The first view: the picture, in the last layer, in the head that attends most to one patch.

    The query is that of `pictured`, or the last one, from which a text goes on.
    """
    query = min(group.num_queries - 1 if pictured.query is None else pictured.query, group.num_queries - 1)
    assert pictured.picture is not None
    places = [place for panel in pictured.picture["panels"] for place in places_of(panel)]
    row = reading.rows(query)[-1][:, places]
    head = int(row.amax(-1).argmax())
    return {"layer": len(group.maps) - 1, "head": head, "query": query}


def places_of(panel: dict[str, Any]) -> list[int]:
    """The token of every patch of a panel."""
    size = panel["rows"] * panel["columns"]
    return panel.get("tokens") or list(range(panel["start"], panel["start"] + size))
