"""Checks of arguments against their annotations; a `RegardError` names the argument, the rule and the value."""

from __future__ import annotations

import inspect
import operator
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from numbers import Integral, Real
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor

from regard.base.errors import RegardError, first_line
from regard.base.names import explanation
from regard.base.shapes import has_numbers, unusual_kind


@dataclass(frozen=True)
class AtLeast:
    """The least value of an annotated number: `Annotated[int, AtLeast(1)]`."""

    least: float

    def allows(self, value: Any) -> bool:
        return bool(value >= self.least)

    def __str__(self) -> str:
        return f"of at least {self.least}"


@dataclass(frozen=True)
class NotLearned:
    """A number whose gradient would be lost, because it only chooses constants, such as frequencies."""

    def allows(self, value: Any) -> bool:
        return not (isinstance(value, Tensor) and value.requires_grad)

    def remedy(self, value: Any) -> str:
        return "No gradient reaches it; value.item() is its number." if isinstance(value, Tensor) else ""

    def __str__(self) -> str:
        return ""


@dataclass(frozen=True)
class Finite:
    """A number of float32 that is finite, and above `above` if that is given: `Annotated[float, Finite()]`.

    A tensor without axes is not read: it may be learned, or lie on a device.
    """

    above: float | None = None

    def allows(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            return True
        return abs(float(value)) <= LARGEST and (self.above is None or value > self.above)

    def __str__(self) -> str:
        return "" if self.above is None else f"above {self.above}"


#: The largest number of float32.
LARGEST = torch.finfo(torch.float32).max
#: A finite number, such as a factor.
Number = Annotated[float, Finite()]
#: A finite number above 0, such as a temperature.
Positive = Annotated[float, Finite(above=0)]
#: An integer of at least 1, such as a number of heads, channels or layers.
Size = Annotated[int, AtLeast(1)]
#: An integer of at least 0, such as a number of tokens.
Count = Annotated[int, AtLeast(0)]
#: A finite number that is never learned, and one above 0: a tensor without axes becomes Python's number.
Constant = Annotated[float, Finite(), NotLearned()]
PositiveConstant = Annotated[float, Finite(above=0), NotLearned()]

Checked = TypeVar("Checked", bound=Callable[..., Any])


class HoldsMaps:
    """A result with `maps`. It may be given where a function takes a dict of maps: `profile(seen, tokens)`."""

    @property
    def maps(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def names_of(self, weights: Any, batch: int = 0) -> Any:
        """The tokens of a map: one list, or a pair (of queries, of keys); None if they are not known."""
        return None


def checked(target: Checked) -> Checked:
    """Check the arguments of a function, or of the constructor of a class, against their annotations at each call.

    An integer of NumPy, or in a tensor without axes, becomes a Python integer, and other numbers that are not Python's
    become Python's. A number may be an integer, or a tensor without axes, which may be learned unless the number is a
    `Constant`. True is neither an integer nor a number. A result that `HoldsMaps` becomes its dict of maps where a dict
    is expected. The function itself checks the rules that an annotation cannot express, such as a shape.

    >>> from regard.base.checks import checked
    >>> @checked
    ... def repeat(word: str, times: int = 2) -> str:
    ...     return word * times
    >>> repeat("ab", times="3")
    Traceback (most recent call last):
        ...
    regard.RegardError: repeat(times='3'): times must be an integer, got str. repeat(word: str, times: int = 2)
    """
    if isinstance(target, type):
        target.__init__ = _checked(target.__init__, target.__name__)  # type: ignore[misc]
        return target  # type: ignore[return-value]
    return _checked(target, target.__qualname__.rpartition("<locals>.")[2])


def explained(target: Checked) -> Checked:
    """Explain a call with wrong argument names. Nothing is checked before a call fails, so it costs no time.

    >>> import regard as rg
    >>> rg.Attention(is_causal=True)
    Traceback (most recent call last):
        ...
    regard.RegardError: Attention: got an unexpected keyword argument 'is_causal'. is_causal: a mask is a piece:
      Attention(mask=regard.causal()). Attention(score: Score | None = None, *,
      position: Encoding | None = None, bias: Bias | Iterable[Bias] = (), mask: Mask | None = None,
      normalizer: Normalizer | None = None, dropout: float = 0.0, transition: Transition | None = None,
      selection: Selection | None = None)
    """
    if isinstance(target, type):
        target.__init__ = _explained(target.__init__, target.__name__)  # type: ignore[misc]
        return target  # type: ignore[return-value]
    return _explained(target, target.__qualname__.removesuffix(".forward"))


def _explained(function: Any, name: str) -> Any:
    """The function; after a `TypeError` the arguments are compared with its signature, for an error with a remedy."""

    @wraps(function)
    def with_names(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            _refuse_unusual(_bound(inspect.signature(function), args, kwargs, name).arguments, name, error)
            raise  # the arguments are right, so the function itself raised the error
        except (RuntimeError, AttributeError) as error:
            _refuse_unusual(inspect.signature(function).bind(*args, **kwargs).arguments, name, error)
            raise

    return with_names


def _refuse_unusual(arguments: Mapping[str, Any], name: str, error: Exception) -> None:
    """After an error of torch: name the first argument that is an unusual tensor, or a size that memory cannot hold."""
    for argument, value in arguments.items():
        if isinstance(value, Tensor) and (kind := unusual_kind(value) or "on the meta device" * value.is_meta):
            reason = f"the tensor is {kind} ({first_line(error)})"
            raise RegardError(f"{name}({argument}=...): {reason}. Give a dense tensor of real numbers.") from error
        if isinstance(value, int) and value >= 2**31 and isinstance(error, RuntimeError):
            reason = f"torch cannot make a tensor of such a size ({first_line(error)})"
            raise RegardError(f"{name}({argument}={value}): {reason}. Give a smaller number.") from error


def _checked(function: Any, name: str) -> Any:
    """The function behind checks of its arguments; errors begin with `name`."""
    signature = inspect.signature(function)

    @cache
    def annotations() -> dict[str, Any]:
        """Read at the first call: an annotation may name a class that is defined further below."""
        names = inspect.get_annotations(function)
        return {name: _resolved(names[name], function) for name in names if name != "return"}

    @wraps(function)
    def with_checks(*args: Any, **kwargs: Any) -> Any:
        bound = _bound(signature, args, kwargs, name)
        for parameter, value in bound.arguments.items():
            expected = annotations().get(parameter)
            if expected is None:
                continue
            value = _as_number(_as_dict(value, expected), expected)
            is_variadic = signature.parameters[parameter].kind is inspect.Parameter.VAR_POSITIONAL
            wrong = [item for item in (value if is_variadic else [value]) if not fits(item, expected)]
            if wrong:
                raise RegardError(_mistake(name, parameter, wrong[0], expected, signature))
            bound.arguments[parameter] = value
        try:
            return function(*bound.args, **bound.kwargs)
        except (TypeError, RuntimeError, AttributeError) as error:
            _refuse_unusual(bound.arguments, name, error)
            raise

    return with_checks


def _as_number(value: Any, expected: Any) -> Any:
    """Python's number in place of another number. A tensor stays where one may be given or learned."""
    if type(value) in (int, float, str, bool, type(None)):  # the usual cases
        return value
    if isinstance(value, Tensor) and _names(expected, Tensor):
        return value
    if _is_integer(value):
        return operator.index(value)
    if isinstance(value, Tensor):
        is_constant = _names(expected, NotLearned()) and _is_number(value) and NotLearned().allows(value)
        return value.item() if is_constant and has_numbers(value) else value
    return float(value) if _names(expected, float) and isinstance(value, Real) else value


def _bound(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], name: str
) -> inspect.BoundArguments:
    """The arguments by parameter; wrong names or numbers of arguments are an error with a remedy."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:  # Python's message, then a remedy
        remedy = _order(args, signature) + explanation(kwargs, signature.parameters)
        raise RegardError(f"{name}: {error}. {remedy}{_shown(name, signature)}") from None


def _order(args: tuple[Any, ...], signature: inspect.Signature) -> str:
    """A remedy for a call with the attention before the tensors."""
    if len(args) < 4 or isinstance(args[0], Tensor) or "attention" not in signature.parameters:
        return ""
    return "The tensors come first: attention(query, key, value), or attend(query, key, value, attention=attention). "


def _mistake(name: str, parameter: str, value: object, expected: Any, signature: inspect.Signature) -> str:
    """The message: the call, the rule, what was given instead (or which item is wrong), a remedy, the signature."""
    kind = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    kind = "a number beyond 64 bits" if isinstance(value, int) and abs(value) >= 2**63 else kind
    got = "" if _is_integer(value) and _names(expected, int) else f", got {kind}"  # only its value is wrong
    rule = f"{parameter} must be {words(expected)}{got}"
    call, inner = f"{name}({parameter}={_short(value)})", _first_misfit(value, expected, parameter)
    if inner is not None:  # a dict or list of the right kind: one of its items is wrong
        place, item, wanted = inner
        rule = f"{parameter} must be {words(expected)}: {place} must be {words(wanted)}, got {_short(item)}"
        value, expected = item, wanted
    return f"{call}: {rule}. {_remedy(value, expected)}{_shown(name, signature)}"


def _first_misfit(value: Any, expected: Any, place: str) -> tuple[str, Any, Any] | None:
    """The first wrong item of a dict or a list that is itself of the expected kind: its place, value and type.

    The type is the expected one. `place` is the path to `value` in the argument, for example "heads[0]". None if no
    item is wrong.
    """
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):  # if the value could be meant as several types, no item is named
        inner = [found for option in arguments if (found := _first_misfit(value, option, place)) is not None]
        return inner[0] if len(inner) == 1 else None
    for name, item, wanted in _items_of(value, origin, arguments, place):
        if not fits(item, wanted):
            return _first_misfit(item, wanted, name) or (name, item, wanted)
    return None


def _items_of(value: Any, origin: Any, arguments: tuple[Any, ...], place: str) -> Iterable[tuple[str, Any, Any]]:
    """The keys and items of a dict, or the items of a list: name, value and expected type."""
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        keys = ((f"the key {_short(key)} of {place}", key, arguments[0]) for key in value)
        return [*keys, *((f"{place}[{_short(key)}]", item, arguments[1]) for key, item in value.items())]
    if origin is tuple and ... not in arguments:
        is_pair = isinstance(value, tuple) and len(value) == len(arguments)
        return [(f"{place}[{n}]", value[n], arguments[n]) for n in range(len(arguments))] if is_pair else []
    if origin in (list, tuple, Sequence, Collection, Iterable) and _is_collection(value, origin):
        return ((f"{place}[{n}]", item, arguments[0]) for n, item in enumerate(_items(value)))
    return ()


def _remedy(value: object, expected: Any) -> str:
    """The remedy for a text or a tokenizer in place of a model; else that of the expected type, if it has `remedy`."""
    options = (expected, *typing.get_args(expected))
    if torch.nn.Module in options and isinstance(value, str):
        return f"A model is loaded first: model, tokenizer = regard.load_model({value!r}). "
    if torch.nn.Module in options and hasattr(value, "convert_ids_to_tokens"):
        return "This is a tokenizer; the model comes first. "
    remedies = (option.remedy(value) for option in options if hasattr(option, "remedy"))
    return next((f"{remedy} " for remedy in remedies if remedy), "")


def _short(value: object) -> str:
    """The value as Python prints it, in one line of at most 40 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def _shown(name: str, signature: inspect.Signature) -> str:
    """The signature as a user reads it, `repeat(word: str, times: int = 2)`, for the end of a message."""
    parameters = [_with_short_default(p) for p in signature.parameters.values() if p.name not in ("self", "cls")]
    text = str(inspect.Signature(parameters)).replace("'", "").replace("<factory>", "...")
    return f"{name}{text}"


class _Dots:
    """A default that prints as three dots."""

    def __repr__(self) -> str:
        return "..."


def _with_short_default(parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter, with ... as a default that is too long to show or that has an address (" at 0x")."""
    text = "" if parameter.default is parameter.empty else repr(parameter.default)
    return parameter.replace(default=_Dots()) if " at 0x" in text or len(text) > 40 else parameter


def _resolved(annotation: Any, function: Any) -> Any:
    """The type that an annotation names; None if only type checkers import it."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, getattr(inspect.unwrap(function), "__globals__", {}))
    except (NameError, AttributeError):
        return None


def fits(value: object, expected: Any) -> bool:
    """Whether a value has the type of an annotation: unions, sequences, literals and functions included."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in arguments)
    if origin is Annotated:
        return fits(value, arguments[0]) and all(bound.allows(value) for bound in arguments[1:])
    if origin is typing.Literal:
        return isinstance(value, tuple(map(type, arguments))) and value in arguments
    if origin is tuple and isinstance(value, tuple) and ... not in arguments:
        return len(value) == len(arguments) and all(map(fits, value, arguments))
    if origin in (list, tuple, Sequence, Collection, Iterable):
        return _is_collection(value, origin) and all(fits(item, arguments[0]) for item in _items(value))
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(
            fits(key, arguments[0]) and fits(item, arguments[1]) for key, item in value.items()
        )
    if origin is not None:  # Callable[...], type[...]: their arguments are not checked
        return not isinstance(origin, type) or isinstance(value, origin)
    return _is_plain(value, expected)


def _is_plain(value: object, expected: Any) -> bool:
    """`fits` for an annotation without arguments. Protocols, and what is no class, fit every value."""
    if expected in (None, type(None)):
        return value is None
    if expected is int:
        return _is_integer(value)
    if expected is float:
        return _is_number(value) and not isinstance(value, bool)
    if expected is Any or getattr(expected, "_is_protocol", False) or not isinstance(expected, type):
        return True
    return isinstance(value, expected)


def _names(expected: Any, kind: Any) -> bool:
    """Whether an annotation allows a type, or has this rule."""
    return expected == kind or any(_names(option, kind) for option in typing.get_args(expected))


def _as_dict(value: Any, expected: Any) -> Any:
    """The maps of a result where a dict is expected and not the result itself; anything else as it is."""
    is_result = isinstance(value, HoldsMaps) and not _names(expected, HoldsMaps)
    return value.maps if is_result and _takes_dict(expected) else value


def _takes_dict(expected: Any) -> bool:
    """Whether an annotation allows a dict."""
    origin = typing.get_origin(expected)
    if origin in (typing.Union, types.UnionType):
        return any(map(_takes_dict, typing.get_args(expected)))
    return (origin or expected) in (dict, Mapping)


def _is_integer(value: object) -> bool:
    """Whether a value is an integer of 64 bits: of Python, of NumPy, or in a tensor without axes. True is none."""
    if isinstance(value, Tensor):
        return (
            value.ndim == 0
            and not value.is_meta
            and value.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        )
    return isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) < 2**63


def integer(owner: str, name: str, value: Any) -> int:
    """`value` as a Python integer, for values that `checked` does not check, such as the items of a list.

    >>> integer("Positions", "start", 1.5)
    Traceback (most recent call last):
        ...
    regard.RegardError: Positions(start=1.5): start must be an integer.
    """
    if type(value) is int and -(2**63) < value < 2**63:  # the usual case, without the look at abstract classes
        return value
    if not _is_integer(value):
        raise RegardError(f"{owner}({name}={value!r}): {name} must be an integer.")
    return operator.index(value)


def _is_number(value: object) -> bool:
    """A number, or a tensor without axes, which may be learned. An integer beyond 64 bits is none for torch."""
    if isinstance(value, Integral):
        return abs(int(value)) < 2**63
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex())


def _is_collection(value: object, origin: type) -> bool:
    """Whether a value is a list. A NumPy array is a list of numbers; a text or a dict is not a list.

    Arrays and tensors are no `Sequence` of Python, so every iterable is taken for one.
    """
    if (
        isinstance(value, str | bytes)
        or getattr(value, "ndim", 1) == 0
        or (origin is Sequence and isinstance(value, Mapping))
    ):
        return False
    return isinstance(value, Iterable if origin is Sequence else origin)


def _items(value: Any) -> Collection[Any]:
    """The items of a collection; no items of an iterator, because reading would consume it."""
    return value if hasattr(value, "__len__") else ()


def words(expected: Any) -> str:
    """A type in words: `an integer`, `a list of integers`, `a Mask or None`."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(words(option) for option in arguments))
    if origin is Annotated:
        return _with_bounds(words(arguments[0]), arguments[1:])
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if origin in (list, tuple, Sequence, Collection, Iterable):
        return f"a list of {_plural(arguments[0])}" if arguments else "a list"
    if origin in (dict, Mapping):
        return "a dict"
    if origin is Callable or expected is Callable:
        return "a function"
    return WORDS.get(expected) or _with_article(getattr(expected, "__name__", str(expected)))


#: Types whose words are not their names; `words` and `_plural` make the others.
WORDS = {int: "an integer", float: "a number", str: "a text", bool: "True or False", None: "None", type(None): "None"}
WORDS[HoldsMaps] = "the result of regard.watch"  # type: ignore[index]
PLURALS = {int: "integers", float: "numbers", str: "texts", bool: "True and False"}


def _with_bounds(kind: str, bounds: Sequence[object]) -> str:
    """`a number`, and the bounds of an annotation: `a finite number above 0`."""
    kind = kind.replace("number", "finite number") if any(isinstance(bound, Finite) for bound in bounds) else kind
    return " ".join(filter(None, [kind, *map(str, bounds)]))


def _plural(expected: Any) -> str:
    """The items of a list in words: `integers`, `Masks`; `values` for a type without a name."""
    if typing.get_origin(expected) is Annotated:
        return _with_bounds(_plural(typing.get_args(expected)[0]), typing.get_args(expected)[1:])
    name = getattr(expected, "__name__", None)
    return PLURALS.get(expected) or (f"{name}s" if name else "values")


def _with_article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
