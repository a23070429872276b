"""Statistics of heads and warnings about them, for the maps of any model."""

from typing import TYPE_CHECKING

from regard.base.other_libraries import answers_for
from regard.stats.alignment import alignment_roles, token_times, warping_path
from regard.stats.cache_split import cache_split
from regard.stats.composition import head_composition, rollout, value_weighted
from regard.stats.head_distances import head_divergence, head_groups, head_map, sample_rows
from regard.stats.numbering import layer_numbers
from regard.stats.patch_roles import PatchGrid, patch_roles, shuffle_patches
from regard.stats.patterns import contact_maps, locality, patterns
from regard.stats.profile import profile
from regard.stats.retrieval_roles import WatchedNeedle, retrieval_roles
from regard.stats.roles import probe_tokens, roles, shuffle_order
from regard.stats.statistics import STATISTICS, Agreement, HeadStatistic, Offsets, SameToken, text_statistics
from regard.stats.syntax_roles import SyntaxSentence, WatchedSentence, syntax_roles, syntax_sentences
from regard.stats.text_reading import text_differences
from regard.stats.warnings import CAVEAT, findings, mask_findings, prediction_findings

__all__ = [
    "CAVEAT",
    "STATISTICS",
    "Agreement",
    "HeadStatistic",
    "Offsets",
    "PatchGrid",
    "SameToken",
    "SyntaxSentence",
    "WatchedNeedle",
    "WatchedSentence",
    "alignment_roles",
    "cache_split",
    "contact_maps",
    "findings",
    "head_composition",
    "head_divergence",
    "head_groups",
    "head_map",
    "layer_numbers",
    "locality",
    "mask_findings",
    "patch_roles",
    "patterns",
    "prediction_findings",
    "probe_tokens",
    "profile",
    "retrieval_roles",
    "roles",
    "rollout",
    "sample_rows",
    "shuffle_order",
    "shuffle_patches",
    "syntax_roles",
    "syntax_sentences",
    "text_differences",
    "text_statistics",
    "token_times",
    "value_weighted",
    "warping_path",
]

if not TYPE_CHECKING:
    __getattr__ = answers_for(__name__, __all__)
