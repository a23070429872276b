"""The numbers that a call of the user's function computes on the way: the results of all operations of torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from regard.diagnosis.calling import Caller

#: Results with more numbers are left out.
LARGEST = 1 << 20
#: A number of a reference is found if one of the run is as near as this: relative to its size, and at least.
NEAR = {torch.float64: (1e-6, 1e-9), torch.float32: (5e-5, 1e-5)}
#: A result with fewer different numbers may be found by chance. `FEW` of them are looked at first.
FEWEST, FEW = 4, 8


class Recording(TorchDispatchMode):
    """Inside, keeps the real numbers of every result of torch in `parts`; `holds` asks whether numbers are among them.

    `parts` may begin with the numbers of given tensors. `dtype` is that of the run: it says how near equal numbers are.
    """

    def __init__(self, parts: Iterable[Tensor] = (), dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.near = NEAR[dtype]
        self.parts = [x.double().flatten() for x in parts]
        self._sorted: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and x.is_floating_point() and x.numel() <= LARGEST:
                self.parts.append(x.detach().double().flatten().clone())
        return result

    def holds(self, expected: Tensor) -> bool:
        """Whether every finite number of a tensor is among those of the run, in any arrangement.

        False for fewer than `FEWEST` different numbers, which may be found by chance.
        """
        if self._sorted is None:
            every = torch.cat(self.parts) if self.parts else torch.zeros(0, dtype=torch.float64)
            self._sorted = every[every.isfinite()].sort().values  # once: nothing is recorded after the first question
        wanted = expected.double()[expected.isfinite()].contiguous()
        if not len(self._sorted) or len(wanted) < FEWEST:
            return False
        if not self._are_near(
            wanted[:: max(1, len(wanted) // FEW)][:FEW].contiguous()
        ):  # a few numbers tell most cases apart
            return False
        return self._are_near(wanted) and len(wanted.unique()) >= FEWEST

    def _are_near(self, wanted: Tensor) -> bool:
        """Whether each of the numbers `wanted` (n,) is near one of the run."""
        assert self._sorted is not None
        relative, least = self.near
        after = torch.searchsorted(self._sorted, wanted).clamp(max=len(self._sorted) - 1)
        before = (after - 1).clamp(min=0)
        distance = torch.minimum((self._sorted[after] - wanted).abs(), (self._sorted[before] - wanted).abs())
        return bool((distance <= relative * wanted.abs() + least).all())


class RecordedArray(np.ndarray):
    """An array that keeps the result of every operation on it in `results`, a list that the results share."""

    results: list[Tensor] | None = None

    def __array_finalize__(self, obj: Any) -> None:
        """Arrays that are made of this one, such as slices, share its list."""
        self.results = getattr(obj, "results", None)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """An operation such as +, on plain arrays, for it would call this method again."""
        kwargs = {name: tuple(map(_plain, x)) if name == "out" else _plain(x) for name, x in kwargs.items()}
        return self._kept(getattr(ufunc, method)(*map(_plain, inputs), **kwargs))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """A function of NumPy, such as `np.concatenate`."""
        return self._kept(super().__array_function__(func, types, args, kwargs))

    def _kept(self, result: Any) -> Any:
        """The result of an operation; an array of real numbers is kept, and is recorded from there on too."""
        if self.results is not None and isinstance(result, np.ndarray) and result.dtype.kind == "f":
            if result.size <= LARGEST:
                self.results.append(torch.from_numpy(_plain(result).astype(np.float64, order="C")).flatten())
            result = result.view(RecordedArray)
            result.results = self.results
        return result


def _plain(x: Any) -> Any:
    """An array without recording; anything else as it is."""
    return x.view(np.ndarray) if isinstance(x, RecordedArray) else x


def recorded(caller: Caller, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Recording, list[Tensor]]:
    """The numbers of a call with the inputs query, key and value, and what it returned.

    Fused kernels are exchanged for their formulas, whose steps can be seen. (torch's fused kernel of CPUs also gives
    wrong numbers where a mask in float32 meets queries in float64, as in a module that is run in float64 here.)
    """
    if caller.numpy:
        return _recorded_of_arrays(caller, inputs)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with Recording(dtype=caller.dtype) as numbers, sdpa_kernel(SDPBackend.MATH):
            returned = caller.returned(*inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    return numbers, returned


def _recorded_of_arrays(caller: Caller, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Recording, list[Tensor]]:
    """As `recorded`, for a function of NumPy arrays, which gets recorded arrays and returns plain ones."""
    numbers = Recording()

    def with_recording(*args: Any, **kwargs: Any) -> Any:
        result = caller.function(*map(watched, args), **{name: watched(x) for name, x in kwargs.items()})
        return [_plain(x) for x in result] if isinstance(result, tuple | list) else _plain(result)

    def watched(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        x = x.view(RecordedArray)
        x.results = numbers.parts
        return x

    return numbers, replace(caller, function=with_recording).returned(*inputs)
