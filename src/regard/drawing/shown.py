"""`show`: attention weights of any framework in the notebook widget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from regard.base.checks import checked
from regard.base.errors import RegardError, warn_caller
from regard.base.upper_layers import upper_layer
from regard.drawing.panels import as_weights
from regard.maps import AttentionMap, DenseMap


@checked
def show(
    attentions: Any, tokens: Sequence[str] | None = None, queries: Sequence[str] | None = None, batch: int = 0
) -> Any:
    """Show the weights of all layers and heads in a notebook; needs `pip install 'regard[view]'`.

    `attentions` are the weights of each layer, (B, H, I, J) or (H, I, J): tensors of torch, or arrays of NumPy, JAX or
    TensorFlow, in a list or tuple, as `output_attentions=True` returns them and as BertViz takes them. One layer needs
    no list, and a stack (layers, B, H, I, J) is split into layers. `tokens` are those of the keys, and of the queries
    if `queries` are not given. Entry `batch` is shown.

    `rg.show(...).save("attention.html")` writes the page to one file, which opens without a network.

    For a model of torch, `rg.watch(model, tokenizer)` and `seen.show()` show the same, without the slow backend.

    >>> import torch, regard as rg
    >>> rg.show([torch.eye(3).expand(1, 2, 3, 3)] * 4, ["a", "short", "text"])
    Regard(1 text)
    """
    layers = [layer for layer in _layers(attentions) if layer is not None]
    if not layers:
        raise RegardError(
            "show: there are no weights. Models of transformers return none with the fast backends. Watch the "
            "model instead: `with rg.watch(model, tokenizer) as seen: model(**inputs)`, then seen.show()."
        )
    return upper_layer("widget").show_maps(list(map(_map_of_layer, layers)), tokens, queries, batch)


def _layers(attentions: Any) -> Sequence[Any]:
    """The weights of each layer: the items of a list, a tuple, an iterator or a dict, of a stack, or of an output of
    transformers. A layer may be None.
    """
    if hasattr(attentions, "cross_attentions") and not hasattr(attentions, "attentions"):
        raise RegardError(
            "show: this model has an encoder and a decoder. Show one of .encoder_attentions, .decoder_attentions and "
            ".cross_attentions (with queries=, the tokens of the decoder)."
        )
    attentions = getattr(attentions, "attentions", getattr(attentions, "maps", attentions))
    attentions = list(attentions.values()) if isinstance(attentions, Mapping) else attentions
    if isinstance(attentions, list | tuple | Iterator):
        layers = list(attentions)
        if layers and all(isinstance(layer, str) for layer in layers):
            raise RegardError("show: the first argument is a list of texts. Weights come first: show(weights, tokens).")
        if layers and all(isinstance(layer, list | tuple) and layer and hasattr(layer[0], "shape") for layer in layers):
            raise RegardError(
                "show: these are the weights of each step of a generation. One map of the whole text is "
                "seen.generation, after `with rg.watch(model, tokenizer) as seen: model.generate(...)`: "
                "seen.generation.show()."
            )
        return layers
    return list(attentions) if getattr(attentions, "ndim", 0) == 5 else [attentions]


def _map_of_layer(layer: Any) -> AttentionMap:
    """The map of the weights of one layer, (I, J), (H, I, J) or (B, H, I, J); NaN and infinity are refused.

    Scores before the softmax are shown too, with a warning.
    """
    if isinstance(layer, AttentionMap):
        return layer
    weights = as_weights("show", layer)
    weights = weights if weights.is_floating_point() else weights.float()
    if not bool(weights.isfinite().all()):
        raise RegardError(
            "show: the weights hold NaN or infinite numbers. The softmax of a row in which every score is -inf is NaN: "
            "let each query attend to a key, or give weights.nan_to_num(0.0)."
        )
    if bool((weights < 0).any()) or bool((weights.float().sum(-1) > 1.01).any()):
        warn_caller(
            "show: some weights are negative, or a row sums to more than 1, so these may be scores. Weights are "
            "scores.softmax(-1)."
        )
    return DenseMap(weights)
