"""Tries each row of the support matrix, and writes docs/support.json and the tables of docs/support.md.

    python scripts/support.py            # tries what is installed; rows whose package is missing keep their record
    python scripts/support.py --write    # writes the tables of the record again, tries nothing

A model is small and random. "watch" passes if the outputs are the same bit for bit, no attention is missing, and
weights times values are the output of the kernel. "edit" passes if a knock-out changes the output and leaves the model
as it was. "attribute" passes if every input token has a finite number and one is not 0, "generate" if the map of a
generation has its rows.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import regard as rg

ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / "docs/support.json", ROOT / "docs/support.md"
ACTIONS = ("watch", "edit", "attribute", "generate")
WATCHED = ("watch", "edit")
Built = tuple[Any, Callable[[Any], Tensor]]


@dataclass(frozen=True)
class Row:
    """One row of a table: how its model is built, which package it needs and what is tried."""

    table: str
    name: str
    build: Callable[[], Built] | None = None
    needs: tuple[str, ...] = ()
    actions: tuple[str, ...] = ACTIONS

    @property
    def key(self) -> str:
        return f"{self.table}: {self.name}"


IDS = torch.tensor([[3, 14, 15, 9, 2, 6, 5, 3, 5, 8]])
SIZES: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": None}


def logits(model: Any) -> Tensor:
    """The logits of the text."""
    return model(input_ids=IDS, use_cache=False).logits


def llama(backend: str = "sdpa", dtype: torch.dtype = torch.float32, **changes: Any) -> Built:
    """A small Llama with grouped heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    options: dict[str, Any] = {**SIZES, **changes, "attn_implementation": backend}
    model: Any = LlamaForCausalLM(LlamaConfig(**options))
    return model.to(dtype).eval(), logits


def on_disk(device_map: Any) -> Built:
    """The small Llama, saved and loaded with a device map."""
    from transformers import LlamaForCausalLM

    folder = tempfile.mkdtemp(prefix="support-")
    llama()[0].save_pretrained(folder, max_shard_size="20KB")
    placed = LlamaForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=f"{folder}/offload")
    return placed.eval(), logits


OFFLOADED = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu", "model.rotary_emb": "cpu"}
OFFLOADED |= {"model.layers.0": "cpu", "model.layers.1": "disk"}


def torchao() -> Built:
    """Int8 weights by torchao."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model, call = llama()
    quantize_(model, Int8WeightOnlyConfig())
    return model, call


def dynamic_int8() -> Built:
    """Int8 linear layers by torch's own quantization."""
    model, call = llama()
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8), call


def lora() -> Built:
    """Adapters on queries and values, with random weights."""
    from peft import LoraConfig, get_peft_model

    model, call = llama()
    names = ["q_proj", "v_proj"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=names, init_lora_weights=False)).eval(), call


def compiled() -> Built:
    """A model that was compiled before it is watched."""
    model, call = llama()
    model.compile(backend="eager")
    return model, call


def compiled_regard() -> Built:
    """Regard's own backend, compiled."""
    rg.register()
    model, call = llama("regard")
    model.compile(backend="eager")
    return model, call


def sharded() -> Built:
    """Parameters sharded by FSDP2 over one process."""
    from torch.distributed import init_process_group, is_initialized
    from torch.distributed.fsdp import fully_shard

    if not is_initialized():
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29617", RANK="0", WORLD_SIZE="1")
        init_process_group("gloo")
    from torch.distributed.device_mesh import init_device_mesh

    model, call = llama()
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh), call


def images(model: Any, size: int = 32) -> Built:
    """A model of images and a random picture."""
    pixels = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    return model.eval(), lambda model: model(pixels)


def timm() -> Built:
    """A small vision transformer of timm."""
    import timm

    return images(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=7))


def open_clip() -> Built:
    """A small CLIP: a picture and a text."""
    from open_clip.model import CLIP

    text = {"context_length": 10, "vocab_size": 32, "width": 32, "heads": 4, "layers": 2}
    model = CLIP(16, {"image_size": 32, "layers": 2, "width": 32, "head_width": 8, "patch_size": 8}, text).eval()
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return model, lambda model: model.encode_image(pixels).sum() + model.encode_text(IDS)


def vit_pytorch() -> Built:
    """A small vision transformer of vit-pytorch."""
    from vit_pytorch import ViT

    return images(ViT(image_size=32, patch_size=8, num_classes=7, dim=32, depth=2, heads=4, mlp_dim=32))


def x_transformers(flash: bool = True) -> Built:
    """A small decoder with rotary positions."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, attn_flash=flash, rotary_pos_emb=True)
    return TransformerWrapper(num_tokens=32, max_seq_len=16, attn_layers=layers).eval(), lambda model: model(IDS)


def litgpt() -> Built:
    """A small Pythia of litgpt."""
    from litgpt import GPT, Config

    config = Config.from_name("pythia-14m", n_layer=2, n_head=4, n_embd=32, padded_vocab_size=32, block_size=16)
    return GPT(config).eval(), lambda model: model(IDS)


def sentence_transformers() -> Built:
    """MiniLM with mean pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    from regard.hf.models import load_model

    bert, tokenizer = load_model("minilm")
    folder = tempfile.mkdtemp(prefix="support-")
    bert.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    words = Transformer(folder)
    model = SentenceTransformer(modules=[words, Pooling(bert.config.hidden_size)], device="cpu").eval()
    texts = ["The cat sat on the mat.", "It slept."]
    return model, lambda model: model.encode(texts, convert_to_tensor=True)


def torch_transformer() -> Built:
    """torch's encoder and decoder."""
    source, target = torch.randn(1, 7, 32), torch.randn(1, 5, 32)
    model = nn.Transformer(32, 4, 2, 2, 32, batch_first=True).eval()
    return model, lambda model: model(source, target)


class Own(nn.Module):
    """Attention as a course writes it: a softmax, two products."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.out_proj = 4, nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, 8)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


def own() -> Built:
    """Two layers of a module of one's own."""
    x = torch.randn(1, 6, 32)
    return nn.Sequential(Own(), nn.Tanh(), Own()).eval(), lambda model: model(x)


def bert_encoder() -> Built:
    """A small BERT."""
    from transformers import BertConfig, BertModel

    sizes: dict[str, Any] = {
        name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    }
    model = BertModel(BertConfig(**sizes, num_attention_heads=4)).eval()
    return model, lambda model: model(input_ids=IDS).last_hidden_state


KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
BACKENDS, FORMS, LIBRARIES = "Backend, device and dtype", "How the model is held", "Library"
ROWS = [
    *(
        Row(BACKENDS, f"{backend}, CPU, {kind}", lambda b=backend, d=dtype: llama(b, d))
        for backend in ("sdpa", "eager")
        for kind, dtype in KINDS.items()
    ),
    Row(BACKENDS, "flex_attention, CPU, float32", lambda: llama("flex_attention")),
    *(Row(BACKENDS, f"{name}, CUDA") for name in ("sdpa", "eager", "flex_attention", "flash_attention_2")),
    Row(BACKENDS, "sdpa, MPS"),
    Row(BACKENDS, "sdpa, XPU"),
    Row(FORMS, "device_map, all on the CPU", lambda: on_disk("cpu"), ("accelerate",)),
    Row(FORMS, "device_map, a layer on the disk", lambda: on_disk(OFFLOADED), ("accelerate",)),
    Row(FORMS, "device_map, several GPUs"),
    Row(FORMS, "int8 weights (torchao)", torchao, ("torchao",)),
    Row(FORMS, "int8 (torch.ao quantize_dynamic)", dynamic_int8),
    Row(FORMS, "4 bit (bitsandbytes)"),
    Row(FORMS, "LoRA (peft)", lora, ("peft",)),
    Row(FORMS, 'model.compile(backend="eager")', compiled),
    Row(FORMS, 'attn_implementation="regard", then model.compile(backend="eager")', compiled_regard),
    Row(FORMS, "FSDP2, one process", sharded),
    Row(FORMS, "FSDP2, several processes"),
    Row(LIBRARIES, "transformers, decoder (Llama)", llama),
    Row(LIBRARIES, "transformers, encoder (BERT)", bert_encoder, actions=WATCHED),
    Row(LIBRARIES, "sentence-transformers", sentence_transformers, ("sentence_transformers",), WATCHED),
    Row(LIBRARIES, "timm (ViT)", timm, ("timm",), WATCHED),
    Row(LIBRARIES, "open_clip", open_clip, ("open_clip", "timm", "ftfy"), WATCHED),
    Row(LIBRARIES, "vit-pytorch", vit_pytorch, ("vit_pytorch", "einops"), WATCHED),
    Row(LIBRARIES, "x-transformers, flash", x_transformers, ("x_transformers", "einx"), WATCHED),
    Row(LIBRARIES, "x-transformers, own softmax", lambda: x_transformers(False), ("x_transformers", "einx"), WATCHED),
    Row(LIBRARIES, "litgpt (Pythia)", litgpt, ("litgpt",), WATCHED),
    Row(LIBRARIES, "nn.Transformer", torch_transformer, actions=WATCHED),
    Row(LIBRARIES, "your own softmax(QK')V", own, actions=WATCHED),
]


class Failed(Exception):
    """What did not hold, in a few words."""


def hold(condition: bool, words: str) -> None:
    """Fail with these words unless the condition is true."""
    if not condition:
        raise Failed(words)


def try_watch(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> None:
    """Watch a call: the same output, every map, and weights times values checked."""
    with torch.no_grad():
        before = call(model)
        with rg.watch(model, keep="qkv") as seen:
            during = call(model)
    hold(torch.equal(before, during), "the outputs differ")
    hold(len(seen) > 0, "no attention was seen")
    hold(not seen.missing, f"missing: {next(iter(seen.missing.values()), '')}")
    hold(all(bool((weights.dense().sum(-1) - 1).abs().max() < 1e-2) for weights in seen), "rows do not sum to 1")
    seen.verify()


def try_edit(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> None:
    """Knock out token 1 and look at the outputs during and after."""
    with torch.no_grad():
        before = call(model)
        with rg.edit(model, rg.KnockOut(rg.Where(keys=1))):
            edited = call(model)
        after = call(model)
    hold(not torch.equal(before, edited), "the knock-out changed nothing")
    hold(torch.equal(before, after), "the model was not as before")


def try_attribute(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> None:
    """Attribute the prediction: a finite number for each token, not all zero."""
    scores = rg.attribute(model, {"input_ids": IDS}, test=False).tokens()
    hold(bool(scores.isfinite().all()) and scores.shape[-1] == IDS.shape[1], "no finite number for each token")
    hold(bool(scores.any()), "every number is 0")


def try_generate(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> None:
    """Watch a generation: a row for each token that was read."""
    generate: Any = model.generate
    with torch.no_grad(), rg.watch(model) as seen:
        written = generate(input_ids=IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    rows = written.shape[1] - 1
    hold(seen.generation[0].shape[-2:] == (rows, rows), "the map lacks rows")


TRIES = {"watch": try_watch, "edit": try_edit, "attribute": try_attribute, "generate": try_generate}


def outcome(row: Row, action: str) -> str:
    """The word "tried", or what stood in the way."""
    try:
        torch.manual_seed(0)
        assert row.build is not None
        TRIES[action](*row.build())
    except Exception as error:
        first = " ".join(str(error).split())
        return f"no: {type(error).__name__}: {first}" if not isinstance(error, Failed) else f"no: {first}"
    return "tried"


def missing(row: Row) -> bool:
    """Whether a row cannot be tried here."""
    return row.build is None or any(find_spec(name) is None for name in row.needs)


def try_rows(record: dict[str, Any]) -> dict[str, Any]:
    """The record with each row that can be tried here tried again."""
    for row in ROWS:
        if missing(row):
            record.setdefault(row.key, {})
            continue
        cells = {action: outcome(row, action) for action in row.actions}
        packages = {name.replace("_", "-"): found for name in row.needs if (found := version_of(name))}
        record[row.key] = cells | ({"versions": packages} if packages else {})
        print(row.key, cells, flush=True)
    packages = {name: version_of(name) for name in ("torch", "transformers")}
    return {"packages": packages} | {row.key: record[row.key] for row in ROWS}


def version_of(name: str) -> str:
    """The version of a package without its build, or nothing."""
    try:
        return version({"open_clip": "open_clip_torch"}.get(name, name)).partition("+")[0]
    except Exception:
        return ""


def cell(row: Row, action: str, record: dict[str, Any], notes: list[str]) -> str:
    """What the table says; a reason is a numbered note below the tables."""
    if action not in row.actions:
        return "–"
    said = record[row.key].get(action, "not tried")
    if not said.startswith("no: "):
        return said
    note = said.removeprefix("no: ")
    if note not in notes:
        notes.append(note)
    return f"no ({notes.index(note) + 1})"


def tables(record: dict[str, Any]) -> str:
    """The tables as Markdown."""
    parts = [
        f"Made by `python scripts/support.py` with {', '.join(f'{n} {v}' for n, v in record['packages'].items())}."
    ]
    notes: list[str] = []
    for table in dict.fromkeys(row.table for row in ROWS):
        rows = [row for row in ROWS if row.table == table]
        actions = [action for action in ACTIONS if any(action in row.actions for row in rows)]
        lines = [f"| {table} | {' | '.join(actions)} |", "|---" * (len(actions) + 1) + "|"]
        for row in rows:
            versions = ", ".join(record[row.key].get("versions", {}).values()) if table == LIBRARIES else ""
            name = f"{row.name} {versions.partition(',')[0]}".rstrip()
            lines.append(f"| {name} | {' | '.join(cell(row, action, record, notes) for action in actions)} |")
        parts.append("\n".join(lines))
    shown = [note if len(note) < 240 else note[:237].rstrip() + " ..." for note in notes]
    return "\n\n".join([*parts, "\n".join(f"{number}. `{note}`" for number, note in enumerate(shown, 1))])


START, END = "<!-- scripts/support.py -->", "<!-- end of scripts/support.py -->"


def with_tables(page: str, record: dict[str, Any]) -> str:
    """The page with the tables of the record."""
    head, rest = page.split(START)
    return f"{head}{START}\n{tables(record)}\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Try the rows, or only write the tables."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if "--write" not in sys.argv:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            record = try_rows(record)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    if PAGE.exists():
        PAGE.write_text(with_tables(PAGE.read_text(), record))


if __name__ == "__main__":
    main()
