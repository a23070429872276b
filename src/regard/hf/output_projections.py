"""The output projections of attention modules, as linear layers, and the gates that multiply their inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.shapes import at_least_float32
from regard.hf.adapters import adapter_of
from regard.hf.calls import measuring
from regard.hf.names import BESIDE, BY_HAND, OUTPUTS

#: The gates (H,) of attention modules while a block of `gated` runs, by the module and the hook that multiplies the
#: outputs of its heads by them.
open_gates: dict[tuple[nn.Module, object], Tensor] = {}


def output_projection(model: nn.Module, name: str, module: nn.Module, path: str | None = None) -> nn.Module | None:
    """The output projection of a module: at the path that a user gave, of a known name, or beside the attention.

    `name` is the path of the module in the model. Names that people use by hand count for linear layers only. None if
    there is no such layer.
    """
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
    """The width of the inputs of a linear layer (`nx` in GPT-2's Conv1D); None if the module is none."""
    size = getattr(output, "in_features", getattr(output, "nx", None))
    return size if isinstance(size, int) else None


class UnreadableMatrix(Exception):
    """The reason why a layer has no matrix that can be read."""


@dataclass(eq=False)
class LinearLayer:
    """x W + b: the matrix (inputs, outputs) and the bias of a linear layer, whatever form its weights have.

    Plain weights are read as they are, without a copy. Any other layer (packed weights, adapters beside the weights,
    weights that wait on a disk) is measured when its matrix is first read: it computes the rows of the identity, so its
    own code unpacks, adds and loads them. `rows` are a few inputs and outputs of the run that is explained, if there
    was one: the layer must still return them.

    >>> LinearLayer(nn.Linear(3, 5)).matrix.shape
    torch.Size([3, 5])
    """

    module: nn.Module
    rows: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        self._plain = _plain(self.module)
        self._first_versions = self._versions()

    @property
    def is_measured(self) -> bool:
        """Whether the layer has no plain weights in memory."""
        return self._plain is None

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor | None]:
        """The matrix and the bias; `UnreadableMatrix` if there are none."""
        return self._plain or _read(self.module, self.rows)

    @property
    def matrix(self) -> Tensor:
        return self._parts[0]

    @property
    def bias(self) -> Tensor | None:
        return self._parts[1]

    @property
    def is_unchanged(self) -> bool:
        """Whether no weight was changed in place since this object was made."""
        return self._versions() == self._first_versions

    def _versions(self) -> tuple[int, ...]:
        """How often torch counts that each weight was changed in place; inference tensors have no such count."""
        tensors = self.module.parameters() if self._plain is None else self._plain
        return tuple(x._version for x in tensors if x is not None and not x.is_inference())


def language_model_head(model: nn.Module) -> nn.Module | None:
    """The layer that computes logits from the residual stream; None if the model has none that is known."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    head = getattr(model, "lm_head", None) if head is None else head
    return head if isinstance(head, nn.Module) else None


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by the name of its class."""
    return "norm" in type(module).__name__.lower() or type(module).__name__.endswith("LN")


def _plain(module: nn.Module) -> tuple[Tensor, Tensor | None] | None:
    """The matrix (inputs, outputs) and the bias of nn.Linear, and of GPT-2's Conv1D, which stores it in this order.

    None for other modules, and for weights that are packed or not in memory.
    """
    weight: Any = getattr(module, "weight", None)
    bias: Tensor | None = getattr(module, "bias", None)
    if type(weight) not in (Tensor, nn.Parameter) or not weight.is_floating_point() or weight.is_meta:
        return None
    is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    if weight.ndim != 2 or not (is_linear or type(module).__name__ == "Conv1D"):
        return None
    return (weight.mT if is_linear else weight).detach(), None if bias is None else bias.detach()


@contextmanager
def loaded(module: nn.Module) -> Iterator[None]:
    """A block in which the weights of a module are in memory, also if accelerate keeps them elsewhere between calls."""
    is_away = any(x.is_meta for x in module.parameters())
    hook: Any = getattr(module, "_hf_hook", None) if is_away else None
    if hook is not None:
        hook.pre_forward(module)
    try:
        yield
    finally:
        if hook is not None:
            hook.post_forward(module, None)


#: Largest error of a matrix, relative to the largest output: some layers round their inputs to 8 bits.
TOLERANCE = 5e-2
#: Largest difference of outputs that a layer returns twice.
REPEATED = {torch.float16: 1e-2, torch.bfloat16: 1e-2}


@torch.no_grad()
def _read(module: nn.Module, rows: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor | None]:
    """The matrix and the bias that a layer computes with; `UnreadableMatrix` if there are none.

    The layer computes zeros, which give the bias, and the rows of the identity, which give the matrix. It must also
    return the outputs `rows[1]` of a run for its inputs `rows[0]`, and x W + bias must equal them. Without a run, x is
    a row of signs. A copy of the layer computes, by `forward`, so that no hook runs; random numbers stay as they were.
    """
    kind, size = f"{type(module).__name__} without plain weights", num_inputs(module)
    if size is None:
        raise UnreadableMatrix(f"{type(module).__name__} is not a linear layer")
    with loaded(module), measuring.on(), torch.random.fork_rng(()):
        plain = _plain(module)
        if plain is not None:
            return plain[0].clone(), None if plain[1] is None else plain[1].clone()
        zero, signs, unit = _inputs(module, size, None if rows is None else rows[0])
        x = signs if rows is None else rows[0]
        try:
            bias, again = copy(module).forward(zero)[0], copy(module).forward(x)
            of_zero, *of_unit = _without_bias(module).forward(torch.cat([zero, unit]))
        except Exception as error:
            raise UnreadableMatrix(f"{kind} could not be run to read its matrix: {error}") from error
    matrix = torch.stack(of_unit) - of_zero  # a bias under another name than `bias` is in both
    if rows is not None and not _is_close(again, rows[1], REPEATED.get(rows[1].dtype, 2e-3)):
        raise UnreadableMatrix(
            f"{kind} returns other outputs than when it was watched: it was changed since, or it has dropout in "
            "training mode"
        )
    if not _is_close(at_least_float32(x) @ at_least_float32(matrix) + bias, again, TOLERANCE):
        raise UnreadableMatrix(
            f"{kind} is not linear: dropout in training mode, an activation, or inputs that it rounds too coarsely"
        )
    return matrix, bias if bool(bias.any()) else None


def _inputs(module: nn.Module, size: int, like: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """A row of zeros, a row of signs and the rows of the identity, (1 or inputs, inputs), of the type that it reads.

    `like` is an input that the layer had, if one is known: its type may differ from that of the weights.
    """
    tensors = [x for x in (*module.parameters(), *module.buffers()) if x.is_floating_point()]
    dtype = next((x.dtype for x in (like, *tensors) if x is not None), torch.float32)
    device = next((x.device for x in (like, *module.parameters()) if x is not None), torch.device("cpu"))
    unit = torch.eye(size, dtype=dtype, device=device)
    signs = torch.arange(size, device=device)[None].remainder(3).sub(0.5).sign().to(dtype)
    return torch.zeros_like(signs), signs, unit


def _without_bias(module: nn.Module) -> nn.Module:
    """A shallow copy without bias, so that a large bias does not round the matrix away."""
    copied = copy(module)
    for kept in ("_parameters", "_buffers"):
        vars(copied)[kept] = {name: None if name == "bias" else x for name, x in vars(module)[kept].items()}
    copied._modules = {name: part and _without_bias(part) for name, part in module._modules.items()}
    return copied


def _is_close(x: Tensor, y: Tensor, tolerance: float) -> bool:
    """Whether the largest difference is small beside the largest number."""
    x, y = at_least_float32(x), at_least_float32(y)
    return bool((x - y).abs().max() <= tolerance * y.abs().max().clamp_min(1e-6))
