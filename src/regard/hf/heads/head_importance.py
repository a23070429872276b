"""`importance` measures how much a loss depends on each head (Michel et al., 2019)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.hf.heads.gates import apply_gates
from regard.hf.heads.model_heads import ModelHeads


@dataclass(frozen=True, eq=False)
class ImportanceScores:
    """|d loss / d gate| of every head, by module path.

    `values[name]` is (H,). `missing` names the modules without values, with the reason. `groups[name]` is the number of
    consecutive heads that share one key and value head. `batches` is the number of batches in the mean. `output` and
    `num_heads` are the arguments of `importance` that say where the heads are.

    >>> import torch, regard as rg
    >>> found = rg.hf.ImportanceScores({"a": torch.tensor([0.3, 0.1]), "b": torch.tensor([0.4, 0.2])}, batches=1)
    >>> found.ranking()
    [('a', 1), ('b', 1), ('a', 0), ('b', 0)]
    >>> found.least(2)
    [('a', 1), ('b', 1)]
    """

    values: dict[str, Tensor]
    batches: int
    missing: dict[str, str] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    output: str | None = None
    num_heads: int | None = None

    def normalized(self) -> ImportanceScores:
        """Divide each layer by its l2 norm, as Michel et al. do to compare heads of different layers."""
        norms = {name: value.norm().clamp_min(torch.finfo(value.dtype).tiny) for name, value in self.values.items()}
        return replace(self, values={name: value / norms[name] for name, value in self.values.items()})

    def ranking(self, groups: bool = False) -> list[tuple[str, int]]:
        """Every (module, head), the least important first; heads with equal values are in the order of the model.

        With `groups`, heads that share a key head stay together and are ranked by their mean: `prune` can only remove
        whole groups.
        """
        return [head for unit in self._units(groups) for head in unit]

    def least(self, count: int, groups: bool = False) -> list[tuple[str, int]]:
        """The `count` least important heads that `prune` can remove; every layer keeps its most important head.

        With `groups`, only whole groups, at most `count` heads.
        """
        removable = sum(len(value) for value in self.values.values())
        if not 0 <= count <= removable:
            raise RegardError(f"Importance.least: the model has {removable} heads, got {count}.")
        units = self._units(groups)
        best = {unit[0][0]: unit for unit in units}  # the last, so most important, unit of each module
        chosen: list[tuple[str, int]] = []
        for unit in units:
            if unit is not best[unit[0][0]] and len(chosen) + len(unit) <= count:
                chosen += unit
        return chosen

    def _units(self, groups: bool) -> list[list[tuple[str, int]]]:
        """Heads that can only be removed together, (module, head) each, the least important unit first.

        With `groups` these are the query heads that share a key head; without, each head is a unit.
        """
        scored = []
        for name, value in self.values.items():
            size = self.groups.get(name, 1) if groups else 1
            for first, score in enumerate(value.unflatten(0, (-1, size)).mean(-1).tolist()):
                scored.append((score, [(name, head) for head in range(first * size, (first + 1) * size)]))
        return [unit for _, unit in sorted(scored, key=lambda scored: scored[0])]

    def table(self) -> str:
        """A plain-text table with one line per module and one column per head."""
        width = max([len(name) for name in self.values] + [6])
        most = max((len(value) for value in self.values.values()), default=0)
        lines = [f"{'module':{width}} " + " ".join(f"{head:>9}" for head in range(most))]
        for name, value in self.values.items():
            lines.append(f"{name:{width}} " + " ".join(f"{number:9.3g}" for number in value.tolist()))
        return "\n".join(lines + [f"{name:{width}} unknown: {reason}" for name, reason in self.missing.items()])

    def __repr__(self) -> str:
        heads = sum(len(value) for value in self.values.values())
        return f"ImportanceScores({heads} heads of {len(self.values)} modules, {self.batches} batches)"


@checked
def importance(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batches: Iterable[Any],
    output: str | None = None,
    num_heads: int | None = None,
) -> ImportanceScores:
    """I_h = mean over batches of |d loss / d g_h| at g = 1, where head_h -> g_h head_h.

    The derivative with respect to a head mask (Michel et al., 2019, arXiv:1905.10650): the first-order change of the
    loss when the head is removed. `loss(model, batch)` returns a scalar. Absolute values of examples in one batch
    cannot be separated, so use batches of one example for the paper's mean over examples. Put the model in eval mode,
    unless you want dropout in the measurement. Wrap `batches` in a progress bar to see the progress. The model and the
    gradients of its parameters are not changed.

    The first order has limits. If two heads can replace each other, both seem unimportant. At a minimum of the loss,
    such as the distance of an embedding to itself, all derivatives are 0, so every head seems unimportant.

    Multi-head attention that you wrote yourself is found if its output projection has a usual name (W_o, out_proj,
    fc_out, ...) and its input the heads one after the other. If it has another name, `output` is its path inside the
    attention module, such as "linears.3"; a projection to queries, keys or values is refused. `num_heads` is for
    modules that do not have it as an attribute.

    >>> import torch, transformers, regard as rg
    >>> config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=4, vocab_size=9)
    >>> model = transformers.GPT2LMHeadModel(config).eval()
    >>> ids = torch.tensor([[1, 2, 3, 4]])
    >>> found = rg.importance(model, lambda model, ids: model(ids, labels=ids).loss, [ids])
    >>> found, found.values["transformer.h.1.attn"].shape
    (ImportanceScores(4 heads of 2 modules, 1 batches), torch.Size([2]))
    """
    if isinstance(batches, Mapping | Tensor | str):
        raise RegardError(f"importance: batches is a {type(batches).__name__}; give a list of batches: [batch].")
    heads = ModelHeads.of(model, "importance", output, num_heads)
    with torch.inference_mode(False), torch.enable_grad():
        gates = {name: _ones(layer.num_heads, layer.weight) for name, layer in heads.by_name.items()}
        totals, ran, count = {name: torch.zeros_like(gate) for name, gate in gates.items()}, set(), 0
        with apply_gates(heads, gates):
            for count, batch in enumerate(batches, 1):  # noqa: B007
                for name, slope in _slopes(loss(model, batch), gates).items():
                    totals[name] += slope.abs()
                    ran.add(name)
    if not count:
        raise RegardError("importance: there are no batches. An iterator can be read only once: give a list.")
    idle = dict.fromkeys((name for name in totals if name not in ran), "the loss does not depend on it")
    values = {name: (total.detach() / count).cpu() for name, total in totals.items() if name in ran}
    groups = {name: heads.by_name[name].group for name in values}
    return ImportanceScores(values, count, heads.unknown | idle, groups, output, num_heads)


def _ones(num_heads: int, weight: Tensor) -> Tensor:
    """Gates of 1, at least in float32: sums over batches are inaccurate in lower precision."""
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    device = "cpu" if weight.device.type == "meta" else weight.device
    return torch.ones(num_heads, dtype=dtype, device=device, requires_grad=True)


def _slopes(loss: Tensor, gates: dict[str, Tensor]) -> dict[str, Tensor]:
    """d loss / d gate, for the gates on which the loss depends. The .grad of parameters is not changed."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise RegardError(f"importance: loss(model, batch) must return a scalar tensor, got {got}. Take a mean or sum.")
    if not loss.requires_grad:
        raise RegardError(
            "importance: the loss does not depend on any head through differentiable operations. Compute it without "
            "torch.no_grad, .detach() or .item(), with the model that is passed to loss(model, batch)."
        )
    if not loss.isfinite():
        raise RegardError(f"importance: the loss of a batch is {loss.item()}; its derivative is not defined.")
    slopes = torch.autograd.grad(loss.sum(), list(gates.values()), allow_unused=True)
    return {name: slope for name, slope in zip(gates, slopes, strict=True) if slope is not None}
