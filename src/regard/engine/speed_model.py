"""How fast this machine is, measured once, and from that how long a plan will take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from regard.engine.blocked import Work
from regard.engine.problem import Cost, Problem
from regard.pieces.bias import AdditiveBias
from regard.pieces.normalizer import has_logsumexp

#: Share of the matrix-multiply rate that the fused kernel reaches on long rows, inside blocks, and the other
#: engines in their products (measured: 62, 42, 58 and 29 of 73 billion operations a second).
SHARES = {"fused": 0.85, "blocked": 0.58, "rows": 0.8, "linear": 0.4}
#: Fewer rows than these keep the kernel less busy, down to the least.
BUSY_ROWS, LEAST_ROWS = 32, 8
#: Keys that the kernel takes at once: of a causal mask it skips whole such blocks.
KEY_BLOCK = 512
#: Costs of one number, in exponentials: softmax and the passes around it; tanh; an added term; a sorted row.
PASSES, TANH, TERM, SORT = 4.0, 3.5, 2.0, 40.0
#: Seconds of one call to a kernel, and of `attend` itself.
CALL, ATTEND = 150e-6, 300e-6


@dataclass(frozen=True)
class MachineRates:
    """Operations a second in matrix products, and exponentials a second, of float32 with the threads torch has."""

    products: float
    exponentials: float


def machine_rates(device: torch.device) -> MachineRates:
    """The rates of this machine, measured at the first question: some 50 ms."""
    return _measured(device, torch.get_num_threads())


def forget() -> None:
    """Measure again at the next question."""
    _measured.cache_clear()


@lru_cache(maxsize=4)
@torch.no_grad()
def _measured(device: torch.device, _threads: int) -> MachineRates:
    side = 512 if device.type == "cpu" else 4096
    a, b = torch.rand(2, side, side, device=device)
    x = torch.rand(1 << 18, device=device)
    out = torch.empty_like(x)
    return MachineRates(
        2 * side**3 / _seconds(lambda: a @ b, device), len(x) / _seconds(lambda: torch.exp(x, out=out), device)
    )


def _seconds(work: Callable[[], object], device: torch.device, times: int = 15) -> float:
    """The least of some times: beside other work, threads that wait for each other make most of them long."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found)


def seconds(engine: str, problem: Problem, cost: Cost) -> float | None:
    """How long the forward pass should take, within a factor of 2; None for engines that are not made to be fast."""
    if engine not in ("fused", "blocked", "dense", "linear") or problem.query.device.type != "cpu":
        return None
    rates, s = machine_rates(problem.query.device), problem.sizes
    if engine == "linear":
        features = s.B * (s.H * s.I + s.G * s.J) * problem.prepared.query.shape[-1]
        return ATTEND + cost.flops / (SHARES["linear"] * rates.products) + PASSES * features / rates.exponentials
    if engine == "fused":
        busy = min(1.0, max(s.I * (s.R if s.I == 1 else 1), LEAST_ROWS) / BUSY_ROWS)
        skipping = 1 + KEY_BLOCK / s.J if cost.pairs < s.B * s.H * s.I * s.J else 1.0
        return ATTEND + skipping * cost.flops / (SHARES["fused"] * busy * rates.products)
    calls = CALL * (len(Work.of(problem).runs) if engine == "blocked" else 1)
    if engine == "blocked" and Work.of(problem).flash is not None:
        return ATTEND + calls + cost.flops / (SHARES["blocked"] * rates.products) + cost.pairs * _terms(problem, rates)
    return (
        ATTEND
        + calls
        + cost.flops / (SHARES["rows"] * rates.products)
        + cost.pairs * _around(problem) / rates.exponentials
    )


def _terms(problem: Problem, rates: MachineRates) -> float:
    """Seconds that a pair's biases take where they are formed pair by pair, and not once a diagonal."""
    found = 0.0
    for bias, rows in zip(problem.attention.bias, problem.prepared.rows, strict=True):
        if not bias.relative:
            products = 0 if rows is None else 2 * rows.shape[-1]
            found += TERM / rates.exponentials + products / (SHARES["rows"] * rates.products)
    return found


def _around(problem: Problem) -> float:
    """What a pair costs beside the products where whole rows of scores are formed, in exponentials."""
    attention, floats = problem.attention, problem.attention.score.floats_per_score
    additive = sum(isinstance(bias, AdditiveBias) for bias in attention.bias)
    normalizer = PASSES if has_logsumexp(attention.normalizer) or attention.normalizer.needs_nonnegative else SORT
    return normalizer + TERM * additive + TANH * (len(attention.bias) - additive) + (TANH * floats if floats > 1 else 0)
