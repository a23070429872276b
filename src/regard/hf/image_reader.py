"""`ImageReader` runs a vision or image-text model on an image, and on the same image with its patches shuffled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.base.errors import RegardError, first_line
from regard.hf.capture import WatchedAttention, watch
from regard.hf.gguf import without_bars
from regard.hf.image_grids import image_grids
from regard.hf.token_labels import label_of
from regard.stats import shuffle_patches


@dataclass(frozen=True, eq=False)
class ImageResult:
    """The maps of an image, the tokens of its text (None: the model read no text), and the maps of shuffled patches.

    `image` is the image as the model read it, after resizing and cropping, if the processor tells how it changed the
    colors. `null` is None if the patches cannot be shuffled, for example if the model reads a text around them.
    """

    seen: WatchedAttention
    tokens: list[str] | None
    null: WatchedAttention | None
    image: Any = None


@dataclass(frozen=True, eq=False)
class ImageReader:
    """A model with its processor, which reads images: `ImageReader.load("path/to/folder").read(image)`."""

    model: Any
    processor: Any
    name: str = ""

    @staticmethod
    def load(folder: str | Path) -> ImageReader:
        """The model and the processor of a folder that `save_pretrained` of both wrote. Nothing is downloaded."""
        import transformers as hf

        if not (Path(folder) / "config.json").is_file():
            raise RegardError(
                f"analyze: --image: {folder} has no config.json. Give the folder of a vision model: --model DIR."
            )
        try:
            config = hf.AutoConfig.from_pretrained(folder, local_files_only=True)
            kind = getattr(hf, (config.architectures or ["AutoModel"])[0], hf.AutoModel)
            with without_bars():
                model = kind.from_pretrained(folder, local_files_only=True, use_safetensors=True)
            processor = hf.AutoProcessor.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers and safetensors raise errors of different types
            reason = first_line(error) or type(error).__name__
            raise RegardError(
                f"analyze: --image: cannot load {folder}: {reason} Give a folder with the model and its image "
                "processor, both saved with save_pretrained."
            ) from error
        return ImageReader(model.eval(), processor, str(folder))

    def read(self, image: Any, text: str | None = None) -> ImageResult:
        """Run the model on a PIL image, and on a text if it reads one."""
        inputs = self._inputs(image, text)
        seen = self._watch(inputs)
        tokens = None
        if "input_ids" in inputs:
            tokens = [label_of(self.processor.tokenizer, index) for index in inputs["input_ids"][0].tolist()]
        null = None if tokens else self._shuffled(seen, inputs)
        return ImageResult(seen, tokens, null, self._as_read(inputs["pixel_values"]))

    def _as_read(self, pixels: Tensor) -> Any:
        """The images (B, 3, height, width) in their own colors: the processor subtracted a mean and divided by a
        deviation. None if these are not known.
        """
        processor = getattr(self.processor, "image_processor", self.processor)
        mean, deviation = (getattr(processor, name, None) for name in ("image_mean", "image_std"))
        if pixels.ndim != 4 or mean is None or deviation is None:
            return None
        mean, deviation = (torch.tensor(values).view(-1, 1, 1) for values in (mean, deviation))
        return list((pixels * deviation + mean).clamp(0, 1))

    def _inputs(self, image: Any, text: str | None) -> dict[str, Any]:
        """The tensors of an image, and of a text in which the token of the image stands first if it names none."""
        reads_text = hasattr(self.processor, "tokenizer")
        if text is not None and not reads_text:
            raise RegardError(f"analyze: --image: {type(self.model).__name__} reads no text. Give --image alone.")
        try:
            if not reads_text:
                return dict(self.processor(images=image, return_tensors="pt"))
            token = getattr(self.processor, "image_token", "")
            text = text or ""
            prompt = text if not token or token in text else f"{token} {text}"
            return dict(self.processor(images=image, text=prompt, return_tensors="pt"))
        except RegardError:
            raise
        except Exception as error:  # processors raise errors of many types
            raise RegardError(
                f"analyze: --image: the processor of {self.name} refused the image or the text: {error}"
            ) from error

    def _watch(self, inputs: dict[str, Any]) -> WatchedAttention:
        with watch(self.model) as seen, torch.no_grad():
            self.model(**inputs)
        return seen

    def _shuffled(self, seen: WatchedAttention, inputs: dict[str, Any]) -> WatchedAttention | None:
        """The maps of the image with its patches shuffled.

        None for a video, for keys that are not the queries, and if the sides of the image are no multiples of patches.
        """
        weights = seen[0]
        if weights.shape[2] != weights.shape[3]:
            return None
        (grid,) = image_grids(seen.inputs, seen.names[0], weights.shape[3])
        pixels = inputs["pixel_values"]
        if grid.frames > 1 or pixels.shape[-2] % grid.rows or pixels.shape[-1] % grid.columns:
            return None
        return self._watch(inputs | {"pixel_values": shuffle_patches(pixels, grid.rows, grid.columns)})
