"""What a watch keeps of the calls of each attention module; every kind of call has a `shape`, a `check` and a `map`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from regard.attention import Attention, Prepared
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.edits.layer_edits import EditedMap, LayerEdits
from regard.hf.capture.kept_values import NoValues
from regard.hf.capture.lazy_projection import DeferredCall
from regard.hf.capture.module_rerun import RerunCall, RerunSteps
from regard.hf.capture.module_statistics import ModuleStatistics
from regard.hf.capture.recurrent_calls import RecurrentCall
from regard.hf.capture.returned_weights import ReturnedCall
from regard.hf.capture.value_probe import ProbedCall
from regard.hf.capture.verification import Check, worst
from regard.maps.attention_map import AttentionMap
from regard.maps.joined import joined
from regard.maps.scored_map import ScoredMap
from regard.pieces.grid import Grid

#: The kind of every layer that is not recurrent.
ATTENTION = "attention"
#: Why a map that a module reported has no values.
OF_RING = "each rank of a ring has only its share of the values"


class NotCaptured(RegardError, KeyError):
    """No attention of that name or number was captured."""

    __str__ = Exception.__str__


@dataclass(eq=False)
class SharedKeys:
    """Keys or values (B, G, J, D) that several calls with a growing cache share; each call uses the first of them."""

    tensor: Tensor

    def grow(self, later: Tensor) -> bool:
        """Replace the tensor by `later` if it begins with it, or is equal; returns whether it does.

        Graphs are not shared.
        """
        if later.requires_grad or self.tensor.requires_grad:
            return False
        size = self.tensor.shape[2]
        if later.dtype != self.tensor.dtype or later.shape[2] < size or later.shape[:2] != self.tensor.shape[:2]:
            return False
        if torch.equal(later[:, :, :size], self.tensor):
            self.tensor = later
            return True
        return False


@dataclass(eq=False)
class Capture:
    """One call of a module: its pieces, queries and keys, the verification, and the log-sum-exp of rows if known.

    `values` are kept with watch(keep="qkv"), and `patched`, the output (B, H, I, E) after patches. If `is_live`, the
    tensors have their graphs.
    """

    attention: Attention
    positions: Positions
    query: Tensor
    keys: SharedKeys
    check: Check
    logsumexp: Tensor | None = None
    values: SharedKeys | None = None
    edits: LayerEdits | None = None
    patched: Tensor | None = None
    is_live: bool = field(default_factory=torch.is_grad_enabled)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        B, H, I, _ = self.query.shape
        return B, H, I, len(self.positions.keys)

    @cached_property
    def map(self) -> AttentionMap:
        """The weights; built at the first access."""
        return self._scored() if self.edits is None else EditedMap(self._scored(), self.edits)

    def read_values(self) -> Tensor:
        assert self.values is not None
        return self.values.tensor[:, :, : len(self.positions.keys)]

    def _scored(self) -> ScoredMap:
        B, H, I, _ = self.query.shape
        grid = Grid.whole(self.positions, B, H, I, self.query.device)
        row_statistic = None if self.logsumexp is None else (self.logsumexp,)
        with torch.set_grad_enabled(self.is_live):
            key = self.keys.tensor[:, :, : len(self.positions.keys)]
            prepared = Prepared.of(self.attention, self.query, key, self.positions)
            return ScoredMap(self.attention, prepared, self.positions, grid, row_statistic)


@dataclass(eq=False)
class ModuleMap:
    """A map that a module of `regard.nn` reported, or the maps of consecutive decoding steps.

    Without `steps` every call has its own map: another call of `attend` may have other pieces.
    """

    maps: list[AttentionMap]
    check: Check
    steps: bool = True
    values: Tensor | None = None
    patched: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        B, H, _, J = self.maps[-1].shape
        return B, H, sum(weights.shape[2] for weights in self.maps), J

    @property
    def map(self) -> AttentionMap:
        if len(self.maps) > 1:
            self.maps[:] = [joined(self.maps)]
        return self.maps[0]

    def read_values(self) -> Tensor:
        if self.values is None:
            raise NoValues(OF_RING)
        return self.values

    def append(self, later: ModuleMap) -> bool:
        """Append the map of a later call if its queries follow; returns whether they do."""
        if not (self.steps and later.steps) or self.patched is not None or later.patched is not None:
            return False
        last, new = self.maps[-1], later.maps[0]
        if not (isinstance(last, ScoredMap) and isinstance(new, ScoredMap)):
            return False
        follows = new.positions.start == last.positions.start + last.shape[2] and new.shape[:2] == last.shape[:2]
        if follows and _begins_with(new._prepared.key, last._prepared.key):
            self.maps.append(new)
            self.values = later.values
            return True
        return False


def _begins_with(keys: Tensor, earlier: Tensor) -> bool:
    """Whether keys begin with earlier ones, up to rounding. They do not after a beam search reordered its rows."""
    if keys is earlier:
        return True
    return keys.shape[2] >= earlier.shape[2] and torch.allclose(keys[:, :, : earlier.shape[2]], earlier)


@dataclass(frozen=True, eq=False)
class ReducedCall:
    """One call of which only statistics were kept: its shape, and the verification."""

    name: str
    shape: tuple[int, int, int, int]
    check: Check

    @property
    def map(self) -> AttentionMap:
        raise NotCaptured(
            f"seen[{self.name!r}]: only statistics were kept, in seen.statistics[{self.name!r}]. "
            "watch(model, keep='qk') keeps the queries and keys that a map needs."
        )

    def read_values(self) -> Tensor:
        raise NoValues("only statistics were kept")


Kept = Capture | RerunCall | RerunSteps | ProbedCall | ReturnedCall | ModuleMap | DeferredCall | ReducedCall


@dataclass(eq=False)
class ModuleCalls:
    """One attention module: the part of the model it is in, its calls in order, and statistics if they are kept."""

    part: str
    calls: list[
        Capture
        | RerunCall
        | RerunSteps
        | ProbedCall
        | ReturnedCall
        | ModuleMap
        | DeferredCall
        | RecurrentCall
        | ReducedCall
    ] = field(default_factory=list)
    statistics: ModuleStatistics | None = None
    kind: str = ATTENTION
    #: The last call of a recurrent layer, which the next one may continue.
    recurrent: RecurrentCall | None = None
    #: The calls that were dropped, and the worst of their checks.
    num_dropped: int = 0
    dropped_checks: list[Check] = field(default_factory=list)

    @property
    def num_calls(self) -> int:
        """The number of calls so far, with those that were dropped."""
        return self.num_dropped + len(self.calls)

    @property
    def check(self) -> Check:
        """The worst check of all calls."""
        return worst([*self.dropped_checks, *(call.check for call in self.calls)])

    def drop_before(self, number: int) -> None:
        """Drop the calls before a call, by its number; their checks stay."""
        count = max(0, number - self.num_dropped)
        if count:
            self.dropped_checks = [worst([*self.dropped_checks, *(call.check for call in self.calls[:count])])]
            del self.calls[:count]
            self.num_dropped += count
            if self.statistics is not None:
                del self.statistics.calls[:count]

    def add(
        self, capture: Capture | RerunCall | ProbedCall | ReturnedCall | ModuleMap | DeferredCall | RecurrentCall
    ) -> None:
        """Append a call. If its keys begin with those of the call before, both calls share them."""
        if isinstance(capture, RecurrentCall):
            self._follow(capture)
        if self.statistics is not None:
            weights = capture.map
            with torch.autocast(weights.device.type, enabled=False):
                self.statistics.add(weights)
            self.calls.append(ReducedCall(self.statistics.name, capture.shape, capture.check))
            return
        last = self.calls[-1] if self.calls else None
        if isinstance(last, ModuleMap) and isinstance(capture, ModuleMap) and last.append(capture):
            return
        if isinstance(last, RerunCall | RerunSteps) and self._continues(last, capture):
            return
        if isinstance(last, Capture) and isinstance(capture, Capture) and last.keys.grow(capture.keys.tensor):
            capture.keys = last.keys
            if last.values and capture.values and last.values.grow(capture.values.tensor):
                capture.values = last.values
        self.calls.append(capture)

    def _follow(self, capture: RecurrentCall) -> None:
        """Verify a run of calls of a recurrent layer when the next run begins, and each call of which none is kept."""
        if capture.earlier is None:
            self._end_run()
        if self.statistics is not None:
            capture.verify()
        self.recurrent, self.kind = capture, capture.kind

    def _end_run(self) -> None:
        if self.recurrent is not None:
            if self.statistics is None:
                self.recurrent.verify()
            self.recurrent.forget()

    def _continues(self, last: RerunCall | RerunSteps, capture: object) -> bool:
        """Join a step of a decoder to the steps before it; returns whether both read the same values."""
        steps = last if isinstance(last, RerunSteps) else RerunSteps([last])
        continues = isinstance(capture, RerunCall) and steps.append(capture)
        if continues:
            self.calls[-1] = steps
            self.part = "cross"  # the values do not grow with the steps
        steps.calls[-1 - continues].memory = None
        return continues

    def release(self) -> None:
        """Verify recurrent layers, and forget the values of the last step: no call follows."""
        self._end_run()
        for call in self.calls[-1:]:
            if isinstance(call, RerunCall | RerunSteps):
                (call.calls[-1] if isinstance(call, RerunSteps) else call).memory = None
