"""The names of `regard` itself: what README and the guides use most. `regard/__init__.py` loads it at the first use."""

from regard.attention import Attention
from regard.attention_output import attend, plan
from regard.attribution import Target, attribute, faithfulness, sweep
from regard.base.errors import RegardError
from regard.biases import ALiBi
from regard.caches import GrowingCache
from regard.catalog import mechanism, mechanisms
from regard.composites.sum import combine
from regard.diagnosis import check
from regard.drawing import figure, heatmap, show, weight_table
from regard.edits import KnockOut, Where
from regard.encodings import RoPE
from regard.engine.ring import Ring
from regard.hf import TextReader, edit, importance, load_model, prune, register, watch
from regard.maps import AttentionMap
from regard.masks import causal, documents, mask_mod, mask_tensor, padding, window
from regard.nn.torch_attention import scaled_dot_product_attention
from regard.profiling import profile_corpus
from regard.scores import Dot
from regard.stats import findings, profile, roles, rollout

__all__ = [
    "ALiBi",
    "Attention",
    "AttentionMap",
    "Dot",
    "GrowingCache",
    "KnockOut",
    "RegardError",
    "Ring",
    "RoPE",
    "Target",
    "TextReader",
    "Where",
    "attend",
    "attribute",
    "causal",
    "check",
    "combine",
    "documents",
    "edit",
    "faithfulness",
    "figure",
    "findings",
    "heatmap",
    "importance",
    "load_model",
    "mask_mod",
    "mask_tensor",
    "mechanism",
    "mechanisms",
    "padding",
    "plan",
    "profile",
    "profile_corpus",
    "prune",
    "register",
    "roles",
    "rollout",
    "scaled_dot_product_attention",
    "show",
    "sweep",
    "watch",
    "weight_table",
    "window",
]
