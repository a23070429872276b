"""`read_generation` lets a model continue a text, and returns one map of prompt and output for each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.hf.capture import Generation, watch
from regard.hf.text_reader import TextReader, TextResult, chosen_maps, in_one_line, no_reductions
from regard.maps import AttentionMap, Reduction
from regard.stats.text_reading import TextReading


@dataclass(frozen=True)
class ReadShares:
    """Where a layer reads when it predicts the generated tokens: shares of the weight, as means over heads and tokens.

    `first` is the first token, on which many heads put what they do not need; `prompt` is the rest of the prompt, and
    `output` are the generated tokens.
    """

    layer: int
    first: float
    prompt: float
    output: float


@dataclass(frozen=True)
class GeneratedLink:
    """The strongest link of the row that predicts a generated token; neighbors and the first token are left out.

    `token` and `key` are labels, and `number` is the place of the generated token in the text.
    """

    token: str
    number: int
    key: str
    layer: int
    head: int
    weight: float


@dataclass(frozen=True, eq=False)
class GenerationResult:
    """A text that a model continued: its maps, and what each generated token was predicted from.

    `result` has the reading of the decoder, over all tokens that the model read. The last token was generated and not
    read. `labels` names all tokens, the last one too. `cross` is the reading of an encoder-decoder's cross-attention.
    """

    prompt: str
    output: str
    labels: list[str]
    result: TextResult
    generation: Generation
    cross: TextReading | None = None

    @property
    def prompt_length(self) -> int:
        return self.generation.prompt_length

    @property
    def num_generated(self) -> int:
        return len(self.labels) - self.prompt_length

    def shares(self) -> list[ReadShares]:
        """Where each layer reads when it predicts the generated tokens."""
        layers = zip(self.result.reading.profile.layers, self.result.reading.maps.values(), strict=True)
        first = self.prompt_length - 1  # the row that predicts the first generated token
        return [ReadShares(layer.number, *self._parts(weights[0, :, first:])) for layer, weights in layers]

    def links(self) -> Iterator[GeneratedLink]:
        """The strongest link of each generated token, in their order; in translation the link to the source."""
        reading = self.result.reading if self.cross is None else self.cross
        for number in range(self.prompt_length, len(self.labels)):
            for found in reading.notable(number - 1, 1):  # the row before a token predicts it
                key = reading.profile.tokens[found.link.key]
                yield GeneratedLink(self.labels[number], number, key, found.layer, found.head, found.link.weight)

    def _parts(self, rows: Tensor) -> tuple[float, float, float]:
        """The weight that rows (H, rows, J) put on the first token, the rest of the prompt and the output: means."""
        parts = rows[..., :1], rows[..., 1 : self.prompt_length], rows[..., self.prompt_length :]
        first, prompt, output = (float(part.sum(-1).mean()) for part in parts)
        return first, prompt, output


def read_generation(
    reader: TextReader,
    text: str,
    num_tokens: int,
    layers: Sequence[int] | None = None,
    length: int | None = None,
    also: Callable[[AttentionMap], Sequence[Reduction]] = no_reductions,
) -> GenerationResult:
    """Continue a text by at most `num_tokens` tokens, greedily; the maps are those of `layers` (None: all).

    The prompt is the first `length` tokens of the text (None: all). `also(map)` returns reductions of a map that are
    computed in addition to those of its profile.

    >>> import transformers, regard as rg
    >>> from regard.hf.generation_reader import read_generation
    >>> _, tokenizer = rg.load_model("minilm")
    >>> sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 30_522, "bos_token_id": 0, "eos_token_id": None}
    >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    >>> result = read_generation(rg.TextReader(model, tokenizer), "The cat sat.", 4)
    >>> result.prompt_length, result.num_generated, result.result.reading.maps["transformer.h.0.attn"]
    (6, 4, AttentionMap(1 x 2 heads x 9 queries x 9 keys))
    """
    inputs = reader.tokenize(text, length)
    _check(reader, inputs, num_tokens)
    ids = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
    settings = {"do_sample": False, "num_beams": 1, "max_new_tokens": num_tokens}
    if getattr(reader.model.generation_config, "pad_token_id", None) is None:
        settings["pad_token_id"] = reader.tokenizer.pad_token_id or 0
    with watch(reader.model, verify="all" if reader.verify_all else True) as seen, torch.no_grad():
        reader.model.generate(**ids, **settings)
    generation = seen.generation.sequence(0)
    if not generation.decoder and not generation.names:
        raise RegardError(f"generate: no attention of {type(reader.model).__name__} could be captured.")
    return _result(reader, text, inputs, generation, layers, also)


def _check(reader: TextReader, inputs: dict[str, Any], num_tokens: int) -> None:
    """Refuse models that do not generate text, and more tokens than the model has positions for."""
    model, num_prompt = reader.model, inputs["input_ids"].shape[1]
    if not callable(getattr(model, "can_generate", None)) or not model.can_generate():
        raise RegardError(
            f"generate: {type(model).__name__} does not generate text. Give a language model or a translator: smollm2, "
            "or the folder of one."
        )
    is_decoder = not getattr(model.config, "is_encoder_decoder", False)
    if is_decoder and reader.limit is not None and num_prompt + num_tokens > reader.limit:
        raise RegardError(
            f"generate: {num_prompt} tokens of prompt and {num_tokens} more are above the {reader.limit} tokens that "
            "the model takes. Ask for fewer, or cut the prompt with length= (--length)."
        )


def _result(
    reader: TextReader,
    text: str,
    inputs: dict[str, Any],
    generation: Generation,
    layers: Sequence[int] | None,
    also: Callable[[AttentionMap], Sequence[Reduction]],
) -> GenerationResult:
    """What a reader shows of a finished generation: of a translator, the decoder's and the cross-attention.

    A translator has no roles, because the reader would run only its encoder on shuffled tokens.
    """
    ids = generation.tokens[0].tolist()
    labels, read = reader.labels(ids), ids[:-1]
    output = _output(reader.tokenizer, ids, generation.prompt_length)
    translates = bool(generation.cross)
    chosen = chosen_maps(generation.decoder if translates else generation, layers)
    shown = {"also": also, "model": reader.model_name, "kinds": generation.kinds}
    title = in_one_line(f"{text} → {output}" if translates else text + output)
    reading = TextReading.of(title, chosen.maps, labels[:-1], reader.special(read), chosen.numbers, **shown)
    if not translates:
        tokens = {"input_ids": torch.tensor([read])} | {
            name: torch.ones(1, len(read), dtype=torch.int64) for name in inputs if name == "attention_mask"
        }
        reading = replace(reading, roles=reader.roles_of(chosen, tokens))
    errors = [check.error for check in generation.verify().values() if check.error is not None]
    result = TextResult(reading, generation.missing, max(errors, default=None))
    cross = None
    if translates:
        source, maps = inputs["input_ids"][0].tolist(), generation.cross.maps
        tokens, special = reader.labels(source), reader.special(source)
        cross = TextReading.of(title, maps, tokens, special, queries=labels[:-1], **shown)
    return GenerationResult(text, output, labels, result, generation, cross)


def _output(tokenizer: Any, ids: list[int], prompt_length: int) -> str:
    """The generated tokens as they follow the prompt, with the space between."""
    prompt, whole = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:prompt_length], ids))
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    return tokenizer.decode(ids[prompt_length:], skip_special_tokens=True)
