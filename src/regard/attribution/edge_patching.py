"""Edge attribution patching (Syed, Rager & Conmy 2023, arXiv:2310.10348): what a corrupted text would change.

Patching replaces an activation by that of another run. To first order it changes L by (z' - z) . dL/dz, for all
places from one backward pass. Here an edge is one of two things:

- a link (token j -> token i in a head): the head's output is sum_j w_ij v_j, so the link carries
  g_i . (w_ij v_j - w'_ij v'_j);
- a connection between heads (head u -> query, key or value of head v, or the logits): what u adds to the residual
  stream, times the gradient of the residual stream through that input of v.

Scores are clean minus corrupted, so a positive edge raises L in the clean text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.attribution.inputs import TextInputs
from regard.attribution.model_blocks import BlockCalls, block_name, is_additive
from regard.attribution.request import DECODER, INPUT, AttributionRequest, MethodResult, received
from regard.attribution.traced_run import Rules, TracedRun, gradients_on, traced_run
from regard.base.errors import RegardError
from regard.base.shapes import at_least_float32
from regard.hf.attention_modules import attention_modules
from regard.hf.calls import AttentionCall
from regard.hf.heads.model_heads import Heads, ModelHeads
from regard.maps import GradientMap, SumMap
from regard.stats.numbering import head_name, layer_numbers

FORMULA = "g_i . (w_ij v_j - w'_ij v'_j), w' and v' those of the corrupted text"
#: The inputs of a head.
PARTS = ("query", "key", "value")
LOGITS = "logits"


@dataclass(frozen=True, eq=False)
class HeadEdges:
    """The score of each edge between heads: `scores[s, r]` from the sender s to the receiver r, 0 where there is none.

    A sender is a head ("L0.H2"), a receiver an input of a later head ("L1.H0.query") or the logits. Heads that share
    a key and value head are one receiver: "L1.G0.key".

    >>> import torch, regard as rg
    >>> scores = torch.tensor([[0.1, 0.0], [-0.7, 0.2]])
    >>> edges = rg.types.HeadEdges(["L0.H0", "L0.H1"], ["L1.H0.query", "logits"], scores)
    >>> edges.top(2)
    [('L0.H1', 'L1.H0.query', -0.7), ('L0.H1', 'logits', 0.2)]
    """

    senders: list[str]
    receivers: list[str]
    scores: Tensor

    def top(self, count: int = 10) -> list[tuple[str, str, float]]:
        """The edges with the largest |score|: sender, receiver and score."""
        flat = self.scores.flatten()
        best = flat.abs().topk(min(count, len(flat))).indices
        pairs = (divmod(int(n), len(self.receivers)) for n in best)
        return [(self.senders[s], self.receivers[r], round(float(self.scores[s, r]), 6)) for s, r in pairs]

    def __repr__(self) -> str:
        lines = [f"  {sender} -> {receiver}: {score:+.3g}" for sender, receiver, score in self.top(5)]
        return "\n".join([f"HeadEdges({len(self.senders)} heads, {len(self.receivers)} receivers)", *lines])


def edge_patching(request: AttributionRequest) -> MethodResult:
    """Links and connections between heads, for a clean text and `corrupted`, a text of the same length."""
    other = _corrupted(request)
    blocks = BlockCalls(request.model, attention_modules(request.model))
    rules = _EdgeRules(blocks)
    clean = traced_run(request.model, request.inputs, request.target.number, request.layers, rules)
    corrupted = traced_run(request.model, other, request.target.number, request.layers)
    _check_same(clean, corrupted)
    pairs = {name: (call, corrupted.calls[name]) for name, call in clean.calls.items()}
    maps = {
        name: SumMap([call.links(), GradientMap(there.weights, call.gradient, there.value)], [1.0, -1.0])
        for name, (call, there) in pairs.items()
    }
    with gradients_on():
        edges, notes = _edges(request, rules, clean, corrupted)
    relevance = received(request, clean.calls, maps)
    return MethodResult(dict(maps), relevance, clean.number, clean.parts, clean.missing, notes, edges)


def _corrupted(request: AttributionRequest) -> TextInputs:
    """The corrupted text; an error if there is none, or one whose tokens have another shape."""
    given = request.options.get("corrupted")
    if given is None:
        raise RegardError(
            "attribute(method='edge-patching'): give corrupted=, the inputs of a text of the same length in which the "
            "answer differs, such as another name."
        )
    other = TextInputs.of(request.model, given)
    for text, ids, other_ids in (
        (INPUT, request.inputs.ids, other.ids),
        (DECODER, request.inputs.decoder_ids, other.decoder_ids),
    ):
        if ids is not None and (other_ids is None or other_ids.shape != ids.shape):
            shape = None if other_ids is None else tuple(other_ids.shape)
            raise RegardError(
                f"attribute(method='edge-patching'): the {text} has the shape {tuple(ids.shape)} and in corrupted "
                f"{shape}. Activations are exchanged token by token, so both texts need the same length."
            )
    return other


def _check_same(clean: TracedRun, corrupted: TracedRun) -> None:
    """Refuse two runs whose attention calls differ in name or shape: their activations cannot be exchanged."""
    shapes = [{name: call.weights.shape for name, call in run.calls.items()} for run in (clean, corrupted)]
    if shapes[0] != shapes[1]:
        raise RegardError(
            "attribute(method='edge-patching'): the clean and the corrupted text run through different attention calls."
        )


class _EdgeRules(Rules):
    """Keeps queries, keys and values of all calls, and the blocks, with the gradients that edges need.

    `tensors` gives the three inputs of each call in the order of `calls`, and after them the outputs of the blocks:
    `_edges` and `_read` find gradients by this order.
    """

    def __init__(self, blocks: BlockCalls) -> None:
        self.blocks = blocks
        self.calls: list[AttentionCall] = []

    @contextmanager
    def during(self) -> Iterator[None]:
        with self.blocks.kept():
            yield

    def before_gradients(self, number: Tensor, calls: Sequence[tuple[AttentionCall, Tensor]]) -> None:
        self.calls = [call for call, _ in calls]

    def tensors(self) -> list[Tensor]:
        inputs = [getattr(call, part) for call in self.calls for part in PARTS]
        return [*inputs, *(call.output for call in self.blocks.calls.values())]

    @property
    def keeps_graph(self) -> bool:
        return True  # `_read` computes more gradients in the graph of the run


def _edges(
    request: AttributionRequest, rules: _EdgeRules, clean: TracedRun, corrupted: TracedRun
) -> tuple[HeadEdges | None, tuple[str, ...]]:
    """The edges between heads, or None and the reason as a note.

    A score is (what the sender adds in the clean run - in the corrupted one) . (gradient of L through the receiver),
    both (B, n, C) in the residual stream. It is 0 unless the receiver is in a later layer.
    """
    names = {module: name for name, module in request.model.named_modules()}
    calls = {names[call.module]: n for n, call in enumerate(rules.calls)}
    reason = _no_edges(request, rules, clean, len(calls))
    try:
        heads = ModelHeads.of(request.model, "attribute").by_name
    except RegardError as error:
        heads, reason = {}, reason or str(error)
    unknown = [name for name in clean.calls if name not in heads]
    if reason is None and unknown:
        reason = f"the output projection of {unknown[0]} is not known"
    if reason is not None:
        return None, (f"No edges between heads: {reason}.",)
    numbers = dict(zip(clean.calls, layer_numbers(clean.calls), strict=True))
    senders, receivers, columns = [], [], []
    # `columns` has the gradient of each receiver, `added` the difference of each sender
    added = []
    for name, call in clean.calls.items():
        added += list(_added(heads[name], call.output - corrupted.calls[name].output))
        senders += [(numbers[name], head_name(numbers[name], head)) for head in range(heads[name].num_heads)]
    for name in clean.calls:
        for label, gradient in _read(rules, clean, name, calls[name]):
            receivers.append((numbers[name], f"L{numbers[name]}.{label}"))
            columns.append(gradient)
    # a number above all layers: the logits read every head, by the gradient at the output of the last block
    receivers.append((len(numbers) + max(numbers.values()), LOGITS))
    columns.append(clean.gradients[-1])
    scores = torch.stack([torch.stack([(at_least_float32(z) * g).sum() for g in columns]) for z in added]).float().cpu()
    later = torch.tensor([[layer < reader for reader, _ in receivers] for layer, _ in senders])
    return HeadEdges([name for _, name in senders], [name for _, name in receivers], scores * later), ()


def _no_edges(request: AttributionRequest, rules: _EdgeRules, clean: TracedRun, num_modules: int) -> str | None:
    """The reason why edges cannot be computed, or None. `num_modules` is the number of modules that attended."""
    if request.has_decoder:
        return "they are computed for one residual stream, and an encoder-decoder has two"
    if not all(call.is_backend for call in clean.calls.values()):
        return "attention does not go through transformers' attention interface"
    if num_modules != len(rules.calls) or clean.missing:
        return "a module attends several times, or has no map"
    for name in clean.calls:
        block = block_name(name)
        call = rules.blocks.calls.get(block)
        if call is None or not is_additive(call, name.removeprefix(f"{block}.")):
            return (
                f"{block} does not only add to its input (a norm after the sum, as in BERT), so heads share no stream"
            )
    return None


def _added(heads: Heads, change: Tensor) -> Iterator[Tensor]:
    """What each head adds to the residual stream, (B, n, C), for its outputs (B, H, n, E), or for a change of them."""
    for head, matrix in enumerate(heads.output_matrices.detach()):
        yield change[:, head] @ matrix


def _read(rules: _EdgeRules, clean: TracedRun, name: str, number: int) -> Iterator[tuple[str, Tensor]]:
    """The name of each input of each head of a call, and the gradient of L through this input alone, (B, n, C).

    It is the gradient at the input of the block, the residual stream. `number` is the index of the call in
    `rules.calls`. Query heads that share a key head are one group G.
    """
    call, hidden = rules.calls[number], rules.blocks.calls[block_name(name)].hidden
    slopes: Any = clean.gradients[3 * number : 3 * number + 3]
    for part, slope in zip(PARTS, slopes, strict=True):
        tensor = getattr(call, part)
        shared = tensor.shape[1] < call.query.shape[1]
        for head in range(tensor.shape[1]):
            only = torch.zeros_like(slope)
            only[:, head] = slope[:, head]
            (gradient,) = torch.autograd.grad(tensor, hidden, only, retain_graph=True, allow_unused=True)
            yield f"{'G' if shared else 'H'}{head}.{part}", torch.zeros_like(hidden) if gradient is None else gradient
