"""Finds the attention modules of a model, and whether each is in the encoder, in the decoder or between them."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from regard.attention import Attention, Mechanism
from regard.attention_output import attend
from regard.base.closures import closure_values
from regard.base.errors import RegardError, nearest
from regard.hf.adapters import is_adapted
from regard.hf.names import is_of_attention
from regard.nn import Attends
from regard.stats.numbering import layer_number, layer_paths

#: Paths of attention between the encoder and the decoder.
CROSS = re.compile(r"cross_?att|encdecattention|encoder_attn|encoder_attention|attn2$", re.IGNORECASE)
#: Words that name attention in classes and variables.
ATTENTION = re.compile("attention|attn|bahdanau|luong", re.IGNORECASE)
#: Variables beside a softmax that say that it is one of attention.
VARIABLES = ({"q", "k", "v"}, {"query", "key", "value"}, {"queries", "keys", "values"})
#: What `names_called` has for `regard.attend` under any name, and for a call of an `Attention`.
OURS = "regard.attend"
#: The functions of torch that compute attention.
OF_TORCH = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})
#: The functions that transformers offers to attention modules.
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
#: Packages whose functions are not searched, and packages whose methods are not searched.
LIBRARIES = ("torch", "transformers", "regard.")
BASES = ("torch", "transformers.modeling_utils", "transformers.generation", "regard.")
SOFTMAX_LAYERS = (nn.Softmax, nn.Softmax2d)


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Module path -> module, for all modules that seem to compute attention; not all of them can be captured."""
    if is_called_attention(model):
        return {"": model}
    return with_numbers({name: module for name, module in model.named_modules() if _attends(module)})


def unnamed_softmaxes(model: nn.Module) -> dict[str, nn.Module]:
    """Module path -> module, for those whose code has a softmax and no name of attention: a run shows what they are.

    Modules inside of attention are left out: their softmax is a part of it.
    """
    known = {part for module in attention_modules(model).values() for part in module.modules()}
    return {name: part for name, part in model.named_modules() if part not in known and _has_softmax(part)}


def _has_softmax(module: nn.Module) -> bool:
    """Whether a module that a user wrote computes a softmax, by a layer among its children or in its code."""
    package = type(module).__module__.partition(".")[0]
    if package in ("torch", "transformers", "regard") or not may_compute_weights(module):
        return False
    has_layer = any(isinstance(child, SOFTMAX_LAYERS) for child in module.children())
    return has_layer or "softmax" in names_called(type(module))


def with_numbers(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The same modules by paths that know the number of their layer."""
    return dict(zip(layer_paths(modules).values(), modules.values(), strict=True))


def _attends(module: nn.Module) -> bool:
    """Whether a module seems to compute attention.

    It does if it has an adapter, calls a known function of attention, or has a part that is called as attention. Else
    it needs two of these: a class named attention, projections, a softmax. Beside a softmax, variables called q, k and
    v are as good as projections of these names.
    """
    names = names_called(type(module))
    if is_adapted(module) or isinstance(module, Attends) or INTERFACE in names or {*OF_TORCH, OURS} & names:
        return True
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and any(
        is_called_attention(child) for child in module.children()
    ):
        return True
    named = ATTENTION.search(type(module).__name__) is not None
    if "softmax" in names:
        variables = _own_variables(type(module))
        has_variables = any(triple <= variables for triple in VARIABLES)
        return named or _has_projections(module) or has_variables or _code_names_attention(module)
    return named and _has_projections(module)


def _code_names_attention(module: nn.Module) -> bool:
    """Whether the code of a module with a softmax names attention as something that the module itself computes.

    If parts of the module attend, the name may be theirs. Then a variable of its own code must have such a name, or a
    parameter, or a part in which nothing attends. Arguments and buffers do not count, because they may only be handed
    on: an `attention_mask` beside the softmax over the words of a language model.
    """
    if not any(map(ATTENTION.search, names_called(type(module)))):
        return False
    attending = [part for part in module.modules() if part is not module and _attends(part)]
    if not attending or any(map(ATTENTION.search, _own_variables(type(module)))):
        return True
    parts = (name for name, part in module.named_children() if not any(inner in attending for inner in part.modules()))
    own = {*parts, *(name for name, _ in module.named_parameters(recurse=False))}
    return any(map(ATTENTION.search, own & names_called(type(module))))


def is_called_attention(module: object) -> bool:
    """Whether a module is called in place of `regard.attend`: the attention is that of the module that calls it."""
    return isinstance(module, Mechanism)


def _has_projections(module: nn.Module) -> bool:
    """Whether a child or a parameter of the module has the name of a projection of attention, such as `W_q`."""
    children = any(is_of_attention(name) and _projects(child) for name, child in module.named_children())
    return children or any(is_of_attention(name) for name, _ in module.named_parameters(recurse=False))


def names_called(kind: type[nn.Module]) -> frozenset[str]:
    """All names in the code of a module's forward, and in the user's functions and methods that it calls.

    A name of `regard.attend` or of an `Attention` is replaced by `OURS`.
    """
    return _searched(kind)[0]


@cache
def _own_variables(kind: type[nn.Module]) -> frozenset[str]:
    """The variables in the code that `names_called` reads, without the arguments."""
    codes = (code for function in _searched(kind)[1] for code in _codes_in(function.__code__))
    return frozenset(name for code in codes for name in _assigned(code))


def _assigned(code: CodeType) -> set[str]:
    """The variables of a piece of code that are no arguments."""
    stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + stars]
    return {*code.co_varnames, *code.co_cellvars} - {*arguments}


@cache
def _searched(kind: type[nn.Module]) -> tuple[frozenset[str], frozenset[FunctionType]]:
    """The names in the code of a module's forward and of the user's functions that it calls, and these functions."""
    names: set[str] = set()
    functions: set[FunctionType] = set()
    _collect(inspect.unwrap(kind.forward), kind, names, functions)
    return frozenset(names), frozenset(functions)


def _collect(function: Any, kind: type[nn.Module], names: set[str], visited: set[Any]) -> None:
    """Add to `names` the names in the code of `function` and of the functions that it calls.

    A name in the code may be a global variable, a variable of an enclosing function, or a method of the class `kind`.
    Code of libraries is not searched. What names no module in `__module__` counts as code of torch: it is no function
    of a user. `visited` has the functions that were already read, so recursion ends.
    """
    if not isinstance(function, FunctionType) or function in visited:
        return
    visited.add(function)
    values = function.__globals__ | closure_values(function)
    for name in _names_in(function.__code__):
        called, method = values.get(name), getattr(kind, name, None)
        names.add(OURS if called is attend or called is Attention or is_called_attention(called) else name)
        if not (getattr(called, "__module__", None) or "torch").startswith(LIBRARIES):
            _collect(called, kind, names, visited)
        if not (getattr(method, "__module__", None) or "torch").startswith(BASES):
            _collect(method, kind, names, visited)
    # `regard.attend` is an attribute of a module, which is no global variable: both names must be in the code.
    if {"attend", "Attention"} & names and any(values.get(name) is sys.modules["regard"] for name in names):
        names.add(OURS)


def _names_in(code: CodeType) -> Iterator[str]:
    """All names in a piece of code, including its variables and the functions that it defines."""
    for part in _codes_in(code):
        yield from (*part.co_names, *part.co_varnames, *part.co_freevars)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """A piece of code, and the functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


def may_compute_weights(module: nn.Module) -> bool:
    """Whether a module may compute its weights itself, not through transformers, torch or Regard."""
    if isinstance(module, Attends) or INTERFACE in names_called(type(module)):
        return False
    return not any(map(is_adapted, module.modules()))


def parts_of_torch_layers(model: nn.Module) -> dict[str, str]:
    """Module path -> "encoder", "decoder" or "cross", for the attention in torch's encoder and decoder layers."""
    parts = {}
    for name, module in model.named_modules():
        start = f"{name}." if name else ""
        if isinstance(module, nn.TransformerEncoderLayer):
            parts[f"{start}self_attn"] = "encoder"
        elif isinstance(module, nn.TransformerDecoderLayer):
            parts |= {f"{start}self_attn": "decoder", f"{start}multihead_attn": "cross"}
    return parts


def inside_torch_layers(model: nn.Module) -> set[nn.Module]:
    """The attention in torch's encoder and decoder layers whose forward was not overridden.

    Such a layer may compute its attention in a fused kernel, without calling this module.
    """
    forwards = (nn.TransformerEncoderLayer.forward, nn.TransformerDecoderLayer.forward)
    layers = [layer for layer in model.modules() if type(layer).forward in forwards]
    return {part for layer in layers for part in layer.children() if type(part) is nn.MultiheadAttention}


def _projects(child: nn.Module) -> bool:
    """Whether a child module is a projection: it has a weight and is not a norm."""
    return getattr(child, "weight", None) is not None and "norm" not in type(child).__name__.lower()


def part_of(name: str, module: nn.Module) -> str:
    """The part of the model an attention module is in: "encoder", "decoder", or "cross" between them.

    The innermost name in the path decides, then the flags of the module.
    """
    flags = ("is_cross_attention", "is_cross_attn", "is_cross")
    if CROSS.search(name) or any(getattr(module, flag, False) is True for flag in flags):
        return "cross"
    for part in reversed(name.lower().split(".")):
        if "decoder" in part or "encoder" in part:
            return "decoder" if "decoder" in part else "encoder"
    return "decoder" if getattr(module, "is_causal", False) or getattr(module, "is_decoder", False) else "encoder"


class ChosenLayers:
    """The layers that a user chose: numbers, or module paths with * and ?. None chooses all.

    >>> name = "encoder.layer.3.attention.self"
    >>> name in ChosenLayers([0, 3]), name in ChosenLayers(["decoder.*"])
    (True, False)
    """

    def __init__(self, layers: int | str | Iterable[int | str] | None) -> None:
        self.layers = None if layers is None else [layers] if isinstance(layers, int | str) else list(layers)
        for layer in self.layers or ():
            if not isinstance(layer, int | str) or isinstance(layer, bool):
                raise RegardError(f"watch(layers=...): layers are numbers or module paths, got {layer!r}.")

    def __contains__(self, path: str) -> bool:
        return self.layers is None or any(_matches(layer, path) for layer in self.layers)

    def check(self, module_paths: Iterable[str], attention_paths: Iterable[str]) -> None:
        """Refuse a number that no attention module has, and a path or pattern that matches no module at all."""
        module_paths, attention_paths = list(module_paths), list(attention_paths)
        for layer in self.layers or ():
            if not any(_matches(layer, path) for path in (attention_paths if isinstance(layer, int) else module_paths)):
                numbers = sorted({n for n in map(layer_number, attention_paths) if n is not None})
                listed = f"It has layers {', '.join(map(str, numbers))}." if numbers else "Its layers have no numbers."
                remedy = listed if isinstance(layer, int) else nearest(layer, attention_paths)
                raise RegardError(f"watch(layers=...): the model has no layer {layer!r}. {remedy}")


def _matches(layer: int | str, path: str) -> bool:
    """Whether the module at a path has this layer number, or fits this pattern."""
    return layer_number(path) == layer if isinstance(layer, int) else fnmatchcase(path, layer)
