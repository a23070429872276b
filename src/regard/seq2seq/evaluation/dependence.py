"""What the cross-attention of a translator looks at, beside what its words depend on."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from regard.data.batches import Batch
from regard.data.vocabulary import EOS, PAD
from regard.errors import RegardError
from regard.seq2seq.decoding.alignment import attention_of, check_alignable
from regard.seq2seq.decoding.search import evaluating

if TYPE_CHECKING:
    from regard.data.corpus import Pair
    from regard.data.tokenizer import Tokenizer
    from regard.seq2seq.evaluation.scores import TranslationSystem
    from regard.seq2seq.models.translator import Translator


@dataclass(frozen=True)
class AttentionShares:
    """Means over the target pieces (and their EOS) of some sentence pairs, and over the heads.

    `end` and `punctuation` are the shares of the weight on the end of the source and on its punctuation, which
    are `end_pieces` and `punctuation_pieces` of all pieces there; `entropy` is in nats, and `spread` is its
    share of log S, that of looking at all S pieces alike.
    """

    end: float
    punctuation: float
    entropy: float
    spread: float
    end_pieces: float
    punctuation_pieces: float
    num_targets: int


def attention_shares(system: TranslationSystem, pairs: Sequence[Pair], batch: int = 32) -> AttentionShares:
    """Where the last cross-attention looks while the model is made to say the references."""
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
    """The seven numbers of a `AttentionShares`, summed over the target pieces of a batch."""
    near = part.to(model.device)
    seen = attention_of(model, near.source, near.target_input)[model.cross_attention or ""]
    weights, entropy = seen.dense().mean(1), seen.entropy().mean(1)
    said, real = near.target_output != PAD, near.source != PAD
    ends = (near.source == EOS).to(weights)
    marks = punctuation(near.source, tokenizer).to(weights)
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
    chosen = said.cpu()
    return torch.stack([share.cpu()[chosen].double().sum() for share in shares])


def punctuation(ids: Tensor, tokenizer: Tokenizer) -> Tensor:
    """Which ids are written in punctuation alone; of the shape of `ids`."""
    known = ids.unique().tolist()
    marks = [each for each, piece in zip(known, tokenizer.pieces(known), strict=True) if each > EOS and _is_mark(piece)]
    return torch.isin(ids, torch.tensor(marks, dtype=ids.dtype, device=ids.device))


def _is_mark(piece: str) -> bool:
    written = piece.strip("▁ ")
    return bool(written) and all(unicodedata.category(character).startswith("P") for character in written)


def source_gradients(model: Translator, source: Tensor, target: Tensor) -> Tensor:
    """|d log p(y_t | y_<t, x) / d x_s|, the Euclidean norm over the embedding of x_s; (B, T, S).

    `source` is (B, S), `target` (B, T + 1) is [BOS, y, EOS], both padded; what belongs to padding is 0. A model
    without attention has to bring all of the source through one vector, and the gradient shows what of it arrives;
    unlike a weight it says how much the word depends on the source position. The embedding is that of the
    token, before its position is added. T backward passes: meant for a few sentences.

    >>> import torch
    >>> from regard import seq2seq
    >>> model = seq2seq.build("none", source_size=9, target_size=9, width=8)
    >>> source_gradients(model, torch.tensor([[5, 4, 7, 3]]), torch.tensor([[2, 6, 8, 3]])).shape
    torch.Size([1, 3, 4])
    """
    found: list[Tensor] = []

    def replaced(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if found or args[0].shape != source.shape or not torch.equal(args[0], source):
            return None
        found.append(output.detach().requires_grad_())
        return found[0]

    hooks = [each.register_forward_hook(replaced) for each in model.modules() if isinstance(each, nn.Embedding)]
    try:
        with evaluating(model), torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
            hidden = model(source, target[:, :-1])
            chosen = model.logits(hidden).log_softmax(-1).gather(2, target[:, 1:, None])[..., 0]
            if not found:
                raise RegardError("source_gradients: no nn.Embedding of this model reads the source as it is given.")
            steps = (torch.autograd.grad(step.sum(), found[0], retain_graph=True)[0] for step in chosen.unbind(1))
            norms = torch.stack([gradient.norm(dim=-1) for gradient in steps], 1)
    finally:
        for hook in hooks:
            hook.remove()
    return norms * (target[:, 1:, None] != PAD) * (source[:, None] != PAD)
