"""A transition over the ranks of a ring: each rank runs its own tokens, and the memories before them are added.

The memory after a run of tokens is linear in the memory before: S' = P S + L, where P is the product of the transitions
and L the memory of these tokens alone. Their outputs are o_i = l_i + R_i S. So a rank runs its tokens once, with more
value channels that begin with the identity, which gives R and P. All ranks get every P and L, which are small, and
each adds R S with the memory S before its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.base.shapes import at_least_float32
from regard.base.spans import Spans
from regard.engine.problem import Problem, Result
from regard.engine.recurrent import recur
from regard.engine.ring.exchange import Exchange
from regard.engine.ring.gathering import Gathered
from regard.engine.ring.route import Route
from regard.engine.transforms import differentiable_once
from regard.pieces.transition import Steps, with_heads


@dataclass(frozen=True, eq=False)
class Part:
    """Consecutive tokens of one rank: outputs without earlier tokens, R (B, H, n, D), and L and P beside each other."""

    output: Tensor
    reads: Tensor
    states: Tensor

    @staticmethod
    def of(steps: Steps, value: Tensor) -> Part:
        """Run the tokens with D more channels, whose values are 0 and whose memory begins with the identity.

        The memory of these channels becomes P, and what the queries read from them R. `value` is (B, H, n, E).
        """
        value = at_least_float32(value)
        width, num_values = steps.query.shape[3], value.shape[3]
        wider = torch.cat((value, value.new_zeros(()).expand(*value.shape[:3], width)), 3)
        identity = torch.eye(width, dtype=value.dtype, device=value.device)
        start = torch.cat((identity.new_zeros(width, num_values), identity), 1).expand(*value.shape[:2], -1, -1)
        output, last = recur(steps, wider, start)
        return Part(output[..., :num_values], output[..., num_values:], last)


@dataclass(frozen=True, eq=False)
class StatePassing:
    """One call of a transition on one rank: `own` is its share of the problem, `route` has the tokens of all ranks."""

    own: Problem
    route: Route
    exchange: Exchange
    number: int = 0
    unplanned: ClassVar[str] = "there is no cost model of a transition in a ring. attend(...) runs it."

    def run(self) -> Result:
        """The output of the own queries. Collective."""
        steps, value = self.own.prepared.steps, with_heads(self.own.value, self.own.sizes.H)
        assert steps is not None
        parts, before = [], 0
        for start, stop in self.route.keys[self.exchange.rank]:
            place = slice(before, before := before + stop - start)
            parts.append(Part.of(steps.with_tensors(t[:, :, place] for t in steps.tensors()), value[:, :, place]))
        memories = self._memories(parts)
        outputs = [part.output + part.reads @ memory for part, memory in zip(parts, memories, strict=True)]
        return Result(torch.cat(outputs, 2).to(value.dtype), None)

    def _memories(self, parts: Sequence[Part]) -> list[Tensor]:
        """The memory (B, H, D, E) before each own part, from those of all ranks. Collective, and so is its backward."""
        held = _parts_of_ranks(self.route)
        # parts take the place of tokens: (B, H, parts, D (E + D))
        flat = torch.stack([part.states.flatten(2) for part in parts], 2)
        whole = Gathered.apply(self.exchange, self.number, held, *differentiable_once("ring", flat))
        assert isinstance(whole, Tensor)
        states = whole.unflatten(3, parts[0].states.shape[2:])
        num_values = parts[0].output.shape[3]
        # Zeros that depend on what all ranks gave. Else the first rank would not take part in the backward pass, which
        # is collective.
        memory = torch.zeros_like(states[:, :, 0, :, :num_values]) + whole[:, :, :0].sum()
        before = []
        for number in range(states.shape[2]):
            before.append(memory)
            own, product = states[:, :, number].split((num_values, states.shape[3]), 3)
            memory = own + product @ memory
        return [before[number] for number in held[self.exchange.rank].tensor("cpu").tolist()]


def _parts_of_ranks(route: Route) -> list[Spans]:
    """The parts of each rank, numbered through all ranks in the order of their tokens."""
    starts = sorted(start for keys in route.keys for start, _ in keys)
    return [Spans.union((n, n + 1) for n in (starts.index(start) for start, _ in keys)) for keys in route.keys]
