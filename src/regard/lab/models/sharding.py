"""Sharded weights (FSDP2): each process keeps some rows of every tensor, and gathers the others when it needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from regard.nn import DecoderLayer, EncoderLayer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# `torch.distributed.tensor` takes more than a second to import, and translating does not need it. So sharded modules
# and tensors are recognized by their methods, not by their classes.


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard every weight, its gradient and its optimizer state by rows over the processes.

    Each layer of a Transformer is gathered when it runs (Zhao et al. 2023, arXiv:2304.11277; ZeRO-3, Rajbhandari et
    al. 2020, arXiv:1910.02054). Embeddings and recurrent cells, which every step reads, are gathered together.
    """
    from torch.distributed.fsdp import fully_shard

    for unit in (*_units(model), model):
        fully_shard(unit, mesh=mesh)


def _units(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that are gathered one at a time, inner ones first; they compute only inside their own calls."""
    layers = [module for module in model.modules() if isinstance(module, EncoderLayer | DecoderLayer)]
    for layer in layers:
        across = getattr(layer, "cross_attention", None)
        if across is not None:  # the keys of the source are projected before the layer runs
            yield from (across.key, across.value)
    yield from layers


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` was applied to this module."""
    return hasattr(model, "unshard")


def is_sharded_tensor(tensor: Tensor) -> bool:
    """Whether this process holds only some rows of the tensor."""
    return hasattr(tensor, "full_tensor")


@contextmanager
def gathered_weights(model: nn.Module) -> Iterator[None]:
    """Inside, not only `forward` can be called, but also `encode`, `advance` and `logits`; all processes call the same.

    Weights must not be read or changed inside.
    """
    sharded: list[Any] = [module for module in model.modules() if is_sharded(module)]
    # the model itself comes first; its layers gather their weights when they run
    for root in sharded[:1]:
        root.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()


def own_rows(tensor: Tensor) -> Tensor:
    """The rows of a tensor that this process holds."""
    return cast(Any, tensor).to_local() if is_sharded_tensor(tensor) else tensor


def all_rows(tensor: Tensor) -> Tensor:
    """All rows, gathered from all processes; every process must call this."""
    return cast(Any, tensor).full_tensor() if is_sharded_tensor(tensor) else tensor


def sharded_like(like: Tensor, tensor: Tensor) -> Tensor:
    """A whole tensor, sharded as `like` is: the rows of this process, or all rows."""
    if not is_sharded_tensor(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    sharded = cast(Any, like)
    return distribute_tensor(tensor.to(like.device), sharded.device_mesh, sharded.placements, src_data_rank=None)
