"""The numbers that a call of the user's function computes on the way: the results of all operations of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from regard.diagnosis.calling import Caller

#: Results with more numbers are left out.
LARGEST = 1 << 20
#: A number of a reference is found if one is as near as this, relative to its size.
NEAR = 1e-6
#: A result with fewer different numbers may be found by chance. `FEW` of them are looked at first.
FEWEST, FEW = 4, 8


class Recording(TorchDispatchMode):
    """Inside, keeps the real numbers of every result."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[Tensor] = []
        self._sorted: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and x.is_floating_point() and x.numel() <= LARGEST:
                self._parts.append(x.detach().double().flatten().clone())
        return result

    def __bool__(self) -> bool:
        return bool(self._parts)

    def holds(self, expected: Tensor) -> bool:
        """Whether every finite number of a tensor is among those of the run, in any arrangement."""
        if self._sorted is None:
            every = torch.cat(self._parts) if self._parts else torch.zeros(0, dtype=torch.float64)
            self._sorted = every[every.isfinite()].sort().values
        wanted = expected.double()[expected.isfinite()].contiguous()
        if not len(self._sorted) or len(wanted) < FEWEST:
            return False
        if not self._are_near(
            wanted[:: max(1, len(wanted) // FEW)][:FEW].contiguous()
        ):  # a few numbers tell most cases apart
            return False
        return self._are_near(wanted) and len(wanted.unique()) >= FEWEST

    def _are_near(self, wanted: Tensor) -> bool:
        """Whether each number is near one of the run."""
        assert self._sorted is not None
        after = torch.searchsorted(self._sorted, wanted).clamp(max=len(self._sorted) - 1)
        before = (after - 1).clamp(min=0)
        distance = torch.minimum((self._sorted[after] - wanted).abs(), (self._sorted[before] - wanted).abs())
        return bool((distance <= NEAR * (1e-3 + wanted.abs())).all())


def recorded(caller: Caller, inputs: tuple[Tensor, Tensor, Tensor]) -> Recording:
    """The numbers of a call. Fused kernels are exchanged for their formulas, whose steps can be seen."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with Recording() as numbers, sdpa_kernel(SDPBackend.MATH):
            caller.returned(*inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    return numbers
