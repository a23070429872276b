"""Adapters: functions that read the queries, keys and values of modules that compute attention in their own way.

An adapter is one function for a class of modules. With it a module is watched and edited like `nn.MultiheadAttention`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regard.base.errors import RegardError

Read = Callable[..., "AdaptedCall"]


@dataclass(frozen=True, eq=False)
class AdaptedCall:
    """One call of a module: its queries, keys and values, and what the module computes from the outputs of the heads.

    `query` is (B, H, I, D), `key` (B, G, J, D) and `value` (B, G, J, E); H is a multiple of G. `finish` gets the
    outputs of the heads, softmax(scale q k^T) v, (B, H, I, E). It returns the output of the module, without the other
    entries of a tuple. `mask` (B or 1, H or 1, I, J) is boolean, True = may attend, or is added to the scores. `scale`
    is 1/sqrt(D) by default. `dropout` is the share of weights that the module drops in training mode.

    >>> import torch, regard as rg
    >>> x = torch.randn(1, 2, 5, 4)
    >>> call = rg.hf.AdaptedCall(x, x, x, finish=lambda heads: heads.transpose(1, 2).flatten(2))
    >>> call.finish(x).shape
    torch.Size([1, 5, 8])
    """

    query: Tensor
    key: Tensor
    value: Tensor
    finish: Callable[[Tensor], Tensor]
    mask: Tensor | None = None
    scale: float | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("query", "key", "value", "mask"):
            tensor = getattr(self, name)
            if not (isinstance(tensor, Tensor) and tensor.ndim == 4) and not (name == "mask" and tensor is None):
                kind = f"a tensor of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else repr(tensor)
                raise RegardError(f"AdaptedCall({name}=...): expected a tensor of four axes, got {kind}.")
        if not callable(self.finish):
            raise RegardError(f"AdaptedCall(finish=...): expected a function, got {self.finish!r}.")
        for name, number in (("scale", 1.0 if self.scale is None else self.scale), ("dropout", self.dropout)):
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise RegardError(f"AdaptedCall({name}=...): expected a number, got {number!r}.")


@dataclass(frozen=True, eq=False)
class Adapter:
    """The function that reads a call; the path of the output projection and the attribute with the number of heads."""

    read: Read
    output: str | None = None
    num_heads: str | None = None


#: Class of modules, or its name -> its adapter.
_adapters: dict[str | type, Adapter] = {}


def adapter(
    kind: str | type[nn.Module], *, output: str | None = None, num_heads: str | None = None
) -> Callable[[Read], Read]:
    """Register a function that reads the calls of modules that compute attention in their own way.

    `kind` is the class of the module or the name of the class. The function gets the module and the arguments of its
    forward, and returns an `AdaptedCall`. `rg.watch` then returns a map of the module and checks it: `finish(weights @
    values)` must equal the output of the module. `rg.edit` changes the module, too. `output` is the path of the
    output projection inside the module, and `num_heads` the attribute with the number of its heads, for
    `keep="qkv"`, `rg.importance` and gates.

    >>> import torch, regard as rg
    >>> class Mixer(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.theta, self.phi, self.g = (torch.nn.Linear(8, 8) for _ in range(3))
    ...     def forward(self, x):
    ...         return x + torch.softmax(self.phi(x) @ self.theta(x).mT, 1).mT @ self.g(x)
    >>> @rg.hf.adapter(Mixer)
    ... def read_mixer(module, x):
    ...     q, k, v = (layer(x)[:, None] for layer in (module.theta, module.phi, module.g))
    ...     return rg.hf.AdaptedCall(q, k, v, lambda heads: x + heads[:, 0], scale=1.0)
    >>> model = torch.nn.Sequential(Mixer())
    >>> with rg.watch(model) as seen:
    ...     _ = model(torch.randn(2, 5, 8))
    >>> seen[0], seen.verify()["0"].ok
    (AttentionMap(2 x 1 heads x 5 queries x 5 keys), True)
    """
    if not isinstance(kind, str) and not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise RegardError(f"adapter({kind!r}): give a class of modules, or its name.")
    for name, given in (("output", output), ("num_heads", num_heads)):
        if given is not None and not isinstance(given, str):
            raise RegardError(f"adapter({name}=...): expected a name, got {given!r}.")

    def register(read: Read) -> Read:
        _adapters[kind] = Adapter(read, output, num_heads)
        return read

    return register


def adapter_of(module: nn.Module) -> Adapter | None:
    """The adapter of the class of a module, or of its nearest base class with an adapter."""
    kinds = type(module).__mro__ if _adapters else ()
    return next((_adapters[name] for kind in kinds for name in (kind, kind.__name__) if name in _adapters), None)


def is_adapted(module: nn.Module) -> bool:
    """Whether the calls of a module are read from its arguments: it has an adapter, or is `nn.MultiheadAttention`."""
    return isinstance(module, nn.MultiheadAttention) or adapter_of(module) is not None


def read_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AdaptedCall:
    """The call of a module, as its adapter reads it."""
    adapter_of_module = adapter_of(module)
    assert adapter_of_module is not None
    call = adapter_of_module.read(module, *args, **kwargs)
    if not isinstance(call, AdaptedCall):
        raise RegardError(
            f"adapter({type(module).__name__!r}): the function must return a regard.hf.AdaptedCall, got {call!r}."
        )
    return call
