"""The ring engine: one sequence over many ranks."""

from regard.engine.ring.exchange import Exchange, RankLost
from regard.engine.ring.plan import RingPlan
from regard.engine.ring.rank_share import RankShare
from regard.engine.ring.ring import Ring
from regard.engine.ring.ring_call import RingCall
from regard.engine.ring.state_passing import StatePassing

__all__ = ["Exchange", "RankLost", "RankShare", "Ring", "RingCall", "RingPlan", "StatePassing"]
