"""Attribution to the source: where the cross-attention puts its weight, and gradients of the output words."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from regard.base.errors import RegardError
from regard.lab.data.batches import Batch
from regard.lab.data.vocabulary import EOS, PAD
from regard.lab.decoding.alignment import attention_of, check_alignable
from regard.lab.decoding.search import evaluating

if TYPE_CHECKING:
    from regard.lab.data.corpus import Pair
    from regard.lab.data.tokenizer import Tokenizer
    from regard.lab.evaluation.scores import TranslationSystem
    from regard.lab.models.translator import Translator


@dataclass(frozen=True)
class AttentionShares:
    """The weight of the cross-attention on kinds of source pieces: means over target pieces, EOS and heads.

    `end` and `punctuation` are the shares of the weight on the end of the source and on its punctuation. `end_pieces`
    and `punctuation_pieces` are their shares of all source pieces. `entropy` is in nats. `spread` is the entropy
    divided by log S, the entropy of equal weights on all S pieces.
    """

    end: float
    punctuation: float
    entropy: float
    spread: float
    end_pieces: float
    punctuation_pieces: float
    num_targets: int


def attention_shares(system: TranslationSystem, pairs: Sequence[Pair], batch: int = 32) -> AttentionShares:
    """The weight shares of the last cross-attention, under teacher forcing with the references, `batch` at a time."""
    check_alignable(system.model, "output")
    if not pairs:
        raise RegardError("attention_shares: there are no sentence pairs. Give at least one.")
    ids = [(system.source_tokenizer.encode(p.source), system.target_tokenizer.encode(p.target)) for p in pairs]
    totals = torch.zeros(7, dtype=torch.float64)
    for start in range(0, len(ids), batch):
        totals += _totals(system.model, Batch.of(ids[start : start + batch]), system.source_tokenizer)
    means = (totals[:6] / totals[6]).tolist()
    return AttentionShares(*means, num_targets=int(totals[6]))


def _totals(model: Translator, part: Batch, tokenizer: Tokenizer) -> Tensor:
    """The first six fields of `AttentionShares`, summed over the target pieces of a batch, then their number; (7,).

    `part` is the batch, and `tokenizer` that of the source.
    """
    on_device = part.to(model.device)
    seen = attention_of(model, on_device.source, on_device.target_input)[model.cross_attention or ""]
    weights, entropy = seen.dense().mean(1), seen.entropy().mean(1)  # means over the heads, (B, T, S) and (B, T)
    has_output, real = on_device.target_output != PAD, on_device.source != PAD
    ends = (on_device.source == EOS).to(weights)
    marks = punctuation(on_device.source, tokenizer).to(weights)
    size = real.sum(1, keepdim=True).to(weights)
    shares = [
        (weights * ends[:, None]).sum(2),
        (weights * marks[:, None]).sum(2),
        entropy,
        entropy / size.log().clamp_min(1e-9),
        (ends.sum(1, keepdim=True) / size).expand_as(entropy),
        (marks.sum(1, keepdim=True) / size).expand_as(entropy),
        torch.ones_like(entropy),
    ]
    chosen = has_output.cpu()
    return torch.stack([share.cpu()[chosen].double().sum() for share in shares])


def punctuation(ids: Tensor, tokenizer: Tokenizer) -> Tensor:
    """True for the ids whose piece is only punctuation; of the shape of `ids`."""
    unique = ids.unique().tolist()
    marks = [n for n, piece in zip(unique, tokenizer.pieces(unique), strict=True) if n > EOS and _is_mark(piece)]
    return torch.isin(ids, torch.tensor(marks, dtype=ids.dtype, device=ids.device))


def _is_mark(piece: str) -> bool:
    """Whether a piece is only punctuation, apart from the sign of a space."""
    written = piece.strip("▁ ")
    return bool(written) and all(unicodedata.category(character).startswith("P") for character in written)


def source_gradients(model: Translator, source: Tensor, target: Tensor) -> Tensor:
    """|d log p(y_t | y_<t, x) / d x_s|, the Euclidean norm over the embedding of x_s; (B, T, S).

    `source` is (B, S), `target` (B, T + 1) is [BOS, y, EOS], both padded; the result is 0 at padding. Unlike an
    attention weight, the gradient measures how much an output word depends on a source position, also in a model
    without attention. The embedding is that of the token, before its position is added. It takes T backward passes,
    so use it for a few sentences.

    >>> import torch
    >>> from regard import lab
    >>> model = lab.build("none", source_size=9, target_size=9, width=8)
    >>> source_gradients(model, torch.tensor([[5, 4, 7, 3]]), torch.tensor([[2, 6, 8, 3]])).shape
    torch.Size([1, 3, 4])
    """
    embeddings: list[Tensor] = []

    def replaced(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """A hook: the embeddings of the source become a leaf, with respect to which gradients are taken.

        None, which changes nothing, after that and for other inputs of the same layer.
        """
        if embeddings or args[0].shape != source.shape or not torch.equal(args[0], source):
            return None
        embeddings.append(output.detach().requires_grad_())
        return embeddings[0]

    hooks = [m.register_forward_hook(replaced) for m in model.modules() if isinstance(m, nn.Embedding)]
    try:
        # cuDNN's recurrent layers have no backward pass in evaluation mode
        with evaluating(model), torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
            hidden = model(source, target[:, :-1])
            chosen = model.logits(hidden).log_softmax(-1).gather(2, target[:, 1:, None])[..., 0]
            if not embeddings:
                raise RegardError("source_gradients: no nn.Embedding of this model has the source ids as its input.")
            steps = (torch.autograd.grad(step.sum(), embeddings[0], retain_graph=True)[0] for step in chosen.unbind(1))
            norms = torch.stack([gradient.norm(dim=-1) for gradient in steps], 1)
    finally:
        for hook in hooks:
            hook.remove()
    return norms * (target[:, 1:, None] != PAD) * (source[:, None] != PAD)
