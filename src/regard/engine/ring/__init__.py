"""The ring engine: one sequence over many ranks."""

from regard.engine.ring.exchange import Exchange, RankLost
from regard.engine.ring.plan import RingPlan
from regard.engine.ring.ring import Ring
from regard.engine.ring.ring_call import RingCall

__all__ = ["Exchange", "RankLost", "Ring", "RingCall", "RingPlan"]
