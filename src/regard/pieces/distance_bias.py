"""Biases that are learned functions of the distance: KERPLE and FIRE."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.base.checks import Size, checked
from regard.base.shapes import Sizes
from regard.pieces.bias import AdditiveBias, by_distance, check_heads
from regard.pieces.grid import Grid, at

#: KERPLE's parameters are at least this, as in the authors' code.
LEAST = 0.01
#: Numbers in the hidden layer of FIRE that are computed at once.
HIDDEN_NUMBERS = 1 << 22


@checked
class KERPLEBias(nn.Module, AdditiveBias):
    """-a_h log(1 + b_h |i - j|), or -a_h |i - j|^b_h with `power` (Chi et al. 2022, arXiv:2205.09921).

    a and b are learned, one of each for each head, and positive: below 0.01 they count as 0.01. The power is at most 2.
    With b = 1 the power form is ALiBi with learned slopes. The distance has no sign.

    >>> import torch, regard as rg
    >>> bias = rg.biases.KERPLEBias(num_heads=1)
    >>> bias.amplitude.data[:], bias.rate.data[:] = 2.0, 1.0
    >>> grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(1, 4), 1, 1, 1)
    >>> bias.term(grid, None, None).flatten().detach()  # -2 log of 4, 3, 2 and 1
    tensor([-2.7726, -2.1972, -1.3863, -0.0000])
    """

    relative = True

    def __init__(self, num_heads: Size, power: bool = False) -> None:
        super().__init__()
        self.power = power
        self.amplitude = nn.Parameter(torch.rand(num_heads) + 0.5)
        self.rate = nn.Parameter(torch.rand(num_heads) + 0.5)

    def term(self, grid: Grid, rows: Tensor | None, cols: Tensor | None) -> Tensor:
        amplitude, rate = (
            at("KERPLEBias", "heads", x, 0, grid.head).clamp_min(LEAST) for x in (self.amplitude, self.rate)
        )

        def number(distance: Tensor) -> Tensor:
            a, b = (x.view(-1, *(1,) * distance.ndim) for x in (amplitude, rate))
            apart = distance.abs().to(a.dtype)
            return -a * (apart ** b.clamp_max(2.0) if self.power else torch.log1p(b * apart))

        return by_distance(grid, number)

    def check(self, sizes: Sizes) -> None:
        check_heads("KERPLEBias", len(self.amplitude), sizes)

    def extra_repr(self) -> str:
        return f"{len(self.amplitude)}, power={self.power}"


@checked
class FIREBias(nn.Module, AdditiveBias):
    """f_h(psi(i - j) / psi(max(i, L))) with psi(x) = log(|c x| + 1) (Li et al. 2023, FIRE, arXiv:2310.04418).

    f is a small network of one hidden layer with ReLU; c and the threshold L are learned. The division by psi of the
    query's position keeps the argument in [0, 1] for earlier keys, in texts of any length. For positions up to L the
    bias depends on i - j only.

    With `fixed_length=N` the divisor is psi(N) everywhere. Then the bias depends on i - j only, and the fused and
    compiled engines can run it; the dense and blocked ones run both.

    >>> import torch, regard as rg
    >>> grid = rg.types.Grid.whole(rg.types.Positions.aligned_to_end(5, 5), 1, 2, 5)
    >>> term = rg.biases.FIREBias(num_heads=2, threshold=2).term(grid, None, None)[0]
    >>> term.shape, torch.allclose(term[:, 2, 0], term[:, 4, 0])  # the first key has the argument 1 for i >= 2
    (torch.Size([2, 5, 5]), True)
    """

    def __init__(
        self, num_heads: Size, hidden: Size = 32, threshold: Size = 512, fixed_length: Size | None = None
    ) -> None:
        super().__init__()
        self.fixed_length, self.threshold = fixed_length, threshold
        self.rate = nn.Parameter(torch.tensor(0.1))
        self.share = nn.Parameter(torch.tensor(1.0)) if fixed_length is None else None  # L as a share of `threshold`
        self.inner, self.outer = nn.Linear(1, hidden), nn.Linear(hidden, num_heads)

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return self.fixed_length is not None

    def term(self, grid: Grid, rows: Tensor | None, cols: Tensor | None) -> Tensor:
        """A number for each distance if the length is fixed, else for each pair, some queries at a time."""
        if self.fixed_length is not None or self.share is None:
            length = torch.tensor(self.fixed_length, device=grid.device)
            return by_distance(grid, lambda distance: self._network(-distance, length, grid.head))
        lengths = torch.maximum(grid.query.to(self.rate.dtype), (self.share * self.threshold).abs())[:, None]
        step = max(HIDDEN_NUMBERS // max(len(grid.key) * self.inner.out_features, 1), 1)
        parts = [
            self._network(behind, length, grid.head)
            for behind, length in zip((-grid.distance[0, 0]).split(step), lengths.split(step), strict=True)
        ]
        return torch.cat(parts, -2)[None]

    def _network(self, behind: Tensor, length: Tensor, head: Tensor) -> Tensor:
        """f of these heads at psi(i - j) / psi(length): distances (...) and lengths that broadcast -> (H, ...)."""
        ratio = self._psi(behind) / (self._psi(length) + 1e-6)  # psi of a length of 0 is 0
        of_all = self.outer(torch.relu(self.inner(ratio[..., None]))).movedim(-1, 0)
        return at("FIREBias", "heads", of_all, 0, head)

    def _psi(self, x: Tensor) -> Tensor:
        return torch.log1p((self.rate * x.to(self.rate.dtype)).abs())

    def check(self, sizes: Sizes) -> None:
        check_heads("FIREBias", self.outer.out_features, sizes)

    def extra_repr(self) -> str:
        return f"{self.outer.out_features}, hidden={self.inner.out_features}, fixed_length={self.fixed_length}"
