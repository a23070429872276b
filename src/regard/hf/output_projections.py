"""The output projections of attention modules, as linear layers, and the gates that multiply their inputs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from regard.hf.adapters import adapter_of
from regard.hf.names import BESIDE, BY_HAND, OUTPUTS

#: The gates (H,) of attention modules while a block of `gated` runs, by the module and the hook that multiplies.
open_gates: dict[tuple[nn.Module, object], Tensor] = {}


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


def language_model_head(model: nn.Module) -> nn.Module | None:
    """The layer that computes logits from the residual stream."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    head = getattr(model, "lm_head", None) if head is None else head
    return head if isinstance(head, nn.Module) else None


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by the name of its class."""
    return "norm" in type(module).__name__.lower() or type(module).__name__.endswith("LN")
