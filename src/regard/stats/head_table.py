"""Head statistics over many documents: tables that can be merged, because every mean knows its number of queries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.base.errors import RegardError
from regard.stats.profile import ModelProfile


@dataclass(frozen=True, eq=False)
class LayerTable:
    """The statistics of one layer, with the number of that layer in the model.

    For each statistic, `means` holds (H,) or (H, ...) and `counts` (H,) the number of queries that were averaged.

    >>> import torch
    >>> from regard.types import LayerTable
    >>> first = LayerTable("layer", {"reach": torch.tensor([1.0])}, {"reach": torch.tensor([3.0])})
    >>> second = LayerTable("layer", {"reach": torch.tensor([5.0])}, {"reach": torch.tensor([1.0])})
    >>> first.merge(second).means["reach"]  # (3 * 1 + 1 * 5) / 4
    tensor([2.])
    """

    name: str
    means: dict[str, Tensor]
    counts: dict[str, Tensor]
    number: int = 0

    def merge(self, other: LayerTable) -> LayerTable:
        """The means over the queries of both tables."""
        means, counts = {}, {}
        for name, mean in self.means.items():
            count, other_count = self.counts[name], other.counts[name]
            share = (other_count / (count + other_count).clamp_min(1)).view(-1, *(1,) * (mean.ndim - 1))
            means[name] = mean * (1 - share) + other.means[name] * share
            counts[name] = count + other_count
        return LayerTable(self.name, means, counts, self.number)


@dataclass(frozen=True, eq=False)
class HeadTable:
    """Every statistic of every head, as the mean over the queries of any number of documents.

    m = sum_d n_d m_d / sum_d n_d, with m_d the mean over the n_d queries of document d. This equals the mean over
    all queries, whatever the order of merging. Means and counts are float64: counts are exact up to 2^53
    queries, and one document still changes the means of a large corpus.

    >>> import torch, regard as rg
    >>> from regard.stats import profile
    >>> from regard.types import HeadTable
    >>> def table(n):
    ...     x = torch.zeros(1, 1, n, 4)
    ...     return HeadTable.of(profile({"layer": rg.Attention()(x, x, x).weights}, ["a"] * n))
    >>> round(table(2).merge(table(4)).layers[0].means["itself"].item(), 4)  # (2 * 1/2 + 4 * 1/4) / 6
    0.3333
    """

    layers: list[LayerTable]
    documents: int = 1

    @staticmethod
    def of(profile: ModelProfile) -> HeadTable:
        """The table of one document."""
        layers = []
        for layer in profile.layers:
            counts = {name: layer.counts[name].double() for name in layer.values}
            means = {name: values.double() for name, values in layer.values.items()}
            layers.append(LayerTable(layer.name, means, counts, layer.number))
        return HeadTable(layers)

    @staticmethod
    def over(profiles: Iterable[ModelProfile]) -> HeadTable:
        """The table of all documents. The profiles are read one after another, so they may come from a generator."""
        total: HeadTable | None = None
        for profile in profiles:
            table = HeadTable.of(profile)
            total = table if total is None else total.merge(table)
        if total is None:
            raise RegardError("HeadTable.over: there are no profiles. Give at least one document.")
        return total

    def merge(self, other: HeadTable) -> HeadTable:
        """The table of the documents of both tables."""
        if _layout(self) != _layout(other):
            raise RegardError(
                "HeadTable.merge: the two tables differ in layers, heads or statistics. "
                "Merge tables of one model, measured with the same statistics."
            )
        layers = [layer.merge(other_layer) for layer, other_layer in zip(self.layers, other.layers, strict=True)]
        return HeadTable(layers, self.documents + other.documents)

    def values(self, name: str) -> Tensor:
        """One statistic of all heads, (layers, H) or (layers, H, ...)."""
        known = list(self.layers[0].means)
        if name not in known:
            raise RegardError(f"HeadTable: there is no statistic {name!r}. Known names: {', '.join(known)}.")
        means = [layer.means[name] for layer in self.layers]
        if len({mean.shape for mean in means}) > 1:
            sizes = ", ".join(str(len(mean)) for mean in means)
            raise RegardError(
                f"HeadTable.values: the layers have {sizes} heads, so {name!r} is no tensor (layers, heads). Read the "
                "layers one by one: table.layers[n].means."
            )
        return torch.stack(means)

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers for `json.dumps`. `from_json` restores exactly the same table."""
        layers = [
            {
                "name": layer.name,
                "number": layer.number,
                "means": _listed(layer.means),
                "counts": _listed(layer.counts),
            }
            for layer in self.layers
        ]
        return {"documents": self.documents, "layers": layers}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> HeadTable:
        """The table that `to_json` wrote.

        >>> import torch
        >>> table = HeadTable([LayerTable("a", {"x": torch.tensor([0.1])}, {"x": torch.tensor([3.0])})], documents=2)
        >>> restored = HeadTable.from_json(table.to_json())
        >>> torch.equal(restored.values("x"), table.values("x")), restored.documents
        (True, 2)
        """
        try:
            layers = [
                LayerTable(layer["name"], _tensors(layer["means"]), _tensors(layer["counts"]), int(layer["number"]))
                for layer in data["layers"]
            ]
            return HeadTable(layers, int(data["documents"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RegardError(
                f"HeadTable.from_json: the data are not a table ({type(error).__name__}: {error}). "
                "Give the result of HeadTable.to_json."
            ) from None

    def table(self) -> str:
        """One line of plain text for each head; statistics with several numbers for each head are left out."""
        names = [name for name, mean in self.layers[0].means.items() if mean.ndim == 1]
        lines = ["layer head " + " ".join(f"{name:>11}" for name in names)]
        for layer in self.layers:
            for head in range(len(layer.means[names[0]])):
                cells = " ".join(f"{float(layer.means[name][head]):11.3f}" for name in names)
                lines.append(f"{layer.number:5d} {head:4d} {cells}")
        return "\n".join(lines)


def _layout(table: HeadTable) -> list[tuple[str, dict[str, torch.Size]]]:
    return [(layer.name, {name: mean.shape for name, mean in layer.means.items()}) for layer in table.layers]


def _listed(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: {"dtype": str(t.dtype).removeprefix("torch."), "values": t.tolist()} for name, t in tensors.items()}


def _tensors(listed: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: torch.tensor(part["values"], dtype=getattr(torch, part["dtype"])) for name, part in listed.items()}
