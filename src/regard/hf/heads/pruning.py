"""Heads removed from the weights of a Hugging Face model, or of one built of `regard.nn`."""

from __future__ import annotations

import copy as copying
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.errors import RegardError
from regard.hf.heads.layout import COUNTS, Heads, ModelHeads
from regard.nn import MultiHeadAttention
from regard.pieces import Bilinear, LearnedSink, ShawBias, Softcap

#: Attention classes whose forward takes the number of heads from the weights or from the attributes set below.
#: Each is tested against gating to zero; a class that reads the configuration instead would fail or be wrong.
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
#: Child -> which of queries, keys and values its output holds, one after the other.
LAYOUTS: tuple[dict[str, str], ...] = (
    {"query": "q", "key": "k", "value": "v"},
    {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
    {"q_lin": "q", "k_lin": "k", "v_lin": "v"},
    {"q_attn": "q", "c_attn": "kv"},
    {"c_attn": "qkv"},
    {"Wqkv": "qkv"},
)


@dataclass(frozen=True, eq=False)
class Pruned:
    """What `prune` did: the model, the heads removed (numbered as before), the heads left, parameters then and now.

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
        """One line for each module that lost heads, and the total, in plain text."""
        width = max([len(name) for name in self.left] + [6])
        lines = [f"{'module':{width}} left  removed"]
        lines += [f"{name:{width}} {self.left[name]:4d}  {_listed(heads)}" for name, heads in self.removed.items()]
        return "\n".join([*lines, repr(self)])

    def __repr__(self) -> str:
        where = "in place" if self.in_place else "in a copy"
        count = sum(map(len, self.removed.values()))
        return f"Pruned({count} heads {where}: {self.parameters_before:,} -> {self.parameters_after:,} parameters)"


def prune(
    model: nn.Module, heads: Mapping[Any, Iterable[int]] | Iterable[tuple[Any, int]], copy: bool = False
) -> Pruned:
    """Remove heads from the weights of a model, in place: outputs equal those of gating them to zero.

    Multi-head attention is the sum over heads of head_h W_h plus a bias (Michel et al., 2019,
    arXiv:1905.10650): without a head, its rows of the query, key and value projections and its columns
    of the output projection go. `heads` is {module path: [head, ...]} or a list of (module path, head),
    such as `importance.least(10)`. Where query heads share key heads, whole groups go (`groups=True`
    there). Everything is checked before anything is changed; `copy=True` prunes a deep copy instead.

    Afterwards heads are numbered anew, the configuration still tells the old number, and an optimizer made
    before holds the old weights. A checkpoint loads into a fresh model pruned by the same `removed`.

    >>> import transformers, regard as rg
    >>> config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=8, vocab_size=9, n_positions=9)
    >>> rg.prune(transformers.GPT2Model(config), {"h.0.attn": [1, 2], "h.1.attn": [0]})
    Pruned(3 heads in place: 1,904 -> 1,694 parameters)
    """
    found = ModelHeads.of(model, "prune")
    removed = {name: numbers for name, numbers in found.select(heads).items() if numbers}
    for name, numbers in removed.items():
        _check(found[name], numbers)
    before = _parameters(model)
    if copy:
        model = copying.deepcopy(model)
        found = ModelHeads.of(model, "prune")
    for name, numbers in removed.items():
        _remove(found[name], numbers)
    left = {name: each.num_heads - len(removed.get(name, ())) for name, each in found.found.items()}
    return Pruned(model, removed, left, before, _parameters(model), not copy)


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


# What is refused


def _check(heads: Heads, numbers: list[int]) -> None:
    """Refuse what cannot be cut, and cuts that would leave another model than gating does."""
    kind = type(heads.module)
    theirs = kind.__module__.startswith("transformers.") and kind.__name__ in PRUNABLE
    if not theirs and kind is not MultiHeadAttention:
        supported = ", ".join(sorted(name.removesuffix("Attention").removesuffix("Self") for name in PRUNABLE))
        raise RegardError(
            f"prune: {kind.__name__} ({heads.name}) cannot be pruned; supported is the attention of regard.nn and of "
            f"{supported}. "
            f"{_remedy(heads, numbers)}"
        )
    reason = _uncuttable(heads)
    if reason:
        raise RegardError(f"prune: {heads.name} cannot be cut: {reason}. {_remedy(heads, numbers)}")
    if len(numbers) == heads.num_heads:
        raise RegardError(
            f"prune: all {heads.num_heads} heads of {heads.name} were asked for, and attention without any head does "
            f"not run. Keep one, or: {_remedy(heads, numbers)}"
        )
    _check_groups(heads, numbers)


def _remedy(heads: Heads, numbers: list[int]) -> str:
    gates = [float(head not in numbers) for head in range(heads.num_heads)]
    shown = gates if len(gates) <= 16 else "zeros for these heads, ones for the others"
    return f"regard.gated(model, {{{heads.name!r}: {shown}}}) switches the heads off without cutting."


def _check_groups(heads: Heads, numbers: list[int]) -> None:
    R, gone = heads.group, set(numbers)
    groups = [range(first, first + R) for first in range(0, heads.num_heads, R)]
    torn = [group for group in groups if 0 < len(gone.intersection(group)) < R]
    if torn:
        named = "; ".join(_listed(group) for group in torn)
        raise RegardError(
            f"prune: in {heads.name} every {R} query heads share one key and value head, and go together. Asked for "
            f"were {_listed(numbers)}; groups asked for in part: {named}. importance.least(count, groups=True) "
            f"chooses whole groups. {_remedy(heads, numbers)}"
        )


def _uncuttable(heads: Heads) -> str | None:
    """Why these projections cannot be cut, if so."""
    layout = _layout(heads)
    if layout is None:
        return f"its projections are called {_names(heads.module)}"
    projections = {name: heads.module.get_submodule(name) for name in layout}
    for name, projection in {**projections, "the output projection": heads.output}.items():
        weight = getattr(projection, "weight", None)
        if type(projection) is not nn.Linear and type(projection).__name__ != "Conv1D":
            kind = type(projection).__name__
            return f"{name} is a {kind}, not a plain Linear (prune before quantising; merge adapters before pruning)"
        if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.is_meta:
            return f"{name} has no weights of a floating type in memory"
    for name, parts in layout.items():
        outputs, needed = _number_of_outputs(projections[name]), sum(_sizes(heads, parts))
        if outputs != needed:
            return f"{name} has {outputs} outputs where {parts} of its heads have {needed}"
    return _others(heads, set(projections.values()) | {heads.output})


def _others(heads: Heads, projections: set[nn.Module]) -> str | None:
    """A parameter besides the projections that may belong to single heads (sinks, biases, norms over all heads)."""
    if isinstance(heads.module, MultiHeadAttention):
        return _made_for_heads(heads.module.attention)
    cut = {id(parameter) for projection in projections for parameter in projection.parameters()}
    for name, parameter in heads.module.named_parameters():
        inside_heads = "norm" in name and parameter.shape == (heads.width,)
        if id(parameter) not in cut and not inside_heads:
            return f"{name} {tuple(parameter.shape)} may belong to single heads"
    return None


def _made_for_heads(attention: Attention) -> str | None:
    """A piece that knows how many heads there are."""
    pieces = [bias for bias in attention.bias if not isinstance(bias, ShawBias | Softcap)]
    pieces += [attention.normalizer] if isinstance(attention.normalizer, LearnedSink) else []
    pieces += [attention.score] if isinstance(attention.score, Bilinear) and len(attention.score.weight) > 1 else []
    return f"its {type(pieces[0]).__name__} has a number for each head" if pieces else None


# The cut


def _layout(heads: Heads) -> dict[str, str] | None:
    children = dict(heads.module.named_children())
    return next((layout for layout in LAYOUTS if layout.keys() <= children.keys()), None)


def _names(module: nn.Module) -> str:
    return ", ".join(name for name, child in module.named_children() if getattr(child, "weight", None) is not None)


def _sizes(heads: Heads, parts: str) -> list[int]:
    """How many outputs belong to each of the queries, keys and values of a projection."""
    whole = {"q": heads.num_heads, "k": heads.num_heads // heads.group, "v": heads.num_heads // heads.group}
    return [whole[part] * heads.width for part in parts]


def _number_of_outputs(projection: Any) -> int:
    return projection.weight.shape[_axis(projection, "out")]


def _axis(projection: nn.Module, side: str) -> int:
    """Conv1D holds its weight as (inputs, outputs), Linear as (outputs, inputs)."""
    return int((side == "in") is (type(projection) is nn.Linear))


def _remove(heads: Heads, numbers: list[int]) -> None:
    queries = [head for head in range(heads.num_heads) if head not in numbers]
    keys = [head // heads.group for head in queries if head % heads.group == 0]
    for name, parts in (_layout(heads) or {}).items():
        projection, kept, start = heads.module.get_submodule(name), [], 0
        for part, size in zip(parts, _sizes(heads, parts), strict=True):
            kept.append(start + _columns(queries if part == "q" else keys, heads.width))
            start += size
        _cut(projection, torch.cat(kept), "out")
    _cut(heads.output, _columns(queries, heads.width), "in")
    _tell(heads.module, len(queries), len(keys), heads.width)


def _columns(heads: list[int], width: int) -> Tensor:
    return (torch.tensor(heads)[:, None] * width + torch.arange(width)).flatten()


def _cut(projection: nn.Module, kept: Tensor, side: str) -> None:
    """Keep some inputs or outputs of a Linear or a Conv1D; the module stays, so hooks on it do."""
    projection.weight = _kept(projection.weight, kept, _axis(projection, side))
    if side == "out" and isinstance(projection.bias, Tensor):
        projection.bias = _kept(projection.bias, kept, 0)
    linear = type(projection) is nn.Linear
    attribute = {"in": "in_features" if linear else "nx", "out": "out_features" if linear else "nf"}[side]
    setattr(projection, attribute, len(kept))


def _kept(parameter: Any, kept: Tensor, axis: int) -> nn.Parameter:
    smaller = parameter.detach().index_select(axis, kept.to(parameter.device))
    return nn.Parameter(smaller, requires_grad=parameter.requires_grad)


def _tell(module: nn.Module, num_heads: int, num_key_heads: int, width: int) -> None:
    """Set what the module's own forward reads."""
    sizes = dict.fromkeys(COUNTS, num_heads) | dict.fromkeys(("all_head_size", "split_size"), num_heads * width)
    sizes |= dict.fromkeys(("num_key_value_heads", "num_key_heads"), num_key_heads)
    for name, size in sizes.items():
        if name in vars(module):
            setattr(module, name, size)
