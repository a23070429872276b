"""Weights that are shared out over processes (FSDP2): each holds some rows of every tensor and borrows the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from regard.nn import DecoderLayer, EncoderLayer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# torch.distributed.tensor takes a second and more to import, and who only translates needs none of it: what
# is shared out is told by what it can do.


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave each process its rows of every weight, of its gradient and of what the optimizer keeps for it.

    Layers of Transformers are gathered one at a time, when they are used (Zhao et al. 2023, arXiv:2304.11277; ZeRO-3,
    Rajbhandari et al. 2020, arXiv:1910.02054); tables of words and recurrent cells, which every step reads, together.
    """
    from torch.distributed.fsdp import fully_shard

    for unit in (*_units(model), model):
        fully_shard(unit, mesh=mesh)


def _units(model: nn.Module) -> Iterator[nn.Module]:
    """What computes only where it is called as a module, smaller ones before those that hold them."""
    layers = [module for module in model.modules() if isinstance(module, EncoderLayer | DecoderLayer)]
    for layer in layers:
        across = getattr(layer, "cross_attention", None)
        if across is not None:  # the keys of the source are made before the layer is run
            yield from (across.key, across.value)
    yield from layers


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` was here."""
    return hasattr(model, "unshard")


def is_shared(tensor: Tensor) -> bool:
    """Whether each process holds only some of its rows."""
    return hasattr(tensor, "full_tensor")


@contextmanager
def borrowed(model: nn.Module) -> Iterator[None]:
    """`encode`, `advance` and `logits` can be called, not `forward` alone; all processes must call the same.

    Weights may not be looked at inside, nor changed.
    """
    sharded: list[Any] = [module for module in model.modules() if is_sharded(module)]
    for root in sharded[:1]:
        root.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()


def own_rows(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return cast(Any, tensor).to_local() if is_shared(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All rows, of all processes; all of them must ask."""
    return cast(Any, tensor).full_tensor() if is_shared(tensor) else tensor


def shared_like(like: Tensor, tensor: Tensor) -> Tensor:
    """A whole tensor as `like` is held: the rows of this process, or all."""
    if not is_shared(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    held = cast(Any, like)
    return distribute_tensor(tensor.to(like.device), held.device_mesh, held.placements, src_data_rank=None)
