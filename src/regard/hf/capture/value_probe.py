"""`ProbedCall`: a captured call whose weights are measured: the output of an attention is linear in its values.

A module that changes its weights after the softmax, sorts its queries into blocks or multiplies several softmaxes does
not hold a matrix of weights. Its map is defined all the same: output = W . values, all else held fixed. The module runs
again with unit vectors in place of its values, and the output is W, column by column: a run gives as many columns as a
head has channels. While the model runs, three runs prove that the module is linear in its values, that batch entries
and heads do not mix, and that all channels of a head have one map.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.errors import RegardError
from regard.hf.calls import Untranslatable, check_numbers
from regard.hf.capture.kept_calls import Check, NoValues
from regard.hf.capture.module_rerun import DenseCall, LastWeights, sampled_rows, snapshot
from regard.hf.names import ALL_SIDES, COUNTS, COUNTS_BY_HAND, is_of_values, output_names, sides_of

#: Names of inputs that are the values of a module without a projection of values.
GIVEN = ("values", "value", "encoder_hidden_states")
#: Largest error of a probe, relative to the largest output.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
#: Weights above this negative number are not negative, but rounded.
ROUNDING = 1e-6


def has_values(module: nn.Module) -> bool:
    """Whether a module has a projection of its values, or an input of that name, that can be replaced."""
    return bool(_projections(module)) or _given_values(module) is not None


def _projections(module: nn.Module) -> dict[str, nn.Module]:
    """The projections of values: those with a name of their own, or else one of queries, keys and values."""
    children = dict(module.named_children())
    projections = {name: child for name, child in children.items() if is_of_values(name)}
    return projections or {name: child for name, child in children.items() if sides_of(name) == ALL_SIDES}


def _given_values(module: nn.Module) -> str | None:
    """The name of the input that is the values, if the module does not project them."""
    names = inspect.signature(module.forward).parameters
    return None if _projections(module) else next((name for name in GIVEN if name in names), None)


@dataclass(frozen=True, eq=False)
class ModuleRun:
    """One run of a module: the values with the name of their projection or input, their weighted sums, the output.

    The sums are the inputs of the output projection, or the output itself if there is no projection.
    """

    values: list[tuple[str, Tensor]]
    sums: list[Tensor]
    output: Tensor


@dataclass(frozen=True, eq=False)
class GivenCall:
    """What a module was given: arguments, and the state of the random numbers when it began, for its dropout."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: Tensor

    @torch.no_grad()
    def run(self, replacements: list[Tensor] | None = None) -> ModuleRun:
        """Run the module, with other values if given: one for each projection of values, in the order of their calls.

        A hook keeps what each projection returns, and replaces it. `forward` runs no hook of the module itself.
        """
        values: list[tuple[str, Tensor]] = []
        sums: list[Tensor] = []

        def keep(name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
            def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
                start = output.shape[-1] * 2 // 3 if sides_of(name) == ALL_SIDES else 0  # values are last
                values.append((name, output[..., start:].detach().clone()))
                changed = output.clone()
                if replacements is not None:
                    changed[..., start:] = replacements[len(values) - 1]
                return changed

            return hook

        args, kwargs = self._given(replacements, values)
        with ExitStack() as hooks, torch.random.fork_rng(()):
            torch.set_rng_state(self.random)
            for name, child in _projections(self.module).items():
                hooks.callback(child.register_forward_hook(keep(name)).remove)
            children = dict(self.module.named_children())
            for name in output_names(children):
                hook = children[name].register_forward_pre_hook(lambda _, given: sums.append(given[0]))
                hooks.callback(hook.remove)
            output = self.module.forward(*args, **kwargs)
        result = _first(output)
        return ModuleRun(values, [x.detach().clone() for x in sums or [result]], result)

    def _given(self, replacements: list[Tensor] | None, values: list[tuple[str, Tensor]]) -> tuple[Any, Any]:
        """The inputs. If a module does not project its values, they are one of the inputs, and replaced here.

        Then they are added to `values`, with the name of the argument.
        """
        args, kwargs = snapshot(self.args, self.kwargs)
        name = _given_values(self.module)
        if name is None:
            return args, kwargs
        given = inspect.signature(self.module.forward).bind(*args, **kwargs)
        tensor = given.arguments.get(name)
        if isinstance(tensor, Tensor):
            values.append((name, tensor.detach().clone()))
            given.arguments[name] = tensor if replacements is None else replacements[0].clone()
        return given.args, given.kwargs


@dataclass(frozen=True)
class ValueAxes:
    """Where batch entries, tokens and heads are in the values and sums of a module.

    Several values are those of several sequences of tokens, one after the other; or, with `is_shared`, those of one
    sequence, projected twice for two kinds of queries (Longformer). `lengths` are the numbers of tokens of the values.
    `order` has the index of the sum that comes first, second and so on, in the order of the values.
    """

    values_batch_first: bool
    sums_batch_first: bool
    num_heads: int
    lengths: tuple[int, ...]
    order: tuple[int, ...]
    is_shared: bool

    def _split(self, tensor: Tensor, batch_first: bool) -> Tensor:
        """(B, H, n, D)."""
        tensor = tensor if batch_first else tensor.transpose(0, 1)
        return tensor.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def values(self, run: ModuleRun) -> Tensor:
        """All values, (B, H, J, D)."""
        return torch.cat([self._split(x, self.values_batch_first) for _, x in run.values], 2)

    def sums(self, run: ModuleRun) -> Tensor:
        """All weighted sums, (B, H, I, D)."""
        return torch.cat([self._split(_three_axes(run.sums[n]), self.sums_batch_first) for n in self.order], 2)

    def replacements(self, values: Tensor) -> list[Tensor]:
        """Values (B, H, J, D) in the form that the module computes itself."""
        parts = [values] * len(self.lengths) if self.is_shared else values.split(self.lengths, 2)
        return [self._joined(part, self.values_batch_first) for part in parts]

    def joined(self, sums: Tensor) -> Tensor:
        """Weighted sums (B, H, I, D) in the form that a module with one output returns them."""
        return self._joined(sums, self.sums_batch_first)

    @staticmethod
    def _joined(heads: Tensor, batch_first: bool) -> Tensor:
        """(B, H, n, D) -> (B, n, H D), or (n, B, H D)."""
        x = heads.transpose(1, 2).flatten(2)
        return x if batch_first else x.transpose(0, 1)


@dataclass(eq=False)
class ProbedCall(DenseCall):
    """One call of a module whose weights are measured with unit values.

    `name` is the path of the module, `given` what it was called with, and `layout` the axes of its values. `shape` is
    that of the weights. The rows `sample` must be the same when they are measured again. `slot` holds the weights that
    were read last.
    """

    name: str
    given: GivenCall
    layout: ValueAxes
    shape: tuple[int, int, int, int]
    sample: Tensor
    slot: LastWeights
    check: Check

    @staticmethod
    def of(name: str, given: GivenCall, output: Any, slot: LastWeights) -> ProbedCall:
        """The call, after three runs of the module that prove its weights can be measured; else `Untranslatable`.

        `name` is the path of the module, and `output` what it returned in the run of the model.
        """
        run, kind = given.run(), type(given.module).__name__
        original = _first(output)
        if not isinstance(original, Tensor) or not isinstance(run.output, Tensor):
            raise Untranslatable(f"{kind} returns no tensor first, so its weights cannot be measured")
        check_numbers(original)
        if run.output.shape != original.shape or not _close(run.output, original, 1e-4 * float(original.abs().max())):
            raise Untranslatable(f"{kind} gives another output when it runs again, so its weights cannot be measured")
        if not run.values:
            raise Untranslatable(
                f"{kind} did not call its projection of values: what it attends to was absent in this call, or it "
                "gives the weight of the projection to a function"
            )
        layouts = list(_layouts(given.module, run))
        if not layouts:
            shapes = ", ".join(str(tuple(x.shape)) for x in (*(x for _, x in run.values), *run.sums))
            raise Untranslatable(f"{kind} has values and sums of shapes in which no heads are found: {shapes}")
        for layout in layouts:
            error, largest = _probe(given, layout, run)
            tolerance = TOLERANCE.get(original.dtype, 1e-4) * largest
            if error <= tolerance:
                if layout.is_shared and _adds(given, layout, run, tolerance):
                    raise Untranslatable(f"{kind} adds several projections of values, so they have no single map")
                check = Check(name, error, tolerance, True, "its weights are measured with unit values")
                sums = layout.sums(run)
                (B, H, I, _), J = sums.shape, layout.lengths[0] if layout.is_shared else sum(layout.lengths)
                return ProbedCall(name, given, layout, (B, H, I, J), sampled_rows(sums).clone(), slot, check)
        heads = " or ".join(map(str, dict.fromkeys(layout.num_heads for layout in layouts)))
        raise Untranslatable(
            f"{kind} is not linear in its values with one map for each of {heads} heads, so its weights cannot be "
            "measured; name the number of heads num_heads, and if it reads values from a cache, use use_cache=False"
        )

    @staticmethod
    def is_signed(weights: Tensor) -> bool:
        """Whether some weights are below 0: those of products of maps, and of convolutions of the values."""
        return bool((weights < -ROUNDING).any())

    def read_values(self) -> Tensor:
        """The values (B, H, J, E), from running the module again."""
        if self.layout.is_shared:
            raise NoValues(
                f"{type(self.given.module).__name__} projects its values twice, for two kinds of queries, so no single "
                "value of a key gives its output"
            )
        run = self.given.run()
        self._check_sums(self.layout.sums(run))
        return self.layout.values(run)

    def compute(self) -> Tensor:
        """Measure the weights (B, H, I, J); times the values they must give the sums of a plain run.

        Values that are projected twice have no single product with the weights, so there only the sums are compared.
        """
        self.check_budget(f"the weights of {type(self.given.module).__name__} are measured all at once")
        run = self.given.run()
        values, sums = self.layout.values(run), self.layout.sums(run)
        weights = torch.cat(list(self._columns(values)), -1)
        self._check_sums(sums, None if self.layout.is_shared else weights @ values)
        return weights

    def _check_sums(self, sums: Tensor, expected: Tensor | None = None) -> None:
        """Refuse sums of another run that are not those of the watched run, or not `expected`."""
        tolerance = TOLERANCE.get(sums.dtype, 1e-4) * max(float(sums.abs().max()), 1e-6)
        is_exact = expected is None or _close(expected, sums, tolerance)
        if not is_exact or not _close(sampled_rows(sums), self.sample, tolerance):
            raise RegardError(
                f"seen[{self.name!r}]: {type(self.given.module).__name__} computes another output than when it was "
                "watched: its parameters or inputs were changed. Read the map before the change, or watch again."
            )

    def _columns(self, values: Tensor) -> Iterator[Tensor]:
        """The weights of as many keys at once as a head has channels: key c of them has unit vector c as its value."""
        (B, H, _, D), J = values.shape, self.shape[3]
        for start in range(0, J, D):
            units = torch.zeros(B, H, J, D, dtype=values.dtype, device=values.device)
            places = torch.arange(min(D, J - start), device=values.device)
            units[:, :, start + places, places] = 1.0
            run = self.given.run(self.layout.replacements(units))
            yield self.layout.sums(run)[..., : len(places)]


def _layouts(module: nn.Module, run: ModuleRun) -> Iterator[ValueAxes]:
    """Layouts that the shapes allow: values and sums of three axes, with one batch size and the same channels.

    The last axis has the channels of all heads, whose number the module or its config names; else there is one head.
    Several values are shared if projections of different names computed them in one shape.
    """
    values, sums = [x for _, x in run.values], [_three_axes(x) for x in run.sums]
    if not values or any(x.ndim != 3 or x.shape[-1] != values[0].shape[-1] for x in (*values, *sums)):
        return
    config = getattr(module, "config", None)
    numbers = [getattr(owner, name, None) for owner in (module, config) for name in (*COUNTS, *COUNTS_BY_HAND)]
    counts = [n for n in numbers if isinstance(n, int) and n > 0 and values[0].shape[-1] % n == 0]
    names = [name for name, _ in run.values]
    is_shared = len(values) > 1 and len(set(names)) == len(names) and len({x.shape for x in values}) == 1
    for values_batch_first, sums_batch_first in ((True, True), (False, True), (False, False), (True, False)):
        of_values = [x.shape[:2] if values_batch_first else (x.shape[1], x.shape[0]) for x in values]  # batch, tokens
        of_sums = [x.shape[:2] if sums_batch_first else (x.shape[1], x.shape[0]) for x in sums]
        if len({num_batch for num_batch, _ in (*of_values, *of_sums)}) != 1:
            continue
        lengths = tuple(length for _, length in of_values)
        order = _order([length for _, length in of_sums], lengths)
        for num_heads in dict.fromkeys([*counts, 1]):
            yield ValueAxes(values_batch_first, sums_batch_first, num_heads, lengths, order, is_shared)


def _order(sum_lengths: list[int], value_lengths: tuple[int, ...]) -> tuple[int, ...]:
    """The order of the sums: that of the values, if they are of the same sequences, of different lengths."""
    if len(set(sum_lengths)) == len(sum_lengths) and sorted(sum_lengths) == sorted(value_lengths):
        return tuple(sum_lengths.index(length) for length in value_lengths)
    return tuple(range(len(sum_lengths)))


def _first(output: Any) -> Any:
    """The first tensor of a module's output; a pair of attentions returns pairs."""
    while isinstance(output, tuple | list) and output:
        output = output[0]
    return output


def _three_axes(sums: Tensor) -> Tensor:
    """(batch, tokens, channels) also where the tokens have two axes, as the streams of ProphetNet."""
    return sums.flatten(1, 2) if sums.ndim == 4 else sums


def _probe(given: GivenCall, layout: ValueAxes, run: ModuleRun) -> tuple[float, float]:
    """The error of output(T values + r) = T output(values) + output(r), and the largest of these outputs.

    T multiplies each head of each batch entry by another number, and moves its channels by one; r is drawn. This holds
    if the output is linear in the values, and if each head of each entry has one map for all its channels. Values that
    are shared are replaced one by one here, because two kinds of queries read them apart.
    """
    values, sums = layout.values(run), layout.sums(run)
    draw = torch.Generator().manual_seed(0)
    factors = torch.rand(*sums.shape[:2], 1, 1, generator=draw).add(0.5).to(sums)
    noise = torch.randn(values.shape, generator=draw).to(values) * values.abs().mean()
    both = values.roll(1, -1) * factors + noise
    separate = replace(layout, is_shared=False)
    of_noise, of_both = (layout.sums(given.run(separate.replacements(x))) for x in (noise, both))
    expected = sums.roll(1, -1) * factors + of_noise
    return float((expected - of_both).abs().max()), max(float(expected.abs().max()), 1e-6)


def _adds(given: GivenCall, layout: ValueAxes, run: ModuleRun, tolerance: float) -> bool:
    """Whether a query reads more than one of several projections of one sequence.

    The module runs with the values of one projection, and zeros for the others. A query reads those for which its sum
    is above `tolerance`. `run` is a run with the values as they are.
    """
    separate, values, length = replace(layout, is_shared=False), layout.values(run), layout.lengths[0]
    readers = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, values.shape[2], length):
        alone = torch.zeros_like(values)
        alone[:, :, start : start + length] = values[:, :, start : start + length]
        readers = readers + (layout.sums(given.run(separate.replacements(alone))).abs().amax(-1) > tolerance)
    return bool((readers > 1).any())


def _close(mine: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether two tensors have one shape and differ by at most `tolerance`."""
    return mine.shape == other.shape and torch.allclose(mine, other, rtol=0, atol=tolerance, equal_nan=True)
