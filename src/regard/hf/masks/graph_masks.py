"""`GraphMask`: the mask of a model inside a graph of torch.compile, where it is numbers and tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import Any

from torch import Tensor

from regard.hf.masks.mask_tensors import Recognized
from regard.pieces.data_masks import padding
from regard.pieces.mask import Mask, causal, conjuncts, window
from regard.pieces.same_group import groups_mask

WHOLE = slice(None)


@dataclass(frozen=True, eq=False)
class GraphMask:
    """The mask of a graph: the fields of `regard.engine.kernel.operator.OperatorTerms` that masks have.

    Query i has position `start` + i, and key j has `first` + j. A `window` of 0 is none. `real` (B, n) says for each
    position whether its key is no padding, and `groups` (B, n) has the packed sequence of each position: a query sees
    only its own. `start` is a tensor in graphs that use a static cache.
    """

    start: int | Tensor
    first: int
    is_causal: bool
    window: int
    real: Tensor | None
    groups: Tensor | None

    @staticmethod
    def of(rule: Recognized, num_queries: int, num_keys: int) -> GraphMask | None:
        """The numbers of a rule, for a call of so many queries and keys; None if it needs more than these."""
        graph_mask = GraphMask(rule.positions(num_queries, num_keys).start, rule.first, False, 0, None, None)
        for part in () if rule.mask is None else conjuncts(rule.mask):
            if part.is_lower_triangular:
                graph_mask = replace(graph_mask, is_causal=True)
            elif isinstance(part, window) and not graph_mask.window:
                graph_mask = replace(graph_mask, window=part.size)
            elif part.real_keys is not None and graph_mask.real is None:
                graph_mask = replace(graph_mask, real=part.real_keys)
            else:
                return None
        return graph_mask

    def __getitem__(self, index: Any) -> GraphMask:
        """The mask of consecutive queries or keys, as models slice a mask (B, 1, I, J)."""
        _, _, queries, keys = index if isinstance(index, tuple) else (index, WHOLE, WHOLE, WHOLE)
        return replace(self, start=self.start + (queries.start or 0), first=self.first + (keys.start or 0))

    def recognized(self) -> Recognized:
        """The same mask for a call that runs outside of the graph."""
        masks: list[Mask] = [causal()] if self.is_causal else []
        masks += [window(self.window)] if self.window else []
        masks += [groups_mask(self.groups)] if self.groups is not None else []
        if self.real is not None and not bool(self.real.all()):
            masks.append(padding(self.real))
        return Recognized(reduce(and_, masks) if masks else None, int(self.start), self.first)
