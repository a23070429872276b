"""Images for the page: any image as an array of bytes, and an array as a data URL of bounded size."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from regard.base.errors import MissingPackage, RegardError

#: The longest side of one image of the page, and of a frame of a video, in pixels.
LONGEST, FRAME = 768, 320
QUALITY = 88
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
    array = image.detach().cpu().float().numpy() if isinstance(image, Tensor) else image
    if array.ndim == 3 and isinstance(image, Tensor) and array.shape[0] in (1, 3) and array.shape[2] not in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        raise RegardError(f"show(image=...): the image has shape {tuple(image.shape)}. {RULE}")
    return _to_bytes(np.broadcast_to(array[:, :, :3], (*array.shape[:2], 3)), image)


def _to_bytes(array: np.ndarray, image: Any) -> np.ndarray:
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 255):
        raise RegardError(f"show(image=...): the values of the image reach from {low:.4g} to {high:.4g}. {RULE}")
    is_share = high <= 1 and not (isinstance(image, Tensor) and not image.is_floating_point())
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
