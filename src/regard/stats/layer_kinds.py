"""What the layers of each kind of a hybrid model attend to, beside one another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from regard.stats.numbering import layer_number
from regard.stats.profile import LayerProfile, ModelProfile

#: The kind of every layer that is not recurrent.
ATTENTION = "attention"
#: Statistics that a comparison names -> the words for them.
TARGETS = {"itself": "the token itself", "previous": "the previous token", "first": "the first token"}


@dataclass(frozen=True)
class LayerKind:
    """The layers of one kind: their numbers, and the means over their heads.

    `shares` are shares of the weight (of |weight|, if weights are signed) by target, `reach` the mean distance in
    tokens, `effective` the effective number of tokens, exp(entropy), and `negative` the negative share of |weight|.
    """

    kind: str
    numbers: tuple[int, ...]
    shares: dict[str, float]
    reach: float
    effective: float
    negative: float | None

    @property
    def sentence(self) -> str:
        """The kind in one sentence."""
        weight = "weight" if self.negative is None else "|weight|"
        parts = [f"{100 * share:.0f} % of {weight} on {TARGETS[target]}" for target, share in self.shares.items()]
        parts[1:] = [part.replace(f" of {weight}", "") for part in parts[1:]]  # the first part has said it
        parts += [f"mean distance {self.reach:.1f} tokens", f"effectively {self.effective:.1f} tokens"]
        if self.negative is not None:
            parts.append(f"{100 * self.negative:.0f} % of |weight| is negative")
        return f"{self.kind.capitalize()} ({_layers(self.numbers)}): {', '.join(parts)}."


def layer_kinds(profile: ModelProfile) -> list[LayerKind]:
    """The kinds of a profile in the order of their first layers.

    >>> import torch, regard as rg
    >>> from regard.stats import profile
    >>> from regard.stats.layer_kinds import layer_kinds
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> maps = {"layers.0": rg.Attention(mask=rg.causal())(x, x, x).weights}
    >>> (kind,) = layer_kinds(profile(maps, ["a", "b", "c"], kinds={"layers.0": "attention"}))
    >>> kind.numbers, round(kind.shares["itself"], 2), kind.negative
    ((0,), 0.61, None)
    """
    kinds = dict.fromkeys(layer.kind or ATTENTION for layer in profile.layers)
    return [_kind(kind, [layer for layer in profile.layers if (layer.kind or ATTENTION) == kind]) for kind in kinds]


def _kind(kind: str, layers: Sequence[LayerProfile]) -> LayerKind:
    """The means over all heads of these layers, which are of one kind."""
    shares = {name: _mean(layers, name) for name in TARGETS if name in layers[0].values}
    negatives = [layer.negative for layer in layers if layer.negative is not None]
    negative = sum(negatives) / len(negatives) if negatives else None
    numbers = tuple(layer.number for layer in layers)
    return LayerKind(kind, numbers, shares, _mean(layers, "reach"), math.exp(_mean(layers, "entropy")), negative)


def _mean(layers: Sequence[LayerProfile], name: str) -> float:
    """The mean of one statistic over the heads of all layers; heads for which it is NaN are left out."""
    return float(torch.cat([layer.values[name].float() for layer in layers]).nanmean())


def kind_lines(profile: ModelProfile) -> Iterator[str]:
    """Sentences about the layers of a model, for the lines below its statistics.

    If some layers are not attention, there is one for each kind. Others say which layers are means over channels, and
    which layers have signed weights, so that their numbers are shares of |weight|.
    """
    kinds, layers = layer_kinds(profile), profile.layers
    if any(kind.kind != ATTENTION for kind in kinds):
        yield from (kind.sentence for kind in kinds)
        yield from _numbering(layers)
    by_size: dict[tuple[int, int], list[int]] = {}
    for layer in layers:
        if layer.averaged is not None:
            by_size.setdefault(layer.averaged, []).append(layer.number)
    for averaged, numbers in by_size.items():
        each = "Each of " if len(numbers) > 1 else ""
        yield f"{each}{_layers(numbers)} is shown as {_mean_of(averaged)}.".capitalize()
    signed = [layer.number for layer in layers if layer.negative is not None]
    if signed:
        yield f"Weights of {_layers(signed)} have signs; the numbers here are shares of |weight|."


def layer_note(layer: LayerProfile) -> str:
    """What is special about a layer, in sentences; "" for attention whose weights have no signs.

    >>> layer_note(LayerProfile("", {}, None, None, None, None, kind="delta rule", negative=0.25))
    'Delta rule. Weights have signs: numbers are shares of |weight|, of which 25 % is negative.'
    """
    kind = "" if layer.kind in ("", ATTENTION) else f"{layer.kind.capitalize()}."
    mean = f"This is {_mean_of(layer.averaged)}." if layer.averaged else ""
    share = None if layer.negative is None else f"{100 * layer.negative:.0f} % is negative"
    signs = f"Weights have signs: numbers are shares of |weight|, of which {share}." if share else ""
    return " ".join(part for part in (kind, mean, signs) if part)


def _mean_of(averaged: tuple[int, int]) -> str:
    """`the mean of 128 of its 1,536 channels`, for `averaged` = (128, 1536)."""
    num_averaged, num_channels = averaged
    some = f"{num_averaged} of " if num_averaged < num_channels else ""
    return f"the mean of {some}its {num_channels:,} channels"


def _numbering(layers: Sequence[LayerProfile]) -> Iterator[str]:
    """A sentence if the numbers count maps, since a layer of the model has several."""
    other = next((layer for layer in layers if layer_number(layer.name) not in (None, layer.number)), None)
    if other is not None:
        yield f"A layer of this model has several maps, which are numbered one by one: L{other.number} is {other.name}."


def _layers(numbers: Sequence[int]) -> str:
    """`layers 0 to 2, 4`, with three or more consecutive numbers as one range; the numbers ascend.

    >>> _layers([0, 1, 2, 4]), _layers([3])
    ('layers 0 to 2, 4', 'layer 3')
    """
    runs: list[list[int]] = []  # [first, last] of each range
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    listed = ", ".join(f"{a} to {b}" if b - a > 1 else f"{a}, {b}" if b > a else str(a) for a, b in runs)
    return f"layer{'s' * (len(numbers) > 1)} {listed}"
