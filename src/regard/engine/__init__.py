"""Engines: every way to run the same definition."""

from regard.engine.plan import ENGINES, Plan, plan
from regard.engine.problem import Cost, Engine, Problem, Result

__all__ = ["ENGINES", "Cost", "Engine", "Plan", "Problem", "Result", "plan"]
