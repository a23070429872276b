"""Attention flow (Abnar & Zuidema 2020, arXiv:2005.00928): the maximum flow from a position to each input token.

The graph has a node for each token before and after every layer. Token i after a layer is joined with token j before
it by an edge of capacity 0.5 mean_h w_hij, and with itself by 0.5 more, for the residual. The relevance of an input
token is the maximum flow from the position that the target reads to this token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from regard.attribution.chefer import check_chain, chosen_maps, reading_rows
from regard.attribution.request import INPUT, AttributionRequest, MethodResult, one_sequence
from regard.attribution.traced_run import traced_run
from regard.base.errors import RegardError
from regard.maps.changed_map import HeadMean

FORMULA = "maximum flow with the capacities 0.5 mean_h w + 0.5 I"
#: Edges of the graph, above which a flow takes minutes.
MOST_EDGES = 1 << 20
#: A capacity below this is rounding.
LEAST = 1e-12


def attention_flow(request: AttributionRequest) -> MethodResult:
    """The flow from the position that the target reads to each input token. It reads weights, not their gradients."""
    one_sequence("attention-flow", request)
    run = traced_run(request.model, request.inputs, request.target.number)
    check_chain("attention-flow", run)
    calls = list(run.calls.values())
    maps = {name: HeadMean(call.weights) for name, call in run.calls.items()}
    n = calls[0].weights.shape[2]
    if len(calls) * n * n > MOST_EDGES:
        raise RegardError(
            f"attribute(method='attention-flow'): {n} tokens and {len(calls)} layers are {len(calls) * n * n:,} edges; "
            f"a flow of more than {MOST_EDGES:,} takes too long. Give a shorter text, or use method='chefer'."
        )
    capacities = [0.5 * weights.dense()[0, 0].double().cpu().numpy() + 0.5 * np.eye(n) for weights in maps.values()]
    # only this reads gradients: they show which positions the target reads
    start = reading_rows(calls[-1], 0)[0].double().cpu().numpy()
    flows = torch.from_numpy(flows_to_inputs(capacities, start)).float()[None]
    notes = ("Flow reads the weights alone: another token at this position has the same flow.",)
    return MethodResult(chosen_maps(request, maps), {INPUT: flows}, run.number, run.parts, notes=notes)


def flows_to_inputs(capacities: Sequence[np.ndarray], start: np.ndarray) -> np.ndarray:
    """The maximum flow to each input token, (n,). `capacities` are those of each layer, the first layer first.

    `start` (n,) are the capacities from the source to the tokens after the last layer.

    >>> flows_to_inputs([np.array([[1.0, 0.0], [0.5, 0.5]])] * 2, np.array([0.0, 1.0]))
    array([1. , 0.5])
    """
    return np.array([_maximum_flow(capacities, start, sink) for sink in range(len(start))])


def _maximum_flow(capacities: Sequence[np.ndarray], start: np.ndarray, sink: int) -> float:
    """The maximum flow from the source to the input token `sink`, by Dinic's algorithm on a graph of layers.

    `capacities` and `start` are those of `flows_to_inputs`. Layers are numbered from the last one downwards.
    `down[l][i, j]` is what may still flow from token i to j through layer l, `up[l][i, j]` what flows there already and
    may return. `left[i]` is what the source may still send to token i.
    """
    down = [matrix.copy() for matrix in reversed(capacities)]
    up = [np.zeros_like(matrix) for matrix in down]
    left, total = start.copy(), 0.0
    while (levels := _levels(down, up, left, sink)) is not None:
        while True:
            path = _path(down, up, left, levels, sink)
            if path is None:
                break
            total += _send(down, up, left, path)
    return total


#: A step of a path: down or up, the layer, and the tokens at both of its ends.
Step = tuple[bool, int, int, int]


def _levels(down: list[np.ndarray], up: list[np.ndarray], left: np.ndarray, sink: int) -> list[np.ndarray] | None:
    """The distance of each node from the source along edges with capacity; None if the sink cannot be reached.

    `levels[l]` (n,) are the tokens above layer l, and the last one the input tokens; -1 is not reached. A breadth-first
    search: in each round all nodes at `distance` reach others, down or back up.
    """
    levels = [np.full(len(left), -1) for _ in range(len(down) + 1)]
    levels[0][left > LEAST] = 0
    distance = 0
    while True:
        fronts = [level == distance for level in levels]
        if not any(front.any() for front in fronts):
            return None
        if levels[-1][sink] >= 0:
            return levels
        distance += 1
        for layer in range(len(down)):
            reached = (down[layer][fronts[layer]] > LEAST).any(0) & (levels[layer + 1] < 0)
            levels[layer + 1][reached] = distance
            returned = (up[layer][:, fronts[layer + 1]] > LEAST).any(1) & (levels[layer] < 0)
            levels[layer][returned] = distance


def _path(
    down: list[np.ndarray], up: list[np.ndarray], left: np.ndarray, levels: list[np.ndarray], sink: int
) -> list[Step] | None:
    """A path from the source to the sink whose levels rise by one at each step; None if there is no more.

    `down`, `up` and `left` are as in `_maximum_flow`, here and below, and `levels` as `_levels` returns them. A
    depth-first search. A dead end loses its level (-1), also for later calls, so no search visits it again.
    """
    bottom = len(down)
    while True:
        starts = np.flatnonzero((left > LEAST) & (levels[0] == 0))
        if not len(starts):
            return None
        layer, token, path = 0, int(starts[0]), list[Step]()
        while (layer, token) != (bottom, sink):
            step = _next_step(down, up, levels, layer, token)
            if step is not None:
                path.append(step)
                layer, token = (step[1] + 1, step[3]) if step[0] else (step[1], step[2])
                continue
            levels[layer][token] = -1
            if not path:
                break
            # step back to the node before the dead end
            is_down, at, i, j = path.pop()
            layer, token = (at, i) if is_down else (at + 1, j)
        else:
            return path


def _next_step(
    down: list[np.ndarray], up: list[np.ndarray], levels: list[np.ndarray], layer: int, token: int
) -> Step | None:
    """A step from a token at this layer to a node one level further, down if possible, else back up; None if there is
    none.
    """
    wanted = levels[layer][token] + 1
    if layer < len(down):
        open_ = np.flatnonzero((down[layer][token] > LEAST) & (levels[layer + 1] == wanted))
        if len(open_):
            return True, layer, token, int(open_[0])
    if layer > 0:
        open_ = np.flatnonzero((up[layer - 1][:, token] > LEAST) & (levels[layer - 1] == wanted))
        if len(open_):
            return False, layer - 1, int(open_[0]), token
    return None


def _send(down: list[np.ndarray], up: list[np.ndarray], left: np.ndarray, path: list[Step]) -> float:
    """Send as much as the path allows, and return the amount, a sum of weights.

    Flow up a step takes back flow that was sent down. `down` and `up` are what each layer can still carry, and `left`
    what each start of a path still has to send.
    """
    first = path[0][2]
    amount = min(left[first], *(down[at][i, j] if is_down else up[at][i, j] for is_down, at, i, j in path))
    left[first] -= amount
    for is_down, at, i, j in path:
        sign = 1.0 if is_down else -1.0
        down[at][i, j] -= sign * amount
        up[at][i, j] += sign * amount
    return float(amount)
