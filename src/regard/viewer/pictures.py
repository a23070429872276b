"""What the page needs to show weights over an image, the frames of a video, or a spectrogram: `picture`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.hf.capture.model_inputs import ModelInputs
from regard.hf.image_grids import vision_config
from regard.stats import PatchGrid
from regard.viewer.images import FRAME, LONGEST, as_list, data_url, spectrogram, stretched

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
    size = grid.rows * grid.columns
    tokens = list(grid.places[frame * size : (frame + 1) * size])
    panel = {"rows": grid.rows, "columns": grid.columns, "width": array.shape[1], "height": array.shape[0]}
    panel |= {"image": data_url(array, longest), "start": tokens[0]}
    return panel if tokens == list(range(tokens[0], tokens[0] + size)) else panel | {"tokens": tokens}


def sound(features: Tensor, num_keys: int) -> dict[str, Any]:
    """The picture of a sound: the spectrogram (bins, frames), with `num_keys` tokens along the time."""
    bins, frames = features.shape
    image = data_url(spectrogram(features), max(LONGEST, min(frames, 2 * LONGEST)), lossless=True)
    panel = {"rows": 1, "columns": num_keys, "width": frames, "height": bins, "image": image, "start": 0}
    return {"kind": "sound", "panels": [panel], "seconds": MEL_SECONDS * frames / num_keys}


def images_of(inputs: ModelInputs, grids: Sequence[PatchGrid], given: Any, batch: int) -> list[np.ndarray]:
    """The image of every frame of every grid: those that were given, or those that the model read."""
    num_frames = sum(grid.frames for grid in grids)
    images = _read(inputs, grids, batch) if given is None else as_list(given)
    is_video = any(grid.frames > 1 for grid in grids)
    if is_video and len(images) > num_frames and len(images) % num_frames == 0:
        images = images[
            :: len(images) // num_frames
        ]  # a token shows several frames of a video; the first stands for all
    return images


def _read(inputs: ModelInputs, grids: Sequence[PatchGrid], batch: int) -> list[np.ndarray]:
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
    """The images of Qwen-VL, whose patches stand in rows: (patches, channels x time x height x width)."""
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
