"""`ModelHeads` locates the heads of a model: the output projection, number and width of heads of each attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, NoReturn

from torch import Tensor, nn

from regard.base.errors import RegardError, nearest
from regard.hf.adapters import adapter_of
from regard.hf.attention_modules import attention_modules, layer_number
from regard.hf.names import BETWEEN, BY_HAND, COUNTS, COUNTS_BY_HAND, HEADS_OR_HEIGHT, OUTPUTS, WIDTHS, sides_of
from regard.hf.output_projections import LinearLayer, UnreadableMatrix, num_inputs, output_projection
from regard.hf.recurrent.core_functions import core_names
from regard.nn import Attends, MultiHeadAttention


@dataclass(frozen=True, eq=False)
class Heads:
    """The heads of one attention module.

    Head h is `input[..., h * head_dim : (h + 1) * head_dim]` of the input of the output projection. Each `group`
    consecutive query heads share one key and value head (1: nothing is shared).
    """

    name: str
    module: nn.Module
    output: nn.Module
    num_heads: int
    head_dim: int
    group: int

    @property
    def output_path(self) -> str:
        """The path of the output projection inside the attention module; empty if it is beside the module."""
        return next((path for path, part in self.module.named_modules() if part is self.output), "")

    @property
    def weight(self) -> Tensor:
        """The first tensor of the output projection; gates are on its device."""
        return next(iter((*self.output.parameters(), *self.output.buffers())))

    @property
    def output_matrices(self) -> Tensor:
        """The part of the output projection that each head writes with, (H, head_dim, C)."""
        return matrix_of(self.output, self.name).unflatten(0, (self.num_heads, self.head_dim))

    def check(self, caller: str, head: Any) -> int:
        """The number of a head, as an int; a number that the module does not have is refused."""
        try:
            number = -1 if isinstance(head, bool) else index(head)
        except TypeError:
            number = -1
        if not 0 <= number < self.num_heads:
            raise RegardError(f"{caller}: {self.name} has heads 0 to {self.num_heads - 1}, got {head!r}.")
        return number


#: Why the heads of a recurrent layer are unknown here: a norm or gate between them and the projection may join them.
RECURRENT = (
    "it is recurrent, and what follows its heads may join them before the output projection. "
    "rg.edit(model, rg.edits.ScaleWeights(rg.Where(layers=..., heads=...), factor)) scales their outputs"
)


@dataclass(frozen=True, eq=False)
class ModelHeads:
    """The heads of a model by module path; `unknown` has the attention modules whose heads were not found, and why.

    `recurrent` are the paths of recurrent layers. `caller` is the call that errors name.
    """

    caller: str
    by_name: dict[str, Heads]
    unknown: dict[str, str]
    recurrent: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: nn.Module, caller: str, output: str | None = None, num_heads: int | None = None) -> ModelHeads:
        """Find the heads of all attention modules. Error messages name `caller`.

        `output` is the path of the output projection inside an attention module; it counts before the known names.
        `num_heads` is for modules that do not have their number of heads.
        """
        check_model(model, caller)
        attending = attention_modules(model)
        hints = HeadHints(caller, output, _told_number(caller, num_heads))
        hints.check_output(attending)
        found = {name: _heads(model, name, module, hints) for name, module in attending.items()}
        by_name = {name: heads for name, heads in found.items() if isinstance(heads, Heads)}
        unknown = {name: reason for name, reason in found.items() if isinstance(reason, str)}
        recurrent = frozenset(name for name, part in model.named_modules() if core_names(part))
        if not by_name:
            reasons = "; ".join(dict.fromkeys(unknown.values())) or (
                RECURRENT if recurrent else "it has no attention modules"
            )
            raise RegardError(f"{caller}: no heads were found in {type(model).__name__}: {reasons}.")
        return cls(caller, by_name, unknown, recurrent)

    def __getitem__(self, name: str | int) -> Heads:
        """The heads of a module path, or of a layer number if the layer has one attention module."""
        if isinstance(name, int) and not isinstance(name, bool):
            name = self._numbered(name)
        if name in self.unknown:
            raise RegardError(f"{self.caller}: the heads of {name!r} are not known: {self.unknown[name]}.")
        if name in self.recurrent - self.by_name.keys():
            raise RegardError(f"{self.caller}: the heads of {name!r} are not known: {RECURRENT}.")
        if name not in self.by_name:
            raise RegardError(f"{self.caller}: no attention module {name!r}. {nearest(str(name), self.by_name)}")
        return self.by_name[name]

    def _numbered(self, layer: int) -> str:
        """The path of the only attention module of a layer."""
        names = [name for name in self.by_name if layer_number(name) == layer]
        if len(names) != 1:
            which = f"is in {', '.join(names)}" if names else f"is in none of {', '.join(self.by_name)}"
            raise RegardError(f"{self.caller}: layer {layer} {which}. Give the module path.")
        return names[0]

    def select(self, chosen: Mapping[Any, Iterable[int]] | Iterable[tuple[Any, int]]) -> dict[str, list[int]]:
        """Heads from {module: [head, ...]} or (module, head) pairs: checked, sorted, without duplicates."""
        selected: dict[str, set[int]] = {}
        for name, head in _pairs(self.caller, chosen):
            heads = self[name]
            selected.setdefault(heads.name, set()).add(heads.check(self.caller, head))
        return {name: sorted(numbers) for name, numbers in selected.items()}


def matrix_of(layer: nn.Module, path: str) -> Tensor:
    """The matrix (inputs, outputs) of a linear layer of an attention module; its errors name the module."""
    try:
        return LinearLayer(layer).matrix
    except UnreadableMatrix as reason:
        raise RegardError(f"reading the weights of {path}: {reason}.") from reason


def check_model(model: object, caller: str) -> None:
    """Refuse objects that are no modules, and compiled modules, which ignore the hooks of gates.

    Here and below `caller` is the name of the public function, for errors.
    """
    if not isinstance(model, nn.Module):
        raise RegardError(f"{caller}: expected a Hugging Face model, got {type(model).__name__}.")
    for module in model.modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise RegardError(
                f"{caller}: {type(module).__name__} is compiled, and compiled code ignores hooks and new weights. "
                "Use the model before torch.compile (model._orig_mod), and compile it again afterwards."
            )


@dataclass(frozen=True)
class HeadHints:
    """What a caller says about the attention modules of a model: the path of the output projection, and the heads."""

    caller: str
    output: str | None
    num_heads: int | None

    def check_output(self, attending: Mapping[str, nn.Module]) -> None:
        """Refuse a path that no attention module has, or that has the name of an input projection."""
        if self.output is None or not attending:
            return
        having = {name: module for name, module in attending.items() if self.output in _linear_paths(module)}
        if not having:
            paths = [path for module in attending.values() for path in _linear_paths(module)]
            raise RegardError(
                f"{self.caller}: no attention module has an output projection {self.output!r}. "
                f"{nearest(self.output, paths)}"
            )
        if sides_of(self.output):
            name, module = next(iter(having.items()))
            refuse_input(self.caller, name, module, self.output, "computes queries, keys or values, as its name says")

    def check_num_heads(self, name: str, own: int | None, size: int) -> None:
        """Refuse a number of heads that is not that of a module, or does not divide the inputs of its projection.

        `own` is the number that the module has, if it has one, and `size` the width of these inputs.
        """
        if self.num_heads is None:
            return
        call = f"{self.caller}(num_heads={self.num_heads})"
        if own and own != self.num_heads:
            raise RegardError(
                f"{call}: {name} has {own} heads. num_heads is for modules that do not have their number of heads: "
                "leave it out, and set it as the attribute `num_heads` of those modules."
            )
        if size % self.num_heads:
            divisors = ", ".join(str(number) for number in range(1, size + 1) if size % number == 0)
            raise RegardError(
                f"{call}: heads have equal width, so the number of heads must divide the {size} inputs of the output "
                f"projection of {name}: {divisors}."
            )


def _told_number(caller: str, num_heads: Any) -> int | None:
    """A number of heads that a user gave, as an int of at least 1; None if none was given."""
    try:
        number = 0 if isinstance(num_heads, bool) else index(num_heads if num_heads is not None else 1)
    except TypeError:
        number = 0
    if number < 1:
        raise RegardError(f"{caller}(num_heads={num_heads!r}): num_heads must be an integer of at least 1.")
    return None if num_heads is None else number


def refuse_input(caller: str, name: str, module: nn.Module, path: str, reason: str) -> NoReturn:
    """Raise the error for an input projection in the place of the output projection.

    `name` is the path of the attention module, `path` that of the projection inside it, and `reason` what is wrong.
    """
    kind, part = type(module).__name__, module.get_submodule(path)
    others = [repr(other) for other in _linear_paths(module) if other != path and not sides_of(other)]
    weight = getattr(part, "weight", None)
    shape = tuple(weight.shape) if isinstance(weight, Tensor) else ()
    remedy = f"Give its path in {kind}: output={' or '.join(others)}." if others else f"{kind} has no other layer."
    raise RegardError(
        f"{caller}: {name + '.' if name else ''}{path}, a {type(part).__name__} with a weight of shape "
        f"{shape}, {reason}. The output projection is the layer that reads the concatenated heads. {remedy}"
    )


def _heads(model: nn.Module, name: str, module: nn.Module, hints: HeadHints) -> Heads | str:
    """The heads of one attention module at the path `name`, or the reason why they are unknown."""
    reason = _without_output(module)
    if reason:
        return reason
    if isinstance(module, MultiHeadAttention):
        assert module.output is not None
        hints.check_num_heads(name, module.num_heads, module.num_heads * module.head_dim)
        group = module.num_heads // module.num_key_value_heads
        return Heads(name, module, module.output, module.num_heads, module.head_dim, group)
    kind, output = type(module).__name__, output_projection(model, name, module, hints.output)
    size = num_inputs(output)
    if output is None or size is None:
        names = ", ".join((*OUTPUTS, *BY_HAND))
        return f"{kind} has no output projection of a known name ({names}). Give its path in {kind}: output='...'"
    adapter = adapter_of(module)
    by_adapter = () if adapter is None or adapter.num_heads is None else (adapter.num_heads,)
    counts = (*by_adapter, *COUNTS, *COUNTS_BY_HAND, HEADS_OR_HEIGHT)  # attributes with the number of heads
    head_dim = _number(module, WIDTHS)
    known = _number(module, counts) or (size // head_dim if head_dim else 0)  # 0: the module does not say it
    hints.check_num_heads(name, known, size)
    num_heads = known or hints.num_heads
    if not num_heads or size % num_heads:
        return f"{kind} does not say how its output projection of {size} inputs divides into heads. Give num_heads="
    return Heads(name, module, output, num_heads, size // num_heads, _number(module, ("num_key_value_groups",)) or 1)


def _without_output(module: nn.Module) -> str | None:
    """The reason why gates before an output projection are not the heads of this module; None if they are."""
    kind = type(module).__name__
    if isinstance(module, MultiHeadAttention):
        return f"{kind} has no output projection" if module.output is None else None
    if isinstance(module, Attends):
        return f"{kind} has one head without an output projection"
    if isinstance(module, nn.MultiheadAttention):
        return f"{kind} reads the weight of its output projection without calling it"
    between = next((norm for norm in BETWEEN if isinstance(getattr(module, norm, None), nn.Module)), None)
    return f"{kind} normalizes all heads together ({between}) before its output projection" if between else None


def _linear_paths(module: nn.Module) -> list[str]:
    """The paths of the linear layers in a module."""
    return [path for path, part in module.named_modules() if path and num_inputs(part) is not None]


def _number(module: nn.Module, names: Sequence[str]) -> int | None:
    """The first of these attributes that is a positive number; None if none is."""
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _pairs(caller: str, chosen: Any) -> list[tuple[Any, Any]]:
    """(module, head) pairs from a list of them or from {module: [head, ...]}, not yet checked."""
    try:
        if isinstance(chosen, Mapping):
            return [(name, head) for name, heads in chosen.items() for head in heads]
        return [(name, head) for name, head in chosen]
    except (TypeError, ValueError) as error:
        rule = (
            "heads are {module: [head, ...]} or a list of (module, head), such as scores.least(count) of an importance"
        )
        raise RegardError(f"{caller}: {rule}, got {chosen!r}.") from error
