"""Why a module has no map, in words."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from regard.base.versions import hidden_eager

UNCALLED = "was not called inside the with-block by the watching thread"
OUTSIDE = (
    "computes its weights itself, without the attention interface of transformers, F.scaled_dot_product_attention, "
    "nn.MultiheadAttention or regard.attend, and has no projection named v_proj or value to measure them by"
)
FUSED = (
    "computed this layer in one fused kernel, which does not return the tensors of its weights (use model.eval()), or "
    "in the code of another transformers than 5.23"
)
NO_GRAPH = (
    "its weights have no gradients, because it is recurrent, it subtracts two maps, or its module must run once more; "
    "watch it without grad=True, in a block of its own"
)
#: Ends the errors of models that cannot be watched.
SUPPORTED = (
    "Maps are recorded of attention that goes through transformers' attention interface (BERT, Llama, T5, ViT and some "
    "350 more), F.scaled_dot_product_attention, nn.MultiheadAttention or regard.attend, that computes softmax itself "
    "(known by its name, its projections or its variables: attention, attn, qkv, or q, k and v), or that is linear in "
    "the result of a projection named v_proj or value; and of transformers' recurrent layers"
)
#: Why a module of a compiled model has no map.
NOT_IN_GRAPH = (
    "did not run inside the with-block in the watching thread, or its compiled code is older than the registration of "
    "the backend"
)


def nothing_captured(model: nn.Module, reasons: Iterable[str]) -> str:
    """What to say of a model that ran and of which no module has a map."""
    reasons = list(reasons)
    listed = f" {len(reasons)} attention modules: {'; '.join(dict.fromkeys(reasons))}." if reasons else ""
    backend = getattr(getattr(model, "config", None), "_attn_implementation", "eager")
    listed += hidden_eager(model)
    remedy = "with attn_implementation='eager' " if backend != "eager" else ""
    return (
        f"watch: no attention of {type(model).__name__} was captured although it ran.{listed} {SUPPORTED}; "
        f"output_attentions=True {remedy}may still return its weights."
    )
