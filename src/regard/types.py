"""Types: what functions return, and the values that pieces of your own receive."""

from typing import TYPE_CHECKING

from regard.attention_output import AttentionOutput
from regard.attribution.edge_patching import HeadEdges
from regard.attribution.faithfulness import FaithfulnessCurves
from regard.attribution.result import Attribution
from regard.attribution.sweeps import SweepTable
from regard.base.other_libraries import answers_for
from regard.base.positions import Positions
from regard.base.spans import Spans
from regard.catalog import CatalogEntry
from regard.diagnosis.report import CheckFinding, CheckReport
from regard.engine.plan import CompositePlan, ExecutionPlan
from regard.engine.ring import RankLost, RingPlan
from regard.maps.step_table import StepTable
from regard.pieces.grid import Grid
from regard.profiling.corpus_profile import CorpusProfile
from regard.stats.alignment import TimeAlignment
from regard.stats.cache_split import KeyHeadSplit, LayerSplit
from regard.stats.composition import CompositionScores, HeadMatrices, HeadPair
from regard.stats.patterns import LayerLocality, LayerPatterns, ModelLocality
from regard.stats.profile import HeadTable, LayerProfile, LayerTable, Link, ModelProfile
from regard.stats.roles import Role, RoleTable
from regard.stats.text_reading import HeadLink, TextDifference, TextReading
from regard.stats.warnings import Finding

__all__ = [
    "AttentionOutput",
    "Attribution",
    "CatalogEntry",
    "CheckFinding",
    "CheckReport",
    "CompositePlan",
    "CompositionScores",
    "CorpusProfile",
    "ExecutionPlan",
    "FaithfulnessCurves",
    "Finding",
    "Grid",
    "HeadEdges",
    "HeadLink",
    "HeadMatrices",
    "HeadPair",
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
    "Positions",
    "RankLost",
    "RingPlan",
    "Role",
    "RoleTable",
    "Spans",
    "StepTable",
    "SweepTable",
    "TextDifference",
    "TextReading",
    "TimeAlignment",
]

if not TYPE_CHECKING:
    __getattr__ = answers_for(__name__, __all__)
