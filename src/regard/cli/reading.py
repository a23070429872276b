"""From what the user typed to a `Reading`: text, model, tokens, maps."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from regard.errors import RegardError
from regard.hf import watch
from regard.hf.models import load_model
from regard.stats import Reading

#: Marks of byte-level and SentencePiece tokenizers: here begins a word.
WORD_STARTS = ("Ġ", "▁")


@dataclass(frozen=True, eq=False)
class Read:
    """A reading, the attention modules that could not be seen with the reason, and how right the maps are.

    `error` is the greatest difference between recomputed weights @ values and the model's own
    output, on the rows that were checked; None where none could be.
    """

    reading: Reading
    missing: dict[str, str]
    error: float | None


@dataclass(frozen=True)
class Reader:
    """A model and its tokenizer; `read` reads a text with them."""

    model: Any
    tokenizer: Any

    @staticmethod
    def load(name: str) -> Reader:
        with suppress(ImportError):  # without transformers, load_model says what to install
            from transformers.utils.logging import disable_progress_bar

            disable_progress_bar()
        return Reader(*load_model(name))

    def read(
        self, text: str, layers: Sequence[int] | None = None, length: int | None = None, title: str | None = None
    ) -> Read:
        """Run the model on a text, of which `length` tokens at most, and keep the maps of `layers`."""
        inputs = self._tokenize(text, length)
        ids = inputs["input_ids"][0].tolist()
        encoder = self._encoder()
        with watch(encoder) as seen, torch.no_grad():
            encoder(**inputs)
        maps = _chosen(dict(seen.maps), layers)
        special = [index for index, token in enumerate(ids) if token in set(self.tokenizer.all_special_ids)]
        errors = [check.error for check in seen.verify().values() if check.error is not None]
        reading = Reading.of(title or _title(text), maps, self._labels(ids), special)
        return Read(reading, seen.missing, max(errors, default=None))

    def _encoder(self) -> Any:
        """Of an encoder-decoder only the encoder, which is the part that reads."""
        return self.model.get_encoder() if getattr(self.model.config, "is_encoder_decoder", False) else self.model

    def _tokenize(self, text: str, length: int | None) -> Any:
        if not text.strip():
            raise RegardError("see: the text is empty. Give at least one word, a file, or - for standard input.")
        limit = self._limit()
        if limit is not None and length is not None and length > limit:
            raise RegardError(f"see: --length {length} is more than the {limit} tokens that this model takes.")
        num_tokens = len(self.tokenizer(text, verbose=False)["input_ids"])
        if limit is not None and length is None and num_tokens > limit:
            raise RegardError(
                f"see: the text has {num_tokens} tokens, and this model takes {limit}. Read its beginning with "
                f"--length {limit}, or give a shorter text."
            )
        room = self.tokenizer.num_special_tokens_to_add()
        if length is not None and length <= room:
            raise RegardError(f"see: --length {length} leaves no room for the text; {room} tokens are special ones.")
        cut = {"truncation": True, "max_length": length} if length is not None else {}
        inputs = self.tokenizer(text, return_tensors="pt", verbose=False, **cut)
        return {name: inputs[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in inputs}

    def _limit(self) -> int | None:
        """Tokens that the model has positions for; RoBERTa and its kin keep two positions to themselves."""
        positions = getattr(self.model.config, "max_position_embeddings", None)
        told = self.tokenizer.model_max_length
        return told if positions is not None and positions - 2 <= told < positions else positions

    def _labels(self, ids: Sequence[int]) -> list[str]:
        """Tokens as people read them; pieces inside a word are marked ##, as WordPiece does."""
        raw = self.tokenizer.convert_ids_to_tokens(ids)
        spaced = any(token.startswith(WORD_STARTS) for token in raw)
        labels: list[str] = []
        for token, index in zip(raw, ids, strict=True):
            text = self.tokenizer.convert_tokens_to_string([token])
            label = token if token.startswith("##") else text.strip() or ("↵" if "\n" in text else token)
            after_word = bool(labels) and labels[-1][-1].isalnum() and index not in self.tokenizer.all_special_ids
            inside = spaced and after_word and label.isalnum() and not token.startswith(WORD_STARTS)
            labels.append(f"##{label}" if inside else label)
        return labels


def read_text(source: str) -> str:
    """A text as given, the contents of a file, or standard input for "-"."""
    if source == "-":
        return _decode(sys.stdin.buffer.read(), "standard input")
    if os.path.isfile(source):
        with open(source, "rb") as file:
            return _decode(file.read(), source)
    if os.path.isdir(source):
        raise RegardError(f"see: {source} is a folder. Give a text, a UTF-8 file, or - for standard input.")
    if (
        source
        and not any(c.isspace() for c in source)
        and (os.sep in source or os.path.splitext(source)[1][1:].isalnum())
    ):
        raise RegardError(f"see: there is no file {source}. Give a text, a UTF-8 file, or - for standard input.")
    return source


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RegardError(
            f"see: {name} is not UTF-8 text (byte {error.start} is 0x{content[error.start]:02x}). Convert it, for "
            "example with: iconv -f latin1 -t utf-8"
        ) from None


def _title(text: str, width: int = 76) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1].rsplit(" ", 1)[0] + "…"


def _chosen(maps: dict[str, Any], layers: Sequence[int] | None) -> dict[str, Any]:
    if layers is None:
        return maps
    names = list(maps)
    wrong = [layer for layer in layers if not 0 <= layer < len(names)]
    if wrong:
        raise RegardError(f"see: there is no layer {wrong[0]}; the model has layers 0 to {len(names) - 1}.")
    return {names[layer]: maps[names[layer]] for layer in layers}
