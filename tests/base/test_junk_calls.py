"""Junk calls of the public functions that `test_mistakes.py` does not name: a drawn few, each works or is refused."""

from __future__ import annotations

import inspect
import random
import warnings
from copy import deepcopy

import pytest
import torch
import transformers
from test_mistakes import CALLS, MAP, MAPS, TOKENS, WRONG, q
from torch import nn

import regard as rg
from miniatures import LLAMA
from public_names import PUBLIC, named
from regard.base.errors import MissingPackage

SEED = 31
DRAWS = 300


class Net(nn.Module):
    """Attends with projections that have the usual names."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        heads = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return rg.Attention(mask=rg.causal())(*heads).output.transpose(1, 2).flatten(2)


NET, X = Net().eval(), torch.randn(1, 6, 32)
GRID = rg.stats.PatchGrid(2, 3)
SEEN = rg.Attention()(q, q, q)
LANGUAGE_MODEL = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()
IDS = torch.arange(3, 9)[None]
CAUSAL = {name: rg.Attention(mask=rg.causal())(q, q, q).weights for name in MAPS}
with torch.no_grad(), rg.watch(LANGUAGE_MODEL) as watched:
    LANGUAGE_MODEL(IDS)
JUNK = WRONG | {
    "ragged lists": [[1, 2], [3]],
    "nested lists": [[0.5, 0.5], [0.1, 0.9]],
    "a model": nn.Linear(2, 2),
    "a map": MAP,
    "maps": MAPS,
    "a list of None": [None],
    "NaN everywhere": torch.full((2, 4, 6, 8), torch.nan),
    "integers of four axes": torch.zeros(2, 4, 6, 8, dtype=torch.int64),
    "two axes": torch.zeros(6, 6),
    "a large integer": 10**20,
}
#: A right call of public names that `CALLS` of `test_mistakes.py` does not have, and that `simple_call` cannot make.
OTHERS = {
    "AxialRoPE": {"coordinates": torch.arange(12).view(6, 2), "axes": [0, 0, 1, 1], "rates": [1.0, 0.1, 1.0, 0.1]},
    "Decay": {"log_decay": -0.1},
    "StateSpace": {"rate": torch.ones(4), "skip": None},
    "DifferenceFactors": {"head_dim": 8, "initial": 0.8},
    "GateFactors": {"num_parts": 2},
    "ConstantFactors": {"numbers": 0.5},
    "Chain": {"parts": rg.RoPE(8)},
    "Divergence": {"to": MAP},
    "FIREBias": {"num_heads": 4, "hidden": 8, "threshold": 4, "fixed_length": None},
    "KERPLEBias": {"num_heads": 4, "power": True},
    "Grouped": {"attention": rg.Attention(), "groups": rg.composites.MeanGroups(2)},
    "LongRoPEScaling": {"factors": [1.0, 2.0], "extension": 2.0, "trained_length": 8},
    "YaRNScaling": {"factor": 2.0, "trained_length": 8, "fast": 32.0, "slow": 1.0, "attention_factor": 1.0},
    "ProportionalScaling": {"share": 0.5, "factor": 2.0},
    "MassWhere": {"mask": rg.causal()},
    "MeanGroups": {"size": 2, "stride": 1},
    "ProjectedGroups": {"length": 8, "num_groups": 2, "is_shared": True},
    "Nystrom": {"num_landmarks": 2, "iterations": 2},
    "ThroughLatents": {"num_latents": 2, "head_dim": 8, "num_heads": 4},
    "SegmentMemory": {"size": 2, "features": rg.scores.EluPlusOne()},
    "scaled_dot_product_attention": {
        "query": q,
        "key": q,
        "value": q,
        "dropout_p": 0.1,
        "is_causal": True,
        "scale": 0.5,
    },
    "PoPE": {"num_heads": 4, "head_dim": 8, "base": 100.0},
    "PositionTemperature": {"floor": 2, "factor": 0.1, "first": 1},
    "QKNorm": {"head_dim": 8, "num_heads": 4, "num_key_value_heads": 4, "joint": True, "learned": True, "eps": 1e-6},
    "Sigmoid": {"offset": 1.0},
    "Spans": {"intervals": ((0, 2),)},
    "Positions": {"start": 0, "keys": rg.types.Spans(((0, 6),))},
    "Sum": {"parts": [rg.Attention(), rg.Attention()], "factors": [0.5, 0.5], "splits_channels": False},
    "Taps": {"numbers": torch.ones(4, 3)},
    "PatchGrid": {"rows": 2, "columns": 3, "start": 0, "frames": 1, "tokens": None},
    "PagedKeys": {
        "pages": torch.zeros(3, 2, 1, 4),
        "table": torch.tensor([[0, 1]]),
        "lengths": torch.tensor([3]),
    },
    "Where": {"layers": 0, "heads": [1], "queries": 2, "keys": [0], "roles": None, "batch": None},
    "KnockOut": {"where": rg.Where(keys=0), "renormalize": True},
    "ScaleWeights": {"where": rg.Where(keys=0), "factor": 2.0},
    "ReplaceWeights": {"where": rg.Where(keys=0), "weights": "uniform"},
    "AddToScores": {"where": rg.Where(keys=0), "amount": 1.0},
    "ActivationPatch": {"where": rg.Where(heads=0), "part": "output", "source": 0.0},
    "Target": {"token": 3, "position": -1, "against": 2},
    "Part": {
        "attention": rg.Attention(),
        "query": q,
        "key": q,
        "value": q,
        "positions": rg.types.Positions.of(0, 5, 5),
    },
    "PreparedParts": {"parts": [], "join": lambda seen: seen},
    "AdaptedCall": {"query": q, "key": q, "value": q, "finish": lambda heads: heads, "mask": None, "scale": 1.0},
    "adapter": {"kind": "NoSuchAttention", "output": "last", "num_heads": "groups"},
    "alignment_roles": {"maps": MAPS, "gold": None, "lengths": [(6, 6), (6, 6)], "first": 0, "numbers": [0, 1]},
    "cache_split": {"maps": CAUSAL, "sinks": 1, "window": 2, "least": 0.1, "groups": None, "batch": 0},
    "check": {"subject": rg.causal(), "mask": "keep", "scale": 1.0, "seed": 0, "limit": 60.0, "progress": None},
    "combine": {"outputs": [SEEN, SEEN], "factors": [0.5, 0.5]},
    "contact_maps": {"weights": MAP, "special": [0], "batch": 0},
    "text_differences": {"readings": [rg.types.TextReading.of("a", MAPS, TOKENS)] * 2},
    "edit": {"model": NET, "edits": rg.KnockOut(rg.Where(keys=0)), "tokens": TOKENS, "targets": None, "roles": None},
    "edit_from_json": {"text": rg.KnockOut(rg.Where(keys=0)).to_json()},
    "faithfulness": {"model": LANGUAGE_MODEL, "inputs": IDS, "relevance": torch.ones(6), "target": 3},
    "attribute": {
        "model": LANGUAGE_MODEL,
        "inputs": IDS,
        "target": 3,
        "method": "weight-gradient",
        "layers": [1],
        "test": False,
    },
    "figure": {"source": rg.Attention()(q[:1], q[:1], q[:1]).weights, "tokens": TOKENS, "panels": ["map"], "head": 0},
    "findings": {"source": MAPS, "tokens": TOKENS, "query_tokens": TOKENS, "batch": 1},
    "gated": {"model": LANGUAGE_MODEL, "gates": {0: torch.ones(4)}, "output": None, "num_heads": 4},
    "composition": {"model": LANGUAGE_MODEL, "kind": "K", "fold_norms": True, "rotations": 3, "layers": [0, 1]},
    "head_weights": {"model": LANGUAGE_MODEL, "fold_norms": True},
    "copying_scores": {"model": LANGUAGE_MODEL, "circuit": "QK", "fold_norms": True},
    "sweep": {
        "model": NET,
        "edits": rg.KnockOut,
        "inputs": X,
        "measure": lambda output, examples: output.sum((1, 2)),
        "over": ["heads"],
        "into": None,
        "tokens": None,
        "batch_size": 4,
        "file": None,
        "progress": None,
    },
    "head_composition": {"layers": rg.hf.head_weights(LANGUAGE_MODEL), "kind": "K", "rotations": 3},
    "heatmap": {"weights": MAP, "tokens": TOKENS, "head": 0, "batch": 0, "title": "a", "vmax": 1.0, "axes": None},
    "importance": {
        "model": LANGUAGE_MODEL,
        "loss": lambda model, ids: model(ids).logits.sum(),
        "batches": [IDS],
        "num_heads": 4,
    },
    "load_model": {"name": "minilm"},
    "locality": {"maps": MAPS, "within": 2, "batch": 0, "numbers": [0, 1]},
    "mechanisms": {},
    "patch_roles": {"maps": MAPS, "grid": GRID, "null": MAPS, "batch": 0, "numbers": [0, 1]},
    "prune": {"model": LANGUAGE_MODEL, "heads": {0: [2, 3]}, "copy": True},
    "retrieval_roles": {
        "watched": [rg.stats.WatchedNeedle(CAUSAL, needle, 4, 1) for needle in (0, 1)],
        "batch": 0,
        "numbers": [0, 1],
    },
    "shuffle_patches": {"pixels": torch.rand(3, 4, 6), "rows": 2, "columns": 3, "seed": 1},
    "streaming": {"model": LANGUAGE_MODEL, "split": rg.stats.cache_split(watched.maps, sinks=1, window=2)},
    "token_times": {"maps": MAPS, "heads": [(0, 1)], "seconds": 0.02, "num_keys": 6, "first": 0, "filter_width": 3},
    "warping_path": {"gains": torch.rand(3, 4)},
    "watch": {"model": NET, "layers": None, "keep": "qk", "verify": True, "reductions": None},
    "weight_table": {"weights": MAP, "tokens": TOKENS, "head": 0, "batch": 0, "digits": 2},
    "Where.parse": {"text": "L0.H1: b -> a", "tokens": TOKENS, "targets": None, "roles": None},
}


def call(name, arguments):
    function = named(name)
    parameters = inspect.signature(function).parameters
    if (
        name == "prune" and arguments["model"] is LANGUAGE_MODEL
    ):  # junk in place of `copy=True` would let it change the model of the other calls
        arguments = arguments | {"model": deepcopy(LANGUAGE_MODEL)}
    is_variadic = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values()) and name != "check"
    with warnings.catch_warnings(action="ignore"):
        result = function(*arguments.values()) if is_variadic else function(**arguments)
        if hasattr(result, "__enter__"):
            with result:
                LANGUAGE_MODEL(IDS) if arguments["model"] is LANGUAGE_MODEL else NET(X)


def raw_errors(name, argument, mistakes):
    """The junk that ends in another error than a `RegardError`, and the error."""
    raw = {}
    for mistake in mistakes:
        try:
            call(name, OTHERS[name] | {argument: JUNK[mistake]})
        except rg.RegardError:
            continue
        except Exception as error:
            raw[mistake] = f"{type(error).__name__}: {str(error)[:100]}"
    return raw


#: Junk that still ends in an error of Python or torch. This list may only become shorter.
STILL_RAW = {
    ("figure", "source", "a dict"),
}
#: Arguments that the user's own model or function gets, or that are one: it raises its own errors. A text is a file.
OF_THE_MODEL = {("faithfulness", "inputs"), ("attribute", "inputs")}
OF_THE_MODEL |= {(name, argument) for name in ("faithfulness", "attribute") for argument in ("model", "target")}
OF_THE_MODEL |= {("importance", "loss"), ("importance", "batches"), ("check", "progress")}
OF_THE_MODEL |= {("sweep", name) for name in ("model", "inputs", "measure", "progress", "file")}
#: Values that only Regard makes, and what needs a model of Hugging Face, optional packages, files or processes.
NAMES = """
AttentionMap AttentionOutput Attribution CacheCost KeyHeadSplit CheckFinding CheckReport CompositePlan
CompositionScores CorpusProfile CurvePoint TextDifference EditResult EditedRun EditSequence FaithfulnessCurves
Finding Generation GradientMap Grid HeadEdges HeadLink HeadPair HeadTable HeadMatrices ImportanceScores KeyGroupMap
LayerLocality LayerProfile LayerSplit LayerTable Link RowLinks ModelLocality DenseMap CatalogEntry LayerPatterns
ExecutionPlan ProductMap ModelProfile QualityCurve PruningResult RankLost RegardError RingMap RingPlan
RingTransportedMap Role RoleTable StepTable Steps SumMap SyntaxSentence TextReader TextReading TextResult Tile
TransportedMap ValueWeightedMap TimeAlignment WatchedAttention WatchedNeedle WatchedSentence WatchedStep Ring
edit_effect profile_corpus pruning_curve register show syntax_roles SweepTable
"""
MADE_BY_REGARD = set(NAMES.split())


#: A right value of each type of an argument without a default.
RIGHT = {"Size": 4, "Count": 4, "int": 1, "float": 0.5, "Number": 0.5, "Positive": 0.5, "bool": True}


def _parameters(name):
    parameters = inspect.signature(named(name)).parameters.values()
    return [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or name == "Chain"]


def simple_call(name):
    """A right call by defaults and types, as most pieces have one; None if an argument is of another type."""
    values = {p.name: RIGHT.get(str(p.annotation)) if p.default is p.empty else p.default for p in _parameters(name)}
    is_known = all(values[p.name] is not None for p in _parameters(name) if p.default is p.empty)
    return values if values and is_known else None


TAKE_ARGUMENTS = {
    name
    for name in PUBLIC
    if name not in MADE_BY_REGARD and not inspect.isabstract(PUBLIC[name]) and callable(PUBLIC[name])
    if _parameters(name)
}
SIMPLE = {name: simple_call(name) for name in sorted(TAKE_ARGUMENTS - {*CALLS, *OTHERS}) if simple_call(name)}
OTHERS |= SIMPLE


def test_every_public_name_has_junk_calls_or_a_reason():
    without = sorted(TAKE_ARGUMENTS - {*CALLS, *OTHERS})
    assert not without, f"write a right call of each in OTHERS, or a name in NAMES if only Regard makes it: {without}"
    assert not MADE_BY_REGARD & (set(CALLS) | set(OTHERS)) and set(PUBLIC) >= MADE_BY_REGARD


@pytest.mark.parametrize("name", OTHERS)
def test_a_right_call_runs(name):
    """A call that is refused itself would hide what junk does beyond the first check."""
    try:
        call(name, OTHERS[name])
    except MissingPackage:
        raise
    except rg.RegardError as refused:
        raise AssertionError(f"write a right call of {name} in OTHERS of this file") from refused


def drawn():
    every = [(name, argument) for name in OTHERS for argument in OTHERS[name] if (name, argument) not in OF_THE_MODEL]
    draw = random.Random(SEED)
    return [(*draw.choice(every), draw.choice(list(JUNK))) for _ in range(DRAWS)]


def test_drawn_junk_works_or_is_refused():
    raw = {}
    for name, argument, mistake in sorted(set(drawn()) - STILL_RAW):
        if found := raw_errors(name, argument, [mistake]):
            raw[name, argument, mistake] = found[mistake]
    assert not raw, f"seed {SEED}:\n" + "\n".join(f"{key}: {error}" for key, error in raw.items())


FOUND = [
    *(("scaled_dot_product_attention", "is_causal", mistake) for mistake in ("an array", "booleans", "no rows")),
    *(("faithfulness", "relevance", mistake) for mistake in ("None", "a text", "ragged lists", "a large integer")),
    ("scaled_dot_product_attention", "scale", "a large integer"),
    ("check", "limit", "infinity"),
    ("prune", "copy", "an array"),
]


@pytest.mark.parametrize(("name", "argument", "mistake"), FOUND)
def test_junk_that_was_found_stays_refused(name, argument, mistake):
    """Another seed would not draw it again."""
    assert not raw_errors(name, argument, [mistake])


def test_swapped_arguments_work_or_are_refused():
    raw = {}
    for name, right in OTHERS.items():
        for one, other in zip(right, list(right)[1:], strict=False):
            if {(name, one), (name, other)} & OF_THE_MODEL:
                continue
            try:
                call(name, right | {one: right[other], other: right[one]})
            except rg.RegardError:
                continue
            except Exception as error:
                raw[name, one, other] = f"{type(error).__name__}: {str(error)[:100]}"
    assert not raw, "\n".join(f"{key}: {error}" for key, error in raw.items())


@pytest.mark.parametrize(("name", "argument", "mistake"), sorted(STILL_RAW))
def test_what_is_listed_as_raw_is_raw(name, argument, mistake):
    assert raw_errors(name, argument, [mistake]), "it is refused in words now: remove it from STILL_RAW"
