"""`Translator`, the protocol of all encoder-decoders: encode a source once, then decode by steps or teacher forcing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.base.errors import RegardError
from regard.base.shapes import to_device
from regard.lab.data.vocabulary import EOS, PAD
from regard.masks import Mask, padding
from regard.nn import MultiHeadAttention, ProjectedKV, Rows, select_rows


@dataclass(frozen=True, eq=False)
class Memory:
    """The result of encoding a batch of sources.

    `states` are (B, S, C), and `real` (B, S) is True for tokens and False for padding. Decoding steps read `keys` and
    `final`. Each attention of the decoder has one entry in `keys`: the states, projected once for the source. `final`
    (B, C) is the last state of a recurrent encoder.

    >>> import torch
    >>> from regard import lab
    >>> model = lab.build("bahdanau", source_size=9, target_size=9, width=8)
    >>> memory = model.encode(torch.tensor([[5, 4, 3], [6, 3, 0]]))
    >>> memory.states.shape, memory.real.sum(1).tolist()
    (torch.Size([2, 3, 8]), [3, 2])
    >>> memory.select(torch.tensor([0, 0, 1])).final.shape  # a beam of two, and one
    torch.Size([3, 8])
    """

    states: Tensor
    real: Tensor
    keys: tuple[ProjectedKV, ...] = ()
    final: Tensor | None = None

    @property
    def last_state(self) -> Tensor:
        """`final`, which a recurrent decoder begins with."""
        if self.final is None:
            raise _other_encoder("last state")
        return self.final

    @property
    def source_keys(self) -> ProjectedKV:
        """The keys of the only attention of a recurrent decoder."""
        if not self.keys:
            raise _other_encoder("keys for attention")
        return self.keys[0]

    def select(self, index: Tensor) -> Memory:
        """The memory for decoder rows that read the sources at `index`, in that order; an index may be repeated.

        Rows of one source must be neighbors. Hypotheses of one sentence share its keys. `states` and `real` remain
        those of all sources.
        """
        rows = Rows.of(index)
        return replace(self, keys=tuple(keys.shared(rows) for keys in self.keys), final=select_rows(self.final, index))


def _other_encoder(missing: str) -> RegardError:
    """The error of a decoder that needs what the memory of another model does not have."""
    return RegardError(
        f"Memory: this decoder needs the {missing} of its encoder, and the memory has none. Encode the source with the "
        "same model: memory = model.encode(source); state = model.start(memory)."
    )


@dataclass(frozen=True, eq=False)
class State:
    """The state of a decoder after `length` tokens, the same number for all rows.

    `carried` are the tensors that the next step needs, in nested tuples with the batch on axis 0: recurrent states,
    the last attentional vector, or the keys and values of earlier tokens.

    >>> import torch
    >>> State((torch.tensor([[1.0], [2.0]]),), length=3).select(torch.tensor([1, 1, 0]))
    State(carried=(tensor([[2.], [2.], [1.]]),), length=3)
    """

    carried: Any
    length: int = 0

    def select(self, index: Tensor) -> State:
        """The rows at `index`, in that order; an index may be repeated, as beam search does."""
        return replace(self, carried=select_rows(self.carried, index))


class Translator(nn.Module, ABC):
    """Base of all encoder-decoders.

    Source ids (B, S) end with the end of sentence and are padded on the right with 0; target input (B, T)
    begins with the start of sentence. A model keeps no state between calls: methods take and return `Memory`
    and `State`. Step-by-step decoding equals teacher forcing: after the same tokens, the logits of `step` equal
    `logits(forward(source, target))[:, t]`.

    `build(**model.settings())` makes an equal model. `cross_attention` is the path of the module whose map aligns
    target with source; None if the model has no attention to the source.

    >>> import torch
    >>> from regard import lab
    >>> model = lab.build("bahdanau", source_size=9, target_size=9, width=8)
    >>> source, target = torch.tensor([[5, 4, 3]]), torch.tensor([[2, 6]])
    >>> memory = model.encode(source)
    >>> logits, state = model.step(memory, model.start(memory), target[:, 0])
    >>> torch.allclose(logits, model.logits(model(source, target))[:, 0], atol=1e-6), state.length
    (True, 1)
    """

    source_size: int
    target_size: int
    cross_attention: str | None
    padding_id = PAD
    end_id = EOS

    @abstractmethod
    def encode(self, source: Tensor) -> Memory:
        """Source ids (B, S) -> the memory that the decoder reads."""

    @abstractmethod
    def start(self, memory: Memory) -> State:
        """The state before the first token."""

    @abstractmethod
    def advance(self, memory: Memory, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """One more token (B,) -> the decoder's output (B, C), and the next state; `state` stays valid."""

    @abstractmethod
    def decode(self, memory: Memory, target: Tensor) -> Tensor:
        """Teacher forcing: target input (B, T) -> the decoder's outputs (B, T, C)."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """The decoder's outputs (..., C) -> scores of every target token (..., V), before softmax."""

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Teacher forcing: source (B, S) and target input (B, T) -> the decoder's outputs (B, T, C).

        `logits` projects them to the vocabulary, so a loss can leave out padding before this costly product.
        """
        check_ids("target", target, self.target_size)
        memory = self.encode(source)
        if len(source) != len(target):
            raise RegardError(
                f"forward: {len(source)} sources and {len(target)} targets. Give one target for each source."
            )
        return self.decode(memory, target)

    def step(self, memory: Memory, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        """One more token (B,) -> logits (B, V) of the one after it, and the next state. The old state stays valid."""
        hidden, following = self.advance(memory, state, tokens)
        return self.logits(hidden), following

    def settings(self) -> dict[str, Any]:
        """The arguments of `build` for an equal model, fit for JSON; after `regard.prune` with the heads left."""
        # a pruned module has fewer channels of queries than of inputs
        left = {
            name: module.num_heads
            for name, module in self.named_modules()
            if isinstance(module, MultiHeadAttention) and module.query.out_features < module.query.in_features
        }
        return {**self._settings, "heads_left": left} if left else dict(self._settings)

    #: The arguments of `build`, set by it.
    _settings: dict[str, Any]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


def check_ids(name: str, ids: Tensor, size: int) -> Tensor:
    """The ids, copied once to the host; raises an error if the tensor is not a batch of token ids.

    `size` is that of the vocabulary, and `name` begins the error.
    """
    if ids.ndim != 2 or ids.is_floating_point() or 0 in ids.shape:
        raise RegardError(
            f"{name}: token ids are integers (batch, length) with at least one token, got {ids.dtype} of shape "
            f"{tuple(ids.shape)}. Pad shorter sentences on the right with 0; one sentence is ids[None]."
        )
    near = ids.cpu()
    low, high = (int(edge) for edge in near.aminmax())
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise RegardError(
            f"{name}: token id {wrong}, but the vocabulary has ids 0 to {size - 1}. "
            "Use the tokenizer that the model was trained with."
        )
    return near


def real_tokens(source: Tensor, size: int) -> tuple[Tensor, Mask | None]:
    """True (B, S) where an id is not padding, and a padding mask; None in place of the mask if no id is padding."""
    real = check_ids("source", source, size) != PAD
    return to_device(real, source.device), None if bool(real.all()) else padding(real)
