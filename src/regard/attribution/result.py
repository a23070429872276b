"""`Attribution`: the result of `attribute`, one map for each layer and the relevance of each token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from regard.attribution.edge_patching import HeadEdges
from regard.attribution.faithfulness import FaithfulnessCurves
from regard.attribution.request import INPUT
from regard.base.errors import RegardError, nearest
from regard.base.upper_layers import upper_layer
from regard.hf.capture.captured_calls import NotCaptured
from regard.maps import AttentionMap, TopLinks

#: Tokens named in a printed attribution.
NAMED = 5


class Link(NamedTuple):
    """A link of an attribution: the layer and the head, the indices of the query and the key, and its value."""

    layer: str
    head: int
    query: int
    key: int
    value: float


@dataclass(frozen=True, eq=False, repr=False)
class Attribution(Mapping[str, AttentionMap]):
    """What made a prediction: a map of links for each layer, and the relevance of each token.

    `attribution[3]` is the map of the fourth attention, `attribution[name]` that of a module path; they have the tiles,
    rows and reductions of every `AttentionMap`. `tokens()` is the relevance of each input token (B, n), and
    `tokens("decoder")` of each token that the decoder of an encoder-decoder has read. `value` is the number that is
    explained, (B,). `method` is its name, and `formula` says what it computes. `labels` are the tokens of the input as
    text, if they are known, and `parts` has the part of the model that each map belongs to. `notes` say what to know
    of the numbers. `test` is the test of faithfulness (`rg.faithfulness`), `missing` says which layers have no map.
    `edges` are the connections between heads of "edge-patching".

    >>> import torch, transformers, regard as rg
    >>> config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)
    >>> model = transformers.GPT2LMHeadModel(config).eval()
    >>> found = rg.attribute(model, torch.tensor([[3, 1, 4, 1, 5]]), target=9)
    >>> found[1], found.tokens().shape
    (AttentionMap(1 x 2 heads x 5 queries x 5 keys, signed), torch.Size([1, 5]))
    """

    method: str
    formula: str
    target: str
    maps: dict[str, AttentionMap]
    relevance: dict[str, Tensor]
    value: Tensor
    labels: tuple[str, ...] = ()
    parts: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    test: FaithfulnessCurves | None = None
    edges: HeadEdges | None = None

    @property
    def names(self) -> list[str]:
        """Module paths in the order of the run."""
        return list(self.maps)

    def __getitem__(self, layer: str | int) -> AttentionMap:
        """The map of a module path, or of the number of an attention in the order of the run.

        `NotCaptured`, which is a KeyError too, if there is none.
        """
        if isinstance(layer, int) and not isinstance(layer, bool):
            if not -len(self.names) <= layer < len(self.names):
                raise NotCaptured(f"attribution[{layer}]: there are {len(self.names)} maps, numbered from 0.")
            layer = self.names[layer]
        if not isinstance(layer, str) or layer not in self.maps:
            missing = self.missing.get(str(layer))
            reason = nearest(str(layer), self.names) if missing is None else f"it has no map: {missing}"
            raise NotCaptured(f"attribution[{layer!r}]: {reason}")
        return self.maps[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self.maps)

    def __len__(self) -> int:
        return len(self.maps)

    def __contains__(self, layer: object) -> bool:
        return layer in self.maps

    def tokens(self, text: str = INPUT) -> Tensor:
        """The relevance of each token, (B, n): of the "input", or of the "decoder" of an encoder-decoder."""
        if text not in self.relevance:
            reason = nearest(str(text), self.relevance) if self.relevance else f"there are none. {' '.join(self.notes)}"
            raise RegardError(f"attribution.tokens({text!r}): {reason}")
        return self.relevance[text]

    def top(self, count: int = NAMED, batch: int = 0) -> list[tuple[int, float]]:
        """The indices and the relevance of the input tokens with the largest relevance, the largest first."""
        relevance = self.tokens()[batch]
        best = relevance.topk(min(count, len(relevance)))
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def links(self, count: int = NAMED, batch: int = 0) -> list[Link]:
        """The links with the largest positive values of all layers and heads, the largest first."""
        found: list[Link] = []
        for layer, weights in self.maps.items():
            k = min(count, weights.shape[3])
            (best,) = weights.select([batch], None).summarize(TopLinks(k))
            values, places = best.weights[0].flatten().topk(min(count, best.weights[0].numel()))
            for value, place in zip(values.tolist(), places.tolist(), strict=True):
                # best.weights[0] is (H, queries, k): the k largest links of each row
                head, query = divmod(place // k, weights.shape[2])
                if value > 0:
                    found.append(Link(layer, head, query, int(best.keys[0].flatten()[place]), value))
        return sorted(found, key=lambda link: -link.value)[:count]

    @property
    def sentence(self) -> str:
        """The result in words."""
        if INPUT not in self.relevance:
            return f"{self.method} explains {self.target} of {len(self)} layers."
        named = [f"{self._label(index)}{value:+.2g})" for index, value in self.top() if value > 0]
        tokens = ", ".join(named) or "no token"
        return f"By {self.method}, {self.target} depends most on {tokens}."

    def _label(self, index: int) -> str:
        """The start of `"token" (index, value)`: `sentence` adds the value and closes the bracket."""
        return f'"{self.labels[index]}" (token {index}, ' if self.labels else f"token {index} ("

    def show(self, tokens: Sequence[str] | None = None, targets: Sequence[str] | None = None, batch: int = 0) -> Any:
        """Show the maps of all layers in a notebook; needs `pip install 'regard[view]'`.

        `tokens` are those of the input, by default those of the tokenizer; `targets` those that a decoder has read. The
        page shows shares of |link| in each row: which keys count for a query, not which queries count for L. For that,
        `rg.heatmap(attribution[3], tokens, head=2)` has one scale of two colors.
        """
        return upper_layer("widget").show_attribution(self, tokens or self.labels or None, targets, batch)

    def __repr__(self) -> str:
        lines = [
            f"Attribution({self.method}: {len(self)} maps, {self.target})",
            f"  {self.formula}",
            f"  {self.sentence}",
        ]
        lines += [] if self.test is None else [f"  {line}" for line in self.test.sentences]
        lines += [] if self.edges is None else [f"  {line}" for line in repr(self.edges).split("\n")]
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  missing: {name}: {reason}" for name, reason in list(self.missing.items())[:3]]
        return "\n".join(lines)
