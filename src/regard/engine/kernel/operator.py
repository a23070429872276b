"""The kernels as operators of torch: `regard::attention` and its backward pass, for graphs of torch.compile.

A graph holds only tensors and numbers, so the operator takes its mask as numbers: the position of the first query and
of the first key, whether the mask is causal, the size of a window, which keys are real, and the group of every token.
The layout of tiles is made when the operator runs, from the sizes that it has then. So one graph serves all lengths.

The kernel engine does not call it: with gradients, an operator costs 77 microseconds a call, an `autograd.Function` 11.
Both run the same `forward` and `gradients`.
"""

from __future__ import annotations

from functools import lru_cache, reduce
from operator import and_
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.base.context import ContextItems
from regard.base.errors import RegardError
from regard.base.positions import Positions
from regard.base.shapes import Sizes
from regard.base.spans import Spans
from regard.engine.kernel.attention import CallSettings, Dropout, Inputs, forward, gradients
from regard.engine.kernel.library import load, reason
from regard.engine.kernel.mask_layout import Layout
from regard.engine.kernel.running import empty
from regard.pieces.data_masks import padding
from regard.pieces.mask import Mask, causal, window
from regard.pieces.normalizer import any_coarse
from regard.pieces.same_group import groups_mask

TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor? sink, Tensor? real, Tensor? groups, Tensor? offset, Tensor? seed, "
    "Tensor? owner"
)
NUMBERS = "SymInt start, SymInt first, bool is_causal, SymInt window, float scale, float cap, float dropout"


class OperatorTerms(NamedTuple):
    """The mask and the numbers of a call.

    Query i has position `start` + i, plus `offset` if it is given; key j has position `first` + j. `real` (B, n) and
    `groups` (B, n) hold for each position whether the key is real, and the group of the token: a query attends only to
    its own group, whose tokens are neighbors. A `window` of 0 is none, and so is a `cap` of 0. `seed` is an integer
    for the dropout; None: no weight is dropped. `owner` is a parameter of the module that calls, without gradients: in
    a graph, which one graph of several layers shares, it alone tells them apart.
    """

    real: Tensor | None
    groups: Tensor | None
    offset: Tensor | None
    seed: Tensor | None
    owner: Tensor | None
    start: int
    first: int
    is_causal: bool
    window: int
    scale: float
    cap: float
    dropout: float

    def setting(self, sizes: Sizes) -> CallSettings:
        """The settings of a call of these sizes, with the layout of its mask."""
        library = load()
        if library is None:
            raise RegardError(f"regard::attention: this graph needs the compiled kernels. {reason()}")
        start = self.start + (0 if self.offset is None else int(self.offset))
        positions = Positions(start, Spans(((self.first, self.first + sizes.J),)))
        tables = (None if t is None else HashableMatrix.of(t) for t in (self._real(positions), self.groups))
        layout = _layout(positions, sizes, self.is_causal, self.window, *tables)
        dropout = None if self.seed is None else Dropout(self.dropout, int(self.seed), start, self.first)
        return CallSettings(library, layout, self.scale, self.cap, False, dropout)

    def _real(self, positions: Positions) -> Tensor | None:
        """The real keys up to the last one; None if all are real. Keys behind the end of `real` are not written yet."""
        if self.real is None:
            return None
        ((first, stop),) = positions.keys
        real = F.pad(self.real, (0, max(0, stop - self.real.shape[1])))[:, :stop]
        return None if bool(real[:, first:].all()) else real


class OperatorObserver(Protocol):
    """Is called after every call of the operator. It must copy what it keeps: the caller may overwrite the tensors."""

    def operator_called(self, inputs: Inputs, terms: OperatorTerms, output: Tensor, logsumexp: Tensor) -> None: ...


#: Observers of the operator in this context: code that torch compiled calls nothing else of Regard.
operator_observers: ContextItems[OperatorObserver] = ContextItems("operator")


class HashableMatrix(NamedTuple):
    """A matrix as a value that can be compared and hashed."""

    dtype: torch.dtype
    num_columns: int
    content: bytes

    @staticmethod
    def of(tensor: Tensor) -> HashableMatrix:
        return HashableMatrix(tensor.dtype, tensor.shape[1], tensor.cpu().numpy().tobytes())

    def tensor(self) -> Tensor:
        return torch.frombuffer(bytearray(self.content), dtype=self.dtype).view(-1, self.num_columns)


@lru_cache(maxsize=32)
def _layout(
    positions: Positions,
    sizes: Sizes,
    is_causal: bool,
    window_size: int,
    real: HashableMatrix | None,
    groups: HashableMatrix | None,
) -> Layout:
    """The layout of a mask; layers of a model have the same one, so all of them find the layout of the first.

    The mask is the intersection of a causal one, a window (0: none), real keys and groups of tokens, as far as given.
    """
    parts: list[Mask] = [causal()] if is_causal else []
    if window_size:
        parts.append(window(window_size))
    if real is not None:
        parts.append(padding(real.tensor()))
    if groups is not None:
        parts.append(groups_mask(groups.tensor()))
    return Layout.of(reduce(and_, parts) if parts else None, positions, sizes)


def attention(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, *terms: Any) -> tuple[Tensor, Tensor]:
    """The output (B, H, I, E), whose heads are neighbors in memory, and the log-sum-exp (B, H, I); no gradients.

    `sink` (H,) is a score beside the keys of each row, or None. `terms` are the fields of `OperatorTerms`, in their
    order.
    """
    sizes, named = Sizes.of(query, key, value), OperatorTerms(*terms)
    output = value.new_empty(sizes.B, sizes.I, sizes.H, sizes.E).transpose(1, 2)
    if sizes.is_empty:
        return output.zero_(), empty(*query.shape[:3]).fill_(-torch.inf)
    inputs = Inputs(query, key, value, None, None, sink)
    output, logsumexp = forward(named.setting(sizes), inputs, output=output)
    for observer in operator_observers:
        observer.operator_called(inputs, named, output, logsumexp)
    return output, logsumexp


def decode(query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """`attention` of queries that attend to all real keys."""
    return attention(query, key, value, None, real, None, None, None, None, 0, 0, False, 0, scale, 0.0, 0.0)


def attention_backward(
    grad: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    *terms: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and sink; the last has no element without a sink: operators return no None.

    `grad` (B, H, I, E) is the gradient of the output. `output` and `logsumexp` are those of `attention`.
    `terms` are the fields of `OperatorTerms`, in their order.
    """
    sizes = Sizes.of(query, key, value)
    inputs, wanted = Inputs(query, key, value, None, None, sink), Inputs(True, True, True, None, None, sink is not None)  # type: ignore[arg-type]
    if sizes.is_empty:
        return tuple(torch.zeros_like(t) for t in _fake_gradients(query, key, value, sink))  # type: ignore[return-value]
    if any_coarse(logsumexp):
        raise RegardError(
            "regard::attention: scores are so large that float32 is too coarse for the log-sum-exp of a row, which the "
            "backward pass of the kernel needs. Train this model without torch.compile, or with attn_implementation="
            "'sdpa'."
        )
    grads = gradients(OperatorTerms(*terms).setting(sizes), inputs, wanted, grad, output, logsumexp)
    results = [grads[0], grads[1], grads[2], query.new_empty(0) if sink is None else grads[5]]
    return tuple(t.contiguous() for t in results if t is not None)  # type: ignore[return-value]


def _fake_attention(query: Tensor, key: Tensor, value: Tensor, *terms: Any) -> tuple[Tensor, Tensor]:
    """Tensors of the shapes, strides and dtypes that `attention` returns, for the tracing of graphs."""
    (B, H, I, _), E = query.shape, value.shape[3]
    return value.new_empty(B, I, H, E).transpose(1, 2), query.new_empty(B, H, I, dtype=torch.float32)


def _fake_gradients(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> tuple[Tensor, ...]:
    """The same for `attention_backward`."""
    like = [t.new_empty(t.shape) for t in (query, key, value)]
    like.append(query.new_empty(0) if sink is None else sink.new_empty(sink.shape))
    return tuple(like)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the backward pass reads: output, log-sum-exp and the nine arguments of TENSORS; then NUMBERS."""
    ctx.save_for_backward(*output, *inputs[:9])
    ctx.numbers = inputs[9:]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value and sink, and None for the fields of `OperatorTerms`."""
    saved = ctx.saved_tensors  # read once: checkpointing refuses a second reading
    grads = torch.ops.regard.attention_backward(grad, *saved, *ctx.numbers)
    has_sink = saved[5] is not None  # after output, log-sum-exp, query, key and value
    return *grads[:3], grads[3] if has_sink else None, *[None] * (len(OperatorTerms._fields))


def _refuse(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
    """The backward pass of the backward pass: an error."""
    raise RegardError(
        "regard::attention: the kernels compute gradients themselves, so these gradients have no gradient "
        "(create_graph=True). Use attn_implementation='eager'."
    )


def _define() -> torch.library.Library:
    """Register the two operators in torch, until the library that is returned is freed.

    `Library.define` costs 14 microseconds a call without gradients, `torch.library.custom_op` 18.
    """
    library = torch.library.Library("regard", "DEF")
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    library.define(f"attention({TENSORS}, {NUMBERS}) -> (Tensor, Tensor)", tags=tags)
    results = "Tensor grad, Tensor output, Tensor logsumexp"
    library.define(
        f"attention_backward({results}, {TENSORS}, {NUMBERS}) -> (Tensor, Tensor, Tensor, Tensor)", tags=tags
    )
    library.impl("attention", attention, "CPU")
    library.impl("attention_backward", attention_backward, "CPU")
    torch.library.register_fake("regard::attention", _fake_attention, lib=library)
    torch.library.register_fake("regard::attention_backward", lambda *a: _fake_gradients(*a[3:7]), lib=library)
    torch.library.register_autograd("regard::attention", _differentiate, setup_context=_save, lib=library)
    torch.library.register_autograd("regard::attention_backward", _refuse, lib=library)
    return library


_library = _define()  # an operator lives as long as its library
#: `regard::attention`, with the arguments of `attention`.
OPERATOR = torch.ops.regard.attention.default
