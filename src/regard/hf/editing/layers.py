"""The layers of a model that edits may change or have to know, each with its module path."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from regard.hf.attention_modules import attention_modules, with_numbers
from regard.hf.capture.recurrent_calls import is_recurrent
from regard.hf.capture.transformers_interface import refuse_compiled
from regard.hf.editing.recurrent_layers import is_editable


@dataclass(frozen=True, eq=False)
class EditableLayers:
    """Attention modules and recurrent layers. A sweep reads them once for all its runs.

    Their paths know the number of their layer (`LayerPath`). `names` has the path of every module. `observed` are all
    attention modules and recurrent layers, `editable` those that some edit could change: the attention modules
    `attending`, and `recurrent`.
    """

    names: dict[nn.Module, str]
    observed: dict[nn.Module, str]
    attending: dict[nn.Module, str]
    recurrent: dict[nn.Module, str]

    @classmethod
    def of(cls, model: nn.Module) -> EditableLayers:
        """The layers of a model; a compiled model is refused."""
        refuse_compiled(model, "edit")
        attending, paths = {*attention_modules(model).values()}, dict(model.named_modules())
        recurrent = {module for module in paths.values() if is_recurrent(module)}
        layers = {m: n for n, m in with_numbers({n: m for n, m in paths.items() if m in attending | recurrent}).items()}
        names = {module: layers.get(module, name) for name, module in paths.items()}
        return cls(
            names,
            layers,
            {module: name for module, name in layers.items() if module in attending},
            {module: name for module, name in layers.items() if is_editable(module)},
        )

    @property
    def editable(self) -> dict[nn.Module, str]:
        """The layers that some edit could change."""
        return {m: name for m, name in self.observed.items() if m in self.attending or m in self.recurrent}
