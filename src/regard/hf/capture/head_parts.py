"""What the heads of a captured call compute and write: outputs, parts of the residual stream, effects on a logit."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard.base.shapes import at_least_float32, spread_indices, to_device
from regard.hf.capture.captured_calls import ModuleCalls
from regard.hf.capture.kept_calls import LostProjection, NoValues
from regard.hf.output_projections import (
    LinearLayer,
    is_norm,
    language_model_head,
    loaded,
    num_inputs,
    open_gates,
    output_projection,
)
from regard.maps.attention_map import AttentionMap
from regard.maps.changed_map import GradientMap, ValueWeightedMap
from regard.nn import Attends
from regard.stats.composition import value_weighted

#: Rows that are compared, spread over the tokens of the first and the last text.
ROWS = 4
#: The most parts beside a head's layer that a block may add to its input.
PARTS = 3
#: Sums are equal if they differ by at most this number of rounding errors of their terms.
ROUNDINGS = 4
#: Largest error of a norm, relative to its largest number.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 1e-2}
#: Names of the small number that norms add to the mean square.
EPSILONS = ("eps", "variance_epsilon", "epsilon")
NOT_A_SUM = (
    "this block, or one after it, does not add the result of its attention to its input and hand on the sum (a norm "
    "after attention, a factor, or several streams), so a head has no direct effect on the logit"
)


@dataclass(frozen=True, eq=False)
class FinalNorm:
    """norm(x) = gain * (x - mean) * scale + bias with the scale (B, I) of one call; `is_centered`: less the mean."""

    gain: Tensor
    scale: Tensor
    is_centered: bool

    def direction(self, of_logit: Tensor) -> Tensor:
        """d (C,), such that the part p of the residual stream adds scale * (p . d) to the logit u . norm(x)."""
        gained = self.gain * at_least_float32(of_logit)
        return gained - gained.mean() if self.is_centered else gained


@dataclass(frozen=True, eq=False)
class FinalRead:
    """One call of the language-model head: its final norm, and the attention modules whose sums reach it.

    `norm` is the reason why there is none if the head reads something else. `without` has the modules whose sums do not
    reach it, and why.
    """

    norm: FinalNorm | str
    reached: frozenset[str] = frozenset()
    without: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Block:
    """A few rows of one call of a block: its input `before`, its output `after`, and whether it only adds (`is_sum`).

    Then the output is the input plus the parts of the block. `names` are the attention modules in the block.
    """

    names: tuple[str, ...]
    before: Tensor
    after: Tensor
    is_sum: bool


@dataclass(eq=False)
class _Running:
    """What the blocks of one run did so far.

    `parts` has the results of the children of a block that runs, except norms, and `written` the results of output
    projections by attention module.
    """

    parts: dict[nn.Module, list[Tensor]] = field(default_factory=dict)
    written: dict[str, Tensor] = field(default_factory=dict)
    blocks: list[_Block] = field(default_factory=list)
    #: The last norm that ended, its input and its output.
    norm: tuple[nn.Module, Tensor, Tensor] | None = None


class ResidualStream:
    """Observes the blocks, the final norm and the head of a language model, and whether heads reach it by sums alone.

    The logit of a token is u . norm(x), where x is the residual stream and u the row of the language-model head. If x
    is a sum of what the embedding, the heads and the MLPs write, and the scale of the norm is held as it was, then the
    logit is the sum of their direct effects. So each block must add what its heads write to its input, and must hand on
    the sum: a norm after attention (BERT, Gemma 2) or a factor does not. A few rows prove it while the model runs.
    """

    def __init__(self, model: nn.Module, attending: Iterable[str]) -> None:
        self._head = language_model_head(model)
        self.head = linear_layer(self._head)
        self.reads: list[FinalRead] = []
        self._blocks = blocks_of(model, attending) if self._head is not None else {}
        self._parents = {child: block for block in self._blocks for child in block.children()}
        self._running = _Running()

    @property
    def kind(self) -> str:
        """The class of the language-model head."""
        return type(self._head).__name__

    @torch.no_grad()
    def module_ended(
        self, module: nn.Module, args: Iterable[Any], kwargs: Mapping[str, Any], output: Any, name: str | None
    ) -> None:
        """Follow a module that ended; `name` is the attention module whose output projection it is, or None.

        Its input is the first tensor among its arguments. A call of the language-model head ends a run.
        """
        result = _first((output,))
        if self._head is None or result is None:
            return
        given, running = _first((*args, kwargs.get("hidden_states"), *kwargs.values())), self._running
        if name is not None:
            running.written[name] = result.detach()
        if module in self._parents and not is_norm(module):
            running.parts.setdefault(self._parents[module], []).append(result.detach())
        if module in self._blocks and given is not None:
            self._keep_block(module, given, result)
        if is_norm(module) and given is not None:
            running.norm = module, given.detach(), result.detach()
        if module is self._head and given is not None:
            self.reads.append(_final_read(running, given))
            self._running = _Running()

    def _keep_block(self, block: nn.Module, given: Tensor, result: Tensor) -> None:
        """Note whether a block that ended added what its heads wrote (`own`) and other parts to its input.

        `given` is the input and `result` the output of the block, (B, n, C) if it is one of a Transformer.
        """
        running, names = self._running, self._blocks[block]
        parts = running.parts.pop(block, [])
        written = [running.written.pop(name) for name in names if name in running.written]
        if given.ndim != 3 or result.shape != given.shape:
            return
        own, others = (
            [_rows(x.reshape(given.shape)) for x in tensors if x.numel() == given.numel()]
            for tensors in (written, parts)
        )
        before, after = _rows(given), _rows(result)
        is_sum = len(own) == len(written) > 0 and _is_sum(before, after, own, others, result.dtype)
        running.blocks.append(_Block(names, before, after, is_sum))


def blocks_of(model: nn.Module, attending: Iterable[str]) -> dict[nn.Module, tuple[str, ...]]:
    """The blocks of a model: the entries of lists of modules that hold attention modules, with their names.

    `attending` are the paths of the attention modules.
    """
    modules = dict(model.named_modules())
    names: dict[nn.Module, tuple[str, ...]] = {}
    for name in attending:
        path = name
        while path and not isinstance(modules[path.rpartition(".")[0]], nn.ModuleList):
            path = path.rpartition(".")[0]
        if path:
            names[modules[path]] = (*names.get(modules[path], ()), name)
    return names


def _first(values: Iterable[Any]) -> Tensor | None:
    """The first tensor of floating-point numbers in arguments or results, also inside tuples; None without one."""
    for value in values:
        if isinstance(value, tuple | list):
            value = _first(value)
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    return None


def _rows(x: Tensor) -> Tensor:
    """A few rows of (B, I, C), of the first and the last text."""
    rows = spread_indices(x.shape[1], ROWS, x.device)
    return at_least_float32(x[[0, -1]][:, rows].detach())


def _are_equal(left: Tensor, right: list[Tensor], dtype: torch.dtype) -> bool:
    """Whether left is the sum of the others, up to the rounding of each number."""
    size = left.abs() + sum(term.abs() for term in right)
    limit = ROUNDINGS * max(torch.finfo(dtype).eps, torch.finfo(left.dtype).eps)
    return left.shape == right[0].shape and bool(((left - sum(right)).abs() <= limit * size).all())


def _is_sum(before: Tensor, after: Tensor, own: list[Tensor], others: list[Tensor], dtype: torch.dtype) -> bool:
    """Whether a block adds what its heads wrote, and a few other parts, to its input; it may use only some of these."""
    counts = range(min(PARTS, len(others)) + 1)
    choices = (chosen for count in counts for chosen in combinations(others, count))
    return any(_are_equal(after, [before, *own, *chosen], dtype) for chosen in choices)


def _final_read(running: _Running, given: Tensor) -> FinalRead:
    """How this run ended: the norm that the head reads, and the blocks whose sums do not reach it.

    `given` (B, n, C) is the input of the language-model head. From the last block back, each must hand its sum to the
    next one, unchanged; the last one to the norm.
    """
    if running.norm is None or given.untyped_storage().data_ptr() != running.norm[2].untyped_storage().data_ptr():
        return FinalRead("the language-model head does not read the result of a norm of the residual stream")
    module, x, y = running.norm
    if x.ndim != 3:
        return FinalRead(f"the final norm reads a tensor of shape {tuple(x.shape)}, not (batch, tokens, channels)")
    without: dict[str, str] = {}
    known: set[str] = set()
    stream, reaches = _rows(x), True
    for block in reversed(running.blocks):
        if known.isdisjoint(block.names):  # else this is a call in an earlier run, which did not reach the head
            reaches = reaches and block.is_sum and _are_equal(block.after, [stream], x.dtype)
            without |= {} if reaches else dict.fromkeys(block.names, NOT_A_SUM)
            known |= {*block.names}
            stream = block.before
    return FinalRead(_linearized(module, x, y), frozenset(known - without.keys()), without)


def _linearized(module: nn.Module, x: Tensor, y: Tensor) -> FinalNorm | str:
    """The norm of x with its scale held, if it is a LayerNorm or an RMSNorm: the form that fits its output y best.

    Both are (B, n, C). A norm may subtract the mean, and its gain is its weight, or one more (Gemma). Else the reason
    why it is neither.
    """
    with loaded(module):
        wide, weight, bias = at_least_float32(x), getattr(module, "weight", None), getattr(module, "bias", None)
    weight = torch.ones_like(wide[0, 0]) if weight is None else at_least_float32(weight.detach())
    found: dict[float, FinalNorm] = {}
    for is_centered in (True,) if isinstance(module, nn.LayerNorm) else (False, True):
        centered = wide - wide.mean(-1, keepdim=True) if is_centered else wide
        scale = (centered.square().mean(-1) + _epsilon(module, x.dtype)).rsqrt()
        for gain in (weight, 1 + weight):
            expected = _rows(centered) * _rows(scale[..., None]) * gain + (0 if bias is None else bias.detach())
            error = float((expected - _rows(y)).abs().max())
            found.setdefault(error, FinalNorm(gain.clone(), scale, is_centered))
    if min(found) <= TOLERANCE.get(y.dtype, 1e-4) * max(float(y.abs().max()), 1e-6):
        return found[min(found)]
    return f"the final norm, {type(module).__name__}, is neither a LayerNorm nor an RMSNorm"


def _epsilon(module: nn.Module, dtype: torch.dtype) -> float:
    """The small number that a norm adds to the mean square."""
    given = [getattr(module, name, None) for name in EPSILONS]
    default = torch.finfo(dtype).eps if isinstance(module, nn.RMSNorm) else 1e-5
    return next((eps for eps in given if isinstance(eps, float)), default)


#: (B, H, I, J) of a call.
Shape = tuple[int, int, int, int]


class JoinedHeads:
    """The inputs of the output projections of attention modules, in the order of their calls.

    A gate or a norm between the weighted values and the projection is part of this input, so its slices times the
    slices of the matrix are what the heads write into the residual stream. `attending` are the attention modules of the
    model by path. `layers` has the projection of each of them, and `without` the reason why that of a module is not
    known, or not any more.
    """

    def __init__(self, model: nn.Module, attending: Mapping[str, nn.Module]) -> None:
        self.layers: dict[str, LinearLayer] = {}
        self.without: dict[str, str] = {}
        self._names: dict[nn.Module, str] = {}
        self._inputs: dict[str, list[Tensor]] = {}
        #: Modules that only read the weight of their output projection.
        self._uncalled = {name for name, module in attending.items() if isinstance(module, nn.MultiheadAttention)}
        for name, module in attending.items():
            output = output_projection(model, name, module)
            layer = linear_layer(output)
            if output is None or layer is None:
                self.without[name] = _reason(module, output)
            else:
                self.layers[name], self._names[output] = layer, name

    def module_ended(
        self, module: nn.Module, args: Iterable[Any], kwargs: Mapping[str, Any], output: Any = None
    ) -> str | None:
        """Keep the input of an output projection; returns the name of its attention module, None for other modules."""
        name = self._names.get(module)
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if name is not None and given is not None:
            if name not in self._inputs:  # before its first call a model may change the matrix: RWKV scales its own
                layer = self.layers[name] = LinearLayer(module)
                layer.rows = _sample(given, output) if layer.is_measured else None
            elif not self.layers[name].is_unchanged:
                self.without[name] = "its output projection was changed in place between its calls"
            self._inputs.setdefault(name, []).append(given.detach())
        return name

    def layer(self, name: str) -> LinearLayer:
        """The output projection of the attention module at the path `name`."""
        if name in self.without:
            raise (LostProjection if name in self.layers else NoValues)(self.without[name])
        if name not in self.layers:
            raise NoValues("its output projection was not found when the watch began")
        if not self.layers[name].is_unchanged:
            raise LostProjection(
                "its output projection was changed in place after it was watched (by an optimizer step)"
            )
        return self.layers[name]

    def are_values(self, name: str) -> bool:
        """Whether the projection reads the weighted values, and is not called: in nn.MultiheadAttention."""
        return name in self._uncalled and name not in self._inputs

    def of_call(self, name: str, shapes: Sequence[Shape], call: int) -> Tensor:
        """The heads (B, I, H, E) of one of the calls of a module. A call that joins steps has one input for each.

        `shapes` are those of all calls: the inputs are dealt out to them in order, and none may be left over.
        """
        if name not in self._inputs:
            raise NoValues(
                "its output projection was not called as a module inside the with-block (compiled code is not)"
            )
        inputs, of_calls = list(self._inputs[name]), []
        for B, H, I, _ in shapes:
            parts: list[Tensor] = []
            while inputs and sum(part.shape[1] for part in parts) < I:
                parts.append(_batch_first(inputs.pop(0), B))
            of_calls.append((parts, B, H, I))
        if inputs or any(sum(part.shape[1] for part in parts) != I for parts, _, _, I in of_calls):
            raise NoValues("its output projection did not run once for each call of its attention")
        parts, _, H, _ = of_calls[call]
        joined = torch.cat(parts, 1)
        if joined.shape[-1] % H:
            raise NoValues(f"its output projection reads {joined.shape[-1]} channels, which are not those of {H} heads")
        return joined.unflatten(-1, (H, -1))


def linear_layer(module: nn.Module | None) -> LinearLayer | None:
    """The layer of a module that may be linear; None if it has no number of inputs."""
    return None if module is None or num_inputs(module) is None else LinearLayer(module)


def _sample(given: Tensor, output: Any) -> tuple[Tensor, Tensor] | None:
    """A few rows of the input and the output of a layer, (r, inputs) and (r, outputs); None for another layer."""
    output = _first((output,))
    if output is None or given.shape[:-1] != output.shape[:-1]:
        return None
    rows = spread_indices(given.shape[:-1].numel(), ROWS, given.device)
    x, y = (tensor.detach().flatten(0, -2)[rows] for tensor in (given, output))
    return x, y


def _batch_first(x: Tensor, B: int) -> Tensor:
    """The input of a projection as (B, I, channels)."""
    if x.ndim == 3 and len(x) == B:
        return x
    if x.ndim != 2 or len(x) % B:
        raise NoValues(f"its output projection reads a tensor of shape {tuple(x.shape)}, and the batch size is {B}")
    return x.unflatten(0, (B, -1))


def _reason(module: nn.Module, output: nn.Module | None) -> str:
    """Why the output projection of a module is not known."""
    kind = type(module).__name__
    if output is None or isinstance(module, Attends):
        return f"{kind} has no output projection of a known name, so its heads are not parts of a residual stream"
    return f"the output projection of {kind} is a {type(output).__name__}, which is not a linear layer"


BETWEEN = (
    "a gate or a norm stands between its weighted values and its output projection, so no number for each key exists"
)


class KeptParts:
    """What a watch with keep="qkv" keeps beside values: inputs of output projections, and the end of the stream.

    `attending` are the attention modules of the model by path. `gates` has those of each call (`keep_gates`). `trusted`
    are modules of transformers, whose heads are known to stand one after the other in the input of the projection; for
    others it is tested.
    """

    def __init__(self, model: nn.Module, attending: Mapping[str, nn.Module]) -> None:
        self.joined, self.stream = JoinedHeads(model, attending), ResidualStream(model, attending)
        self._threads: set[int] = set()
        self.gates: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
        self.trusted = {
            name for name, module in attending.items() if type(module).__module__.startswith("transformers")
        }

    def module_ended(self, module: nn.Module, args: Iterable[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """Follow a module that ended."""
        self._threads.add(threading.get_ident())
        name = self.joined.module_ended(module, args, kwargs, output)
        self.stream.module_ended(module, args, kwargs, output, name)

    def keep_gates(self, module: nn.Module | None, call: Any) -> None:
        """Keep the gates (H, I) that are open at a call, or at a step that was appended to it.

        A step adds columns: the gates of the rows before it are known.
        """
        _, H, I, _ = call.shape
        factor = torch.ones(H)
        for (gated, _), gate in list(open_gates.items()):
            factor = factor * gate.detach().to(factor.device) if gated is module else factor
        known = self.gates.get(call, factor.new_ones(H, 0))
        self.gates[call] = torch.cat([known, factor[:, None].expand(H, I - known.shape[1])], 1)

    def check_threads(self) -> None:
        """Refuse runs in several threads: the order of their calls does not show which part belongs to which call."""
        if len(self._threads) > 1:
            raise LostProjection("the model ran in several threads under one watch. Begin a watch in each thread")


@dataclass(eq=False)
class CallParts:
    """One call of an attention module, by its index `call` in `calls`, and what was kept of it.

    Methods raise `NoValues` with the reason if they have no answer.
    """

    name: str
    calls: ModuleCalls
    call: int
    kept: KeptParts

    @property
    def weights(self) -> AttentionMap:
        """The map (B, H, I, J) of the call."""
        return self.calls.calls[self.call].map

    @cached_property
    def values(self) -> Tensor:
        """The values (B, G, J, E) of the call."""
        return self.calls.calls[self.call].read_values()

    @property
    def patched(self) -> Tensor | None:
        """The output (B, H, I, E) of the call, if an edit changed it."""
        return self.calls.calls[self.call].patched

    @property
    def gates(self) -> Tensor:
        """The gates (H, I) by which the model multiplied the output of the call; 1 without `gated`."""
        return self.kept.gates.get(self.calls.calls[self.call], torch.ones(self.weights.shape[1:3]))

    def values_of(self, heads: Tensor) -> Tensor:
        """The values (B, H', J, E) that these query heads read."""
        return self.values[:, to_device(heads // (self.weights.shape[1] // self.values.shape[1]), self.values.device)]

    @torch.no_grad()
    def output(self, heads: Tensor) -> Tensor:
        """W . values of these heads, or what an edit put in their place, (B, H', I, E)."""
        if self.patched is not None:
            output = at_least_float32(self.patched[:, to_device(heads, self.patched.device)])
        else:
            output = self.weights.select(None, heads) @ self.values_of(heads)
        return output * self.gates[heads.cpu(), :, None].to(output)

    @cached_property
    def joined(self) -> Tensor:
        """The input of the output projection, (B, I, H, E): weighted values, after a gate or a norm if there is one."""
        self.kept.check_threads()
        self.kept.joined.layer(self.name)
        if self.kept.joined.are_values(self.name):
            return self.output(torch.arange(self.weights.shape[1])).transpose(1, 2)
        joined = self.kept.joined.of_call(self.name, [call.shape for call in self.calls.calls], self.call)
        if self.name not in self.kept.trusted and not self._is_weighted_values(joined):
            raise NoValues(
                "the input of its output projection is not its weighted values, the heads one after the other, so it "
                "is not known which part of it is which head"
            )
        return joined

    @cached_property
    def is_direct(self) -> bool:
        """Whether the output projection reads the weighted values, without a gate or a norm between."""
        self.kept.joined.layer(self.name)  # its error is the reason if there is no projection
        is_read = self.kept.joined.are_values(self.name) or self._is_weighted_values(self.joined)
        return is_read and bool((self.gates == 1).all())

    @torch.no_grad()
    def _is_weighted_values(self, joined: Tensor) -> bool:
        """Whether a few rows of (B, I, H, E) are weights @ values, or the outputs of an edit, times the gates."""
        _, H, I, _ = self.weights.shape
        rows = spread_indices(I, ROWS)
        tile, values = self.weights.tile(rows=rows), at_least_float32(self.values_of(torch.arange(H)))
        expected = (tile.to(values.dtype) @ values).transpose(1, 2)
        if self.patched is not None:
            expected = at_least_float32(self.patched)[:, :, to_device(rows, self.patched.device)].transpose(1, 2)
        expected = expected * self.gates[:, rows.cpu()].mT[..., None].to(expected)
        actual = joined[:, to_device(rows, joined.device)]
        if actual.shape != expected.shape:
            return False
        used = (tile.sum(-1) != 0).transpose(1, 2)  # rows of padding may have any output
        error = (expected - actual).abs().amax(-1)[used]
        limit = TOLERANCE.get(joined.dtype, 1e-4) * max(float(expected.abs().max()), 1e-6)
        return not error.numel() or float(error.max()) <= limit

    @torch.no_grad()
    def part(self, heads: Tensor) -> Tensor:
        """What these heads add to the residual stream, (B, H', I, C)."""
        heads = to_device(heads, self.joined.device)
        matrix = at_least_float32(self._matrix())[heads]
        return torch.einsum("bihe,hec->bhic", at_least_float32(self.joined)[:, :, heads].to(matrix.dtype), matrix)

    def _matrix(self) -> Tensor:
        """The matrix of the output projection by head, (H, E, C)."""
        return self.kept.joined.layer(self.name).matrix.unflatten(0, (self.weights.shape[1], -1))

    def bias(self) -> Tensor:
        """The bias of the output projection, (C,)."""
        layer = self.kept.joined.layer(self.name)
        return layer.matrix.new_zeros(layer.matrix.shape[1]) if layer.bias is None else layer.bias.clone()

    @torch.no_grad()
    def value_weighted(self, projected: bool | None) -> ValueWeightedMap:
        """The map of |w_ij| ||v_j||, or of |w_ij| ||v_j W_h|| with the part W_h of the output projection."""
        if not (projected or (projected is None and self._has_projection())):
            return value_weighted(self.weights, self.values)
        if not self.is_direct:
            raise NoValues(f"{BETWEEN}; projected=False has the norms of the values alone")
        return value_weighted(self.weights, self.values, self._matrix())

    def _has_projection(self) -> bool:
        """Whether the projection reads the weighted values; a projection that was lost is an error."""
        try:
            return self.is_direct
        except LostProjection:
            raise
        except NoValues:
            return False

    @torch.no_grad()
    def logit_effect(self, tokens: Sequence[int], heads: Tensor) -> Tensor:
        """What these heads add to the logit of a token (less that of a second one), (B, H', I)."""
        by_head, scale = self._to_logit(tokens, heads)
        joined = at_least_float32(self.joined)[:, :, to_device(heads, by_head.device)].to(by_head.dtype)
        return torch.einsum("bihe,he->bhi", joined, by_head) * scale

    @torch.no_grad()
    def logit_map(self, tokens: Sequence[int], heads: Tensor) -> GradientMap:
        """The same by key: w_ij times what the value of the key would add alone."""
        if self.patched is not None or not self.is_direct:
            raise NoValues(BETWEEN if self.patched is None else "an edit patched its output, which no keys add up to")
        by_head, scale = self._to_logit(tokens, heads)
        return GradientMap(self.weights.select(None, heads), scale[..., None] * by_head[:, None], self.values_of(heads))

    def _to_logit(self, tokens: Sequence[int], heads: Tensor) -> tuple[Tensor, Tensor]:
        """The direction (H', E) in the outputs of heads that adds to the logit, and the scale of the norm (B, 1, I).

        `tokens` are the id of a token, and that of a second one if the logit is a difference of two.
        """
        stream = self.kept.stream
        if stream.head is None:
            raise NoValues("the model has no language-model head that is a linear layer, such as lm_head")
        unknown = [token for token in tokens if not 0 <= token < stream.head.matrix.shape[1]]
        if unknown:
            count = stream.head.matrix.shape[1]
            raise NoValues(f"token {unknown[0]} is not in the vocabulary: the head has {count} logits")
        if not stream.head.is_unchanged:
            raise NoValues("the language-model head was changed in place after it was watched (by an optimizer step)")
        read = self._final_read()
        token, *others = (read.direction(stream.head.matrix[:, token]) for token in tokens)
        direction = token - others[0] if others else token
        return at_least_float32(self._matrix())[to_device(heads, direction.device)] @ direction, read.scale[:, None]

    def _final_read(self) -> FinalNorm:
        """The final norm of this call."""
        reads, num_calls = self.kept.stream.reads, len(self.calls.calls)
        if not reads:
            raise NoValues("the language-model head was not called inside the with-block. Run the whole model")
        if len(reads) != num_calls:
            raise NoValues(f"the language-model head ran {len(reads)} times, and this layer {num_calls} times")
        read = reads[self.call]
        if isinstance(read.norm, str):
            raise NoValues(read.norm)
        if self.name in read.without:
            raise NoValues(read.without[self.name])
        if self.name not in read.reached:
            raise NoValues("it is in no block of the stack that ends at the language-model head")
        return read.norm
