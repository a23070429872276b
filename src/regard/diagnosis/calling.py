"""`Caller` calls a user's function with (B, H, n, D) tensors, whatever order of axes and arguments it has."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from regard.base.errors import RegardError
from regard.base.shapes import tensor_of_array
from regard.diagnosis.failures import FailedCall, ProgramEnded, is_not_written, listed
from regard.diagnosis.progress import CheckProgress
from regard.diagnosis.signatures import HEAD_WIDTHS, HEADS, WIDTHS, Roles, name_of, roles_of, signature_of

#: Query, key and value in the canonical order of axes, (B, H, n, D).
Inputs = tuple[Tensor, Tensor, Tensor]
#: Axes of query and of key that functions have, with those of plain functions first: batch, head, n tokens, d channels.
LAYOUTS = (
    ("bhnd", "bhnd"),
    ("bnd", "bnd"),
    ("bnhd", "bnhd"),
    ("nbd", "nbd"),
    ("nd", "nd"),
    ("bd", "bnd"),
    ("nbd", "bnd"),
    ("bd", "nbd"),
    ("d", "nd"),
)
AXES = {"b": "batch", "h": "heads", "n": "length", "d": "width"}
SAY_AXES = "Say which axes you mean: regard.check(function, q, k, v)."
NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})
_DROPOUTS = (
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d, torch.dropout),
    *(functional.alpha_dropout, functional.feature_alpha_dropout),
)
#: Types of containers of a module, for example of hooks, that are usually empty.
_CONTAINERS = (dict, OrderedDict, set)


class WithoutDropout(TorchFunctionMode):
    """Inside, torch's dropout changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            # by position: query, key, value, mask, dropout, is_causal; the dropout is given by name instead
            args, kwargs = args[:4], kwargs | {"dropout_p": 0.0} | dict(zip(("is_causal",), args[5:6], strict=False))
        if func is functional.multi_head_attention_forward:  # functions that it calls are not seen here
            kwargs = kwargs | {"training": False}
        return func(*args, **kwargs)


class WithoutRounding(TorchDispatchMode):
    """Inside, a tensor that is cast to float16 or bfloat16 keeps its dtype; `dtypes` are those that were refused."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (torch.float16, torch.bfloat16):
            self.dtypes.add(kwargs["dtype"])
            kwargs["dtype"] = args[0].dtype
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Undone:
    """Mistakes that a caller undoes, so that everything else is measured behind them.

    `rounding`: casts to half precision do nothing. `residual`: "query", "key" or "value" is subtracted from the output.
    `split`, `join`: the function splits or joins heads by .view where they have to be transposed, and inputs or output
    are arranged so that .view is right. `weights` gives the intended weights (B, H, I, J) for those that are used.
    """

    rounding: bool = False
    residual: str = ""
    split: bool = False
    join: bool = False
    weights: Callable[[Tensor], Tensor] | None = None

    @property
    def mixes_tokens(self) -> bool:
        """Whether the function joins parts of different tokens."""
        return self.split or self.join


@dataclass(frozen=True)
class CallResult:
    """What one call returned: the output (B, H, I, D), weights (B, h, I, J) if any, and whether it changed an input."""

    output: Tensor
    weights: Tensor | None
    changes_inputs: bool = False


class NoOutput(ValueError):
    """A call returned tensors, and none of them has an output for each query."""


@dataclass(frozen=True)
class InputSizes:
    """Sizes of the inputs of one call: query (B, H, I, D), key (B, G, J, K) and value (B, G, J, V).

    `width` is D. G is `key_heads` and K is `key_width`; None if they are those of the query. V is `value_width`; None
    if it is K. `seed` is that of the check.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    seed: int = 0
    key_heads: int | None = None
    key_width: int | None = None
    value_width: int | None = None

    def sample(self, seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 0.7) -> Inputs:
        """Random query, key and value with the standard deviation `scale`; each check has a `seed` of its own."""
        generator = torch.Generator().manual_seed(1000 * self.seed + seed)
        *of_key, key_width = self.batch, self.key_heads or self.heads, self.keys, self.key_width or self.width
        shapes = [(self.batch, self.heads, self.queries, self.width), (*of_key, key_width)]
        shapes.append((*of_key, self.value_width or key_width))
        query, key, value = (scale * torch.randn(s, dtype=torch.float64, generator=generator).to(dtype) for s in shapes)
        return query, key, value


@dataclass(frozen=True)
class Caller:
    """A function with the roles of its arguments, and the order of their axes in letters of `AXES`.

    `sizes` are those of the calls that checks make, `dtype` that of their inputs. With `numpy` the function gets arrays
    in place of tensors. `undone` are mistakes that each call undoes.
    """

    function: Callable[..., Any]
    roles: Roles
    query_axes: str
    key_axes: str
    sizes: InputSizes
    dtype: torch.dtype = torch.float64
    numpy: bool = False
    undone: Undone = Undone()
    progress: CheckProgress = field(default_factory=CheckProgress, compare=False)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        extra: Mapping[str, Any] = NO_ARGUMENTS,
        with_dropout: bool = False,
    ) -> CallResult:
        """Call the function with further arguments `extra`. Without `with_dropout` torch's dropout changes nothing.

        Query, key and value are (B, H, n, D). The function gets copies of them, so a change in place shows in the
        copies.
        """
        arguments = self._arguments(query.clone(), key.clone(), value.clone())
        result = self._result(arguments, extra, with_dropout)
        given = self._arguments(query, key, value)
        changed = any(not torch.equal(arguments[name], given[name]) for name in given)
        return replace(self.read_result(result, query, key, value), changes_inputs=changed)

    def returned(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """All tensors of real numbers that a call without dropout returns, as they are."""
        result = self.result(query, key, value)
        return [x for x in tensors_of(result) if x.is_floating_point()]

    def result(self, query: Tensor, key: Tensor, value: Tensor, extra: Mapping[str, Any] = NO_ARGUMENTS) -> Any:
        """What a call without dropout returns, as it is: with the function's own axes, in a tuple or a dict."""
        return self._result(self._arguments(query.clone(), key.clone(), value.clone()), extra, False)

    @property
    def returns_weights_alone(self) -> bool:
        """Whether a call returns no output for its queries."""
        inputs = self.sizes.sample(0, self.dtype)
        try:
            self(*inputs)
        except NoOutput:
            return True
        return False

    def _result(self, inputs: dict[str, Tensor], extra: Mapping[str, Any], with_dropout: bool) -> Any:
        """What the function returns for its own arguments `inputs` and the further arguments `extra`, by name.

        Warnings and printed text are hidden. SystemExit becomes `ProgramEnded`, and a returned None a
        NotImplementedError: the function is not written yet (`is_not_written` in failures.py).
        """
        arguments: dict[str, Any] = inputs | self._required_arguments() | dict(extra)
        if self.numpy:
            arguments = {name: x.numpy() if isinstance(x, Tensor) else x for name, x in arguments.items()}
        ordered = [arguments.pop(name) for name in self.roles.positional]
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            if not with_dropout:
                stack.enter_context(WithoutDropout())
            if self.undone.rounding:
                stack.enter_context(WithoutRounding())
            stack.enter_context(self.progress.one_call())
            try:
                result = self.function(*ordered, **arguments)
            except SystemExit as error:
                raise ProgramEnded(f"{name_of(self.function)} ended the program: SystemExit({error.code!r})") from error
        if result is None:
            raise NotImplementedError("it returned None")
        return result

    def takes_gradients(self) -> bool:
        """Whether the function runs with tensors that require a gradient."""
        try:
            query, key, value = (x.requires_grad_() for x in self.sizes.sample(0, self.dtype))
            with torch.enable_grad():
                self(query, key, value)
        except Exception:  # of the user's function
            return False
        return True

    def _arguments(self, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
        """The inputs by the names of the function's arguments, with its own axes; f(x) gets the query alone."""
        axes = (self.query_axes, self.key_axes, self.key_axes)
        inputs = [argument_tensor(x, a, self.undone.split) for x, a in zip((query, key, value), axes, strict=True)]
        return dict(zip(self.roles.inputs, inputs, strict=False))

    def shapes(self, query: Tensor, key: Tensor, value: Tensor) -> list[tuple[str, tuple[int, ...]]]:
        """The names and shapes of the function's own arguments for query, key and value (B, H, n, D)."""
        return [(name, tuple(x.shape)) for name, x in self._arguments(query, key, value).items()]

    def _required_arguments(self) -> dict[str, Any]:
        """The values of required arguments that are no inputs. A switch for training is always off."""
        values = {n: self.argument_width if v == "width" else v for n, v in self.roles.required.items()}
        return values | ({self.roles.training: False} if self.roles.training else {})

    def read_result(self, result: Any, query: Tensor, key: Tensor, value: Tensor) -> CallResult:
        """The output (B, H, I, D) and the weights (B, h, I, J), if any, in what a call of these inputs returned.

        The inputs are (B, H, n, D). `NoOutput` if no tensor has an output for each query.
        """
        B, H, I, J = *query.shape[:3], key.shape[2]
        returned = [x for x in tensors_of(result) if x.is_floating_point()]
        outputs = [x for x in returned if _axes_of(x, self.query_axes, B, H, I)]
        # first those as wide as the values, then those whose last axis is not that of the keys, as it is in weights
        outputs.sort(key=lambda x: (x.shape[-1] != value.shape[-1], x.shape[-1] == J))
        if not outputs:
            shapes = ", ".join(str(tuple(x.shape)) for x in returned) or type(result).__name__
            raise NoOutput(f"it returned {shapes}, and no output of {I} tokens")
        axes = _axes_of(outputs[0], self.query_axes, B, H, I)
        output = canonical_tensor(outputs[0], axes, H, self.undone.join)
        if self.undone.residual:
            output = output - {"query": query, "key": key, "value": value}[self.undone.residual]
        weights = [w for x in returned if x is not outputs[0] and (w := _as_weights(x, B, I, J)) is not None]
        return CallResult(output, weights[0] if weights else None)

    @property
    def argument_width(self) -> int:
        """The size of the axis of channels in the function's own arguments."""
        return self.sizes.width * (1 if "h" in self.query_axes else self.sizes.heads)

    @property
    def is_of_one_token(self) -> bool:
        """Whether the query has an axis of tokens, but runs with one token only: mistakes of other axes do not show."""
        return self.sizes.queries == 1 and "n" in self.query_axes

    @property
    def axes(self) -> str:
        """The names of the axes of the query: of "bnd" they are "batch, length, width"."""
        return ", ".join(AXES[axis] for axis in self.query_axes)

    @property
    def text(self) -> str:
        """How the function is called, in words."""
        parameters = signature_of(self.function).parameters.values()
        arguments = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
        s = self.sizes
        of_axis = {"b": s.batch, "h": s.heads, "n": s.queries, "d": self.argument_width}
        sizes = ", ".join(str(of_axis[axis]) for axis in self.query_axes)
        keys = "" if s.queries == s.keys else f", and {s.keys} keys"
        keys += f" in {s.key_heads} heads" if s.key_heads else ""
        kind = "NumPy arrays" if self.numpy else "tensors"
        return f"({arguments}), with {kind} ({self.axes}) = ({sizes}){keys}"


def without_rounding(caller: Caller) -> Caller:
    """The same call in which casts to half precision do nothing."""
    return replace(caller, undone=replace(caller.undone, rounding=True))


def argument_tensor(x: Tensor, axes: str, is_viewed: bool = False) -> Tensor:
    """A (B, H, n, D) tensor with the axes of the user's function; heads without an axis are parts of the width.

    Other axes that are left out have size 1. `is_viewed` is for a function that splits heads by .view, a mistake: the
    numbers keep their order, so that its .view to (B, H, n, D) gives `x` back.
    """
    own = x if "h" in axes else x.transpose(1, 2).flatten(2).unsqueeze(1)
    kept = ["bhnd".index(axis) for axis in axes]
    absent = [axis for axis in range(4) if axis not in kept]
    permuted = own.permute(*kept, *absent)
    permuted = permuted.flatten(len(kept) - 1) if absent else permuted  # axes of size 1 go into the last one
    return x.reshape(permuted.shape) if is_viewed else permuted


def canonical_tensor(x: Tensor, axes: str, num_heads: int = 1, is_viewed: bool = False) -> Tensor:
    """The inverse of `argument_tensor`, for tensors of the function with these axes: (B, H, n, D).

    A width without an axis of heads is split into `num_heads`. `is_viewed`: by .view alone, as the function joined it.
    """
    absent = [axis for axis in "bhnd" if axis not in axes]
    own = x.reshape(*x.shape, *(1 for _ in absent))
    own = own.permute(*[(axes + "".join(absent)).index(axis) for axis in "bhnd"])
    own = own if "h" in axes else split_heads(own, num_heads)
    return x.reshape(own.shape) if is_viewed else own


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, 1, n, H D) as (B, H, n, D); a tensor that has heads stays as it is."""
    return x if x.shape[1] > 1 or num_heads == 1 else x[:, 0].unflatten(-1, (num_heads, -1)).transpose(1, 2)


def tensors_of(result: Any) -> list[Tensor]:
    """All tensors that a function returned: alone, in a tuple, a dict or an object with output and weights."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, np.ndarray):
        return [tensor_of_array(result)]
    if isinstance(result, tuple | list):
        return [x for item in result for x in tensors_of(item)]
    if isinstance(result, Mapping):
        return tensors_of(list(result.values()))
    if hasattr(result, "dense"):  # a lazy map of Regard
        return tensors_of(result.dense())
    return tensors_of([getattr(result, n) for n in ("output", "weights") if hasattr(result, n)])


def adding_table(function: Any) -> Any:
    """The function of x that adds the table of positions that `function(length, width)` returns; else `function`."""
    try:
        (table,) = tensors_of(function(7, 16))
    except Exception:  # of the user's function
        return function

    def add(x: Tensor) -> Tensor:
        return x + tensors_of(function(*x.shape[-2:]))[0].to(x)

    add.__name__ = name_of(function)
    return add if table.shape[-2:] == (7, 16) else function


def _axes_of(x: Tensor, query_axes: str, B: int, H: int, I: int) -> str:
    """The order of axes of an output of I queries; empty if `x` is no output.

    That of the query comes first, then what functions make of it: heads and tokens exchanged, the batch before the
    tokens, or the axis of the one query added or left out.
    """
    sizes = {"b": B, "h": H, "n": I, "d": x.shape[-1] if x.ndim else 0}
    options = [query_axes, {"bhnd": "bnhd", "bnhd": "bhnd", "bd": "bnd", "nbd": "bnd"}.get(query_axes, query_axes)]
    options += ["bd", "d"] if I == 1 and "h" not in query_axes else []
    return next((axes for axes in options if tuple(x.shape) == tuple(sizes[axis] for axis in axes)), "")


def _as_weights(x: Tensor, B: int, I: int, J: int) -> Tensor | None:
    """A returned tensor as weights (B, h, I, J), also if it is transposed, (B, h, J, I); or None."""
    pair = tuple(x.shape[-2:])
    if x.ndim >= 2 and pair in ((I, J), (J, I)):
        lead = x.shape[:-2]
        if len(lead) < 2 or lead[0] == B:
            # without a batch: the same weights for all sequences
            return x.reshape(B, -1, *pair) if x.numel() % (B * I * J) == 0 else x.expand(B, 1, *pair)
    if I == 1 and x.numel() == B * J:
        return x.reshape(B, 1, 1, J)
    return None


@dataclass(frozen=True)
class Subject:
    """A function of the user, and how it is to be checked. Of a module it is a copy in evaluation.

    `inputs` are examples of what it takes, and `seed` is that of random inputs. `mask` and `scale` are the sense of
    masks and the factor of the scores that the user means, None if that is not said. `names` are those of parameters by
    the roles that the user gives them.
    """

    function: Callable[..., Any]
    inputs: tuple[Tensor, ...] = ()
    seed: int = 0
    mask: str | None = None
    scale: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    progress: CheckProgress = field(default_factory=CheckProgress)

    @cached_property
    def roles(self) -> Roles:
        return roles_of(self.function)

    @property
    def is_module(self) -> bool:
        return isinstance(self.function, nn.Module)


def callers_of(subject: Subject, needs_output: bool = True) -> list[Caller]:
    """A caller for each order of axes in which the function runs; those that are more likely come first.

    The user's inputs give the number of axes, the widths and the heads. With `needs_output` a function that returns no
    output of its queries, but weights alone, does not count. If no call runs, a `RegardError` lists those that were
    tried.
    """
    tried: list[FailedCall] = []
    for widths in _widths_to_try(subject):
        attempts = (_attempts(subject, axes, widths, tried, needs_output) for axes in _layouts(subject))
        callers = [running for of_axes in attempts if (running := next(of_axes, None)) is not None]
        if callers:
            return callers
    name = f"{name_of(subject.function)}{signature_of(subject.function)}"
    if is_not_written(tried):
        raise RegardError(f"check: {name} is not written yet. {tried[0].error}. Write its body, and return the output.")
    raise RegardError(f"check: {name} could not be called. Tried:\n{listed(tried)}\n{_remedy(subject.inputs)}")


def _remedy(inputs: tuple[Tensor, ...]) -> str:
    """The advice at the end of the error of `callers_of`; `inputs` are those that the user gave."""
    if not inputs:
        return (
            "Give inputs that it takes: regard.check(function, q, k, v). For a function that builds a mask or a table "
            "of positions say so: like='causal_mask', like='padding_mask' or like='sinusoidal'."
        )
    text = "The function raises this on the inputs that were given."
    if len({x.ndim for x in inputs}) == 1:
        return text
    return (
        f"{text} Before a state (batch, width) is added to states (batch, length, width), it needs their axis: "
        "state[:, None]."
    )


def _widths_to_try(subject: Subject) -> Iterator[list[tuple[int, int, int]]]:
    """Lists of widths of query, key and value to try: equal ones, then those of an encoder and a decoder.

    A list is only tried if nothing in those before it runs.
    """
    inputs = subject.inputs
    if inputs:
        yield [(inputs[0].shape[-1], inputs[min(1, len(inputs) - 1)].shape[-1], inputs[-1].shape[-1])]
        return
    widths = widths_of(subject.function)
    yield [(width, width, width) for width in widths]
    if not subject.roles.is_self and subject.is_module:
        yield [(first, second, second) for first in widths for second in widths if first != second]


def _attempts(
    subject: Subject,
    axes: tuple[str, str],
    widths: list[tuple[int, int, int]],
    tried: list[FailedCall],
    needs_output: bool,
) -> Iterator[Caller]:
    """The callers of one order of axes that run: different lengths before equal ones, torch before NumPy.

    `widths` has the widths of query, key and value to try, one tuple for each try. `tried` receives the errors of calls
    with tensors; other arguments are as in `callers_of`. Many functions of NumPy take tensors too, as long as these
    require no gradient. So callers with tensors that take no gradient come after those with arrays.
    """
    function, roles = subject.function, subject.roles
    for of_inputs in widths:
        is_misshapen = False
        for sizes in _sizes(subject, axes[0], of_inputs):
            if is_misshapen and sizes.queries == 1 and len(roles.inputs) == 3:
                continue  # a call with several queries had no output for each of them, so one query says little
            without_gradients: list[Caller] = []
            for dtype, numpy in ((torch.float64, False), (torch.float32, False), (torch.float64, True)):
                own = copy_of(function).to(dtype) if isinstance(function, nn.Module) else function
                caller = Caller(own, roles, *axes, sizes, dtype, numpy, progress=subject.progress)
                query, key, value = sizes.sample(0, dtype)
                try:
                    with torch.no_grad():
                        (caller if needs_output else caller.returned)(query, key, value)
                except Exception as error:  # of the user's function
                    is_misshapen |= isinstance(error, NoOutput)
                    if not numpy:
                        tried.append(FailedCall.of(error, caller.shapes(query, key, value)))
                    continue
                if numpy or not needs_output or caller.takes_gradients():
                    yield caller
                else:
                    without_gradients.append(caller)
            yield from without_gradients


def _layouts(subject: Subject) -> list[tuple[str, str]]:
    """The orders of axes of query and key to try, with as many axes as the user's inputs have, if any."""
    inputs, roles = subject.inputs, subject.roles
    # the states of an encoder may have the length first, unless given inputs begin with the same batch
    is_length_first = roles.is_recurrent and len({len(x) for x in inputs}) != 1
    options = [pair for pair in LAYOUTS if not (roles.is_self and pair[0] != pair[1])]
    options = [pair for pair in options if is_length_first or pair != ("bd", "nbd")]
    if inputs:
        options = [pair for pair in options if len(pair[0]) == inputs[0].ndim and len(pair[1]) == inputs[-1].ndim]
    if subject.is_module and any(True for _ in subject.function.parameters()):
        options.sort(key=lambda pair: "h" in pair[0])  # modules with projections divide the width into heads themselves
    return options


def _sizes(subject: Subject, axes: str, widths: tuple[int, int, int]) -> list[InputSizes]:
    """The sizes to try with these axes and widths, with different numbers of queries and keys first.

    One query is tried last. A function of one input has as many keys as queries. The user's inputs only give the heads.
    """
    inputs, (width, key_width, value_width) = subject.inputs, widths
    heads, key_heads = 4 if "h" in axes else 1, None
    if inputs and "h" in axes:
        heads, key_heads = inputs[0].shape[axes.index("h")], inputs[-1].shape[axes.index("h")]
    head_dim = width // next(iter(declared_heads(subject.function)), 1)
    n = 5 if head_dim > 5 else max(2, head_dim - 1)  # fewer tokens than channels: their weights can be solved for
    lengths = [(n, n)] if subject.roles.is_self else [(5, 7), (5, 5), (1, 7)]
    if "n" not in axes:
        lengths = [(1, 7)]
    sizes = InputSizes(
        2 if "b" in axes else 1,
        heads,
        *lengths[0],
        width,
        subject.seed,
        key_heads=None if key_heads == heads else key_heads,
        key_width=None if key_width == width else key_width,
        value_width=None if value_width == key_width else value_width,
    )
    return [replace(sizes, queries=queries, keys=keys) for queries, keys in lengths]


def copy_of(module: nn.Module) -> nn.Module:
    """A copy of a module, also if it keeps results of a call that gradients could flow through.

    `deepcopy` refuses such tensors, so its memo gets detached copies of them. It also gets new empty dictionaries and
    sets for those of each module, about a dozen, because `deepcopy` takes longest for these.
    """
    values = [x for part in module.modules() for x in vars(part).values()]
    kept = {id(x): x.detach().clone() for x in values if isinstance(x, Tensor) and not x.is_leaf}
    return copy.deepcopy(module, kept | {id(x): type(x)() for x in values if type(x) in _CONTAINERS and not x})


def declared_heads(function: Any) -> list[int]:
    """Numbers of heads in attributes of a module, or in defaults of a function's arguments."""
    defaults = {name: p.default for name, p in signature_of(function).parameters.items()}
    values = [source for name in HEADS for source in (getattr(function, name, None), defaults.get(name))]
    return [number for number in values if isinstance(number, int) and number > 0]


def widths_of(function: Any) -> list[int]:
    """At most 6 widths that inputs may have: those of modules and attributes, then 16; and those of all buffers."""
    modules = list(function.modules()) if isinstance(function, nn.Module) else []
    sizes = [getattr(function, name, None) for name in WIDTHS]
    sizes += [m.in_features for m in modules if isinstance(m, nn.Linear)]
    sizes += [getattr(function, name, None) for name in HEAD_WIDTHS]
    sizes += [size for m in modules for p in m.parameters(False) if p.ndim >= 2 for size in p.shape[-2:]]
    known = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and size > 1]
    buffers = [x.shape[-1] for m in modules for x in m.buffers(False) if x.ndim > 1]
    return list(dict.fromkeys([*list(dict.fromkeys([*known, 16]))[:6], *buffers]))
