"""`AttributionRequest`: what a method of attribution is asked, and `MethodResult`, what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from regard.attribution.inputs import TextInputs
from regard.attribution.target import Explained
from regard.attribution.traced_run import TracedCall
from regard.base.errors import RegardError
from regard.maps import AttentionMap

#: The name of the tokens that the model reads, and of those of the decoder of an encoder-decoder.
INPUT, DECODER = "input", "decoder"


@dataclass(frozen=True, eq=False)
class AttributionRequest:
    """What a method is asked: a model, its inputs, and the number L to explain.

    `layers` chooses layers as in `rg.watch` (None: all). `options` are the keyword options of `attribute` for this
    method, whose values the method checks.
    """

    model: nn.Module
    inputs: TextInputs
    target: Explained
    layers: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_decoder(self) -> bool:
        """Whether the model is an encoder-decoder."""
        return self.inputs.decoder_ids is not None or bool(
            getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        )

    def text_of_keys(self, call: TracedCall) -> str:
        """INPUT or DECODER: the text whose tokens the keys of a call are.

        The keys of cross-attention are tokens of the source, so they count as INPUT.
        """
        return DECODER if self.has_decoder and call.part == "decoder" else INPUT


@dataclass(frozen=True, eq=False)
class MethodResult:
    """The answer of a method: a map for each layer, the relevance of each token (B, n), and notes in words.

    Keys of `maps` and `parts` ("encoder", "decoder" or "cross") are names of calls, those of `missing` (the reasons)
    module paths, those of `relevance` INPUT and DECODER. `value` is L of each sequence, (B,).
    """

    maps: dict[str, AttentionMap]
    relevance: dict[str, Tensor]
    value: Tensor
    parts: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    #: The edges between heads of edge attribution patching.
    edges: Any = None


def received(
    request: AttributionRequest, calls: Mapping[str, TracedCall], maps: Mapping[str, AttentionMap]
) -> dict[str, Tensor]:
    """The sum of the maps over layers, heads and queries, for each token as a key; (B, n) for each text, on the CPU.

    The first map of a text decides the number of tokens; maps with another number of keys are left out.
    """
    totals: dict[str, Tensor] = {}
    for name, weights in maps.items():
        text, total = request.text_of_keys(calls[name]), weights.received().sum(1)
        known = totals.get(text)
        if known is None or known.shape == total.shape:
            totals[text] = total if known is None else known + total
    return {text: total.cpu() for text, total in totals.items()}


def one_sequence(method: str, request: AttributionRequest) -> None:
    """Refuse a batch of several sequences."""
    if request.inputs.batch_size > 1:
        raise RegardError(
            f"attribute(method={method!r}): this method takes one sequence, got {request.inputs.batch_size}. Ask for "
            "each: inputs[b : b + 1]."
        )
