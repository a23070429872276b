"""Every public name of `regard`, in one place; `regard/__init__.py` loads it at the first use."""

from regard import attribution, composites, drawing, edits, hf, maps, pieces, profiling, stats
from regard.attention import Attention
from regard.attention_output import AttentionOutput, attend, plan
from regard.attribution import *  # noqa: F403
from regard.cache import Cache, GrowingCache, LatentCache, RecurrentCache, RingCache
from regard.catalog import CatalogEntry, mechanism, mechanisms
from regard.combine import combine
from regard.composites import *  # noqa: F403
from regard.diagnosis import CheckFinding, CheckReport, check
from regard.drawing import *  # noqa: F403
from regard.edits import *  # noqa: F403
from regard.engine import ExecutionPlan
from regard.engine.ring import RankLost, Ring, RingPlan
from regard.errors import RegardError
from regard.hf import *  # noqa: F403
from regard.maps import *  # noqa: F403
from regard.pieces import *  # noqa: F403
from regard.positions import Positions
from regard.profiling import *  # noqa: F403
from regard.spans import Spans
from regard.stats import *  # noqa: F403
from regard.torch_attention import scaled_dot_product_attention

__all__ = [
    "Attention",
    "AttentionOutput",
    "Cache",
    "CatalogEntry",
    "CheckFinding",
    "CheckReport",
    "ExecutionPlan",
    "GrowingCache",
    "LatentCache",
    "Positions",
    "RankLost",
    "RecurrentCache",
    "RegardError",
    "Ring",
    "RingCache",
    "RingPlan",
    "Spans",
    "attend",
    "check",
    "combine",
    "mechanism",
    "mechanisms",
    "plan",
    "scaled_dot_product_attention",
]
__all__ += attribution.__all__
__all__ += composites.__all__
__all__ += drawing.__all__
__all__ += edits.__all__
__all__ += hf.__all__
__all__ += maps.__all__
__all__ += pieces.__all__
__all__ += profiling.__all__
__all__ += stats.__all__
