"""How much a language model's own loss hangs on each head, and how it grows as heads are removed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.text import Text
from torch import Tensor

from regard.errors import RegardError
from regard.hf import importance, pruning_curve
from regard.hf.heads.pruning_curve import ORDERS, TENTHS
from regard.hf.text_reader import Read, Reader
from regard.seq2seq.comparison.curves import ORDERS as WAYS
from regard.stats import Reading

#: Heads named in a line.
NAMED = 3


def weighed(reader: Reader, text: str, read: Read, length: int | None = None) -> Read:
    """The importance of every head beside its statistics, and the loss against the share of heads removed.

    The loss is that of the next token of this text, whose targets the text itself holds; only a model that was
    trained to tell them has one. Importance is |d loss / d gate| (Michel et al. 2019, arXiv:1905.10650).
    """
    if not _tells_the_next_token(reader.model):
        raise RegardError(
            f"see: --importance needs a loss, and {type(reader.model).__name__} has none of a bare text: only a causal "
            "language model, such as smollm2, tells each next token. For other models give your own to rg.importance."
        )
    inputs = reader.tokenize(text, length)
    if inputs["input_ids"].shape[1] < 2:
        raise RegardError("see: --importance needs at least 2 tokens, the second of which is to be told.")
    found = importance(reader.model, _loss, [inputs])
    layers = read.reading.profile.layers
    for layer in layers:
        if layer.name not in found.values:
            raise RegardError(f"see: the importance of {layer.name} is not known: {found.missing.get(layer.name)}.")
    layers = [replace(layer, values=layer.values | {"importance": found.values[layer.name]}) for layer in layers]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Removing heads", total=len(ORDERS) * len(TENTHS))
        curve = pruning_curve(
            reader.model, lambda model: float(_loss(model, inputs)), found, progress=lambda _: progress.advance(task)
        )
    series = [
        {"name": WAYS[order], "points": [list(point) for point in curve.qualities(order).items()]}
        for order in dict.fromkeys(point.order for point in curve.points)
    ]
    title = "Loss of the next token without heads"
    chart = {"title": title, "x": "share of heads removed", "y": "loss in nats", "series": series}
    profile = replace(read.reading.profile, layers=layers)
    return replace(read, reading=replace(read.reading, profile=profile), charts=[*read.charts, chart])


def most_important(reading: Reading) -> Text:
    """The heads that the loss hangs on most."""
    heads = [
        (value, f"{layer.number}.{head}")
        for layer in reading.profile.layers
        for head, value in enumerate(layer.values.get("importance", ()))
    ]
    named = ", ".join(f"{head} ({float(value):.2g})" for value, head in sorted(heads, reverse=True)[:NAMED])
    return Text(f"Telling the next token hangs most on heads {named}: |d loss / d gate|, in nats.")


def _tells_the_next_token(model: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    told = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return told and getattr(model.config, "is_decoder", True)  # BERT with such a head is causal only as a decoder


def _loss(model: Any, inputs: dict[str, Any]) -> Tensor:
    return model(**inputs, labels=inputs["input_ids"], use_cache=False).loss
