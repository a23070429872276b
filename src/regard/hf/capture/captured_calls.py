"""The calls that a watch keeps for each attention module: queries and keys, or maps that modules report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from regard.attention import Attention, Prepared
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.edits.layer_edits import EditedMap, LayerEdits
from regard.hf.calls import DIRECT, AttentionCall, Translation, Untranslatable
from regard.hf.capture.kept_calls import ATTENTION, Check, KeptCall, LazyCall, NoValues, worst
from regard.hf.capture.module_statistics import ModuleStatistics
from regard.hf.capture.recurrent_calls import RecurrentCall
from regard.hf.capture.torch_calls import ObservedCall, ProjectionInputs
from regard.maps.attention_map import AttentionMap
from regard.maps.combined_map import SumMap
from regard.maps.joined import joined
from regard.maps.reductions import Reduction, State
from regard.maps.scored_map import ScoredMap
from regard.pieces.grid import Grid


def call_tensors(
    call: AttentionCall, translation: Translation, with_values: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries (B, H, I, D), keys (B, G, J, D) and values (B, G, J, E), None without `with_values`.

    The queries are those of `translation`, which may have the scale in them. In grad mode the tensors have their
    graphs: a watch calls this in grad mode only to keep graphs. Keys and values of a static cache are copied, because
    the next step of the model overwrites them.
    """
    tensors = translation.query, call.key, call.value
    query, key, value = tensors if torch.is_grad_enabled() else (tensor.detach() for tensor in tensors)
    value = value if with_values else None
    if not _is_static(call):
        return query, key, value
    return query, key.clone(), None if value is None else value.clone()


def _is_static(call: AttentionCall) -> bool:
    """Whether keys and values belong to a cache that is written in place.

    Static caches of transformers mark their tensors for torch.compile (`mark_static_address`). A module that calls
    F.scaled_dot_product_attention itself may keep its cache in a buffer.
    """
    if hasattr(call.key, "_dynamo_static_input_type"):
        return True
    if is_functorch_wrapped_tensor(call.key):  # without a storage that can be read
        return False
    place = call.key.untyped_storage().data_ptr()
    return call.backend == DIRECT and any(b.untyped_storage().data_ptr() == place for b in call.module.buffers())


def deferred_call(
    name: str, translation: Translation, inputs: ProjectionInputs, check: Check, keeps_values: bool
) -> LazyCall:
    """One call of a torch layer, by its inputs: queries and keys are projected when its map is read.

    These layers project inside one fused kernel, which does not return queries and keys. Projecting again while the
    model runs would take a fifth of its time. So the inputs are kept, and projected later. This is only done for layers
    with torch's own forward, which never changes its inputs in place. If a user changes inputs or parameters later,
    their versions or a sample of their numbers tell. `name` is the path of the layer. With `keeps_values` values can
    be read too.
    """
    attention, positions = translation.attention, translation.positions
    query, key, _ = inputs.shaped()
    (B, H, I, _), J, device = query.shape, key.shape[2], inputs.tensors[0].device
    versions, sample = inputs.versions(keeps_values), inputs.sample(keeps_values)

    def project(*numbers: int) -> list[Tensor]:
        """Project some of the queries (0), keys (1) and values (2)."""
        is_same = all(torch.equal(now, then) for now, then in zip(inputs.sample(keeps_values), sample, strict=True))
        if not is_same or inputs.versions(keeps_values) != versions:
            raise RegardError(
                f"seen[{name!r}]: the inputs or parameters of this layer were changed in place after it was "
                "watched (by an optimizer step, perhaps), so its queries and keys are lost. Read the map before the "
                "change, or compute statistics while the model runs: watch(model, keep='statistics')."
            )
        with torch.autocast(device.type, enabled=False):
            return [inputs.projected(number, inputs.tensors[number]) for number in numbers]

    @torch.no_grad()
    def build() -> AttentionMap:
        query, key = project(0, 1)
        prepared = Prepared.of(attention, query, key, positions)
        return ScoredMap(attention, prepared, positions, Grid.whole(positions, B, H, I, device), None)

    @torch.no_grad()
    def values() -> Tensor:
        return project(2)[0]

    return LazyCall((B, H, I, J), check, build, values)


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
class Capture(KeptCall):
    """One call of a module: its pieces, queries (B, H, I, D) and keys, and its verification.

    `logsumexp` (B, H, I) is that of the rows if the kernel returned it, and `states` are those of reductions that it
    computed. `values` are kept with watch(keep="qkv"), and `patched`, the output (B, H, I, E) after patches. `edits`
    are those of its weights. If `is_live`, the tensors have their graphs.
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
    states: Mapping[Reduction, State] = field(default_factory=dict)
    is_live: bool = field(default_factory=torch.is_grad_enabled)

    @property
    def shape(self) -> tuple[int, int, int, int]:  # type: ignore[override]
        B, H, I, _ = self.query.shape
        return B, H, I, len(self.positions.keys)

    @cached_property
    def map(self) -> AttentionMap:  # type: ignore[override]
        """The weights; built at the first access."""
        return self._scored() if self.edits is None else EditedMap(self._scored(), self.edits)

    @property
    def is_scored(self) -> bool:  # type: ignore[override]
        return not self.is_live and self.edits is None

    def read_values(self) -> Tensor:
        """The values (B, G, J, E); the shared ones may be longer than those of this call, and are cut."""
        assert self.values is not None
        return self.values.tensor[:, :, : len(self.positions.keys)]

    def read(self, part: str) -> Tensor:
        return self.keys.tensor if part == "key" else self.query

    def followed_by(self, later: KeptCall) -> None:
        """If the keys of the next call begin with those of this one, both calls share them."""
        if isinstance(later, Capture) and self.keys.grow(later.keys.tensor):
            later.keys = self.keys
            if self.values and later.values and self.values.grow(later.values.tensor):
                later.values = self.values

    def own_tensors(self) -> None:
        """Copy the queries, the keys and the values, which a program may change in place."""
        self.query, self.keys.tensor = self.query.clone(), self.keys.tensor.clone()
        if self.values is not None:
            self.values.tensor = self.values.tensor.clone()

    def _scored(self) -> ScoredMap:
        """The weights before edits of weights. The shared keys may be longer than those of this call, and are cut."""
        B, H, I, _ = self.query.shape
        grid = Grid.whole(self.positions, B, H, I, self.query.device)
        row_statistic = None if self.logsumexp is None else (self.logsumexp,)
        with torch.set_grad_enabled(self.is_live):
            key = self.keys.tensor[:, :, : len(self.positions.keys)]
            prepared = Prepared.of(self.attention, self.query, key, self.positions)
            weights = ScoredMap(self.attention, prepared, self.positions, grid, row_statistic)
            weights.remember(self.states)
            return weights


@dataclass(eq=False)
class ModuleMap(KeptCall):
    """A map that a module of `regard.nn` reported, or the maps of consecutive decoding steps.

    Without `steps` every call has its own map: another call of `attend` may have other pieces. `values` (B, G, J, E)
    and `patched`, the output (B, H, I, E) after patches, are kept with watch(keep="qkv").
    """

    maps: list[AttentionMap]
    check: Check
    steps: bool = True
    values: Tensor | None = None
    patched: Tensor | None = None
    is_live: ClassVar[bool] = True  # type: ignore[misc]

    @property
    def shape(self) -> tuple[int, int, int, int]:  # type: ignore[override]
        B, H, _, J = self.maps[-1].shape
        return B, H, sum(weights.shape[2] for weights in self.maps), J

    @property
    def map(self) -> AttentionMap:
        """The map; those of several steps are joined when it is first read."""
        if len(self.maps) > 1:
            self.maps[:] = [joined(self.maps)]
        return self.maps[0]

    def read_values(self) -> Tensor:
        """The values (B, G, J, E) of the last step, which has all of them."""
        if self.values is None:
            raise NoValues(OF_RING)
        return self.values

    def without_map(self) -> Self:
        return replace(self, maps=[])

    def followed_by(self, later: KeptCall) -> ModuleMap | None:
        """This call with the map of the next one, if its queries follow."""
        if not (isinstance(later, ModuleMap) and self.steps and later.steps):
            return None
        last, new = self.maps[-1], later.maps[0]
        if self.patched is not None or later.patched is not None:
            return None
        if not (isinstance(last, ScoredMap) and isinstance(new, ScoredMap)):
            return None
        follows = new.positions.start == last.positions.start + last.shape[2] and new.shape[:2] == last.shape[:2]
        if not follows or not _begins_with(new._prepared.key, last._prepared.key):
            return None
        self.maps.append(new)
        self.values = later.values
        return self


def _begins_with(keys: Tensor, earlier: Tensor) -> bool:
    """Whether keys begin with earlier ones, up to rounding. They do not after a beam search reordered its rows."""
    if keys is earlier:
        return True
    return keys.shape[2] >= earlier.shape[2] and torch.allclose(keys[:, :, : earlier.shape[2]], earlier)


def reduced_call(name: str, call: KeptCall) -> LazyCall:
    """A call of the module at the path `name` whose statistics alone were kept."""

    def build() -> AttentionMap:
        raise NotCaptured(
            f"seen[{name!r}]: only statistics were kept, in seen.statistics[{name!r}]. "
            "watch(model, keep='qk') keeps the queries and keys that a map needs."
        )

    def values() -> Tensor:
        raise NoValues("only statistics were kept")

    return LazyCall(call.shape, call.check, build, values)


@dataclass(eq=False)
class ModuleCalls:
    """One attention module: the part of the model it is in, its calls in order, and statistics if they are kept."""

    part: str
    calls: list[KeptCall] = field(default_factory=list)
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

    def add(self, call: KeptCall) -> None:
        """Append a call, or join it to the one before."""
        if isinstance(call, RecurrentCall):
            if call.earlier is None:  # a new run begins, so the run before it is verified
                self._end_run()
            if self.statistics is not None:  # no call is kept, so each is verified now
                call.verify()
            self.recurrent, self.kind = call, call.kind
        if self.statistics is not None:
            weights = call.map
            with torch.autocast(weights.device.type, enabled=False):
                self.statistics.add(weights)
            self.calls.append(reduced_call(self.statistics.name, call))
            return
        joined = self.calls[-1].followed_by(call) if self.calls else None
        if joined is None:
            self.calls.append(call)
        else:
            self.calls[-1], self.part = joined, joined.part or self.part

    def _end_run(self) -> None:
        """Verify the calls of a recurrent layer that continue each other, and release what the next would need."""
        if self.recurrent is not None:
            if self.statistics is None:
                self.recurrent.verify()
            self.recurrent.forget()

    def release(self) -> None:
        """Verify recurrent layers, and release what was kept to join the next call."""
        self._end_run()
        for call in self.calls[-1:]:
            call.release()


PARAMETERS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "lambda_init", "groupnorm", "o_proj")
#: Largest error of the module's output, relative to the largest output.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 1e-2}


def is_differential(module: nn.Module | None) -> bool:
    """Whether a module subtracts two softmaxes, as DiffLlama does."""
    return module is not None and all(hasattr(module, name) for name in PARAMETERS)


@dataclass(eq=False)
class DifferentialCapture(Capture):
    """One call of differential attention, W = W_1 - lambda W_2: the two softmaxes, and lambda.

    DiffLlama (arXiv 2410.05258) calls the backend twice, with the same queries and keys and two halves of the values.
    The first half of the heads gives W_1, and the second half W_2.
    """

    factor: float = 0.0
    is_scored: ClassVar[bool] = False  # type: ignore[misc]

    @property
    def shape(self) -> tuple[int, int, int, int]:  # type: ignore[override]
        B, H, I, J = super().shape
        return B, H // 2, I, J

    @cached_property
    def map(self) -> AttentionMap:  # type: ignore[override]
        """W_1 - lambda W_2; its `parts` are the two softmaxes, and its `factors` 1 and -lambda."""
        both = self._scored()
        half = both.shape[1] // 2
        parts = [both.select(slice(None), slice(start, start + half)) for start in (0, half)]
        return SumMap(parts, [1.0, -self.factor])


@torch.no_grad()
def differential(module: Any, first: Capture, halves: list[ObservedCall], output: Tensor) -> DifferentialCapture:
    """The difference of two softmaxes, from the captured `first` call, and both calls (`halves`).

    The outputs of the halves are (B, I, H, D), and `output` is that of the module.
    `Untranslatable` if the difference, normalized and projected, is not the output of the module.
    """
    of_first, of_second = (half.output for half in halves)
    factor = float(_exp_dot(module.lambda_q1, module.lambda_k1) - _exp_dot(module.lambda_q2, module.lambda_k2))
    factor += module.lambda_init
    plus, minus = torch.cat([of_first, of_second], -1).chunk(2, dim=2)
    normed = (1 - module.lambda_init) * module.groupnorm(plus - factor * minus)
    expected = module.o_proj(normed.flatten(2))
    tolerance = TOLERANCE.get(output.dtype, 1e-4) * max(float(output.abs().max()), 1e-6)
    error = float((expected - output).abs().max())
    if not error <= tolerance:
        raise Untranslatable(f"{type(module).__name__} does not subtract its two maps as DiffLlama does")
    check = replace(first.check, error=max(error, first.check.error or 0.0)) if first.check.ok else first.check
    shared = [half.call.value.detach().chunk(2, dim=1)[0] for half in halves]  # both halves of the heads have the same
    values = None if first.values is None else SharedKeys(torch.cat(shared, -1))
    return DifferentialCapture(
        first.attention, first.positions, first.query, first.keys, check, first.logsumexp, values, factor=factor
    )


def _exp_dot(left: Tensor, right: Tensor) -> Tensor:
    """exp(left . right), in float32."""
    return (left * right).sum(-1, dtype=torch.float32).exp()
