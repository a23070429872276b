"""The recurrent engine: memories that transitions change from token to token."""

from regard.engine.recurrent.engine import RecurrentEngine, recur
from regard.engine.recurrent.rows import rows_of_steps
from regard.engine.recurrent.transport import Transport

__all__ = ["RecurrentEngine", "Transport", "recur", "rows_of_steps"]
