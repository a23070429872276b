"""Which modules of a model attend, what they are called and which part of the model they belong to."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from regard.errors import RegardError, nearest
from regard.nn import Attends
from regard.stats.numbering import layer_number

#: Names of the projections by which an attention module is known.
PROJECTION = re.compile(r"(^|_)w?(q|k|v|qkv|kv|query|key|value|c_attn|attn)(_|$|\d)", re.IGNORECASE)
CROSS = re.compile(r"cross_?att|encdecattention|encoder_attn|encoder_attention|attn2$", re.IGNORECASE)


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that look like attention: called so, and holding projections of queries and keys themselves."""
    return {name: module for name, module in model.named_modules() if _attends(module)}


def _attends(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention | Attends) or names_in_forward(module, "scaled_dot_product_attention"):
        return True
    if not re.search("attention|attn", type(module).__name__, re.IGNORECASE):
        return False
    return any(PROJECTION.search(name) and _projects(child) for name, child in module.named_children())


def names_in_forward(module: nn.Module, name: str) -> bool:
    """Whether the forward of a module speaks of a function or attribute."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and name in code.co_names


def is_loud(module: nn.Module) -> bool:
    """Whether a module may compute its weights by itself: not those of transformers, nor of torch, nor ours."""
    if isinstance(module, Attends) or names_in_forward(module, "ALL_ATTENTION_FUNCTIONS"):
        return False
    return not any(isinstance(part, nn.MultiheadAttention) for part in module.modules())


def parts_of_torch_layers(model: nn.Module) -> dict[str, str]:
    """Module path -> part, for the attention of torch's own encoder and decoder layers."""
    parts = {}
    for name, module in model.named_modules():
        start = f"{name}." if name else ""
        if isinstance(module, nn.TransformerEncoderLayer):
            parts[f"{start}self_attn"] = "encoder"
        elif isinstance(module, nn.TransformerDecoderLayer):
            parts |= {f"{start}self_attn": "decoder", f"{start}multihead_attn": "cross"}
    return parts


def inside_torch_layers(model: nn.Module) -> set[nn.Module]:
    """The attention of torch's own encoder and decoder layers, where their forward is torch's own too."""
    own = (nn.TransformerEncoderLayer.forward, nn.TransformerDecoderLayer.forward)
    layers = [layer for layer in model.modules() if type(layer).forward in own]
    return {part for layer in layers for part in layer.children() if type(part) is nn.MultiheadAttention}


def _projects(child: nn.Module) -> bool:
    """Whether a child is a projection: it has a weight of its own, and is no norm."""
    return getattr(child, "weight", None) is not None and "norm" not in type(child).__name__.lower()


def part_of(name: str, module: nn.Module) -> str:
    """Whether an attention belongs to the "encoder", to the "decoder", or is the "cross"-attention between them."""
    flags = ("is_cross_attention", "is_cross_attn", "is_cross")
    if CROSS.search(name) or any(getattr(module, flag, False) is True for flag in flags):
        return "cross"
    for part in reversed(name.lower().split(".")):
        if "decoder" in part or "encoder" in part:
            return "decoder" if "decoder" in part else "encoder"
    return "decoder" if getattr(module, "is_causal", False) or getattr(module, "is_decoder", False) else "encoder"


class Chosen:
    """The layers asked for: numbers, or paths with * and ?; None: all.

    >>> "encoder.layer.3.attention.self" in Chosen([0, 3]), "encoder.layer.3.attention.self" in Chosen(["decoder.*"])
    (True, False)
    """

    def __init__(self, layers: Iterable[int | str] | None) -> None:
        self.layers = None if layers is None else [layers] if isinstance(layers, int | str) else list(layers)
        for layer in self.layers or ():
            if not isinstance(layer, int | str) or isinstance(layer, bool):
                raise RegardError(f"watch(layers=...): layers are numbers or module paths, got {layer!r}.")

    def __contains__(self, name: str) -> bool:
        return self.layers is None or any(_matches(layer, name) for layer in self.layers)

    def check(self, names: Iterable[str], attending: Iterable[str]) -> None:
        """Refuse a layer that the model does not have."""
        names = list(names)
        for layer in self.layers or ():
            if not any(_matches(layer, name) for name in names):
                known = sorted({n for n in map(layer_number, names) if n is not None})
                listed = f"It has layers {', '.join(map(str, known))}."
                remedy = listed if isinstance(layer, int) else nearest(layer, attending)
                raise RegardError(f"watch(layers=...): the model has no layer {layer!r}. {remedy}")


def _matches(layer: int | str, name: str) -> bool:
    return layer_number(name) == layer if isinstance(layer, int) else fnmatchcase(name, layer)
