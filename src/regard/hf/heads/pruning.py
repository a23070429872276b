"""`prune` removes heads from the weights of a Hugging Face model, or of a model of `regard.nn`."""

from __future__ import annotations

import copy as copying
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.base.errors import RegardError
from regard.base.versions import fills_width
from regard.composites import Composite
from regard.hf.heads.model_heads import Heads, ModelHeads
from regard.hf.names import COUNTS
from regard.nn import MultiHeadAttention
from regard.pieces.bias import is_shaw, is_softcap
from regard.pieces.contents import tensors_of
from regard.scores import Bilinear

#: Attention classes whose forward reads the number of heads from the weights or from attributes that `prune` sets.
#: Tests compare each with gates of zero. Classes that read the configuration instead cannot be pruned.
PRUNABLE = frozenset(
    f"{name}Attention"
    for name in (
        *("BertSelf", "RobertaSelf", "XLMRobertaSelf", "ElectraSelf", "CamembertSelf", "ErnieSelf", "DistilBertSelf"),
        *("BertCross", "ModernBert", "GPT2", "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Gemma2", "Gemma3"),
        *("Olmo", "Granite", "Cohere", "Cohere2", "StableLm", "Starcoder2", "SmolLM3", "Glm4", "OPT", "BioGpt"),
        *("Bart", "Marian", "MBart", "Pegasus", "M2M100", "Whisper"),
        *("ViT", "DeiT", "Dinov2", "CLIP", "Siglip"),
    )
)
#: Projection -> its outputs in order: queries, keys, values.
LAYOUTS: tuple[dict[str, str], ...] = (
    {"query": "q", "key": "k", "value": "v", "gate": "q"},
    {"query": "q", "key": "k", "value": "v"},
    {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
    {"q_lin": "q", "k_lin": "k", "v_lin": "v"},
    {"q_attn": "q", "c_attn": "kv"},
    {"c_attn": "qkv"},
    {"Wqkv": "qkv"},
)


@dataclass(frozen=True, eq=False)
class PruningResult:
    """The result of `prune`: the model, the removed heads (their old numbers), and the number of heads that are left.

    `parameters_before` and `parameters_after` count the parameters of the model.

    >>> import regard as rg
    >>> encoder = rg.nn.TransformerConfig(8, num_heads=4).encoder(layers=1)
    >>> pruned = rg.prune(encoder, {"layers.0.self_attention": [1, 2]})
    >>> pruned.left, pruned.parameters_before - pruned.parameters_after  # 3 * (4 * 8 + 4) + 8 * 4
    ({'layers.0.self_attention': 2}, 140)
    """

    model: Any
    removed: dict[str, list[int]]
    left: dict[str, int]
    parameters_before: int
    parameters_after: int
    in_place: bool

    def table(self) -> str:
        """A plain-text table with one line per pruned module, and the total."""
        width = max([len(name) for name in self.left] + [6])
        lines = [f"{'module':{width}} left  removed"]
        lines += [f"{name:{width}} {self.left[name]:4d}  {_listed(heads)}" for name, heads in self.removed.items()]
        return "\n".join([*lines, repr(self)])

    def __repr__(self) -> str:
        where = "in place" if self.in_place else "in a copy"
        count = sum(map(len, self.removed.values()))
        return (
            f"PruningResult({count} heads {where}: {self.parameters_before:,} -> {self.parameters_after:,} parameters)"
        )


def prune(
    model: nn.Module, heads: Mapping[Any, Iterable[int]] | Iterable[tuple[Any, int]], copy: bool = False
) -> PruningResult:
    """Remove heads from the weights of a model, in place; its outputs equal those with gates of zero.

    Multi-head attention is the sum over heads of head_h W_h plus a bias (Michel et al., 2019,
    arXiv:1905.10650): removing a head deletes its rows of the query, key and value projections and its
    columns of the output projection. `heads` is {module path: [head, ...]} or a list of (module path, head), such as
    `importance.least(10)`. If query heads share key heads, remove whole groups (`least(count, groups=True)`). All heads
    are checked before the model is changed; `copy=True` prunes a deep copy.

    Afterwards the heads have new numbers. The configuration keeps the old number of heads, and an existing optimizer
    holds the old weights. To load a checkpoint of a pruned model, prune a new model by the same `removed` first.

    >>> import transformers, regard as rg
    >>> config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=8, vocab_size=9, n_positions=9)
    >>> rg.prune(transformers.GPT2Model(config), {"h.0.attn": [1, 2], "h.1.attn": [0]})
    PruningResult(3 heads in place: 1,904 -> 1,694 parameters)
    """
    if not isinstance(copy, bool):
        raise RegardError(
            f"prune(copy={type(copy).__name__}): give True, which prunes a deep copy, or False, which prunes the model."
        )
    layers = ModelHeads.of(model, "prune")
    removed = {name: numbers for name, numbers in layers.select(heads).items() if numbers}
    for name, numbers in removed.items():
        _check(layers[name], numbers)
    before = _num_parameters(model)
    if copy:
        model = copying.deepcopy(model)
        layers = ModelHeads.of(model, "prune")
    for name, numbers in removed.items():
        _remove(layers[name], numbers)
    left = {name: layer.num_heads - len(removed.get(name, ())) for name, layer in layers.by_name.items()}
    return PruningResult(model, removed, left, before, _num_parameters(model), not copy)


def _num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


# Checks


def _check(heads: Heads, numbers: list[int]) -> None:
    """Refuse modules and heads for which removal would differ from gates of zero."""
    kind = type(heads.module)
    is_prunable = kind.__module__.startswith("transformers.") and kind.__name__ in PRUNABLE
    if not is_prunable and kind is not MultiHeadAttention:
        supported = ", ".join(sorted(name.removesuffix("Attention").removesuffix("Self") for name in PRUNABLE))
        raise RegardError(
            f"prune: {kind.__name__} ({heads.name}) cannot be pruned; the attention of regard.nn and of these models "
            f"can: {supported}. {_remedy(heads, numbers)}"
        )
    reason = _obstacle(heads)
    if reason:
        raise RegardError(f"prune: {heads.name} cannot be pruned: {reason}. {_remedy(heads, numbers)}")
    if len(numbers) == heads.num_heads:
        raise RegardError(
            f"prune: these are all {heads.num_heads} heads of {heads.name}, and attention without heads cannot run. "
            f"Keep one head, or: {_remedy(heads, numbers)}"
        )
    _check_groups(heads, numbers)


def _remedy(heads: Heads, numbers: list[int]) -> str:
    """The sentence that says how to switch heads off by gates instead."""
    gates = [float(head not in numbers) for head in range(heads.num_heads)]
    shown = gates if len(gates) <= 16 else "zeros for these heads, ones for the others"
    return f"regard.hf.gated(model, {{{heads.name!r}: {shown}}}) switches the heads off without removing them."


def _check_groups(heads: Heads, numbers: list[int]) -> None:
    """Refuse to remove a part of the heads that share one key and value head. `numbers` are the heads to remove."""
    size, removed = heads.group, set(numbers)
    groups = [range(first, first + size) for first in range(0, heads.num_heads, size)]
    incomplete = [group for group in groups if 0 < len(removed.intersection(group)) < size]
    if incomplete:
        listed = "; ".join(_listed(group) for group in incomplete)
        raise RegardError(
            f"prune: in {heads.name} each {size} query heads share one key and value head, so only whole groups can be "
            f"removed. Of the heads {_listed(numbers)}, these groups are incomplete: {listed}. "
            f"importance.least(count, groups=True) chooses whole groups. {_remedy(heads, numbers)}"
        )


def _obstacle(heads: Heads) -> str | None:
    """The reason why the projections of a module cannot be pruned; None if they can."""
    if not isinstance(heads.module, MultiHeadAttention) and fills_width(type(heads.module)):
        return "this transformers reshapes its heads to the width of the model, which fewer heads do not have"
    layout = _layout(heads)
    if layout is None:
        return f"its projections have the unknown names {_names(heads.module)}"
    projections = {name: heads.module.get_submodule(name) for name in layout}
    for name, projection in {**projections, "the output projection": heads.output}.items():
        weight = getattr(projection, "weight", None)
        if type(projection) is not nn.Linear and type(projection).__name__ != "Conv1D":
            kind = type(projection).__name__
            return f"{name} is a {kind}, not a plain Linear (prune before quantizing; merge adapters before pruning)"
        if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.is_meta:
            return f"{name} has no weights of a floating type in memory"
    for name, parts in layout.items():
        weight: Any = projections[name].weight
        outputs, needed = weight.shape[_axis(projections[name], "out")], sum(_sizes(heads, parts))
        if outputs != needed:
            return f"{name} has {outputs} outputs, but {parts} of its heads have {needed}"
    return _others(heads, set(projections.values()) | {heads.output})


def _others(heads: Heads, projections: set[nn.Module]) -> str | None:
    """The reason if a parameter outside the projections may belong to single heads (sinks, biases, norms)."""
    if isinstance(heads.module, MultiHeadAttention):
        return _piece_per_head(heads.module.attention)
    pruned = {id(parameter) for projection in projections for parameter in projection.parameters()}
    for name, parameter in heads.module.named_parameters():
        inside_heads = "norm" in name and parameter.shape == (heads.head_dim,)
        if id(parameter) not in pruned and not inside_heads:
            return f"{name} {tuple(parameter.shape)} may belong to single heads"
    return None


def _piece_per_head(attention: Attention | Composite) -> str | None:
    """The reason if a piece of the attention has a parameter for each head."""
    if isinstance(attention, Composite):
        return (
            f"its {type(attention).__name__} is made of several attentions, whose parts may have numbers for each head"
        )
    pieces = [bias for bias in attention.bias if not (is_shaw(bias) or is_softcap(bias))]
    pieces += [attention.normalizer] if any(tensor.ndim for tensor in tensors_of(attention.normalizer)) else []
    pieces += [attention.score] if isinstance(attention.score, Bilinear) and len(attention.score.weight) > 1 else []
    pieces += [attention.transition] if tensors_of(attention.transition) else []
    return f"its {type(pieces[0]).__name__} has a number for each head" if pieces else None


# Weights


def _layout(heads: Heads) -> dict[str, str] | None:
    """Projection -> which of queries, keys and values ("q", "kv", ...) it computes; None for unknown names."""
    children = dict(heads.module.named_children())
    return next((layout for layout in LAYOUTS if layout.keys() <= children.keys()), None)


def _names(module: nn.Module) -> str:
    """The names of the children that have weights, for an error."""
    return ", ".join(name for name, child in module.named_children() if getattr(child, "weight", None) is not None)


def _sizes(heads: Heads, parts: str) -> list[int]:
    """The numbers of outputs for queries, keys and values of a projection."""
    counts = {"q": heads.num_heads, "k": heads.num_heads // heads.group, "v": heads.num_heads // heads.group}
    return [counts[part] * heads.head_dim for part in parts]


def _axis(projection: nn.Module, side: str) -> int:
    """The axis of inputs ("in") or outputs ("out"): Conv1D has a weight (inputs, outputs), Linear (outputs, inputs)."""
    return int((side == "in") is (type(projection) is nn.Linear))


def _remove(heads: Heads, numbers: list[int]) -> None:
    """Remove the heads of these numbers from the projections of a module, and set its sizes.

    Only whole groups are removed, so the first query head of a group says whether its key head stays.
    """
    queries = [head for head in range(heads.num_heads) if head not in numbers]
    keys = [head // heads.group for head in queries if head % heads.group == 0]
    for name, parts in (_layout(heads) or {}).items():
        projection, kept, start = heads.module.get_submodule(name), [], 0
        for part, size in zip(parts, _sizes(heads, parts), strict=True):
            kept.append(start + _columns(queries if part == "q" else keys, heads.head_dim))
            start += size
        _cut(projection, torch.cat(kept), "out")
    _cut(heads.output, _columns(queries, heads.head_dim), "in")
    _set_sizes(heads.module, len(queries), len(keys), heads.head_dim)


def _columns(heads: list[int], head_dim: int) -> Tensor:
    """The indices of the channels of these heads."""
    return (torch.tensor(heads)[:, None] * head_dim + torch.arange(head_dim)).flatten()


def _cut(projection: nn.Module, kept: Tensor, side: str) -> None:
    """Keep only some inputs (`side` "in") or outputs ("out") of a Linear or Conv1D: the indices `kept`.

    The module stays, and so do its hooks.
    """
    projection.weight = _kept(projection.weight, kept, _axis(projection, side))
    if side == "out" and isinstance(projection.bias, Tensor):
        projection.bias = _kept(projection.bias, kept, 0)
    linear = type(projection) is nn.Linear
    attribute = {"in": "in_features" if linear else "nx", "out": "out_features" if linear else "nf"}[side]
    setattr(projection, attribute, len(kept))


def _kept(parameter: Any, kept: Tensor, axis: int) -> nn.Parameter:
    """A new parameter with these indices of an axis."""
    smaller = parameter.detach().index_select(axis, kept.to(parameter.device))
    return nn.Parameter(smaller, requires_grad=parameter.requires_grad)


def _set_sizes(module: nn.Module, num_heads: int, num_key_value_heads: int, head_dim: int) -> None:
    """Set the attributes that the module's forward reads, as far as it has them, to the numbers of heads that stay."""
    sizes: dict[str, int] = {"num_key_value_heads": num_key_value_heads} | dict.fromkeys(COUNTS, num_heads)
    sizes |= dict.fromkeys(("all_head_size", "split_size"), num_heads * head_dim)
    for name, size in sizes.items():
        if name in vars(module):
            setattr(module, name, size)
