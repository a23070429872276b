"""The ring engine: one sequence over many ranks."""

from regard.engine.ring.exchange import Exchange, RankLost
from regard.engine.ring.plan import RingPlan
from regard.engine.ring.ring import Ring
from regard.engine.ring.turn import Turn

__all__ = ["Exchange", "RankLost", "Ring", "RingPlan", "Turn"]
