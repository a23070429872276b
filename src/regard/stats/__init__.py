"""Statistics of heads and warnings about them, for the maps of any model."""

from regard.stats.profile import LayerProfile, Link, Profile, profile
from regard.stats.reading import HeadLink, Reading
from regard.stats.statistics import STATISTICS, HeadStatistic
from regard.stats.warnings import CAVEAT, Finding, findings

__all__ = [
    "CAVEAT",
    "STATISTICS",
    "Finding",
    "HeadLink",
    "HeadStatistic",
    "LayerProfile",
    "Link",
    "Profile",
    "Reading",
    "findings",
    "profile",
]
