"""Engines: the ways to compute an attention, and the plan that chooses one of them."""

from regard.engine.plan import ENGINES, ExecutionPlan, plan
from regard.engine.problem import Cost, Engine, Problem, Result

__all__ = ["ENGINES", "Cost", "Engine", "ExecutionPlan", "Problem", "Result", "plan"]
