"""`attribute`: which weights and which tokens made a prediction, by any of several methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regard.attribution import attention_flow as flow
from regard.attribution import attn_lrp as lrp
from regard.attribution import chefer as chefer_rules
from regard.attribution import edge_patching as edges
from regard.attribution import integrated_gradients as integrated
from regard.attribution import value_zeroing as zeroing
from regard.attribution import weight_gradient as gradients
from regard.attribution.faithfulness import FaithfulnessCurves, curves
from regard.attribution.inputs import TextInputs, check_tokenizer
from regard.attribution.request import INPUT, AttributionRequest, MethodResult
from regard.attribution.result import Attribution
from regard.attribution.target import explained
from regard.attribution.traced_run import check_model, precision_notes
from regard.base.checks import checked
from regard.base.errors import RegardError, nearest
from regard.hf.attention_modules import ChosenLayers, attention_modules
from regard.hf.token_labels import label_of


@dataclass(frozen=True)
class Method:
    """A method: its function, its formula, and the options of `attribute` that it reads; `required` is one it needs."""

    run: Callable[[AttributionRequest], MethodResult]
    formula: str
    options: tuple[str, ...] = ()
    required: str = ""


METHODS = {
    "weight-gradient": Method(gradients.weight_gradient, gradients.FORMULA),
    "attention-flow": Method(flow.attention_flow, flow.FORMULA),
    "attn-lrp": Method(lrp.attn_lrp, lrp.FORMULA),
    "chefer": Method(chefer_rules.chefer, chefer_rules.FORMULA),
    "edge-patching": Method(edges.edge_patching, edges.FORMULA, ("corrupted",), "corrupted"),
    "integrated-gradients": Method(integrated.integrated_gradients, integrated.FORMULA, ("baseline", "steps")),
    "value-zeroing": Method(zeroing.value_zeroing, zeroing.FORMULA),
}


@checked
def attribute(
    model: nn.Module,
    inputs: Any,
    target: Any = None,
    method: str = "weight-gradient",
    layers: int | str | Iterable[int | str] | None = None,
    *,
    tokenizer: Any = None,
    test: bool = True,
    **options: Any,
) -> Attribution:
    """Which weights and which tokens made a prediction: a map for each layer, and the relevance of each token.

    `inputs` are token ids (B, n), or the arguments of the model by name. `target` is the number L to explain: a token
    (an id, or a text with `tokenizer`), one id for each sequence, a class, a `rg.Target` with a position and a token to
    compare with, or a function from the model's output to one number for each sequence; by default the model's own
    prediction. `layers` are those of `rg.watch`. `method` is one of

    - "weight-gradient": w_ij dL/dw_ij = w_ij (g_i . v_j), where g_i is the gradient of L at the output of a head;
    - "attention-flow": the maximum flow through the weights of all layers; short texts (arXiv:2005.00928);
    - "attn-lrp": relevance that is passed on by the rules of AttnLRP; exact, or refused (arXiv:2402.05602);
    - "chefer": A' = mean_h max(w dL/dw, 0), and R <- R + A' R from layer to layer (arXiv:2103.15679);
    - "edge-patching": g_i . (w_ij v_j - w'_ij v'_j), where w' and v' are those of `corrupted`, the inputs of a text of
      the same length, and the connections between heads, `edges` (arXiv:2310.10348);
    - "integrated-gradients": (w_ij - w'_ij) v_j . mean_a g_i(a), where an edit moves the weights of one layer from a
      `baseline`, "zero" or "uniform", in `steps` points (16): one run of the model each (arXiv:2004.11207);
    - "value-zeroing": the cosine distance between the outputs of a layer with and without the value of each token; one
      run of the layer for each token (arXiv:2301.12971).

    All maps are lazy, in O(n) memory. With `test` the curves of `rg.faithfulness` are computed, and printed with the
    result: a method whose tokens are no better than random ones explains nothing. Gradients of parameters are not
    changed, and frozen parameters are no obstacle. A model in half precision has gradients of two or three digits,
    which the result says; sums over links are in float32.

    >>> import torch, transformers, regard as rg
    >>> config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)
    >>> model = transformers.GPT2LMHeadModel(config).eval()
    >>> found = rg.attribute(model, torch.tensor([[3, 1, 4, 1, 5]]), target=9)
    >>> found[0], found.tokens().shape, len(found.test.counts)
    (AttentionMap(1 x 2 heads x 5 queries x 5 keys, signed), torch.Size([1, 5]), 4)
    """
    if method not in METHODS:
        raise RegardError(f"attribute(method={method!r}): {nearest(method, METHODS)}")
    chosen = METHODS[method]
    unread = sorted(set(options) - set(chosen.options))
    if unread:
        known = f"It has {', '.join(chosen.options)}." if chosen.options else "It has no options."
        raise RegardError(f"attribute(method={method!r}): no option {', '.join(unread)}. {known}")
    check_model(model)
    check_tokenizer(model, tokenizer, "attribute")
    ChosenLayers(layers).check((name for name, _ in model.named_modules()), attention_modules(model))
    text = TextInputs.of(model, inputs)
    # one plain run: the model's own prediction is the default target, and texts of targets are matched to its logits
    with torch.no_grad():
        request = AttributionRequest(
            model, text, explained(target, model, text, text.run(model), tokenizer), layers, options
        )
    found = chosen.run(request)
    return Attribution(
        method,
        chosen.formula,
        request.target.label,
        found.maps,
        found.relevance,
        found.value,
        _labels(text, tokenizer),
        found.parts,
        found.missing,
        (*found.notes, *precision_notes(model, len(found.maps))),
        _test(request, found, tokenizer, test),
        found.edges,
    )


def _labels(inputs: TextInputs, tokenizer: Any) -> tuple[str, ...]:
    """The tokens of the first sequence in readable form; empty without a tokenizer or token ids."""
    if tokenizer is None or inputs.ids is None:
        return ()
    return tuple(label_of(tokenizer, index) for index in inputs.ids[0].tolist())


def _test(request: AttributionRequest, found: MethodResult, tokenizer: Any, wanted: bool) -> FaithfulnessCurves | None:
    """The faithfulness curves of an attribution, or None.

    They need one sequence of at least two token ids, and one relevance for each of them. None also if not `wanted`.
    """
    ids = request.inputs.ids
    if not wanted or ids is None or len(ids) != 1 or INPUT not in found.relevance or ids.shape[1] < 2:
        return None
    relevance = found.relevance[INPUT]
    return (
        None
        if relevance.shape != ids.shape
        else curves(request.model, request.inputs, relevance, request.target, tokenizer)
    )
