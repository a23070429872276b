"""Predicted seconds of a plan, from the speed of this machine, which is measured once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from regard.base.shapes import without_autocast
from regard.engine.blocked import Work
from regard.engine.kernel.attention import PER_HIDDEN_UNIT, is_few, reading_factor
from regard.engine.problem import Cost, Problem

#: Share of the matrix-product rate that products reach: in long rows, in blocks of the fused kernel, in chunks of
#: linear attention, and in our own kernels (measured: 0.85 and 0.8 in long rows, 0.58, 0.4; 0.7 to 1.0).
LONG_ROWS, BLOCKS, CHUNKS, OWN = 0.8, 0.58, 0.4, 0.85
#: Fewest rows that keep the fused kernel busy. Fewer rows read the same keys, so each row takes longer.
BUSY_ROWS = 32
#: Keys that the fused kernel reads at once: of a causal mask it skips only whole blocks of keys.
KEY_BLOCK = 512
#: Time that one pass over the scores takes for each score, in units of one exponential.
PASS = 4.0
#: Seconds of a call to `attend` with very little to compute.
ATTEND = 300e-6


@dataclass(frozen=True)
class MachineRates:
    """Operations a second in matrix products, and exponentials a second, in float32 with all threads of torch."""

    products: float
    exponentials: float


def machine_rates(device: torch.device) -> MachineRates:
    """The rates of this machine, measured at the first call in about 50 ms."""
    return _measured(device, torch.get_num_threads())


def forget() -> None:
    """Measure the rates again at the next call."""
    _measured.cache_clear()


@lru_cache(maxsize=4)
@torch.no_grad()
def _measured(device: torch.device, _threads: int) -> MachineRates:
    """The rates, kept for each device and number of threads. No number is drawn: the caller's next ones stay."""
    side = 512 if device.type == "cpu" else 4096
    a, b = torch.full((2, side, side), 0.5, dtype=torch.float32, device=device)
    x = torch.full((1 << 18,), 0.5, dtype=torch.float32, device=device)
    out = torch.empty_like(x)
    with without_autocast(device):
        return MachineRates(
            2 * side**3 / _seconds(lambda: a @ b, device), len(x) / _seconds(lambda: torch.exp(x, out=out), device)
        )


def _seconds(work: Callable[[], object], device: torch.device, times: int = 15) -> float:
    """Seconds of `work`, as the minimum of so many timings: robust to background load."""
    timings = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        timings.append(time.perf_counter() - start)
    return min(timings)


def seconds(engine: str, problem: Problem, cost: Cost) -> float | None:
    """Predicted seconds of the forward pass on a CPU, within a factor of 2; None for other devices and engines."""
    if engine not in ("fused", "kernel", "blocked", "dense", "linear") or problem.query.device.type != "cpu":
        return None
    rates, s = machine_rates(problem.query.device), problem.sizes
    if engine == "linear":
        features = s.B * (s.H * s.I + s.G * s.J) * problem.prepared.query.shape[-1]
        return ATTEND + cost.flops / (CHUNKS * rates.products) + PASS * features / rates.exponentials
    if engine == "kernel":
        hidden = problem.attention.score.floats_per_score
        if hidden > 1:
            return ATTEND + (cost.flops + 2 * (PER_HIDDEN_UNIT[0] - 1) * hidden * cost.pairs) / (OWN * rates.products)
        waiting = reading_factor(s.R * s.I) if is_few(s.R * s.I, problem.learns) else 1.0
        return ATTEND + waiting * cost.flops / (OWN * rates.products)
    if engine == "fused":
        busy = min(1.0, s.I * s.R / BUSY_ROWS)
        skipping = 1 + KEY_BLOCK / s.J if cost.pairs < s.B * s.H * s.I * s.J else 1.0
        return ATTEND + skipping * cost.flops / (LONG_ROWS * busy * rates.products)
    if engine == "blocked" and Work.of(problem).flash is not None:
        return ATTEND + cost.flops / (BLOCKS * rates.products) + cost.pairs * _bias_seconds(problem, rates)
    return ATTEND + cost.flops / (LONG_ROWS * rates.products) + cost.pairs * _passes(problem) / rates.exponentials


def _bias_seconds(problem: Problem, rates: MachineRates) -> float:
    """Seconds that one pair spends in biases. A relative bias is computed once for each diagonal and costs nothing."""
    total = 0.0
    for bias, rows in zip(problem.attention.bias, problem.prepared.rows, strict=True):
        if not bias.relative:
            products = 0 if rows is None else 2 * rows.shape[-1]
            total += PASS / rates.exponentials + products / (LONG_ROWS * rates.products)
    return total


def _passes(problem: Problem) -> float:
    """Time of one pair besides its products, in units of one exponential: normalizer, biases, hidden units."""
    attention, floats = problem.attention, problem.attention.score.floats_per_score
    return attention.normalizer.cost + PASS * (len(attention.bias) + (floats if floats > 1 else 0))
