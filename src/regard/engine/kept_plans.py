"""Plans that are kept for later calls, so that a repeated call costs tens of microseconds of Python.

The first call checks its sizes, takes its pieces apart, asks every engine and lays out its mask. None of this depends
on the numbers of a tensor. So it is kept by everything that it depends on (`_key`), and a later call with an equal key
puts its own tensors in. A kept plan holds no tensor of a call and no parameter. A call that cannot be compared with
others, because it has pieces of the user's own or is traced, is planned anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from regard.attention import EMPTY, Attention, Prepared
from regard.base.positions import Positions
from regard.base.shapes import Sizes, has_finite_sum, is_autocast
from regard.caches import Memory
from regard.engine.decoding import NextToken
from regard.engine.kernel.library import SETTING
from regard.engine.kernel.structures import PLAIN
from regard.engine.plan import ENGINES, ExecutionPlan
from regard.engine.problem import FACTS, Problem, Result
from regard.engine.transforms import is_recorded, is_transformed
from regard.pieces.call_tensors import CallTensors
from regard.pieces.contents import Originals, split_tensors
from regard.pieces.fingerprint import NoFingerprint, fingerprint, never_changes
from regard.pieces.normalizer import any_coarse

#: Most plans that are kept. The masks of 32 more layouts are kept in `kernel/mask_layout.py`.
MOST_PLANS = 128

#: Stands for a step that is not kept yet. None is kept for calls that need a plan.
UNKNOWN: Any = object()
Step = TypeVar("Step", bound=NextToken)


class Request(NamedTuple):
    """One call of `attend`: its pieces and tensors. `state`: the sum of earlier keys. `seed`: of dropout.

    `tensors`: those that pieces need beside queries, keys and values. `memory`: what a transition made of the first
    keys of a growing cache. `statistics`: the reductions that somebody will ask of the map.
    """

    attention: Attention
    query: Tensor
    key: Tensor
    value: Tensor
    positions: Positions | None
    state: Tensor | None
    seed: int | None
    engine: Any
    tensors: CallTensors = EMPTY
    memory: Memory | None = None
    statistics: tuple[Any, ...] = ()


@dataclass(eq=False)
class KeptPlan:
    """A plan without its tensors. `repeat` runs it in one function, if nothing is left to decide.

    `requested`: the caller named the engine. `why` is the reason of a choice, or "". `facts` are the attributes of its
    problem by name (`FACTS` of problem.py), and `of_engine` the entries of its `plan_cache` that serve later calls.
    `used` is the time of the last use, on a clock that counts uses of all plans.
    """

    engine: str
    requested: bool
    why: str
    facts: dict[str, Any]
    of_engine: dict[str, Any]
    repeat: Repeat | None
    used: int = 0

    @staticmethod
    def of(planned: ExecutionPlan) -> KeptPlan:
        problem, engine = planned.problem, ENGINES[planned.engine]
        facts = {name: getattr(problem, name) for name in FACTS}
        compute = engine.repeated(problem) if _is_repeatable(problem) else None
        repeat = None if compute is None else Repeat.of(problem, compute)
        return KeptPlan(planned.engine, planned.requested, planned.why, facts, engine.kept_facts(problem), repeat)

    def plan(self, request: Request, piece_tensors: list[Tensor]) -> ExecutionPlan:
        """The plan of a call with an equal key. `piece_tensors` are the tensors that its pieces hold."""
        attention, query, key, value, positions, state, seed, _, tensors, *_ = request
        # with a state the key has no positions, which move on with each decoding step
        facts = self.facts if state is None else {**self.facts, "positions": positions}
        prepared = Prepared.of(attention, query, key, facts["positions"], tensors)
        own = {"query": query, "key": key, "value": value, "prepared": prepared, "seed": seed, "state": state}
        problem = Problem.repeated(facts, piece_tensors, call_tensors=tensors, **own)
        problem.plan_cache.update(self.of_engine)
        return ExecutionPlan(self.engine, self.requested, self.why, problem)


@dataclass(frozen=True, eq=False)
class Repeat:
    """A call of pieces without tensors, which compare queries and keys as they are: `compute` computes it.

    The other fields are what its map needs. `empty_states` are the prepared tensors of its biases, which prepare none.
    `may_hide`: a mask may hide keys that are not finite. `learns`: a backward pass may follow.
    """

    compute: Callable[[Tensor, Tensor, Tensor], Result | None]
    attention: Attention
    originals: Originals
    positions: Positions
    sizes: Sizes
    empty_states: tuple[None, ...]
    may_hide: bool
    learns: bool

    @staticmethod
    def of(problem: Problem, compute: Callable[[Tensor, Tensor, Tensor], Result | None]) -> Repeat:
        facts = problem.pieces_snapshot(), problem.originals(), problem.positions, problem.sizes
        empty_states, may_hide = (None,) * len(problem.attention.bias), problem.attention.mask is not None
        return Repeat(compute, *facts, empty_states, may_hide, problem.learns)

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Result | None:
        """The result; None if the numbers of this call need a plan: hidden keys may have made a NaN, for example."""
        result = self.compute(query, key, value)
        if result is None or not self.may_hide:
            return result
        read = (result.output, key, value) if self.learns else (result.output,)
        return result if all(map(has_finite_sum, read)) else None


def _is_repeatable(problem: Problem) -> bool:
    """Whether a later call differs in queries, keys and values only, and the pieces compare them as they are."""
    prepared = problem.prepared
    is_plain = not problem.piece_tensors and not problem.call_tensors and problem.seed is problem.state is None
    return is_plain and prepared.query is problem.query and prepared.key is problem.key


class KeptPlans:
    """The plans of the latest calls, by their keys. Threads may share them."""

    def __init__(self) -> None:
        self._plans: dict[Hashable, KeptPlan] = {}
        self._steps: dict[Hashable, NextToken | None] = {}
        self._clock = count()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._plans)

    def clear(self) -> None:
        with self._lock:
            self._plans, self._steps = {}, {}

    def find(self, request: Request) -> tuple[KeptPlan | None, Hashable, list[Tensor]]:
        """The plan of a call, if one is kept; the key to keep a new plan by; the tensors of the pieces.

        The key is None if a plan must not be kept. The tensors are complete only if there is a key.
        """
        tensors: list[Tensor] = []
        try:
            key = _key(request, tensors)
            kept = None if key is None else self._plans.get(key)
        except (NoFingerprint, TypeError):  # TypeError: an argument of the wrong type, which planning refuses
            return None, None, tensors
        if kept is not None:
            kept.used = next(self._clock)
        return kept, key, tensors

    def next_token(self, kind: type[Step], request: Request, state: Tensor | None) -> Step | None:
        """The step of a single query after a cache; None if the call needs a plan.

        `kind` is the class of the step. `state` is what the cache keeps in place of keys, None if it keeps keys. A None
        of `kind.of` is kept too, so that it is asked once.
        """
        attention, query, key, value, positions, _, seed, engine, tensors, *_ = request
        if engine != "auto" or not (positions is seed is None) or type(attention) is not Attention:
            return None
        given = (query, key, value, *tensors.values(), *(() if state is None else (state,)))
        if not is_plain_call(*given) or is_autocast(query.device) or query.shape[2:3] != (1,):
            return None
        pieces_key = constant_key(attention)
        if pieces_key is None:
            return None
        shapes = tuple([(t.shape, t.dtype) for t in given])
        learns = torch.is_grad_enabled() and any([t.requires_grad for t in given])
        setting = os.environ.get(SETTING), torch.is_inference_mode_enabled()
        call_key = kind, pieces_key, shapes, tuple(tensors), learns, *setting
        step = self._steps.get(call_key, UNKNOWN)  # one lookup: hashing the key takes longer than comparing it
        if step is UNKNOWN:
            if len(self._steps) >= MOST_PLANS:
                self._steps = {}
            step = self._steps[call_key] = kind.of(attention, query, key, value, tensors, state)
        return step  # type: ignore[return-value]

    def keep(self, key: Hashable, planned: ExecutionPlan, attention: Attention) -> None:
        """Keep a plan that has run, unless there is nothing to compute, its run warns, or its tensors are not known."""
        if key is None or planned.problem.is_empty or planned.quadratic or not _reads_all(attention):
            return
        with self._lock:
            if len(self._plans) >= MOST_PLANS:
                self._forget_older_half()
            self._plans[key] = kept = KeptPlan.of(planned)
            kept.used = next(self._clock)

    def _forget_older_half(self) -> None:
        latest_first = sorted(self._plans.items(), key=lambda item: item[1].used, reverse=True)
        self._plans = dict(latest_first[: MOST_PLANS // 2])  # a new dictionary: other threads read the old one unlocked


#: The plans of this process.
kept_plans = KeptPlans()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: setattr(kept_plans, "_lock", Lock()))  # another thread may hold it


def _key(request: Request, piece_tensors: list[Tensor]) -> Hashable:
    """Everything that a plan depends on; None if that is unknown. `piece_tensors` receives the tensors of the pieces.

    TypeError and NoFingerprint say the same as None.
    """
    attention, query, key, value, positions, state, seed, engine, tensors, memory, _ = request
    if type(attention) is not Attention or attention.selection is not None or memory is not None:
        return None
    if state is not None and attention.family.applies_mask:
        return None  # a mask depends on positions, which differ at each decoding step
    states = () if state is None else (state,)
    if not is_plain_call(query, key, value, *tensors.values(), *states):
        return None
    pieces_key = _pieces_key(attention, piece_tensors)
    sink = getattr(attention.normalizer, "sink", None) if piece_tensors else None
    return (
        pieces_key,
        None if seed is None else attention.dropout,
        sink is not None and any_coarse(sink),  # engines refuse coarse sinks
        *(query.shape, query.dtype, query.requires_grad),
        *(key.shape, key.dtype, key.requires_grad),
        *(value.shape, value.dtype, value.requires_grad),
        tuple([(name, _tensor_key(tensor)) for name, tensor in tensors.items()]) if tensors else None,
        positions if state is None else _tensor_key(state),
        engine,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        is_autocast(query.device),
        torch.get_default_dtype(),
        os.environ.get(SETTING),
    )


#: The fingerprints of pieces that never change, by the identity of the pieces, which it keeps alive.
_constant_pieces: dict[tuple[int, ...], tuple[Any, Hashable]] = {}


def _pieces_key(attention: Attention, piece_tensors: list[Tensor]) -> Hashable:
    """The fingerprint of all pieces."""
    key = constant_key(attention)
    return fingerprint(_slots(attention), piece_tensors) if key is None else key


def constant_key(attention: Attention) -> Hashable:
    """The fingerprint of pieces that never change, read once; None if one may change."""
    slots = _slots(attention)
    identity = tuple(map(id, slots))
    if (known := _constant_pieces.get(identity)) is not None:
        return known[1]
    if not never_changes(slots):
        return None
    if len(_constant_pieces) >= MOST_PLANS:
        _constant_pieces.clear()
    key = fingerprint(slots, [])
    _constant_pieces[identity] = slots, key
    return key


def _slots(attention: Attention) -> tuple[Any, ...]:
    """The pieces that a plan depends on: those of every slot."""
    scored = attention.score, attention.position, attention.bias, attention.mask, attention.normalizer
    return *scored, attention.transition, attention.selection


def _tensor_key(tensor: Tensor) -> Hashable:
    """What a plan reads of a tensor. No strides: each engine reads any, or copies."""
    return tensor.shape, tensor.dtype, tensor.requires_grad


def is_plain_call(*tensors: Tensor) -> bool:
    """Whether all tensors are plain ones in the memory of the host, and torch does not trace or transform the call.

    A mode of the user on torch's stacks may change any operation. An address of 0 means that numbers lie elsewhere.
    """
    if is_transformed() or is_recorded() or torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return False
    strided = torch.strided
    return all(
        [type(t) in PLAIN and t.is_cpu and t.layout is strided and (t.data_ptr() or not t.numel()) for t in tensors]
    )


def _reads_all(attention: Attention) -> bool:
    """Whether fingerprints see the same tensors in the same order as snapshots do.

    A later call of a kept plan takes the tensors of its pieces from the fingerprint, and puts each in the place that it
    has in the snapshot. If the two differed, a tensor could get into the place of another one.
    """
    seen: list[Tensor] = []
    fingerprint(_slots(attention), seen)
    tensors = split_tensors(attention)[0]
    return len(seen) == len(tensors) and all(a is b for a, b in zip(seen, tensors, strict=True))
