"""Statistics of heads and warnings about them, for the maps of any model."""

from regard.stats.alignment_roles import alignment_roles
from regard.stats.cache_split import Beyond, KeyHeadSplit, LayerSplit, cache_split
from regard.stats.composition import CompositionScores, HeadMatrices, HeadPair, head_composition
from regard.stats.contacts import contact_maps
from regard.stats.flow import ValueWeightedMap, rollout, value_weighted
from regard.stats.head_distances import divergence, head_groups, head_map, sample_rows
from regard.stats.head_table import HeadTable, LayerTable
from regard.stats.locality import LayerLocality, ModelLocality, locality
from regard.stats.mask_warnings import mask_findings
from regard.stats.numbering import layer_number, layer_numbers
from regard.stats.patch_grid import PatchGrid
from regard.stats.patch_roles import patch_roles, shuffle_patches
from regard.stats.patterns import LayerPatterns, patterns
from regard.stats.prediction_warnings import prediction_findings
from regard.stats.probes import probe_tokens, shuffle_order
from regard.stats.profile import LayerProfile, Link, ModelProfile, profile
from regard.stats.retrieval_roles import WatchedNeedle, retrieval_roles
from regard.stats.roles import Role, RoleTable, roles
from regard.stats.statistics import STATISTICS, HeadStatistic
from regard.stats.syntax_roles import SyntaxSentence, WatchedSentence, syntax_roles, syntax_sentences
from regard.stats.text_differences import TextDifference, differences
from regard.stats.text_reading import HeadLink, TextReading
from regard.stats.time_warping import TimeAlignment, token_times, warping_path
from regard.stats.token_reductions import Agreement, Offsets, SameToken
from regard.stats.token_statistics import text_statistics
from regard.stats.warnings import CAVEAT, Finding, findings

__all__ = [
    "CAVEAT",
    "STATISTICS",
    "Agreement",
    "Beyond",
    "CompositionScores",
    "Finding",
    "HeadLink",
    "HeadMatrices",
    "HeadPair",
    "HeadStatistic",
    "HeadTable",
    "KeyHeadSplit",
    "LayerLocality",
    "LayerPatterns",
    "LayerProfile",
    "LayerSplit",
    "LayerTable",
    "Link",
    "ModelLocality",
    "ModelProfile",
    "Offsets",
    "PatchGrid",
    "Role",
    "RoleTable",
    "SameToken",
    "SyntaxSentence",
    "TextDifference",
    "TextReading",
    "TimeAlignment",
    "ValueWeightedMap",
    "WatchedNeedle",
    "WatchedSentence",
    "alignment_roles",
    "cache_split",
    "contact_maps",
    "differences",
    "divergence",
    "findings",
    "head_composition",
    "head_groups",
    "head_map",
    "layer_number",
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
    "text_statistics",
    "token_times",
    "value_weighted",
    "warping_path",
]
