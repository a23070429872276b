"""Every public name of `regard`, in one place; `regard/__init__.py` loads it at the first use."""

from regard.seen import Seen, attend, explain
from regard.attention import Attention
from regard.cache import Cache, GrowingCache, RecurrentCache, RingCache
from regard.engine import Plan
from regard.errors import RegardError
from regard.maps import *  # noqa: F403
from regard.maps import __all__ as _maps
from regard.pieces import *  # noqa: F403
from regard.pieces import __all__ as _pieces
from regard.positions import Positions
from regard.spans import Spans

__all__ = [  # noqa: PLE0604
    "Attention",
    "Cache",
    "GrowingCache",
    "Plan",
    "Positions",
    "RecurrentCache",
    "RegardError",
    "RingCache",
    "Seen",
    "Spans",
    "attend",
    "explain",
    *_maps,
    *_pieces,
]
