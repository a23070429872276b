"""`RerunCall`: a captured call of a module that computes softmax itself; reading its map runs the module again.

Queries and keys of such a module are not accessible, so the inputs of the call are kept. To read the weights, the
module runs again, and the result of its softmax is taken. Dense weights are held for one call at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.attention import Attention
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import at_least_float32, grouped_values, spread_indices
from regard.hf.calls import ADAPTED, DIRECT, MULTIHEAD, Untranslatable, check_numbers
from regard.hf.capture.kept_calls import TOLERANCE, Check, KeptCall, LazyCall, NoValues, values_of_product
from regard.hf.capture.softmax_trace import SOFTMAX, Trace
from regard.hf.capture.torch_calls import ObservedCall
from regard.hf.masks.mask_tensors import recognize
from regard.maps import attention_map
from regard.maps.attention_map import AttentionMap
from regard.maps.dense_map import DenseMap
from regard.pieces.data_masks import mask_tensor
from regard.pieces.grid import Grid

#: Weights of at most this many bytes are kept themselves: those of a generation step are smaller than its inputs.
SMALL = 1 << 14
#: Rows of weights that are kept, to compare with those of the second run.
ROWS = 4


@dataclass(eq=False)
class LastWeights:
    """The dense weights of the call whose map was read last."""

    owner: object = None
    weights: Tensor | None = None

    def of(self, owner: object, compute: Callable[[], Tensor]) -> Tensor:
        """The weights of a call: those in memory if they belong to this call, else computed."""
        if self.owner is not owner or self.weights is None:
            self.owner = self.weights = None
            self.owner, self.weights = owner, compute()
        return self.weights


class DenseCall(KeptCall):
    """A call whose dense weights come from running its module again.

    `sample` has a few rows of the weights or outputs of the watched run: another run must reproduce them. `slot` holds
    the dense weights of one call of the whole watch, so that they are not in memory for every layer.
    """

    name: str
    sample: Tensor
    slot: LastWeights

    @property
    def map(self) -> AttentionMap:
        """The map, which computes its weights when they are first needed."""
        B, H, I, J = self.shape
        grid = Grid.whole(Positions.aligned_to_end(I, J), B, H, I, self.sample.device)
        return DenseMap(self.weights, self.is_signed, grid, mask_of)

    @staticmethod
    def is_signed(weights: Tensor) -> bool:
        """Whether some weights are below 0."""
        return False

    def weights(self) -> Tensor:
        """The dense weights (B, H, I, J), from memory or computed."""
        return self.slot.of(self, self.compute)

    def compute(self) -> Tensor:
        """Run the module again and return its dense weights."""
        raise NotImplementedError

    def check_budget(self, how: str) -> None:
        """Raise a `RegardError` if the dense weights exceed the budget; `how` begins the message."""
        size = 4 * self.sample.new_empty(self.shape, device="meta").numel()
        if size > attention_map.BUDGET:
            raise RegardError(
                f"seen[{self.name!r}]: {how}, {size / 2**20:,.0f} MiB; the budget is "
                f"{attention_map.BUDGET / 2**20:,.0f} MiB. Watch a shorter text or a smaller batch."
            )


@dataclass(frozen=True, eq=False)
class StepMemory:
    """The values that a call with one query read, and the version of their tensor then.

    A decoder reads the same ones at its next step.
    """

    values: Tensor
    version: int

    @staticmethod
    def of(module: nn.Module, values: Tensor | None) -> StepMemory | None:
        """The values of a call; None for parameters, which every call reads, whatever its text is."""
        if values is None or isinstance(values, nn.Parameter) or isinstance(values._base, nn.Parameter):
            return None
        place = values.untyped_storage().data_ptr()
        if any(own.untyped_storage().data_ptr() == place for own in (*module.parameters(), *module.buffers())):
            return None
        return StepMemory(values.detach(), 0 if values.is_inference() else values._version)

    def is_the_same(self, later: StepMemory) -> bool:
        """Whether both are the same place in memory, not written in between."""
        mine, other = self.values, later.values
        same_place = mine.data_ptr() == other.data_ptr() and mine.shape == other.shape
        return same_place and mine.stride() == other.stride() and self.version == later.version


@dataclass(eq=False)
class RerunCall(DenseCall):
    """One call of a module that computes softmax itself: the inputs to run it again, and a few rows of its weights.

    `name` is the path of the module, and `shape` that of the weights. `number` is the place of its softmax among those
    of the run. The rows `sample` must be the same when it runs again. `slot` holds the weights that were read last.
    `small` has the weights if they take less memory than the inputs, which are not kept then.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, int, int, int]
    number: int
    sample: Tensor
    slot: LastWeights
    check: Check
    small: Tensor | None = field(default=None, repr=False)
    #: Held until the next call, if this one has one head and one query.
    memory: StepMemory | None = field(default=None, repr=False)
    #: Held with watch(keep="qkv"), or the reason why the call has none.
    values: Tensor | NoValues | None = field(default=None, repr=False)
    #: What edits made of its softmaxes.
    changes: dict[int, Callable[..., Tensor]] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(
        name: str,
        module: nn.Module,
        given: tuple[Any, Any],
        trace: Trace,
        slot: LastWeights,
        output: Any = None,
        keeps_values: bool = False,
    ) -> RerunCall:
        """The call, from the module's inputs, the trace of its run, and its output.

        `name` is the path of the module, and `slot` holds the weights that were read last. With `keeps_values`
        values can be read too.
        """
        check_numbers(trace.softmaxes[0])
        product = trace.weighted_sum(type(module).__name__)
        number = product.weights.number
        if product.weights.is_wide:
            weights = four_axes(module, given, trace.weights(number), output)
        else:
            weights = _one_head(module, trace.weights(number), product.num_batch, product.num_queries)
        B, H, I, J = weights.shape
        small = weights.clone() if weights.numel() * 4 <= SMALL else None
        args, kwargs = given if small is None else ((), {})
        check = Check(name, note="these are the weights of the module's own softmax, by which it multiplies the values")
        sample = sampled_rows(weights).clone()
        memory = StepMemory.of(module, product.values) if H == I == 1 else None
        values = values_of_product(product, (B, H, I, J), type(module).__name__) if keeps_values else None
        shape, changes = (B, H, I, J), trace.changes
        return RerunCall(name, module, args, kwargs, shape, number, sample, slot, check, small, memory, values, changes)

    def read_values(self) -> Tensor:
        """The values (B, H, J, E) of the product that the trace found."""
        assert self.values is not None
        if isinstance(self.values, NoValues):
            raise self.values
        return self.values

    def reads_the_same(self, later: RerunCall) -> bool:
        """Whether the next call has the same values as this call."""
        if self.memory is None or later.memory is None or self.shape != later.shape:
            return False
        return self.memory.is_the_same(later.memory)

    def followed_by(self, later: KeptCall) -> KeptCall | None:
        """Both calls as steps of one decoder, if they have the same values."""
        return RerunSteps([self]).followed_by(later)

    def release(self) -> None:
        """Release the values, which only the next call is compared with."""
        self.memory = None

    def weights(self) -> Tensor:
        """The dense weights, (B, H, I, J)."""
        return super().weights() if self.small is None else self.small

    @torch.no_grad()
    def compute(self) -> Tensor:
        """Run the module again, follow its softmaxes, and return the one that was its weights.

        `forward` runs no hooks. The inputs are copied once more, because the module may append to its cache.
        """
        self.check_budget(f"{type(self.module).__name__} computes all its weights at once")
        devices = [self.sample.device] if self.sample.is_cuda else []
        with torch.random.fork_rng(devices), _SoftmaxCatcher(self.changes) as caught:
            self.module.forward(*_snapshot(self.args), **_snapshot(self.kwargs))
        weights = caught.trace.weights(self.number)
        if caught.trace.of_softmax(self.number).is_wide:
            shaped = _shaped(weights, self.shape[0])
            weights = weights if shaped is None else shaped.detach()
        else:
            weights = _one_head(self.module, weights, self.shape[0], self.shape[2])
        if weights.shape != self.shape or not torch.allclose(
            sampled_rows(weights), self.sample, atol=1e-4, equal_nan=True
        ):
            raise RegardError(
                f"seen[{self.name!r}]: {type(self.module).__name__} returns other weights than when it was watched: "
                "its parameters or inputs were changed. Read the map before the change, or watch again."
            )
        return weights


@dataclass(eq=False)
class RerunSteps(DenseCall):
    """The steps of a decoder, of one head and one query each over the same values. They form one map."""

    calls: list[RerunCall]
    part: ClassVar[str] = "cross"  # type: ignore[misc]  # the values do not grow with the steps

    def __post_init__(self) -> None:
        first = self.calls[0]
        self.check, self.sample, self.slot = first.check, first.sample, first.slot

    @property
    def shape(self) -> tuple[int, int, int, int]:  # type: ignore[override]
        B, H, _, J = self.calls[0].shape
        return B, H, len(self.calls), J

    def read_values(self) -> Tensor:
        """The values, which all steps read."""
        return self.calls[-1].read_values()

    def compute(self) -> Tensor:
        """The weights of all steps, a row each."""
        return torch.cat([call.weights() for call in self.calls], 2)

    def followed_by(self, later: KeptCall) -> RerunSteps | None:
        """This call with the next step appended, if both have the same values."""
        last = self.calls[-1]
        step = later if isinstance(later, RerunCall) and last.reads_the_same(later) else None
        last.release()
        if step is None:
            return None
        self.calls.append(step)
        if self.slot.owner is self:
            self.slot.owner = self.slot.weights = None  # without the new row
        return self

    def release(self) -> None:
        """Release the values of the last step."""
        self.calls[-1].release()


def mask_of(weights: Tensor) -> Attention:
    """An attention with only a mask: the rule for the zeros of weights (B, H, I, J), if a short rule describes them."""
    B, _, I, J = weights.shape
    rule = recognize(weights.abs() > 0, B, I, J).mask
    return Attention(mask=None if isinstance(rule, mask_tensor) else rule).eval()


class _SoftmaxCatcher(TorchFunctionMode):
    """Traces the softmaxes of a run, changed as edits changed them: by the functions `changes`, by softmax number."""

    def __init__(self, changes: dict[int, Callable[..., Tensor]]) -> None:
        super().__init__()
        self.trace = Trace(changes=changes)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch calls this in place of each function `func`; an edit changes the softmax with its number."""
        kwargs = kwargs or {}
        change = self.trace.changes.get(len(self.trace.softmaxes)) if func in SOFTMAX else None
        output = func(*args, **kwargs) if change is None else change(func, args, kwargs)
        self.trace.follow(func, args, kwargs, output)
        return output


def four_axes(module: nn.Module, given: tuple[Any, Any], weights: Tensor, output: Any) -> Tensor:
    """The weights as (B, H, I, J), with batch size and number of queries read from the inputs, or from the output.

    `given` are the positional and the named inputs. Their shapes are tried until the weights fit.
    """
    tensors = [x for x in (*given[0], *given[1].values()) if isinstance(x, Tensor)]
    if weights.ndim == 4 and any(x.ndim == 4 and x.shape[:3] == weights.shape[:3] for x in tensors):
        return weights.detach()  # the queries came as (B, H, I, C)
    inputs = [x for x in tensors if x.ndim == 3]
    result = output[0] if isinstance(output, tuple) and output else output
    places = [x for x in (*tensors, result) if isinstance(x, Tensor) and x.ndim in (3, 4)]
    for B, I in (*_batch_and_length(module, inputs), *((len(x), prod(x.shape[1:-1])) for x in places)):
        shaped = _shaped(weights, B)
        # Weights (B, I', J) of one head, with as many keys as the input has tokens: the queries are the module's own.
        one_head = weights.ndim == 3 and weights.shape[0] == B and weights.shape[2] == I
        if shaped is not None and (shaped.shape[2] == I or one_head):
            return shaped.detach()
    shapes = ", ".join(str(tuple(x.shape)) for x in inputs) or "no tensor of three axes"
    raise Untranslatable(
        f"the softmax of {type(module).__name__} has shape {tuple(weights.shape)}; the inputs do not show which axes "
        f"are batch, heads and queries: {shapes}"
    )


def _one_head(module: nn.Module, weights: Tensor, num_batch: int, num_queries: int) -> Tensor:
    """Weights with few axes as (B, 1, I, J), with the batch and the queries of the product that they are part of."""
    J = weights.shape[-1]
    if weights.numel() != num_batch * num_queries * J:
        raise Untranslatable(
            f"the softmax of {type(module).__name__} has shape {tuple(weights.shape)}, and it multiplies the values of "
            f"{num_batch} batch entries and {num_queries} queries, so it is not known to which each row belongs"
        )
    return weights.detach().reshape(num_batch, 1, num_queries, J)


def _shaped(weights: Tensor, num_batch: int) -> Tensor | None:
    """Weights (B, H, I, J), or (B * H, I, J), as (B, H, I, J); None if they do not have this batch size."""
    if weights.ndim == 3 and num_batch > 0 and len(weights) % num_batch == 0:
        weights = weights.unflatten(0, (num_batch, -1))
    return weights if weights.ndim == 4 and len(weights) == num_batch else None


def _batch_and_length(module: nn.Module, inputs: list[Tensor]) -> Iterator[tuple[int, int]]:
    """Possible batch sizes and numbers of queries, the most likely first.

    Inputs are (B, I, C), (B, C, I) for convolutions, or (I, B, C).
    """
    yield from ((x.shape[0], x.shape[1]) for x in inputs)
    same_width = [x for x in inputs if (x.shape[0], x.shape[2]) == (inputs[0].shape[0], inputs[0].shape[2])]
    if len(same_width) > 1:  # two sequences that attend to each other, such as words and entities
        yield same_width[0].shape[0], sum(x.shape[1] for x in same_width)
    if any(isinstance(child, nn.Conv1d) for child in module.children()):
        yield from ((x.shape[0], x.shape[2]) for x in inputs)
    yield from ((x.shape[1], x.shape[0]) for x in inputs)


def sampled_rows(weights: Tensor) -> Tensor:
    """A few rows of (B, H, I, J)."""
    return weights[:, :, spread_indices(weights.shape[2], ROWS, weights.device)]


def snapshot(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Copies of the inputs before the module runs. Caches append tensors to lists, so the lists are copied."""
    return _snapshot(args), _snapshot(kwargs)


def _snapshot(value: Any) -> Any:
    """A copy of tuples, lists, dicts and caches, with the same tensors in them."""
    if isinstance(value, tuple | list):
        return type(value)(_snapshot(part) for part in value) if type(value) in (tuple, list) else value
    if type(value) is dict:
        return {key: _snapshot(part) for key, part in value.items()}
    if _is_cache(type(value)):
        copied = copy.copy(value)
        copied.__dict__ = {key: _snapshot(part) for key, part in vars(value).items()}
        return copied
    return value


def _is_cache(kind: type) -> bool:
    """Whether this is a cache of transformers, or one of its layers; some models have caches of their own."""
    module = kind.__module__
    return module == "transformers.cache_utils" or (module.startswith("transformers.") and "Cache" in kind.__name__)


@torch.no_grad()
def returned_call(name: str, observed: ObservedCall, reason: Untranslatable, keeps_values: bool = False) -> LazyCall:
    """The returned weights of a call that cannot be recomputed; else `Untranslatable` with reason and remedy.

    Eager backends return their weights. They are kept only if weights times values are the backend's output: some
    models return other weights than they compute with. They take O(n^2) memory, so this is the last resort. `name` is
    the path of the module. With `keeps_values` values can be read too.
    """
    call, weights = observed.call, observed.weights
    if weights is None or weights.ndim != 4:
        remedy = (
            ""
            if call.backend in ("eager", DIRECT, MULTIHEAD, ADAPTED)
            else "; model.set_attn_implementation('eager') may return its weights"
        )
        raise Untranslatable(f"{reason}{remedy}")
    check_numbers(weights)
    fits = weights.shape == (*call.query.shape[:3], call.value.shape[2]) and not call.drops
    if not fits or weights.numel() * weights.element_size() > attention_map.BUDGET:
        raise Untranslatable(f"{reason}; the weights that it returned cannot be used")
    sums = grouped_values(at_least_float32(weights), at_least_float32(call.value)).transpose(1, 2)
    tolerance = TOLERANCE.get(observed.output.dtype, 1e-4) * max(float(observed.output.abs().max()), 1e-6)
    error = float((sums - observed.output).abs().max())
    if not error <= tolerance:
        raise Untranslatable(f"{reason}; the weights that it returned are not those that it computes with")
    weights, values = weights.detach(), call.value.detach() if keeps_values else None
    verified = Check(name, error, tolerance, True, "these weights were returned")
    build = partial(DenseMap, weights, False, rule=mask_of)
    return LazyCall(weights.shape, verified, build, lambda: values)  # type: ignore[arg-type,return-value]
