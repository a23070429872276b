"""The relevance of Chefer, Gur & Wolf 2021 (arXiv:2103.15679), for encoders, decoders and encoder-decoders.

Each layer has the map A' = mean_h max(w dL/dw, 0). Relevance starts as R = I. A layer of self-attention makes
R <- R + A' R. In an encoder-decoder, cross-attention adds to the relevance of source tokens for target tokens:
R_ts <- R_ts + norm(R_tt)^T A' norm(R_ss), where norm(R) = I + (R - I) with rows divided by their sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from regard.attribution.request import DECODER, INPUT, AttributionRequest, MethodResult
from regard.attribution.traced_run import TracedCall, TracedRun, traced_run
from regard.base.errors import RegardError
from regard.base.shapes import without_zeros
from regard.hf.attention_modules import ChosenLayers
from regard.hf.recurrent.core_functions import core_names
from regard.maps import AttentionMap
from regard.maps.changed_map import Carried, HeadMean, PositiveMap
from regard.stats.composition import RowsTimesMap
from regard.stats.numbering import layer_number, module_path

FORMULA = "R <- R + A' R, A' = mean_h max(w dL/dw, 0)"


def chefer(request: AttributionRequest) -> MethodResult:
    """The maps A' of each layer, and the row of R of the position that the target reads.

    Where a target reads several positions (a mean over the text), the relevance is the mean of their rows. The 1 of a
    token's own row is left out.
    """
    # all layers (None), whichever were chosen: relevance passes through each
    run = traced_run(request.model, request.inputs, request.target.number, None, with_recurrent=True)
    refuse_gaps("chefer", run)
    _refuse_parallel(run)
    maps = {name: HeadMean(PositiveMap(call.links())) for name, call in run.calls.items()}
    calls = list(run.calls.values())
    batches = range(calls[0].weights.shape[0])
    if any(call.part == "cross" for call in calls):
        _refuse_without_encoder(calls)
        rows = [_encoder_decoder(calls, maps, b) for b in batches]
        relevance = {text: torch.cat([row[text] for row in rows]).cpu() for text in (INPUT, DECODER)}
    else:
        check_chain("chefer", run)
        relevance = {INPUT: torch.cat([_one_text(calls, maps, b) for b in batches]).cpu()}
    return MethodResult(chosen_maps(request, maps), relevance, run.number, run.parts)


def chosen_maps(request: AttributionRequest, maps: Mapping[str, AttentionMap]) -> dict[str, AttentionMap]:
    """The maps of the layers that were asked for; relevance always passes through all of them."""
    chosen = ChosenLayers(request.layers)
    return {name: weights for name, weights in maps.items() if module_path(name) in chosen}


def refuse_gaps(method: str, run: TracedRun) -> None:
    """Refuse a model some of whose layers have no map: relevance passes through all of them."""
    if run.missing:
        name, reason = next(iter(run.missing.items()))
        raise RegardError(
            f"attribute(method={method!r}): relevance passes through all layers, and {len(run.missing)} of them have "
            f"no map, such as {name}: {reason}. method='weight-gradient' needs no other layer."
        )


def _refuse_parallel(run: TracedRun) -> None:
    """Refuse recurrent layers beside attention in one block: relevance passes through layers one after the other.

    Two calls are in one block if their paths have the same layer number.
    """
    numbers = [layer_number(name) for name in run.calls]
    parallel = [name for name, n in zip(run.calls, numbers, strict=True) if n is not None and numbers.count(n) > 1]
    if any(core_names(run.calls[name].module) for name in parallel):
        raise RegardError(
            f"attribute(method='chefer'): relevance passes through layers one after the other, and {parallel[0]} and "
            f"{parallel[1]} are in one block. method='weight-gradient' reads both."
        )


def _refuse_without_encoder(calls: Sequence[TracedCall]) -> None:
    """Refuse a decoder that reads given states (`encoder_hidden_states`): relevance needs the tokens behind them."""
    if not any(call.part == "encoder" for call in calls):
        raise RegardError(
            "attribute(method='chefer'): the model has cross-attention, and no attention of an encoder ran, so it is "
            "not known from which tokens its keys are. Give the inputs of the encoder too, or use "
            "method='weight-gradient'."
        )


def check_chain(method: str, run: TracedRun) -> None:
    """Refuse layers that are no self-attention over one text."""
    refuse_gaps(method, run)
    shapes = sorted({call.weights.shape[2:] for call in run.calls.values()})
    if len(shapes) > 1 or shapes[0][0] != shapes[0][1] or any(call.part == "cross" for call in run.calls.values()):
        raise RegardError(
            f"attribute(method={method!r}): this method needs layers of self-attention over one text; these have "
            f"(queries, keys) of {', '.join(map(str, shapes))}. method='weight-gradient' takes any, 'chefer' an "
            "encoder-decoder."
        )


def reading_rows(call: TracedCall, batch: int) -> Tensor:
    """The positions of one text that the target reads after the last layer, as a row (1, n) with the sum 1.

    These are the positions at which the output of the last attention has a gradient. The row is 0 if there is none.
    """
    has_gradient = (call.gradient[batch] != 0).any(-1).any(0).float()
    return (has_gradient / has_gradient.sum().clamp_min(1.0))[None]


def _one_text(calls: Sequence[TracedCall], maps: dict[str, HeadMean], batch: int) -> Tensor:
    """The relevance (1, n) of the tokens of one text: the row of R at the target's position, without the token's own 1.

    `calls`, `maps` and `batch` are those of `_encoder_decoder`.
    """
    start = reading_rows(calls[-1], batch)
    return _rows_times_relevance(start, [maps[call.name] for call in calls], batch) - start


def _rows_times_relevance(rows: Tensor, maps: Sequence[AttentionMap], batch: int) -> Tensor:
    """x R = x (I + A'_L) ... (I + A'_1) for rows x (rows, n), from the last layer to the first.

    R, which has n x n entries, is never formed.
    """
    for weights in reversed(maps):
        rows = rows + weights.select([batch], None).summarize(RowsTimesMap(rows))[0]
    return rows


def _row_sums(maps: Sequence[AttentionMap], batch: int) -> Tensor:
    """R 1 = (I + A'_L) ... (I + A'_1) 1, the row sums of R, (n,). `maps` have one head."""
    n = maps[0].shape[2]
    sums = torch.ones(1, 1, n, device=maps[0].device)
    for weights in maps:
        sums = sums + weights.select([batch], None).summarize(Carried(sums))[0]
    return sums[0, 0]


def _encoder_decoder(calls: Sequence[TracedCall], maps: dict[str, HeadMean], batch: int) -> dict[str, Tensor]:
    """The relevance (1, n) of source tokens and of target tokens for one text, the batch entry `batch`.

    `calls` are all calls of the run in their order, and `maps` has the map A' of each, by its name.

    The decoder's own relevance R_tt (`own`) and R_ts (`across`) are matrices, because cross-attention normalizes the
    first one. The factor norm(R_ss) follows at the end, where it meets one row only.
    """
    encoder = [maps[call.name] for call in calls if call.part == "encoder"]
    decoder = [call for call in calls if call.part != "encoder"]
    last = decoder[-1]
    n_target, n_source = last.weights.shape[2], encoder[0].shape[2]
    own = torch.eye(n_target, device=last.weights.device)
    across = torch.zeros(n_target, n_source, device=own.device)  # R_ts before the factor norm(R_ss)
    for call in decoder:
        weights = maps[call.name].select([batch], None).dense()[0, 0].float()
        if call.part == "cross":
            across = across + _normalized(own).T @ weights
        else:
            own, across = own + weights @ own, across + weights @ across
    rows = reading_rows(last, batch)
    return {INPUT: _times_normalized(rows @ across, encoder, batch), DECODER: rows @ own - rows}


def _normalized(relevance: Tensor) -> Tensor:
    """norm(R) = I + (R - I) with each row of R - I divided by its sum; a row of zeros stays zero."""
    identity = torch.eye(len(relevance), device=relevance.device)
    rest = relevance - identity
    sums = rest.sum(-1, keepdim=True)
    return identity + rest / without_zeros(sums)


def _times_normalized(rows: Tensor, maps: Sequence[AttentionMap], batch: int) -> Tensor:
    """x norm(R) = x + (x / s)(R - I) for rows x, where s = (R - I) 1 are the row sums; R is that of `maps`."""
    sums = _row_sums(maps, batch) - 1
    scaled = rows / without_zeros(sums)
    return rows + _rows_times_relevance(scaled, maps, batch) - scaled
