"""`show`: attention weights of any framework in the notebook widget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regard.checks import checked
from regard.drawing.panels import as_weights
from regard.errors import RegardError
from regard.maps import AttentionMap, MatrixMap
from regard.upper_layers import upper_layer


@checked
def show(
    attentions: Any, tokens: Sequence[str] | None = None, queries: Sequence[str] | None = None, batch: int = 0
) -> Any:
    """Show the weights of all layers and heads in a notebook; needs `pip install 'regard[view]'`.

    `attentions` are the weights of each layer, (B, H, I, J) or (H, I, J): tensors of torch, or arrays of NumPy, JAX or
    TensorFlow, in a list or tuple, as `output_attentions=True` returns them and as BertViz takes them. One layer needs
    no list. `tokens` are those of the keys, and of the queries if `queries` are not given. Entry `batch` is shown.

    Of a model of torch, `rg.watch(model, tokenizer)` and `seen.show()` show the same, without the slow backend.

    >>> import torch, regard as rg
    >>> rg.show([torch.eye(3).expand(1, 2, 3, 3)] * 4, ["a", "short", "text"])
    Regard(1 text)
    """
    is_listed = isinstance(attentions, list | tuple)
    layers = [layer for layer in attentions if layer is not None] if is_listed else [attentions]
    if not layers:
        raise RegardError(
            "show: there are no weights. Models of transformers return none with the fast backends: watch the model, "
            "`with rg.watch(model, tokenizer) as seen: model(**inputs)`, and seen.show()."
        )
    maps = [layer if isinstance(layer, AttentionMap) else MatrixMap(as_weights("show", layer)) for layer in layers]
    return upper_layer("widget").show_maps(maps, tokens, queries, batch)
