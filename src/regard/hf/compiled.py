"""Calls of the backend inside a graph of torch.compile: they become the operator `regard::attention`.

torch's compiler traces this file, so it holds plain Python that the compiler can follow. What depends on Python objects
(which rule a mask function is, whether the kernels can run) is computed while tracing, and is a constant of the graph.
A call that the operator cannot compute breaks the graph, and runs as without a compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import assume_constant_result
from transformers import masking_utils as theirs

from regard.base.shapes import in_autocast_dtype
from regard.base.versions import remapping_function
from regard.engine.kernel.library import load_fast
from regard.engine.kernel.operator import OPERATOR
from regard.engine.ring import Ring
from regard.hf.calls import AttentionCall
from regard.hf.masks.graph_masks import GraphMask
from regard.hf.masks.mask_functions import MaskFunction, MaskFunctionReader
from regard.hf.masks.mask_tensors import Recognized
from regard.hf.masks.span_masks import OURS
from regard.hf.operator_calls import call_operator, fits_operator, graph_breaks, owner_of

#: The code of mask functions that may be ranges of distances: causal, all pairs, and any that `and_masks` joins.
RANGES = tuple(
    function.__code__
    for function in (
        theirs.causal_mask_function,
        theirs.bidirectional_mask_function,
        theirs.and_masks(theirs.causal_mask_function),
    )
)
Function = Callable[..., Any]
#: The same function, at which torch's compiler breaks its graph.
_breaking: Function = torch.compiler.disable


def attention_function(run: Function) -> Function:
    """The backend function `run`, which becomes the operator inside a graph where this is possible."""
    outside = _breaking(_reporting(run))

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        if not torch.compiler.is_dynamo_compiling() or Ring.default() is not None or _is_transformed():
            return run(module, query, key, value, attention_mask, **options)
        q, k, v = in_autocast_dtype(query), in_autocast_dtype(key), in_autocast_dtype(value)
        is_known = attention_mask is None or isinstance(attention_mask, GraphMask)
        if is_known and _has_kernels() and fits_operator(q, k, v, options):
            return call_operator(OPERATOR, module, q, k, v, attention_mask, options, owner_of(module)), None
        return outside(module, query, key, value, attention_mask, **options)

    return attention


def _reporting(run: Function) -> Function:
    """The backend function, whose calls between two graphs are reported to the watches of a compiled model."""

    def call(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        output = run(module, query, key, value, attention_mask, **options)
        for observer in graph_breaks:
            observer.backend_called(
                AttentionCall(module, OURS, run, query, key, value, attention_mask, options), output
            )
        return output

    return call


def _is_transformed() -> bool:
    """Whether a transform of torch.func runs: the operator has no derivative in forward mode, so torch takes 0."""
    return torch._C._are_functorch_transforms_active()


def mask_maker(spans_mask: Function) -> Function:
    """The function `spans_mask`, which makes a `GraphMask` inside a graph where this is possible."""
    outside = _breaking(spans_mask)

    def make(*sizes: Any, **options: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() or Ring.default() is not None or _is_transformed():
            return spans_mask(*sizes, **options)
        is_known, mask = graph_mask(*sizes, **options)
        return mask if is_known else outside(*sizes, **options)

    return make


def graph_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: MaskFunction,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> tuple[bool, GraphMask | None]:
    """Whether a graph can hold the mask that transformers requests, and this mask (None: all pairs).

    The lengths and offsets are the numbers of queries and keys, and the positions of the first ones. `attention_mask`
    (B, n) is 1 for keys that are no padding.
    `mark_mask_functions` wrote the parts of functions that hold tensors to their `regard_packing`.
    """
    is_marked = hasattr(mask_function, "regard_packing")
    function, groups = mask_function.regard_packing if is_marked else (mask_function, None)  # type: ignore[attr-defined]
    if use_vmap or not _may_be_range(function):
        return False, None
    is_range, is_causal, size = _range(function)
    if not is_range:
        return False, None
    is_free = attention_mask is None and groups is None and not is_causal and not size
    if is_free and allow_is_bidirectional_skip:
        return True, None
    real = None if attention_mask is None else attention_mask.bool()
    return True, GraphMask(q_offset, kv_offset, is_causal, size, real, groups)


@assume_constant_result
def _range(function: MaskFunction) -> tuple[bool, bool, int]:
    """Whether a function is a range of distances, whether it is causal, and the size of its window (0: none).

    The answer is the same for all sizes, so it is read for one query and one key.
    """
    mask = MaskFunctionReader(1).read(function)
    parts = GraphMask.of(Recognized(mask, 0), 1, 1)
    return (False, False, 0) if parts is None or parts.real is not None else (True, parts.is_causal, parts.window)


@assume_constant_result
def _has_kernels() -> bool:
    return load_fast() is not None


def mark_mask_functions() -> None:
    """Let graphs know the mask functions that hold tensors.

    torch's compiler cannot look into a closure that holds a tensor. So while it traces, functions of transformers are
    replaced by equal ones that also write to `regard_packing` of their result: a mask function of distances (None if
    there is none), and the number of the packed sequence of each token (B, n), or None. Inside a sequence, positions
    that count from its start have the same distances, so the two say everything.
    """
    replace, and_masks = torch.compiler.substitute_in_graph, _copied(theirs.and_masks)
    of_sequences = _copied(theirs.packed_sequence_mask_function)

    @replace(theirs.packed_sequence_mask_function)
    def packed(packed_sequence_mask: Tensor) -> Any:
        function = of_sequences(packed_sequence_mask)
        function.regard_packing = (theirs.bidirectional_mask_function, packed_sequence_mask)
        return function

    @replace(theirs.and_masks)
    def joined(*mask_functions: Any) -> Any:
        function, inside, groups, is_marked = and_masks(*mask_functions), [], None, False
        for part in mask_functions:
            if hasattr(part, "regard_packing"):
                is_marked, groups = True, part.regard_packing[1] if groups is None else groups
                part = part.regard_packing[0]
            if _may_be_range(part):
                inside.append(part)
        if is_marked:
            is_known = len(inside) == len(mask_functions)
            function.regard_packing = (and_masks(*inside) if is_known else None, groups)
        return function

    if (original := remapping_function(theirs)) is not None:
        remap = _copied(original)

        @replace(original)
        def remapped(mask_function: Function, position_ids: Tensor) -> Any:
            function = remap(mask_function, position_ids)
            function.regard_packing = (mask_function if _may_be_range(mask_function) else None, None)
            return function

    @replace(theirs.chunked_causal_mask_function)
    def chunked(chunk_size: int, left_padding: Tensor) -> Any:
        function = and_masks(theirs.chunked_overlay(chunk_size, left_padding), theirs.causal_mask_function)
        function.regard_packing = (None, None)  # no range of distances
        return function


def _may_be_range(function: Any) -> bool:
    """Whether a mask function may be a range of distances, and is not marked: `_range` reads it."""
    if function is None or hasattr(function, "regard_packing"):
        return False
    return any(function.__code__ is code for code in RANGES)


def _copied(function: Any) -> Function:
    """A function of transformers that graphs do not replace; what it returns has the code that `RANGES` knows."""
    return FunctionType(function.__code__, function.__globals__, function.__name__, closure=function.__closure__)
