"""Names of projections, norms and numbers of heads in attention modules, and functions that find these parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from regard.hf.adapters import adapter_of

#: A word in the name of a projection -> what it computes: "q" -> query. A "w" may stand before it, as in "Wqkv".
SIDES = {word: frozenset({side}) for side in ("query", "key", "value") for word in (side, side[0], f"{side}s")}
SIDES |= {"queries": SIDES["query"], "qk": SIDES["q"] | SIDES["k"], "kv": SIDES["k"] | SIDES["v"]}
ALL_SIDES = frozenset({"query", "key", "value"})
SIDES |= {"qkv": ALL_SIDES}
SIDES |= {f"w{word}": sides for word, sides in SIDES.items()}
#: Words that may stand beside such a word ("to_qkv", "W_q", "key_proj").
AROUND = frozenset(("w", "a", "b", "c", "to", "in", "input", "proj", "projection", "lin", "linear", "linears"))
AROUND |= frozenset(("layer", "fc", "attn"))
#: Names of projections to queries, keys and values that contain no such word.
PACKED = frozenset(("c_attn", "in_proj"))
#: Names of projections whose result is all queries, then all keys, then all values. The result of a query_key_value
#: (GPT-NeoX, Bloom, Falcon) is not: it has the query, key and value of each head one after the other.
IN_ORDER = ("c_attn", "qkv_proj", "in_proj", "Wqkv", "qkv", "to_qkv")
#: Names of a projection of values for one kind of tokens, such as value_global.
SOME_VALUES = re.compile(r"^values?_(?!out)\w+$")
#: Names of the projections of additive scores: W_a, U_a and v_a.
ADDITIVE = re.compile(r"(^|_)[wuv]_?a(_|$|\d)", re.IGNORECASE)
#: Names of output projections: of children of the attention module, and of a module next to it. The second and third
#: line have those of modules that people write by hand.
OUTPUTS = ("o_proj", "out_proj", "c_proj", "Wo", "out_lin", "o", "dense", "proj")
BY_HAND = ("W_o", "W_O", "w_o", "wo", "WO", "fc_out", "fc_o", "fc", "out", "output", "linear_out", "out_linear")
BY_HAND += ("to_out", "output_proj", "output_projection", "output_linear")
BESIDE = "output.dense"
#: Names of output projections for one of two sequences that attend to each other.
SOME_OUTPUTS = re.compile(r"^out(put)?_\w+_proj$")
#: Names of the number of heads, and of the width of a head.
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "num_attn_heads")
COUNTS_BY_HAND = ("n_head", "nhead", "num_head", "heads")
#: A name of the number of heads, or of the height of an image.
HEADS_OR_HEIGHT = "h"
WIDTHS = ("head_dim", "attention_head_size", "head_size", "d_k", "d_head", "dim_head")
#: Norms over all heads together, before the output projection (BitNet, Kosmos-2, MiniMax).
BETWEEN = ("attn_sub_norm", "inner_attn_ln", "norm")
#: Norms before the attention, beside the attention module. In other models such a norm may stand after it.
NORMS = ("input_layernorm", "ln_1", "ln1", "layernorm_before", "layer_norm1", "pre_attention_layernorm")
#: The gates (H,) of attention modules while a block of `gated` runs, by the module and the hook that multiplies.
open_gates: dict[tuple[nn.Module, object], Tensor] = {}


def sides_of(path: str) -> frozenset[str]:
    """Which of "query", "key" and "value" a projection computes, read from its name; empty if the name does not say it.

    >>> [sorted(sides_of(name)) for name in ("to_qkv", "W_q", "value_out", "linears.1")]
    [['key', 'query', 'value'], ['query'], [], []]
    """
    if path.rpartition(".")[2] in PACKED:
        return ALL_SIDES
    words = _words(path)
    side_words = words & SIDES.keys()
    return frozenset().union(*(SIDES[word] for word in side_words)) if words <= side_words | AROUND else frozenset()


def is_of_attention(name: str) -> bool:
    """Whether a module or a parameter of this name may be a projection of attention: a word of its name says so."""
    words = _words(name)
    return "attn" in words or bool(words & SIDES.keys()) or ADDITIVE.search(name) is not None


def is_of_values(name: str) -> bool:
    """Whether a projection of this name computes values, and nothing else."""
    return sides_of(name) == {"value"} or SOME_VALUES.match(name) is not None


def _words(path: str) -> set[str]:
    return {word for word in re.split(r"[._\d]+", path.lower()) if word}


def output_names(children: Mapping[str, nn.Module]) -> list[str]:
    """The name of the output projection among the children of an attention module, or its names for two sequences."""
    names = [name for name in (*OUTPUTS, *BY_HAND) if name in children]
    return names[:1] or [name for name in children if SOME_OUTPUTS.match(name)]


def output_projection(model: nn.Module, name: str, module: nn.Module, path: str | None = None) -> nn.Module | None:
    """The output projection of a module: at the path that a user gave, of a known name, or beside the attention."""
    children, adapter = dict(module.named_children()), adapter_of(module)
    path = adapter.output if path is None and adapter is not None else path
    if path is not None and path in dict(module.named_modules()):
        return module.get_submodule(path)
    candidates = [child for child in OUTPUTS if child in children]
    candidates += [child for child in BY_HAND if num_inputs(children.get(child)) is not None]
    if candidates:
        return children[candidates[0]]
    parent = name.rpartition(".")[0]
    return dict(model.named_modules()).get(f"{parent}.{BESIDE}" if parent else BESIDE)


def num_inputs(output: nn.Module | None) -> int | None:
    """The width of the inputs of a linear layer; None if the module is none."""
    size = getattr(output, "in_features", getattr(output, "nx", None))
    return size if isinstance(size, int) else None


def matrix_of(layer: nn.Module) -> Tensor:
    """The matrix (inputs, outputs) of a linear layer. GPT-2's Conv1D stores it so, nn.Linear transposed."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight if type(layer).__name__ == "Conv1D" else weight.mT


@dataclass(frozen=True, eq=False)
class LinearLayer:
    """x W + b: the matrix (inputs, outputs) and the bias of a linear layer, and how often they were changed in place.

    >>> LinearLayer.of(nn.Linear(3, 5)).matrix.shape
    torch.Size([3, 5])
    """

    matrix: Tensor
    bias: Tensor | None
    versions: tuple[int, ...]

    @staticmethod
    def of(module: nn.Module | None) -> LinearLayer | None:
        """The layer of a module; None if the module computes anything else, or has packed weights."""
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if module is None or not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
            return None
        is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        if not is_linear and type(module).__name__ != "Conv1D":
            return None
        matrix, bias = matrix_of(module).detach(), None if bias is None else bias.detach()
        return LinearLayer(matrix, bias, _versions(matrix, bias))

    @property
    def is_unchanged(self) -> bool:
        return _versions(self.matrix, self.bias) == self.versions


def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(x._version for x in tensors if x is not None and not x.is_inference())
