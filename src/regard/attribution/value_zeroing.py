"""Value zeroing (Mohebbi et al. 2023, arXiv:2301.12971): how much each token of a layer changes without one value.

In each layer the value of token j becomes zero in every head, and the layer runs again. The map is the cosine distance
between both outputs of token i, C_ij = 1 - cos(x_i, x_i without j), divided by the sum of its row. It takes the whole
layer into account: residual, norms and feed-forward network. A layer runs once for each token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.attribution.call_changes import CallChange, changing, need_backend
from regard.attribution.chefer import reading_rows
from regard.attribution.model_blocks import BlockCalls, block_name
from regard.attribution.request import INPUT, AttributionRequest, MethodResult, one_sequence
from regard.attribution.traced_run import Rules, TracedCall, traced_run
from regard.base.errors import RegardError
from regard.base.shapes import at_least_float32, without_zeros
from regard.hf.attention_modules import attention_modules
from regard.hf.calls import AttentionCall
from regard.maps import AttentionMap, DenseMap

FORMULA = "C_ij = 1 - cos(x_i, x_i without v_j), rows divided by their sums; relevance = e_t C_L ... C_1"
#: A cosine distance below this is rounding: outputs that do not change are equal, to the bit.
ROUNDING = 1e-14


def value_zeroing(request: AttributionRequest) -> MethodResult:
    """The map C of each layer, with one head, and their product from the position that the target reads.

    Where layers are not self-attention over one text, there is no product, and so no relevance of tokens.
    In a causal model the first token reads itself alone, so every factor moves relevance to it and none away: over many
    layers all of it arrives there, and a note says how much did.
    """
    one_sequence("value-zeroing", request)
    blocks = BlockCalls(request.model, attention_modules(request.model))
    run = traced_run(request.model, request.inputs, request.target.number, request.layers, _Kept(blocks))
    need_backend("value-zeroing", run.calls.values())
    maps: dict[str, AttentionMap] = {name: _layer_map(blocks, name, call) for name, call in run.calls.items()}
    calls = list(run.calls.values())
    is_chain = len({(I, J) for _, _, I, J in (m.shape for m in maps.values())}) == 1 and not run.missing
    is_chain = is_chain and request.layers is None and not any(call.part == "cross" for call in calls)
    relevance, notes = (
        {},
        ("Relevance of tokens needs all layers (leave layers= out), of self-attention over one text.",),
    )
    if is_chain:
        rows = reading_rows(calls[-1], 0)
        for weights in reversed(maps.values()):
            rows = rows @ weights.dense()[0, 0].float()
        relevance, notes = {INPUT: rows.cpu()}, _notes(maps.values(), float(rows[0, 0]))
    return MethodResult(maps, relevance, run.number, run.parts, run.missing, notes)


def _notes(maps: Iterable[AttentionMap], first: float) -> tuple[str, ...]:
    """The note on the product of causal maps; none for others. `first` is the relevance of token 0."""
    if any(bool(weights.dense().triu(1).any()) for weights in maps):
        return ()
    return (
        f"Token 0 has {first:.0%} of the relevance: in a causal model it reads itself alone, so the product of all "
        "layers ends there, whatever the text. Read the map of each layer, or use another method for tokens.",
    )


class _Kept(Rules):
    """Keeps the calls of the blocks during the run, so that `_layer_map` can run each block again."""

    def __init__(self, blocks: BlockCalls) -> None:
        self.blocks = blocks

    @contextmanager
    def during(self) -> Iterator[None]:
        with self.blocks.kept():
            yield


class _ZeroValue(CallChange):
    """The value of one `token` becomes zero in every head. The number of the token is set before each run."""

    token = 0

    def call(self, call: AttentionCall) -> AttentionCall:
        """The call with a copy of the values, in which those of the token are 0: the model may need the values as they
        are.
        """
        value = call.value.clone()
        value[:, :, self.token] = 0
        return replace(call, value=value)


@torch.no_grad()
def _layer_map(blocks: BlockCalls, name: str, call: TracedCall) -> DenseMap:
    """The map C of one layer as (1, 1, n, n), with rows of sum 1; a row in which nothing changes is 0.

    Column j is one run of the block, without the value of token j. `name` is the path of the attention module.
    """
    kept = blocks.calls[block_name(name)]
    change = _ZeroValue(call.module)
    columns: list[Tensor] = []
    with changing(change):
        # the loop variable is the attribute that `_ZeroValue` reads
        for change.token in range(call.value.shape[2]):
            columns.append(1 - F.cosine_similarity(kept.run().double(), kept.output.detach().double(), dim=-1)[0])
    if not change.num_calls:
        raise RegardError(
            f"attribute(method='value-zeroing'): {block_name(name)} does not call the attention {name} when it runs "
            "again. method='weight-gradient' runs the model once."
        )
    distances = torch.stack(columns, -1).clamp_min(0.0)
    distances = distances.masked_fill(distances < ROUNDING, 0.0)
    sums = distances.sum(-1, keepdim=True)
    return DenseMap((distances / without_zeros(sums))[None, None].to(at_least_float32(kept.output).dtype))
