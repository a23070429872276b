"""`Composite`: the base of attentions that are made of several. `attend` runs them like any other attention."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from regard.attention import Mechanism
from regard.attention_output import AttentionOutput, attend, attend_listeners, extended, plan, with_tensors
from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.base.positions import Positions, check_positions
from regard.base.shapes import Sizes, check_finite, without_autocast
from regard.caches import Cache, GrowingCache
from regard.engine.kept_plans import Request
from regard.engine.plan import CompositePlan, ExecutionPlan
from regard.engine.ring import Ring
from regard.maps.attention_map import AttentionMap
from regard.pieces.call_tensors import needs_of
from regard.pieces.mask import Mask


@dataclass(frozen=True, eq=False)
class CompositeCall:
    """One call of `attend`: queries (B, H, I, D), keys and values of all tokens, positions, other tensors by name."""

    query: Tensor
    key: Tensor
    value: Tensor
    positions: Positions
    tensors: Mapping[str, Tensor]

    def part(self, attention: Mechanism) -> Part:
        """A part that reads all tokens of the call."""
        return Part(attention, self.query, self.key, self.value, self.positions)


@checked
@dataclass(frozen=True, eq=False)
class Part:
    """One attention of a composite, and its tensors. `value` may be a function of the output of the part before.

    >>> import torch, regard as rg
    >>> x, latents = torch.zeros(1, 2, 9, 4), torch.zeros(1, 2, 3, 4)  # three latents read nine tokens
    >>> part = rg.composites.Part(rg.Attention(), latents, x, x, rg.types.Positions.of(0, 3, 9))
    >>> part.query.shape, part.positions.start
    (torch.Size([1, 2, 3, 4]), 0)
    """

    attention: Mechanism
    query: Tensor
    key: Tensor
    value: Tensor | Callable[[Tensor], Tensor]
    positions: Positions


@checked
@dataclass(frozen=True, eq=False)
class PreparedParts:
    """The parts of a call, which run in this order, and the function that joins their results.

    `join` returns the output (B, H, I, E) and the map W over tokens, with output = W . values.

    >>> import torch, regard as rg
    >>> class Plain(rg.composites.Composite):
    ...     def prepare(self, call):
    ...         parts = [call.part(rg.Attention())]
    ...         return rg.composites.PreparedParts(parts, lambda seen: (seen[0].output, seen[0].weights))
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> Plain()(x, x, x).weights.shape
    (1, 1, 3, 3)
    """

    parts: Sequence[Part]
    join: Callable[[list[AttentionOutput]], tuple[Tensor, AttentionMap]]


class Composite(Mechanism):
    """Base of mechanisms that consist of several attentions: `attend` returns one output and one map.

    >>> import torch, regard as rg
    >>> class Twice(rg.composites.Composite):
    ...     def prepare(self, call):
    ...         def join(seen):
    ...             return 2 * seen[0].output, rg.maps.SumMap([seen[0].weights], [2.0])
    ...         return rg.composites.PreparedParts([call.part(rg.Attention())], join)
    >>> x = torch.zeros(1, 1, 3, 4)
    >>> Twice()(x, x, x).weights[0, 0, 0]
    tensor([0.6667, 0.6667, 0.6667])
    """

    @property
    def mask(self) -> Mask | None:  # type: ignore[override]
        """The mask over tokens, which follows from those of the parts."""
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse a mask beside those of the parts, which no part would apply."""
        if name == "mask" and isinstance(getattr(type(self), name), property):
            raise RegardError(
                f"{type(self).__name__}.mask = {value!r}: it is made of several attentions, and its mask follows from "
                "theirs. Give each part its mask when you build it; Nystrom and ThroughLatents attend to all tokens."
            )
        super().__setattr__(name, value)

    @abstractmethod
    def prepare(self, call: CompositeCall) -> PreparedParts:
        """The parts of a call. `plan` calls it too, and plans the parts without joining them."""

    def pieces(self) -> list[Any]:
        return []

    def check_option(self, name: str) -> None:
        raise RegardError(
            f"attend({name}=...): {type(self).__name__} is made of several attentions, which have masks, scores and "
            "dropout of their own. Give it to the parts: regard.Attention(mask=...)."
        )

    def with_mask_too(self, mask: Mask) -> NoReturn:
        raise RegardError(
            f"attention: {type(self).__name__} is made of several attentions, and a mask of a call, {mask!r}, has no "
            "place in them. Give each part its mask when you build it."
        )

    def attend_request(self, request: Request, cache: Cache | None, check: bool) -> AttentionOutput:
        """Run the parts in their order and join them. Listeners get the joined map only, not those of the parts."""
        request, next_cache = _extended(request, cache)
        if check:
            check_finite(query=request.query, key=request.key, value=request.value)
        seen: list[AttentionOutput] = []
        with attend_listeners.computing(), without_autocast(request.query.device):
            prepared = self._prepared(request)
            for part in prepared.parts:
                value = _value(part, seen[-1].output if seen else None)
                seen.append(attend(part.query, part.key, value, **_options(part, request)))
            output, weights = prepared.join(seen)
        attend_listeners.tell(None, lambda: weights, lambda: request.value)
        return AttentionOutput(output, weights, next_cache)

    def plan_request(self, request: Request, cache: Cache | None) -> CompositePlan:
        """The plans of all parts; of a part that is a composite, those of its parts."""
        request = _extended(request, cache)[0]
        plans: list[ExecutionPlan] = []
        for part, value in _with_values(self._prepared(request).parts):
            plans += plan(part.query, part.key, value, **_options(part, request)).parts
        return CompositePlan(self, tuple(plans), Sizes.of(request.query, request.key, request.value))

    def _prepared(self, request: Request) -> PreparedParts:
        """The parts of a call that `_extended` returned."""
        assert request.positions is not None
        return self.prepare(CompositeCall(*request[1:5], request.tensors))  # type: ignore[arg-type]


def _value(part: Part, before: Tensor | None) -> Tensor:
    """The values of a part, which may be a function of the output of the part before it."""
    if isinstance(part.value, Tensor):
        return part.value
    if before is None:
        raise RegardError(
            "PreparedParts: the value of the first part is a function of the output before it, and there is none. Give "
            "the first part a tensor (batch, heads, keys, width), for example the values of the call."
        )
    return part.value(before)


def _with_values(parts: Sequence[Part]) -> Iterator[tuple[Part, Tensor]]:
    """The parts with their values, for a plan. It depends on sizes only, so outputs of earlier parts are zeros."""
    output: Tensor | None = None
    for part in parts:
        value = _value(part, output)
        output = part.query.new_zeros(*part.query.shape[:3], value.shape[3])
        yield part, value


def _options(part: Part, request: Request) -> dict[str, Any]:
    """The arguments of `attend` for a part: its own, the engine, and those tensors of the call that it needs."""
    needed = {name: request.tensors[name] for piece in part.attention.pieces() for name in needs_of(piece)}
    return {"attention": part.attention, "positions": part.positions, "engine": request.engine, **needed}


def _extended(request: Request, cache: Cache | None) -> tuple[Request, Cache | None]:
    """The checked call with its positions and the keys of the cache in front of its own, and the next cache."""
    if Ring.of(request.engine) is not None:
        raise RegardError("attend: the ring engine runs one Attention, not a composite of several.")
    if cache is not None and not isinstance(cache, GrowingCache):
        raise RegardError(
            f"attend: a composite of several attentions reads all earlier keys, which {type(cache).__name__} does not "
            "keep. Use GrowingCache."
        )
    request, next_cache = extended(request, cache)
    sizes = Sizes.of(request.query, request.key, request.value)
    if not request.tensors:  # the others are checked before the cache joins them with earlier ones
        with_tensors(request, sizes)
    check_positions(request.positions)
    positions = request.positions or Positions.aligned_to_end(sizes.I, sizes.J)
    positions.check(sizes.J)
    return request._replace(positions=positions), next_cache
