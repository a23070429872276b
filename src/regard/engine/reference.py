"""The engine that runs the definitions of `regard.reference`."""

from __future__ import annotations

import torch

from regard.attention import Scored, Transported
from regard.engine.problem import Cost, Engine, Problem, Result
from regard.reference import reference


class Reference(Engine):
    """Runs the definition."""

    name = "reference"
    description = "follows the definition in NumPy, in float64, one head at a time"
    families = (Scored, Transported)

    def _refusal(self, problem: Problem) -> str | None:
        if problem.learns:
            return "NumPy has no gradients; wrap the call in torch.no_grad()"
        return None

    def run(self, problem: Problem) -> Result:
        output, _ = reference(problem)
        return Result(torch.from_numpy(output).to(problem.value), None)

    def cost(self, problem: Problem) -> Cost:
        s = problem.sizes
        pairs = s.B * s.H * s.I * s.J
        return Cost(pairs, pairs * (2 * s.D + 2 * s.E + 4), pairs * 8 * 4)
