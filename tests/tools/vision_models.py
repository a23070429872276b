"""Tiny random models that read images, and the inputs that a processor would make for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

import regard as rg
from extras import older_than
from miniatures import BART, BERT, LLAMA, sharpened

TOWER = {"patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
#: 8 x 12 pixels: 2 rows and 3 columns of patches.
HEIGHT, WIDTH, ROWS, COLUMNS = 8, 12, 2, 3
SQUARE = TOWER | {"image_size": 8}
IMAGE = 40  # the token of an image in a text
#: transformers 4 names this option otherwise, and takes no kinds of tokens.
ROPE = "rope_scaling" if older_than("5.0") else "rope_parameters"


@dataclass
class Vision:
    """A model by its classes, its inputs, and the grid of its patches: (rows, columns, first patch)."""

    name: str
    config: Any
    inputs: dict[str, Any]
    grid: tuple[int, int, int]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def make(self) -> Any:
        torch.manual_seed(1)
        return sharpened(getattr(transformers, self.name)._from_config(self.config, attn_implementation="sdpa").eval())


def pixels(height=HEIGHT, width=WIDTH, count=1):
    torch.manual_seed(2)
    return torch.randn(count, 3, height, width)


def _wide(name, **more):
    return getattr(transformers, name)(**(TOWER | {"image_size": [HEIGHT, WIDTH]} | more))


def towers() -> list[Vision]:
    """Models of images alone."""
    read = {"pixel_values": pixels()}
    return [
        Vision("ViTModel", _wide("ViTConfig"), read, (ROWS, COLUMNS, 1)),
        Vision("DeiTModel", _wide("DeiTConfig"), read, (ROWS, COLUMNS, 2)),
        Vision("Dinov2Model", transformers.Dinov2Config(**SQUARE, mlp_ratio=1), read, (ROWS, COLUMNS, 1)),
        Vision(
            "Dinov2WithRegistersModel",
            transformers.Dinov2WithRegistersConfig(**SQUARE, num_register_tokens=3, mlp_ratio=1),
            {"pixel_values": pixels(8, 8)},
            (2, 2, 4),
        ),
        Vision(
            "SiglipVisionModel", transformers.SiglipVisionConfig(**SQUARE), {"pixel_values": pixels(8, 8)}, (2, 2, 0)
        ),
        Vision("CLIPVisionModel", transformers.CLIPVisionConfig(**SQUARE), {"pixel_values": pixels(8, 8)}, (2, 2, 1)),
    ]


def _ids(*parts):
    return torch.tensor([[token for part in parts for token in (part if isinstance(part, list) else [part])]])


def with_texts() -> list[Vision]:
    """Models of images and texts; the grid is that of the image tokens in the text."""
    clip = transformers.CLIPVisionConfig(**SQUARE, projection_dim=16)
    siglip = transformers.SiglipVisionConfig(**SQUARE, vision_use_head=False)
    llama = transformers.LlamaConfig(**LLAMA)
    gemma = transformers.GemmaConfig(**LLAMA)
    ids = {"input_ids": _ids(5, 6, [IMAGE] * 4, 7, 8), "pixel_values": pixels(8, 8)}
    mrope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    qwen = transformers.Qwen2VLConfig(
        text_config=LLAMA | {ROPE: mrope, "num_attention_heads": 2},
        vision_config={"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 1, "patch_size": 4},
        image_token_id=IMAGE,
        video_token_id=41,
        vision_start_token_id=42,
        vision_end_token_id=43,
    )
    text = _ids(5, 42, [IMAGE] * 6, 43, 7)
    patches = {
        "input_ids": text,
        "pixel_values": torch.randn(24, 3 * 2 * 16),
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
    }
    if not older_than("5.0"):
        patches["mm_token_type_ids"] = (text == IMAGE).long()
    return [
        Vision("LlavaForConditionalGeneration", transformers.LlavaConfig(
            vision_config=clip, text_config=llama, image_token_index=IMAGE, vision_feature_layer=-1), ids, (2, 2, 2)),
        Vision("PaliGemmaForConditionalGeneration", transformers.PaliGemmaConfig(
            vision_config=siglip, text_config=gemma, image_token_index=IMAGE, projection_dim=16, hidden_size=16),
            ids, (2, 2, 2)),
        Vision("Qwen2VLForConditionalGeneration", qwen, patches, (2, 3, 2)),
    ]  # fmt: skip


def video() -> Vision:
    config = transformers.VideoMAEConfig(**SQUARE, num_frames=4, tubelet_size=2)
    return Vision("VideoMAEModel", config, {"pixel_values": torch.randn(1, 4, 3, 8, 8)}, (2, 2, 0))


def whisper() -> Vision:
    sizes = {"num_mel_bins": 8, "max_source_positions": 9, "max_target_positions": 12}
    read = {"input_features": torch.randn(1, 8, 18), "decoder_input_ids": torch.tensor([[3, 4, 5, 6]])}
    return Vision("WhisperModel", transformers.WhisperConfig(**(BART | sizes)), read, (1, 9, 0))


def esm() -> Vision:
    config = transformers.EsmConfig(**(BERT | {"pad_token_id": 1, "mask_token_id": 2, "vocab_size": 33}))
    return Vision("EsmModel", config, {"input_ids": torch.randint(4, 24, (1, 12))}, (0, 0, 0))


def watched(vision):
    """The maps of one pass over its inputs."""
    model = vision.make()
    with torch.no_grad(), rg.watch(model) as seen:
        model(**vision.inputs)
    return seen


def pictured(sheets):
    """The sheet that has a picture."""
    return next(sheet for sheet in sheets if sheet.about["picture"])
