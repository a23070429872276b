"""`load_once` loads the model of a GGUF file, and saves it dequantized as safetensors in the cache folder."""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from regard.base.errors import RegardError
from regard.base.texts.cache_folder import cache_folder
from regard.base.whole_files import DRAFT

#: A model and its tokenizer.
Loaded = tuple[Any, Any]
#: The age in seconds of a draft folder in the cache whose process was killed.
ABANDONED = 3600.0


def load_once(file: Path, unpack: Callable[[], Loaded], load: Callable[[Path], Loaded]) -> Loaded:
    """The model of a GGUF file: the first time `unpack` reads the file, later `load` reads the cache folder.

    The folder is written by `save_pretrained` and named by a hash of the file, so a changed file is unpacked again. It
    may be deleted at any time. If it cannot be written, the model is unpacked at every call.
    """
    folder = unpacked_folder(file)
    if (folder / "config.json").exists():
        try:
            return load(folder)
        except RegardError:  # incomplete or overwritten: unpack it again
            shutil.rmtree(folder, ignore_errors=True)
    print(f"Unpacking {file.name}; this happens once and takes about a minute.", file=sys.stderr)
    packed, tokenizer = unpack()
    model = plain(packed)
    try:
        _keep(model, tokenizer, folder)
    except OSError as error:
        reason = error.strerror or error
        print(f"The unpacked model cannot be saved in {folder} ({reason}). Set REGARD_CACHE.", file=sys.stderr)
        return model, tokenizer
    print(f"The unpacked model is saved in {folder}, which may be deleted at any time.", file=sys.stderr)
    return load(folder)


def unpacked_folder(file: Path) -> Path:
    """The cache folder of a GGUF file, named by a hash of its content.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
    ...     unpacked_folder(Path(file.name)).name.rpartition("-")[2]
    'e3b0c44298fc1c14'
    """
    with open(file, "rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return cache_folder() / "models" / f"{file.stem}-{digest[:16]}"


def plain(packed: Any) -> Any:
    """The same weights in a model without quantization settings, which `save_pretrained` refuses."""
    config = copy.deepcopy(packed.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = type(packed)(config)
    model.load_state_dict(packed.state_dict(), assign=True)
    model.tie_weights()
    for name, buffer in packed.named_buffers():  # buffers outside the state_dict, such as RoPE frequencies
        module, _, last = name.rpartition(".")
        model.get_submodule(module)._buffers[last] = buffer
    model.generation_config = getattr(packed, "generation_config", None)
    return model.eval()


@contextmanager
def without_bars() -> Iterator[None]:
    """Switch off the progress bars of transformers: loading from a folder takes a moment."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _keep(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a temporary folder and rename it: an interrupted write leaves no incomplete folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for draft in folder.parent.glob(f"{DRAFT}*"):
        if time.time() - draft.stat().st_mtime > ABANDONED:
            shutil.rmtree(draft, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=DRAFT) as near:
        draft = Path(near) / folder.name
        with without_bars():
            model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        try:
            os.replace(draft, folder)
        except OSError:
            if not (folder / "config.json").exists():  # otherwise another process has written it
                raise
