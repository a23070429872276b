"""`TextReader` runs a model on a text and returns the maps, statistics, roles and warnings of all its heads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.base.errors import RegardError, first_line
from regard.base.texts.text_files import has_half_character
from regard.hf.capture import WatchedAttention, watch
from regard.hf.models import full_name, load_model, model_name
from regard.hf.text_probes import DEPTHS, CacheCost, cost_of, needle_table, split_of, syntax_table
from regard.hf.token_labels import token_labels, tokens_of
from regard.maps import AttentionMap, Reduction
from regard.stats import (
    SyntaxSentence,
    layer_numbers,
    mask_findings,
    probe_tokens,
    profile,
    roles,
    shuffle_order,
    syntax_sentences,
    text_statistics,
)
from regard.stats.cache_split import KeyHeadSplit
from regard.stats.profile import ModelProfile
from regard.stats.roles import QUERIES, SYNTAX_KINDS, RoleTable
from regard.stats.text_reading import TextReading

#: Number of different tokens of a probe, which contains each of them twice.
PROBE = 100
#: Values of each parameter that enter a fingerprint.
FINGERPRINT_VALUES = 1024
#: Entries of a configuration that do not change the numbers of a model.
IGNORED_SETTINGS = (
    "_name_or_path", "transformers_version", "_attn_implementation", "_attn_implementation_internal",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class TextResult:
    """The result of `TextReader.read`: a reading, and how exact its maps are.

    `missing` names the attention modules without a map and says why. `error` is the largest difference between
    recomputed weights @ values and the model's own output over the verified rows; None if no row was verified.
    `charts` are additional curves for the page.

    >>> import regard as rg
    >>> result = rg.TextReader.load("minilm").read("The cat sat.", layers=[0])
    >>> result.reading.profile.tokens, result.missing, result.error < 1e-4
    (['[CLS]', 'the', 'cat', 'sat', '.', '[SEP]'], {}, True)
    """

    reading: TextReading
    missing: dict[str, str]
    error: float | None
    charts: list[dict[str, Any]] = field(default_factory=list)


def no_reductions(weights: AttentionMap) -> tuple[Reduction, ...]:
    """No reductions in addition to those of the profile."""
    return ()


@dataclass(frozen=True, eq=False)
class ChosenMaps:
    """The maps of the chosen layers, the numbers of these layers in the model, and the whole watch."""

    maps: dict[str, AttentionMap]
    numbers: list[int]
    seen: WatchedAttention


@dataclass(frozen=True, eq=False)
class TextReader:
    """A model with its tokenizer, which reads texts: `TextReader.load("minilm").read("A text.")`.

    A few rows of the weights are recomputed and compared with the model's output, or all rows with `verify_all`. Of an
    encoder-decoder only the encoder runs. `name` is the name or folder from which the model was loaded.

    >>> import regard as rg
    >>> reader = rg.TextReader.load("minilm")
    >>> result = reader.read("The animal didn't cross the street because it was too tired.")
    >>> result.reading.maps["encoder.layer.3.attention.self"]
    AttentionMap(1 x 12 heads x 16 queries x 16 keys)
    >>> [(link.layer, link.head) for link in result.reading.notable(query=10, count=1)]
    [(2, 1)]
    """

    model: Any
    tokenizer: Any
    verify_all: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        for part in ("model", "tokenizer"):
            value = getattr(self, part)
            if value is None or isinstance(value, str):
                raise RegardError(
                    f"TextReader: {part} must be an object, got {value!r}. TextReader.load(name) loads the model and "
                    "the tokenizer of a folder or a name."
                )

    @staticmethod
    def load(name: str | Path) -> TextReader:
        """The model that `load_model` finds under this name."""
        return TextReader(*load_model(name), name=str(name))

    def read(
        self,
        text: str,
        layers: Sequence[int] | None = None,
        length: int | None = None,
        title: str | None = None,
        also: Callable[[AttentionMap], Sequence[Reduction]] = no_reductions,
        progress: Callable[[str], None] = lambda _: None,
    ) -> TextResult:
        """Run the model on the first `length` tokens of a text (None: on all), and keep the maps of `layers`.

        `title` is that of the result, by default the text. `also(map)` returns further reductions, which run in the
        same pass over the map as those of the profile. `progress` is called with a message for each step.
        """
        inputs = self.tokenize(text, length)
        ids = inputs["input_ids"][0].tolist()
        progress(f"Running the model on {len(ids)} tokens")
        chosen = self.watched(inputs, layers)
        errors = [check.error for check in chosen.seen.verify().values() if check.error is not None]
        title = title or in_one_line(text)
        labels, special = self.labels(ids), self.special(ids)
        options = {"also": also, "model": self.model_name, "kinds": chosen.seen.kinds}
        progress(f"Measuring the heads of {len(chosen.maps)} layers")
        reading = TextReading.of(title, chosen.maps, labels, special, chosen.numbers, **options)
        progress("Checking masks")
        masks = mask_findings(chosen.maps, causal=self._claims_causal(chosen.maps), numbers=chosen.numbers)
        progress("Finding roles, also on shuffled tokens")
        reading = replace(reading, roles=self.roles_of(chosen, inputs), masks=masks)
        return TextResult(reading, chosen.seen.missing | self._skipped_decoder(), max(errors, default=None))

    def profile(
        self, text: str, layers: Sequence[int] | None = None, length: int | None = None
    ) -> tuple[ModelProfile, bool]:
        """All statistics of one document, and whether it was truncated to `length` or to what the model takes."""
        longest = length or self.limit
        num_tokens = self.count_tokens(text)
        truncated = longest is not None and num_tokens > longest
        inputs = self._inputs(text, longest if truncated else None)
        ids = inputs["input_ids"][0].tolist()
        chosen, tokens = self.watched(inputs, layers), tokens_of(self.tokenizer, ids)
        options = {"numbers": chosen.numbers, "kinds": chosen.seen.kinds, "statistics": text_statistics(tokens)}
        return profile(chosen.maps, tokens, special=self.special(ids), **options), truncated

    def probe(self, layers: Sequence[int] | None = None) -> RoleTable:
        """The roles of the heads on a sequence of random tokens that is repeated once.

        Only the repetition predicts the next token there, so induction and duplicate-token heads are visible. The
        special tokens before and after a text stay: those of the text "a" show where they are.
        """
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
        table = self.roles_of(self.watched(inputs, layers), inputs)
        if table is None:
            raise RegardError("TextReader.probe: a probe needs a model that takes at least 60 tokens.")
        return table

    def syntax(
        self,
        sentences: Sequence[SyntaxSentence] | None = None,
        relations: Sequence[str] = tuple(SYNTAX_KINDS),
        layers: Sequence[int] | None = None,
    ) -> RoleTable:
        """The heads that follow grammar (`syntax_roles`), on annotated sentences; by default the 72 of the package.

        The null reads the same sentences with their words in random order.
        """
        return syntax_table(self, syntax_sentences() if sentences is None else sentences, relations, layers)

    def needles(
        self, length: int = 512, depths: Sequence[float] = DEPTHS, layers: Sequence[int] | None = None
    ) -> RoleTable:
        """The retrieval heads (`retrieval_roles`) on four needles at some depths of a text of `length` tokens.

        The text is that of the package. Each needle is asked for at the end, and the answer is given.
        """
        self._check_causal("needles")
        self.check_length(length)
        return needle_table(self, length, depths, layers)

    def cache_split(
        self, text: str, sinks: int = 4, window: int = 256, least: float = 0.1, length: int | None = None
    ) -> KeyHeadSplit:
        """Which heads need the whole cache on this text, and which live from its ends: see
        `regard.stats.cache_split`.
        """
        self._check_causal("cache_split")
        return split_of(self, self.tokenize(text, length), sinks, window, least)

    def cache_cost(self, split: KeyHeadSplit, text: str, length: int | None = None, seed: int = 0) -> CacheCost:
        """The perplexity of a text with the whole cache and with the split, and with as many heads at random.

        Take another text than that of the split, whose heads were chosen on it.
        """
        self._check_causal("cache_cost")
        return cost_of(self, split, self.tokenize(text, length), seed)

    def _check_causal(self, method: str, remedy: str = "") -> None:
        """Refuse a method for a model that does not predict the next token."""
        if not _predicts_next_token(self.model):
            raise RegardError(
                f"TextReader.{method}: {type(self.model).__name__} does not predict the next token; only causal "
                f"language models do, such as smollm2.{remedy}"
            )

    def next_token_loss(self, text: str, length: int | None = None) -> Callable[[Any], Tensor]:
        """A function of a model: the mean loss in nats of predicting each token of the text from those before it.

        Only causal language models have this loss. With it, `rg.importance` and `rg.hf.pruning_curve` need no data.
        """
        self._check_causal("next_token_loss", " For other models give your own loss to rg.importance.")
        inputs = self.tokenize(text, length)
        if inputs["input_ids"].shape[1] < 2:
            raise RegardError("TextReader.next_token_loss: the text has 1 token; give at least 2.")
        return lambda model: model(**inputs, labels=inputs["input_ids"], use_cache=False).loss

    def fingerprint(self) -> str:
        """A hash of the model's configuration and of the first values of every parameter."""
        config = self.model.config.to_dict()
        settings = {name: value for name, value in config.items() if name not in IGNORED_SETTINGS}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
        for name, parameter in self.model.named_parameters():
            digest.update(f"{name} {tuple(parameter.shape)}".encode())
            digest.update(parameter.detach().flatten()[:FINGERPRINT_VALUES].double().cpu().numpy().tobytes())
        return digest.hexdigest()

    def special(self, ids: Sequence[int]) -> list[int]:
        """Indices of the tokens that the tokenizer calls special."""
        special_ids = set(self.tokenizer.all_special_ids)
        return [index for index, token in enumerate(ids) if token in special_ids]

    def count_tokens(self, text: str) -> int:
        """The number of tokens of a text; a text with half a character is refused, because no tokenizer reads it."""
        if has_half_character(text):
            raise RegardError(
                "TextReader: the text has half a character (one surrogate without the other). Give the complete "
                "character, or remove it."
            )
        return len(self.tokenizer(text, verbose=False)["input_ids"])

    def tokenize(self, text: str, length: int | None) -> dict[str, Any]:
        """The model's inputs for the first `length` tokens of a text (None: all).

        A text that is empty, or too long for the model without a `length`, is refused.
        """
        if not text.strip():
            raise RegardError("TextReader: the text is empty. Give at least one word.")
        self.check_length(length)
        num_tokens = self.count_tokens(text)
        if self.limit is not None and length is None and num_tokens > self.limit:
            raise RegardError(
                f"TextReader: the text has {num_tokens} tokens, and this model takes {self.limit}. Read its "
                f"beginning with length={self.limit} (--length {self.limit}), or give a shorter text."
            )
        return self._inputs(text, length)

    def check_length(self, length: int | None) -> None:
        """Refuse a length above the model's limit, or one that has room for special tokens only."""
        if self.limit is not None and length is not None and length > self.limit:
            raise RegardError(f"TextReader: length {length} is more than the {self.limit} tokens that the model takes.")
        num_special = self.tokenizer.num_special_tokens_to_add()
        if length is not None and length <= num_special:
            raise RegardError(
                f"TextReader: length {length} leaves no room for the text; {num_special} tokens are special."
            )

    @property
    def model_name(self) -> str:
        """The name by which a page calls the model."""
        return full_name(self.name) if self.name else model_name(self.model)

    @property
    def limit(self) -> int | None:
        """How many tokens the model has positions for; None if its configuration does not say.

        RoBERTa and its variants reserve two positions.
        """
        positions = getattr(self.model.config, "max_position_embeddings", None)
        declared = self.tokenizer.model_max_length
        return declared if positions is not None and positions - 2 <= declared < positions else positions

    def watched(self, inputs: dict[str, Any], layers: Sequence[int] | None) -> ChosenMaps:
        """Run the model on its inputs, and keep the maps of some layers and their numbers."""
        encoder = self._encoder()
        with watch(encoder, verify="all" if self.verify_all else True) as seen, torch.no_grad():
            _run(encoder, inputs)
        if not seen.names:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in list(seen.missing.items())[:3])
            raise RegardError(
                f"TextReader: no attention of this model could be captured. {reasons or 'It has no attention modules.'}"
            )
        return chosen_maps(seen, layers)

    def roles_of(self, chosen: ChosenMaps, inputs: dict[str, Any]) -> RoleTable | None:
        """The roles of the heads in the maps of a text with these inputs; None if too few tokens can be shuffled.

        The model runs once more, on the shuffled tokens: scores there are the null.
        """
        ids = inputs["input_ids"][0].tolist()
        special = self.special(ids)
        order = shuffle_order(ids, special)
        tokens = tokens_of(self.tokenizer, ids)
        shuffled = [tokens[place] for place in order]
        if len(ids) - len(special) <= QUERIES or shuffled == tokens:
            return None
        null = self.watched(inputs | {"input_ids": inputs["input_ids"][:, order]}, chosen.numbers).maps
        return roles(chosen.maps, tokens, null=null, null_tokens=shuffled, special=special, numbers=chosen.numbers)

    def _claims_causal(self, maps: dict[str, AttentionMap]) -> bool:
        """Whether every module of these maps says that it is causal, so that a map that is not is worth a warning."""
        modules = (self._encoder().get_submodule(name) for name in maps)
        return all(getattr(module, "is_causal", False) is True for module in modules)

    def _ordinary_ids(self) -> list[int]:
        """The vocabulary without special tokens, added tokens and tokens that were never trained."""
        excluded = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        num_embeddings = self.model.get_input_embeddings().num_embeddings
        return sorted(
            number
            for token, number in self.tokenizer.get_vocab().items()
            if number not in excluded and number < num_embeddings and not token.startswith("[unused")
        )

    def _encoder(self) -> Any:
        """The part of the model that reads a text: the encoder of an encoder-decoder, else the whole model."""
        return self.model.get_encoder() if getattr(self.model.config, "is_encoder_decoder", False) else self.model

    def _skipped_decoder(self) -> dict[str, str]:
        """The decoder of an encoder-decoder as a missing module: it does not run on a text alone."""
        if self._encoder() is self.model:
            return {}
        reason = "a text alone runs only the encoder; rg.watch(model) shows decoder and cross-attention while they run"
        return {"decoder": reason}

    def _inputs(self, text: str, length: int | None) -> dict[str, Any]:
        """The tensors (1, n) that the tokenizer makes of the first `length` tokens of a text (None: all)."""
        truncation = {"truncation": True, "max_length": length} if length is not None else {}
        inputs = self.tokenizer(text, return_tensors="pt", verbose=False, **truncation)
        return {name: inputs[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in inputs}

    def labels(self, ids: Sequence[int]) -> list[str]:
        """Tokens in readable form; a piece that continues a word starts with ##, as in WordPiece."""
        return token_labels(self.tokenizer, ids)


def _run(model: Any, inputs: dict[str, Any]) -> None:
    """Run a model on a text; a model that needs other inputs raises a `RegardError`."""
    try:
        model(**inputs)
    except RegardError:
        raise
    except Exception as error:  # models raise errors of many types for missing images or sounds
        reason = first_line(error) or type(error).__name__
        raise RegardError(
            f"TextReader: {type(model).__name__} cannot read a text alone ({reason}). Give a model of texts; "
            "rg.watch(model) shows any model while you run it on its own inputs."
        ) from error


def _predicts_next_token(model: Any) -> bool:
    """Whether a model is a causal language model, by the class that transformers lists as one."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    causal = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    is_encoder = model.config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES  # BERT is causal only as a decoder
    return causal and (not is_encoder or getattr(model.config, "is_decoder", True))


def in_one_line(text: str, width: int = 76) -> str:
    """A text as one line, cut between words."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1].rsplit(" ", 1)[0] + "…"


def chosen_maps(seen: WatchedAttention, layers: Sequence[int] | None) -> ChosenMaps:
    """The maps of some layers, by their numbers in the model."""
    maps = seen.maps
    names = dict(zip(layer_numbers(maps), maps, strict=True))
    wanted = list(names) if layers is None else list(layers)
    for layer in wanted:
        if layer not in names:
            count = len(names)
            choices = f"0 to {count - 1}" if list(names) == list(range(count)) else ", ".join(map(str, names))
            raise RegardError(f"TextReader: there is no layer {layer}; the model has layers {choices}.")
    return ChosenMaps({names[layer]: maps[names[layer]] for layer in wanted}, wanted, seen)
