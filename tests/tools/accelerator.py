"""A pretend accelerator: a device of its own, whose numbers lie on the CPU and whose rules are those of a GPU.

Tensors of `DEVICE` and of the CPU do not mix, every wait of the host for the device is counted, and float64
can be refused, as Apple's GPUs refuse it. Registering it changes the whole process (autograd asks for its
devices once), so only the modules named in test_accelerator.py import this one, each in its own process.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretend"


class _Backend(_DummyBackendModule):
    """What torch asks of the module of a device."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed(self, seed: int) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        pass


_setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
DEVICE = torch.device(NAME, 0)


@dataclass
class Rules:
    """What the device counts and refuses; one object for the process."""

    refuses_float64: bool = False
    waits: list[str] | None = None


RULES = Rules()

#: Operations whose result or size the host has to wait for.
WAITING = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "argwhere", "masked_select",
    "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount",
    "_linalg_check_errors",
}  # fmt: skip
#: Operations that take tensors of two devices.
COPYING = {"_to_copy", "copy_", "_copy_from", "to", "copy"}
#: What no operation has a tensor in.
PLAIN = {int, float, bool, type(None), torch.dtype, torch.device}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


def _lstm_cell(inputs: Tensor, hidden: Tensor, c: Tensor, b_in: Any = None, b_hidden: Any = None) -> tuple[Tensor, ...]:
    i, f, g, o = _added(inputs, hidden, b_in, b_hidden).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * c + i * g
    return o * c.tanh(), c, torch.cat((i, f, g, o), 1)


def _lstm_cell_backward(grad_h: Any, grad_c: Any, c: Tensor, next_c: Tensor, saved: Tensor, has_bias: bool) -> Any:
    i, f, g, o = saved.chunk(4, 1)
    reached = next_c.tanh()
    grad_h, grad_c = (torch.zeros_like(c) if x is None else x for x in (grad_h, grad_c))
    grad_c = grad_c + grad_h * o * (1 - reached**2)
    parts = grad_c * g * i * (1 - i), grad_c * c * f * (1 - f), grad_c * i * (1 - g**2), grad_h * reached * o * (1 - o)
    gates = torch.cat(parts, 1)
    return gates, grad_c * f, gates.sum(0) if has_bias else None


def _gru_cell(inputs: Tensor, hidden: Tensor, h: Tensor, b_in: Any = None, b_hidden: Any = None) -> tuple[Tensor, ...]:
    inputs, hidden = _added(inputs, b_in), _added(hidden, b_hidden)
    (r, z, n), (of_r, of_z, of_n) = inputs.chunk(3, 1), hidden.chunk(3, 1)
    r, z = (r + of_r).sigmoid(), (z + of_z).sigmoid()
    n = (n + r * of_n).tanh()
    return n + z * (h - n), torch.cat((r, z, n, h, of_n), 1)


def _gru_cell_backward(grad: Tensor, saved: Tensor, has_bias: bool) -> Any:
    r, z, n, h, of_n = saved.chunk(5, 1)
    for_z, for_n = grad * (h - n) * z * (1 - z), grad * (1 - z) * (1 - n**2)
    for_r = for_n * of_n * r * (1 - r)
    inputs, hidden = torch.cat((for_r, for_z, for_n), 1), torch.cat((for_r, for_z, for_n * r), 1)
    return inputs, hidden, grad * z, *((inputs.sum(0), hidden.sum(0)) if has_bias else (None, None))


def _added(*parts: Any) -> Tensor:
    return sum(part for part in parts if part is not None)  # type: ignore[return-value]


#: What torch has for accelerators alone.
FORMULAS = {
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}


class PretendTensor(Tensor):
    """A tensor of the device around the numbers of `host`."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> PretendTensor:
        if RULES.refuses_float64 and host.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"The {NAME} device does not support float64. Please use float32 instead.")
        wrapper = Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=DEVICE,
        )
        wrapper.host = host
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        _wait("tolist")
        return self.detach().host.tolist()

    def untyped_storage(self) -> Any:
        return self.detach().host.untyped_storage()

    def data_ptr(self) -> int:
        return self.detach().host.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numpy()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PretendTensor({self.host!r})"


def _wait(operation: str) -> None:
    """One wait of the host, with the line of the package that causes it."""
    if RULES.waits is None:
        return
    frames = traceback.extract_stack(sys._getframe(1))
    ours = [f for f in frames if "/regard/" in f.filename]
    RULES.waits.append(
        f"{operation} at {ours[-1].filename.split('/regard/')[-1]}:{ours[-1].lineno}" if ours else operation
    )


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on the hosts of its tensors, under the rules of the device."""
    name = func.overloadpacket.__name__
    tensors: list[Tensor] = []

    def host(x: Tensor) -> Tensor:
        tensors.append(x)
        return x.host if isinstance(x, PretendTensor) else x

    args_there, kwargs_there = _mapped(host, args), _mapped(host, kwargs)
    _check_devices(func, name, tensors)
    _count_waits(name, args, kwargs, tensors)
    wrapper_of = {id(x.host): x for x in tensors if isinstance(x, PretendTensor)}
    target = kwargs.get("device")
    leaves_device = target is not None and torch.device(target).type == "cpu"
    if target is not None and not leaves_device:
        kwargs_there["device"] = torch.device("cpu")
    result = FORMULAS.get(name, func)(*args_there, **kwargs_there)
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():
            return func(*args, **kwargs)
    if leaves_device:
        return result.clone() if any(result is x.host for x in wrapper_of.values()) else result
    if name == "copy_" and not isinstance(args[0], PretendTensor):
        return args[0]
    return _mapped(lambda x: _wrapped(func, x, wrapper_of), result)


def _mapped(change: Any, value: Any) -> Any:
    """The tensors of nested arguments changed; what torch has for this takes longer than the operations."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)([_mapped(change, part) for part in value])
    return {name: _mapped(change, part) for name, part in value.items()} if isinstance(value, dict) else value


def _wrapped(func: Any, x: Tensor, wrapper_of: dict[int, PretendTensor]) -> Tensor:
    known = wrapper_of.get(id(x))
    if known is None:
        return PretendTensor(x)
    if known.shape != x.shape or known.stride() != x.stride():
        raise NotImplementedError(f"{func} changes the shape of a tensor in place.")
    return known


def _check_devices(func: Any, name: str, tensors: list[Tensor]) -> None:
    strangers = [x for x in tensors if not isinstance(x, PretendTensor) and x.ndim > 0]
    if not strangers or name in COPYING:
        return
    if name in INDEXING and isinstance(tensors[0], PretendTensor):
        _wait("an index on the host")  # torch moves it, and waits for that
        return
    raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {DEVICE} and cpu.")


def _count_waits(name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
    if name in WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None and len(args) < 3):
        _wait(name)
    elif name in COPYING:
        _count_copies(name, args, kwargs)
    elif name in INDEXING:
        indices = [x for x in args[1] if x is not None]
        written = name != "index" and name != "_unsafe_index" and args[2].numel() == 1  # torch fills by the mask itself
        if any(x.dtype in (torch.bool, torch.uint8) for x in indices) and not written:
            _wait(f"{name} by a mask")


def _count_copies(name: str, args: Any, kwargs: Any) -> None:
    """Copies to the host wait for what is copied; copies from it wait unless they are told not to."""
    if name == "copy_":
        target, source = args[:2]
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        if isinstance(source, PretendTensor) and not isinstance(target, PretendTensor):
            _wait("a copy to the host")
        elif not isinstance(source, PretendTensor) and not non_blocking:
            _wait("a copy from the host")
    elif kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu":
        _wait("a copy to the host")


def _copied(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """A copy below the dispatch to Python, as `torch.tensor(..., device=...)` makes it."""
    _count_copies("copy_", (target, source, non_blocking), {})
    hosts = [x.host if isinstance(x, PretendTensor) else x for x in (target, source)]
    hosts[0].copy_(hosts[1])
    return target


def _factory(func: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Tensor:
        kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        return PretendTensor(func(*args, **kwargs))

    return make


def _is_composite(func: Any) -> bool:
    """Whether torch makes the operation of others; operators of its scripts alone have no kernels."""
    known = torch._C._dispatch_has_kernel(func.name())
    return not known or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _register() -> list[torch.library.Library]:
    """Kernels for every operation that makes a tensor from numbers alone."""
    aten = torch.library.Library("aten", "IMPL")
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            func = getattr(packet, overload)
            arguments = func._schema.arguments
            makes = any(a.name == "device" for a in arguments) and len(func._schema.returns) == 1
            if makes and not any("Tensor" in str(a.type) for a in arguments) and not _is_composite(func):
                aten.impl(func, _factory(func), "PrivateUse1")
    aten.impl("_copy_from", _copied, "PrivateUse1")
    autocast = torch.library.Library("_", "IMPL")
    autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return [aten, autocast]


_LIBRARIES = _register()


@contextmanager
def waits() -> Iterator[list[str]]:
    """The waits of the host inside the block, each with its line.

    >>> with waits() as counted:
    ...     torch.ones(2, device=DEVICE).sum().item()
    """
    RULES.waits = counted = []
    try:
        yield counted
    finally:
        RULES.waits = None


@contextmanager
def no_float64() -> Iterator[None]:
    """The device refuses float64."""
    RULES.refuses_float64 = True
    try:
        yield
    finally:
        RULES.refuses_float64 = False


def device_dtype() -> Any:
    """A fixture: float64, then float32 on a device that refuses float64."""

    @pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "no float64"])
    def dtype(request: Any) -> Iterator[torch.dtype]:
        with no_float64() if request.param == torch.float32 else nullcontext():
            yield request.param

    return dtype


def moved(value: Any) -> Any:
    """A tensor, a module or a nest of both on the device; what a module shares stays shared."""
    if isinstance(value, nn.Module):
        return _moved_module(value)
    if isinstance(value, Tensor):
        return value.detach().to(DEVICE).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {name: moved(part) for name, part in value.items()}
    return tuple(map(moved, value)) if isinstance(value, tuple) else value


def _moved_module(module: nn.Module) -> nn.Module:
    known: dict[int, Any] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not isinstance(parameter, PretendTensor):
                new = known.setdefault(
                    id(parameter), nn.Parameter(parameter.detach().to(DEVICE), parameter.requires_grad)
                )
                part._parameters[name] = new
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(DEVICE)
    return module


def on_host(x: Tensor) -> Tensor:
    """The numbers of a tensor of the device, for comparisons; anything else has left the device and fails."""
    assert isinstance(x, PretendTensor), f"a tensor on {x.device} where one of the device was expected"
    return x.detach().host
