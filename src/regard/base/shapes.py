"""The checked sizes of a call, and helpers for tensors: shared heads, devices, dtypes, tracing.

Axis letters in the whole package: B batch, H query heads, G key/value heads, R = H / G query heads for each key/value
head, I queries, J keys, D query/key width, E value width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from regard.base.errors import RegardError


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call to `attend`; `R` query heads share one key/value head."""

    B: int
    H: int
    G: int
    I: int
    J: int
    D: int
    E: int

    @property
    def R(self) -> int:
        return self.H // self.G

    @property
    def is_empty(self) -> bool:
        """Whether there is no pair of a query and a key."""
        return 0 in (self.B, self.I, self.J)

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor) -> Sizes:
        """The sizes of the tensors. A `RegardError` names the rule that they break."""
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            _check_tensor(name, tensor)
        if len({query.dtype, key.dtype, value.dtype}) > 1:
            raise RegardError(
                f"attend: query is {query.dtype}, key {key.dtype}, value {value.dtype}; "
                "they must share one dtype. Convert with .to(query.dtype)."
            )
        if len({query.device, key.device, value.device}) > 1:
            raise RegardError(
                f"attend: query is on {query.device}, key on {key.device}, value on {value.device}; "
                "move them to one device."
            )
        (B, H, I, D), (_, G, J, _) = query.shape, key.shape
        sizes = Sizes(B, H, G, I, J, D, value.shape[3])
        sizes._check(query, key, value)
        return sizes

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Refuse sizes that do not fit each other."""
        has_one_batch = key.shape[0] == value.shape[0] == self.B
        if has_one_batch and value.shape[1:3] == key.shape[1:3] and self.H % self.G == 0:
            return
        given = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        if not has_one_batch:
            raise RegardError(f"attend: batch sizes differ: {given}. Expand the smaller batch before the call.")
        if value.shape[1:3] != key.shape[1:3]:
            raise RegardError(
                f"attend: key and value must have the same heads and length, one value for each key: {given}."
            )
        raise RegardError(
            f"attend: {self.H} query heads cannot share {self.G} key/value heads: the number of key/value "
            f"heads must divide the number of query heads ({given}). Heads are axis 1, length is axis 2: "
            "transpose(1, 2) if your layout is (batch, length, heads, width)."
        )


def _check_tensor(name: str, tensor: Tensor) -> None:
    """Refuse what is no tensor of floats with four axes, of which batch and length may be 0."""
    if not isinstance(tensor, Tensor):
        raise RegardError(
            f"attend: {name} must be a torch.Tensor or an array of numbers, got {type(tensor).__name__}. Numbers in "
            f"lists become a tensor by torch.tensor({name})."
        )
    if tensor.ndim != 4:
        raise RegardError(
            f"attend: {name} must have 4 axes (batch, heads, length, width), got shape {tuple(tensor.shape)}. With one "
            "head, query, key and value may be (batch, length, width), all three of them. Without a batch: "
            f"{name}.unsqueeze(0)."
        )
    if 0 in (tensor.shape[1], tensor.shape[3]):
        raise RegardError(
            f"attend: {name} has shape {tuple(tensor.shape)} (batch, heads, length, width): batch and length may be 0, "
            "but heads and width are at least 1."
        )
    if not tensor.is_floating_point():
        raise RegardError(f"attend: {name} must be floating point, got {tensor.dtype}. Convert with .float().")


def check_finite(**tensors: Tensor) -> None:
    """Refuse NaN and infinity by name and place (`attend(..., check=True)`)."""
    for name, tensor in tensors.items():
        bad = ~torch.isfinite(tensor)
        if bad.any():
            first = tuple(torch.nonzero(bad)[0].tolist())
            raise RegardError(
                f"attend: {name} holds {int(bad.sum())} values that are NaN or infinite, the first at "
                f"[batch, head, position, channel] = {list(first)}. "
                "Look for a division by zero or an overflow before this call."
            )


def has_finite_sum(tensor: Tensor) -> bool:
    """Whether the sum of all numbers is finite, as it is not if one of them is NaN."""
    return math.isfinite(tensor.detach().sum(dtype=torch.float32).item())


def group(x: Tensor, num_groups: int) -> Tensor:
    """Fold the query heads that share a key head into the rows: (B, H, I, D) -> (B, G, R*I, D)."""
    B, H, I, D = x.shape
    return x if num_groups == H else x.reshape(B, num_groups, H // num_groups * I, D)


def grouped_scores(query: Tensor, key: Tensor) -> Tensor:
    """q_i . k_j for every pair: (B, H, I, D), (B, G, J, D) -> (B, H, I, J), no copy of the keys."""
    B, H, I, _ = query.shape
    return (group(query, key.shape[1]) @ key.mT).reshape(B, H, I, key.shape[2])


def grouped_values(weights: Tensor, value: Tensor) -> Tensor:
    """sum_j w_ij v_j: (B, H, I, J), (B, G, J, E) -> (B, H, I, E), no copy of the values."""
    B, H, I, _ = weights.shape
    return (group(weights, value.shape[1]) @ value).reshape(B, H, I, value.shape[3])


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device, without waiting for the work that is queued there.

    For Apple's GPUs the host waits for the copy, because they may read the memory of the host after it is freed.
    """
    return tensor.to(device, non_blocking=device.type != "mps")


def to_host(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copy tensors of one device to the host, in one transfer, so that the host waits for the device once.

    Tensors of wider dtypes must come first: each is read from the joined bytes at a multiple of its item size.
    """
    if all(x.device.type == "cpu" for x in tensors):
        return tensors
    together = torch.cat([x.contiguous().flatten().view(torch.uint8) for x in tensors]).cpu()
    parts = together.split([x.numel() * x.element_size() for x in tensors])
    return tuple(part.view(x.dtype).view(x.shape) for part, x in zip(parts, tensors, strict=True))


def spread_indices(size: int, count: int, device: torch.device | None = None) -> Tensor:
    """At most `count` of the indices 0 to size - 1, spread evenly from the first to the last.

    >>> spread_indices(9, 3), spread_indices(2, 3)
    (tensor([0, 4, 8]), tensor([0, 1]))
    """
    steps = torch.linspace(0, size - 1, min(count, size), dtype=torch.float64)  # float32 is exact up to 2^24 only
    return steps.round().long().to(device)


def unusual_kind(x: Tensor) -> str:
    """What a tensor is if its numbers cannot be compared and added as usual; "" for a usual one.

    >>> unusual_kind(torch.zeros(2).to_sparse()), unusual_kind(torch.zeros(2))
    ('sparse', '')
    """
    is_float8 = x.dtype.is_floating_point and x.dtype.itemsize == 1
    kinds = {
        "nested": x.is_nested,
        "of the layout of MKL-DNN": x.is_mkldnn,
        "sparse": x.layout is not torch.strided,
        "quantized": x.is_quantized,
        "complex": x.is_complex(),
        "of 8-bit floats": is_float8,
    }
    return next((kind for kind, is_it in kinds.items() if is_it), "")


def as_slice(index: Tensor) -> slice | None:
    """Consecutive ascending indices as a slice, which gives a view; None for other indices."""
    if not len(index):
        return None
    first = int(index[0])
    is_consecutive = bool((index == torch.arange(first, first + len(index), device=index.device)).all())
    return slice(first, first + len(index)) if is_consecutive else None


def pick(x: Tensor, batch: Tensor, head: Tensor) -> Tensor:
    """x[batch][:, head] by indices on the host; if both are consecutive, a view, which copies nothing."""
    slices = as_slice(batch), as_slice(head)
    if None not in slices:
        return x[slices]
    return x[to_device(batch, x.device)[:, None], to_device(head, x.device)]


def known_none(flags: Tensor) -> bool:
    """Whether no flag is set. False if it is not known without waiting: on a device, or if no number can be read."""
    return flags.device.type == "cpu" and has_numbers(flags) and not bool(flags.any())


def has_numbers(tensor: Tensor) -> bool:
    """Whether numbers of a tensor can be read: not on meta, nor while torch exports, compiles or maps a function."""
    traced = torch.compiler.is_compiling() or isinstance(tensor, FakeTensor)
    return not (traced or tensor.is_meta or (is_functorch_wrapped_tensor(tensor) and _is_mapped(tensor)))


def _is_mapped(tensor: Tensor) -> bool:
    """Whether torch.vmap maps over a tensor, itself or inside a derivative."""
    while is_functorch_wrapped_tensor(tensor) and not is_batchedtensor(tensor):
        tensor = get_unwrapped(tensor)
    return is_batchedtensor(tensor)


def tensor_of_array(array: np.ndarray[Any, Any]) -> Tensor:
    """An array of NumPy as a tensor on the host: the same memory, or a copy if no tensor can have it.

    Such an array is read-only, or has negative strides, or numbers in the byte order of another machine.
    """
    fits = array.flags.writeable and min(array.strides, default=0) >= 0 and array.dtype.isnative
    return torch.from_numpy(array if fits else array.astype(array.dtype.newbyteorder("=")))


def as_tensor(value: Any, **options: Any) -> Tensor:
    """`torch.as_tensor(value, **options)`, also of an array of NumPy whose memory no tensor can have."""
    return torch.as_tensor(tensor_of_array(value) if isinstance(value, np.ndarray) else value, **options)


@contextmanager
def without_transforms() -> Iterator[None]:
    """Create tensors that outlive the call: torch.func and torch.export would wrap a tensor created inside them."""
    with _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Switch autocast off inside the block, because it would round sums; some devices have no autocast."""
    return torch.autocast(device.type, enabled=False) if is_autocast(device) else nullcontext()


def is_autocast(device: torch.device) -> bool:
    """Whether torch.autocast is on for a device."""
    if not torch._C._is_any_autocast_enabled():
        return False
    kind = device.type
    # is_autocast_enabled raises an error for devices that have no autocast, such as "meta"
    return torch.amp.autocast_mode.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def in_autocast_dtype(tensor: Tensor) -> Tensor:
    """An input in the dtype of torch.autocast if it is enabled, as in scaled_dot_product_attention."""
    if not isinstance(tensor, Tensor) or tensor.dtype == torch.float64 or not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type)) if is_autocast(tensor.device) else tensor


def widest_float(device: torch.device) -> torch.dtype:
    """float64 if the device has it, else float32, as on Apple's GPUs."""
    try:
        return torch.empty(0, dtype=torch.float64, device=device).dtype
    except (TypeError, RuntimeError):
        return torch.float32


def in_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in their common dtype; inputs and parameters of learned pieces may have different dtypes."""
    dtype = tensors[0].dtype
    if all([x.dtype is dtype for x in tensors]):  # the usual case; a list takes less time than a generator
        return tensors
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors))
    return tuple(x.to(dtype) for x in tensors)


def without_zeros(x: Tensor) -> Tensor:
    """The numbers, with 1 in place of 0: divisors of numbers that are 0 in the same places.

    >>> without_zeros(torch.tensor([0.0, 0.5, -2.0])).tolist()
    [1.0, 0.5, -2.0]
    """
    return x.masked_fill(x == 0, 1.0)


def at_least_float32(x: Tensor) -> Tensor:
    """The tensor in float32 or float64, because scores and statistics are never kept in half precision."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
