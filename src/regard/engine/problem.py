"""The input and output of an engine: the problem of one call to `attend`, its result and its cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from regard.attention import EMPTY, Attention, Family, Prepared, Scored, choose_keys, hides_gradients, snapshot_around
from regard.base.positions import Positions
from regard.base.shapes import Sizes, grouped_scores, grouped_values
from regard.caches import Memory
from regard.engine.transforms import TRANSFORMED, is_transformed
from regard.pieces.call_tensors import CallTensors
from regard.pieces.contents import (
    Originals,
    PieceTemplate,
    autograd_records,
    is_small,
    split_tensors,
    tensor_snapshot,
    tensors_of,
)
from regard.pieces.grid import Grid
from regard.pieces.normalizer import RowStatistic
from regard.pieces.score import dot_scale

if TYPE_CHECKING:
    from regard.engine.kernel.attention import RowFolds


@dataclass(frozen=True, eq=False)
class Problem:
    """The pieces, the tensors and their positions: query (B, H, I, D), key (B, G, J, D), value (B, G, J, E).

    `attention` becomes a snapshot whose selection has chosen its keys. `seed` decides which weights dropout drops, None
    for no dropout. `state` is what a `RecurrentCache` keeps of earlier calls: sums over keys (B, G, W, E + 1) for W
    features, or the memory (B, H, D, E) of a transition. `call_tensors` are those that pieces need beside queries, keys
    and values, by name. `memory` is what a transition made of the first keys, before the first query: an engine may
    begin with it. `folds` are statistics that an engine may compute with the output. `plan_cache` holds what engines
    compute while planning and use again while running.

    Fields are set through `vars` here, because the dataclass is frozen for everybody else.
    """

    attention: Attention
    query: Tensor
    key: Tensor
    value: Tensor
    positions: Positions
    sizes: Sizes
    seed: int | None = None
    state: Tensor | None = None
    call_tensors: CallTensors = field(default_factory=dict)
    memory: Memory | None = None
    folds: RowFolds | None = None
    plan_cache: dict[str, Any] = field(default_factory=dict, repr=False)
    #: The tensors that the pieces depend on, and the pieces without these tensors.
    piece_tensors: list[Tensor] = field(init=False, repr=False)
    template: PieceTemplate = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Read the pieces, their tensors and which need gradients once: later changes do not affect this problem."""
        chosen = choose_keys(self.attention, self.query, self.key, self.positions, self.call_tensors)
        vars(self).update(attention=chosen)
        _ = self.prepared  # before the snapshot, so that the hooks of the caller's modules run
        tensors, template = split_tensors(self.attention)
        vars(self).update(template=template)
        self._read(tensors)
        _ = self.learns, self.learns_bias

    def _read(self, tensors: list[Tensor]) -> None:
        """Rebuild the pieces around snapshots of their tensors. Tensors that need gradients stay, for autograd.

        `snapshot_around` marks the pieces as a snapshot, which is not copied again. With a tensor that stays they are
        none.
        """
        stays = [is_transformed() or self.needs_gradient(t) for t in tensors]
        piece_tensors = [t if stay else tensor_snapshot(t) for t, stay in zip(tensors, stays, strict=True)]
        around = self.template.around if any(stays) else partial(snapshot_around, template=self.template)
        vars(self).update(attention=around(piece_tensors), piece_tensors=piece_tensors)

    @classmethod
    def repeated(cls, facts: dict[str, Any], tensors: list[Tensor], **own: Any) -> Self:
        """A problem that differs from an earlier one in the numbers of its tensors only.

        `facts` has what is equal, by attribute: `FACTS`. `tensors` are those of the pieces. `own` has the other fields.
        """
        problem = object.__new__(cls)
        vars(problem).update(facts, plan_cache={}, memory=None, **own)
        problem._read(tensors)
        return problem

    @classmethod
    def from_prepared(cls, *, prepared: Prepared, **facts: Any) -> Self:
        """A problem of prepared queries and keys. `facts` has the other attributes; these may be left out: `seed`,
        `state` and `call_tensors`.
        """
        problem = object.__new__(cls)
        defaults = {"seed": None, "state": None, "call_tensors": EMPTY, "plan_cache": {}, "prepared": prepared}
        vars(problem).update(defaults, query=prepared.query, key=prepared.key, **facts)
        return problem

    def planned(self, name: str, make: Callable[[Problem], Any]) -> Any:
        """The result of `make` for this problem: computed at the first call, then read from `plan_cache`."""
        if name not in self.plan_cache:
            self.plan_cache[name] = make(self)
        return self.plan_cache[name]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: no pair, and no sum of earlier keys."""
        return self.sizes.is_empty and self.state is None

    @cached_property
    def prepared(self) -> Prepared:
        return Prepared.of(self.attention, self.query, self.key, self.positions, self.call_tensors)

    @cached_property
    def grid(self) -> Grid:
        """The coordinates of all pairs."""
        return Grid.whole(self.positions, self.sizes.B, self.sizes.H, self.sizes.I, self.query.device)

    @property
    def dropout(self) -> float:
        """The share of weights that this call drops."""
        return 0.0 if self.seed is None else self.attention.dropout

    @cached_property
    def scale(self) -> float | None:
        """The factor of q.k if the weights are a softmax of scaled dot products, else None."""
        softmax = self.attention.normalizer.as_softmax
        if softmax is None:
            return None
        scale = dot_scale(self.attention.score, self.prepared.query.shape[-1])
        if scale is None or isinstance(scale, Tensor) or isinstance(softmax.temperature, Tensor):
            return None  # kernels take one number for all heads, without gradients
        return scale / softmax.temperature

    def needs_gradient(self, *tensors: Tensor | None) -> bool:
        """Whether autograd records what is computed with one of these tensors."""
        return autograd_records(tensors)

    @cached_property
    def learns_bias(self) -> bool:
        """Whether gradients must reach the biases, which no fused kernel on CPU supports."""
        states = (*self.prepared.rows, *self.prepared.cols)
        return bool(self.attention.bias) and self.needs_gradient(*states, *tensors_of(self.attention.bias))

    @cached_property
    def learns(self) -> bool:
        """Whether a backward pass may follow."""
        return self.needs_gradient(self.query, self.key, self.value, *self.piece_tensors)

    @cached_property
    def hides_gradients(self) -> bool:
        """Whether a piece depends on a tensor that requires gradients but is not stored in the piece."""
        return hides_gradients(self.template, self.piece_tensors, self.prepared, self.grid)

    @property
    def scores_need_gradient(self) -> bool:
        """Whether gradients of weights would reach a tensor."""
        return self.needs_gradient(*self.prepared.tensors(), *self.piece_tensors)

    def tensors(self) -> list[Tensor]:
        """All tensors that the output depends on: values, prepared tensors, and those of the pieces."""
        return [self.value, *self.prepared.tensors(), *self.piece_tensors]

    def pieces_snapshot(self) -> Attention:
        """The pieces as they are now, without gradients."""
        if self.attention.shared is not None:
            return self.attention
        return snapshot_around([tensor_snapshot(t) for t in self.piece_tensors], self.template)

    def originals(self) -> Originals:
        """The tensors of the pieces, for the gradients of a map."""
        return Originals.of(self.piece_tensors, self.template)

    def snapshot(self) -> Problem:
        """The problem as it is now, without gradients. Its pieces name the large tensors that they share, so that a map
        can refuse to answer after one of them has changed.
        """
        tensors = [t.detach() for t in (self.value, *self.prepared.tensors())]
        problem = self.outline().around([*tensors, *map(tensor_snapshot, self.piece_tensors)])
        problem.attention.shared = [t for t in problem.piece_tensors if not is_small(t)]
        return problem

    def outline(self) -> Outline:
        """The problem without its tensors."""
        return Outline(self)


#: What a problem has besides its tensors and the seed. `template` holds the pieces without their tensors.
FACTS = ("positions", "sizes", "template", "learns", "learns_bias", "scale", "hides_gradients")


class Outline:
    """A problem without its tensors. A backward pass rebuilds the problem around the tensors that autograd saved.

    `on_rows` says of the value and of each prepared tensor whether it has a vector for each query (else for each key).
    """

    def __init__(self, problem: Problem) -> None:
        self._facts = {name: getattr(problem, name) for name in ("seed", *FACTS)}
        self._prepared = problem.prepared.with_tensors(repeat(torch.empty(0)))  # placeholders: `around` replaces them
        self.on_rows = [False, *problem.prepared.on_rows()]

    def around(self, tensors: Sequence[Tensor]) -> Problem:
        """The problem around tensors in the order of `Problem.tensors`."""
        value, *rest = tensors
        count = len(self.on_rows) - 1
        prepared, piece_tensors = self._prepared.with_tensors(rest[:count]), rest[count:]
        attention = self._facts["template"].around(piece_tensors)
        return Problem.from_prepared(
            **self._facts, attention=attention, prepared=prepared, value=value, piece_tensors=piece_tensors
        )


@dataclass(frozen=True, eq=False)
class Result:
    """The output (B, H, I, E), the row statistic (None if the kernel does not return it), and the state after this call
    (`Problem.state`; None if the engine carries none).
    """

    output: Tensor
    row_statistic: RowStatistic | None
    state: Tensor | None = None


def empty_result(problem: Problem) -> Result:
    """The result without any pair: no rows, or rows of zeros, with gradients of zero.

    Vectors of width 0 have products of 0, through which autograd reaches query, key and value.
    """
    weights = grouped_scores(problem.query[..., :0], problem.key[..., :0])
    return Result(grouped_values(weights, problem.value), None)


@dataclass(frozen=True)
class Cost:
    """The cost of a run: scored pairs of query and key (all heads), operations, and bytes besides the inputs."""

    pairs: int
    flops: int
    bytes: int


class Engine(ABC):
    """Base: an engine runs a problem exactly, or says why it cannot. It never falls back to another silently."""

    name: ClassVar[str]
    description: ClassVar[str]
    #: The families of weights that it computes.
    families: ClassVar[tuple[type[Family], ...]] = (Scored,)
    #: Whether it accepts the sums over earlier keys that a `RecurrentCache` keeps.
    continues_sums: ClassVar[bool] = False
    #: Whether it consists of torch's own operations, so that torch.func and forward mode work.
    is_transformable: ClassVar[bool] = False

    def refusal(self, problem: Problem) -> str | None:
        """Why this engine cannot run the problem; None if it can."""
        if (family := problem.attention.family) not in self.families:
            return family.refusal
        if problem.state is not None and not self.continues_sums:
            return "a RecurrentCache keeps only a sum of earlier keys; use GrowingCache to keep the keys"
        if is_transformed() and not self.is_transformable:
            return TRANSFORMED
        return self._refusal(problem)

    def _refusal(self, problem: Problem) -> str | None:
        """Why this engine cannot run a problem of one of its families; None if it can."""
        return None

    @abstractmethod
    def run(self, problem: Problem) -> Result:
        """Compute a problem that the engine does not refuse."""

    @abstractmethod
    def cost(self, problem: Problem) -> Cost:
        """The predicted cost of the forward pass of a problem that the engine does not refuse."""

    def kept_facts(self, problem: Problem) -> dict[str, Any]:
        """The entries of `plan_cache` for later problems that differ only in the numbers of tensors."""
        return {}

    def repeated(self, problem: Problem) -> Callable[[Tensor, Tensor, Tensor], Result | None] | None:
        """A function of query, key and value that computes later problems, which differ only in these numbers.

        None if the engine has no such function. It is asked for only if the pieces hold no tensors and the scores
        compare the queries and keys as they are given. The function returns None for numbers that need a plan.
        """
        return None
