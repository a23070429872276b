"""From what the user typed to a `Reading`: text, model, tokens, maps."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from regard.data.files import looks_like_path
from regard.errors import RegardError
from regard.hf.capture import Watched, watch
from regard.hf.models import load_model
from regard.maps import AttentionMap, Fold
from regard.stats import (
    Profile,
    Reading,
    RoleTable,
    layer_numbers,
    mask_findings,
    probe_tokens,
    profile,
    roles,
    shuffle_order,
    text_statistics,
)
from regard.stats.roles import QUERIES

#: Marks of byte-level and SentencePiece tokenizers: here begins a word.
WORD_STARTS = ("Ġ", "▁")
#: Different tokens of a probe, which has each of them twice.
PROBE = 100
#: Numbers of every parameter that a fingerprint is made of, and what of a configuration is left out of it.
BEGINNING = 1024
UNTOLD = ("_name_or_path", "transformers_version", "_attn_implementation", "_attn_implementation_internal")


@dataclass(frozen=True, eq=False)
class Read:
    """A reading, the attention modules that could not be seen with the reason, and how right the maps are.

    `error` is the greatest difference between recomputed weights @ values and the model's own
    output, on the rows that were checked; None where none could be. `charts` are curves for the page.
    """

    reading: Reading
    missing: dict[str, str]
    error: float | None
    charts: list[dict[str, Any]] = field(default_factory=list)


def no_folds(weights: AttentionMap) -> tuple[Fold, ...]:
    """Nothing besides the profile."""
    return ()


@dataclass(frozen=True, eq=False)
class Layers:
    """The maps of the layers asked for, their numbers in the model, and all that was seen."""

    maps: dict[str, AttentionMap]
    numbers: list[int]
    seen: Watched


@dataclass(frozen=True)
class Reader:
    """A model and its tokenizer; `read` reads a text with them, and recomputes a few rows of weights, or all."""

    model: Any
    tokenizer: Any
    verify_all: bool = False

    @staticmethod
    def load(name: str) -> Reader:
        return Reader(*load_model(name))

    def read(
        self,
        text: str,
        layers: Sequence[int] | None = None,
        length: int | None = None,
        title: str | None = None,
        also: Callable[[AttentionMap], Sequence[Fold]] = no_folds,
    ) -> Read:
        """Run the model on a text, of which `length` tokens at most, and keep the maps of `layers`.

        Folds that `also` names for a map run in the pass of its profile.
        """
        inputs = self.tokenize(text, length)
        ids = inputs["input_ids"][0].tolist()
        found = self._see(inputs, layers)
        errors = [check.error for check in found.seen.verify().values() if check.error is not None]
        name = title or shortened(text)
        labels = self._labels(ids)
        reading = Reading.of(name, found.maps, labels, self.special(ids), found.numbers, also=also)
        masks = mask_findings(found.maps, causal=self._claims_causal(found.maps), numbers=found.numbers)
        reading = replace(reading, roles=self._roles(found, inputs, layers), masks=masks)
        return Read(reading, found.seen.missing | self._unread(), max(errors, default=None))

    def profile(
        self, text: str, layers: Sequence[int] | None = None, length: int | None = None
    ) -> tuple[Profile, bool]:
        """Every statistic of one document of a corpus, and whether the document had to be cut to fit."""
        longest = length or self.limit
        whole = len(self.tokenizer(text, verbose=False)["input_ids"])
        cut = longest is not None and whole > longest
        inputs = self._inputs(text, longest if cut else None)
        ids = inputs["input_ids"][0].tolist()
        found, tokens = self._see(inputs, layers), self.tokenizer.convert_ids_to_tokens(ids)
        statistics = text_statistics(tokens)
        measured = profile(found.maps, tokens, special=self.special(ids), statistics=statistics, numbers=found.numbers)
        return measured, cut

    def probe(self, layers: Sequence[int] | None = None) -> RoleTable:
        """The roles on random tokens that repeat, where nothing but the repetition tells what comes next."""
        example = self._inputs("a", None)
        ids = example["input_ids"][0].tolist()
        special = set(self.special(ids))
        start = next((place for place in range(len(ids)) if place not in special), 0)
        stop = next((place for place in range(len(ids), 0, -1) if place - 1 not in special), start)
        room = (self.limit or 2 * PROBE + len(ids)) - start - (len(ids) - stop)
        ordinary = self._ordinary_ids()
        probe = probe_tokens(ordinary, min(PROBE, room // 2, len(ordinary))).tolist()
        row = torch.tensor([[*ids[:start], *probe, *ids[stop:]]])
        inputs = {name: torch.full_like(row, int(value[0, 0])) for name, value in example.items()} | {"input_ids": row}
        found = self._roles(self._see(inputs, layers), inputs, layers)
        if found is None:
            raise RegardError("see: --probe needs a model that takes at least 60 tokens; this one takes fewer.")
        return found

    def fingerprint(self) -> str:
        """A hash of the model's configuration and of the beginning of every parameter."""
        config = self.model.config.to_dict()
        told = {name: value for name, value in config.items() if name not in UNTOLD}
        digest = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode())
        for name, parameter in self.model.named_parameters():
            digest.update(f"{name} {tuple(parameter.shape)}".encode())
            digest.update(parameter.detach().flatten()[:BEGINNING].double().cpu().numpy().tobytes())
        return digest.hexdigest()

    def special(self, ids: Sequence[int]) -> list[int]:
        """Indices of the tokens that the tokenizer calls special."""
        special = set(self.tokenizer.all_special_ids)
        return [index for index, token in enumerate(ids) if token in special]

    def _see(self, inputs: dict[str, Any], layers: Sequence[int] | None) -> Layers:
        encoder = self._encoder()
        with watch(encoder, verify="all" if self.verify_all else True) as seen, torch.no_grad():
            _run(encoder, inputs)
        if not seen.names:
            reasons = "; ".join(f"{name}: {why}" for name, why in list(seen.missing.items())[:3])
            raise RegardError(f"see: no attention of this model could be captured. {reasons or 'It has none.'}")
        return _chosen(seen, layers)

    def _roles(self, found: Layers, inputs: dict[str, Any], layers: Sequence[int] | None) -> RoleTable | None:
        """The roles beside those on the same tokens shuffled; None where there is too little to shuffle."""
        ids = inputs["input_ids"][0].tolist()
        special = self.special(ids)
        order = shuffle_order(ids, special)
        tokens = self.tokenizer.convert_ids_to_tokens(ids)
        shuffled = [tokens[place] for place in order]
        if len(ids) - len(special) <= QUERIES or shuffled == tokens:
            return None
        null = self._see(inputs | {"input_ids": inputs["input_ids"][:, order]}, layers).maps
        return roles(found.maps, tokens, null=null, null_tokens=shuffled, special=special, numbers=found.numbers)

    def _claims_causal(self, maps: dict[str, AttentionMap]) -> bool:
        modules = (self._encoder().get_submodule(name) for name in maps)
        return all(getattr(module, "is_causal", False) is True for module in modules)

    def _ordinary_ids(self) -> list[int]:
        """The vocabulary without special, added and never trained tokens."""
        left_out = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        size = self.model.get_input_embeddings().num_embeddings
        vocabulary = self.tokenizer.get_vocab().items()
        return sorted(
            number
            for token, number in vocabulary
            if number not in left_out and number < size and not token.startswith("[unused")
        )

    def _encoder(self) -> Any:
        """Of an encoder-decoder only the encoder, which is the part that reads."""
        return self.model.get_encoder() if getattr(self.model.config, "is_encoder_decoder", False) else self.model

    def _unread(self) -> dict[str, str]:
        """The decoder of an encoder-decoder, which a text alone does not run."""
        if self._encoder() is self.model:
            return {}
        reason = "a text alone is read by the encoder; rg.watch(model) shows decoder and cross-attention while it runs"
        return {"decoder": reason}

    def tokenize(self, text: str, length: int | None) -> dict[str, Any]:
        """What the model reads of a text; one that is empty or too long is refused."""
        if not text.strip():
            raise RegardError("see: the text is empty. Give at least one word, a file, or - for standard input.")
        self.check_length(length)
        limit = self.limit
        num_tokens = len(self.tokenizer(text, verbose=False)["input_ids"])
        if limit is not None and length is None and num_tokens > limit:
            raise RegardError(
                f"see: the text has {num_tokens} tokens, and this model takes {limit}. Read its beginning with "
                f"--length {limit}, or give a shorter text."
            )
        return self._inputs(text, length)

    def check_length(self, length: int | None) -> None:
        """Refuse a length that the model or the special tokens rule out."""
        limit = self.limit
        if limit is not None and length is not None and length > limit:
            raise RegardError(f"see: --length {length} is more than the {limit} tokens that this model takes.")
        room = self.tokenizer.num_special_tokens_to_add()
        if length is not None and length <= room:
            raise RegardError(f"see: --length {length} leaves no room for the text; {room} tokens are special ones.")

    def _inputs(self, text: str, length: int | None) -> dict[str, Any]:
        cut = {"truncation": True, "max_length": length} if length is not None else {}
        inputs = self.tokenizer(text, return_tensors="pt", verbose=False, **cut)
        return {name: inputs[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in inputs}

    @property
    def limit(self) -> int | None:
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


def _run(model: Any, inputs: dict[str, Any]) -> None:
    """Run a model on a text; a model that needs other inputs raises a `RegardError`."""
    try:
        model(**inputs)
    except RegardError:
        raise
    except Exception as error:  # models raise errors of many types for missing pictures or sounds
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise RegardError(
            f"see: {type(model).__name__} cannot read a text alone ({lines[0][:200]}). Give a model of texts; "
            "rg.watch(model) shows any model while you run it on its own inputs."
        ) from error


def read_text(source: str) -> str:
    """A text as given, the contents of a file, or standard input for "-"."""
    if source == "-":
        return _decode(sys.stdin.buffer.read(), "standard input")
    if os.path.isfile(source):
        with open(source, "rb") as file:
            return _decode(file.read(), source)
    if os.path.isdir(source):
        raise RegardError(f"see: {source} is a folder. Give a text, a UTF-8 file, or - for standard input.")
    if looks_like_path(source):
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


def shortened(text: str, width: int = 76) -> str:
    """A text as one line, cut between words."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1].rsplit(" ", 1)[0] + "…"


def _chosen(seen: Watched, layers: Sequence[int] | None) -> Layers:
    maps = seen.maps
    numbered = dict(zip(layer_numbers(maps), maps, strict=True))
    wanted = list(numbered) if layers is None else list(layers)
    wrong = [layer for layer in wanted if layer not in numbered]
    if wrong:
        count = len(numbered)
        known = f"0 to {count - 1}" if list(numbered) == list(range(count)) else ", ".join(map(str, numbered))
        raise RegardError(f"see: there is no layer {wrong[0]}; the model has layers {known}.")
    return Layers({numbered[layer]: maps[numbered[layer]] for layer in wanted}, wanted, seen)
