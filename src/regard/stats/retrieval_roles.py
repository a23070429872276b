"""Retrieval heads: those that attend to the token of a needle that is copied next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.base.checks import Count, Size, checked
from regard.base.errors import RegardError
from regard.maps import AttentionMap
from regard.stats.numbering import layer_numbers
from regard.stats.profile import one_text
from regard.stats.roles import Measured, RoleTable, roles_of_kind


@checked
@dataclass(frozen=True, eq=False)
class WatchedNeedle:
    """A text with a needle, as a model read it: `length` tokens from `needle` on come again from `answer` on.

    >>> import torch, regard as rg
    >>> from regard.stats import WatchedNeedle
    >>> x = torch.zeros(1, 1, 9, 2)
    >>> maps = {"layer": rg.Attention(mask=rg.causal())(x, x, x).weights}
    >>> WatchedNeedle(maps, needle=2, answer=7, length=2).needle
    2
    """

    maps: Mapping[str, AttentionMap]
    needle: Count
    answer: Size
    length: Size


@checked
def retrieval_roles(
    watched: Sequence[WatchedNeedle], *, batch: Count = 0, numbers: Sequence[int] | None = None
) -> RoleTable:
    """Score every head by how often it attends most to the token of a needle that is copied next.

    The retrieval score (Wu et al. 2024, arXiv:2404.15574): the share of the copied tokens for which the largest weight
    of the head, at the query that predicts the token, is on this token in the needle. With the needle at s and its
    copy at a, token t counts if argmax_j w[a+t-1, j] = s+t. Wu et al. let the model generate the answer and count the
    tokens that it copies; here the answer is given (teacher forcing), so every token counts, and models can be
    compared that would answer otherwise. Their threshold is a score of 0.1; a role here needs 0.4.

    The null scores each text at the places that the needles of the other texts have, so a head that goes by position
    has the same score there. Give at least two places, in texts that differ in nothing else. Chance is that of a
    random key. A head has the role if its score is at least 0.4, and 0.2 above null and chance, over at least 25
    tokens. Induction heads have it too, since the tokens of the answer came before in this order.

    `batch` is the entry of each map that is read. `numbers` are the numbers of the layers; by default they are read
    from the module paths (`layer_numbers`).

    `TextReader.needles()` runs a model on needles in the texts of the package.

    >>> import torch, regard as rg
    >>> from regard.stats import WatchedNeedle, retrieval_roles
    >>> def run(needle, n=40, answer=30, length=8):
    ...     scores = torch.zeros(n, n)
    ...     for t in range(length):
    ...         scores[answer + t - 1, needle + t] = 9.0
    ...     x = rg.Attention(score=rg.Dot(scale=1.0))(scores[None, None], *[torch.eye(n)[None, None]] * 2)
    ...     return WatchedNeedle({"layers.0": x.weights}, needle, answer, length)
    >>> print(retrieval_roles([run(2), run(9), run(15), run(21)]).labeled[0].sentence)
    L0.H0 attends to the token of the needle that comes next (1.00; 0.00 with the needle elsewhere, 0.03 by chance).
    """
    _check(watched)
    names = list(watched[0].maps)
    lengths = torch.tensor([text.length for text in watched])
    # the query that predicts token t of the answer has answer + t keys
    chances = [1 / (text.answer + t) for text in watched for t in range(text.length)]
    head_roles = []
    for number, name in zip(layer_numbers(names, numbers), names, strict=True):
        strongest = [(text, _strongest(text, name, batch)) for text in watched]
        hits = torch.cat([_hits(keys, text.needle) for text, keys in strongest], -1)
        null = torch.stack([_elsewhere(keys, text, watched) for text, keys in strongest])
        count, by_chance = lengths.sum().expand(len(hits)), torch.tensor(chances).mean().expand(len(hits))
        nulls = (null * lengths[:, None]).sum(0) / lengths.sum()
        measured = Measured(hits.mean(-1), by_chance, count), Measured(nulls, by_chance, count)
        head_roles += roles_of_kind("retrieval", number, *measured)
    return RoleTable(head_roles)


def _check(watched: Sequence[WatchedNeedle]) -> None:
    """Refuse needles at a single place, other layers or sizes, and copies that do not stand behind their needle."""
    if len({text.needle for text in watched}) < 2:
        raise RegardError(
            f"retrieval_roles: {len(watched)} texts with needles at {sorted({text.needle for text in watched})}. The "
            "null needs needles at two places at least."
        )
    names = list(watched[0].maps)
    for text in watched:
        sizes = {tuple(weights.shape[2:]) for weights in text.maps.values()}
        I, J = sizes.pop() if len(sizes) == 1 else (0, 0)  # maps of several sizes fail below, as no answer fits 0
        if list(text.maps) != names or I != J or not text.needle + text.length <= text.answer <= I - text.length:
            raise RegardError(
                f"retrieval_roles: a needle of {text.length} tokens at {text.needle}, and its copy at {text.answer}, "
                f"in maps of {I} queries and {J} keys. Every text needs the same layers, of self-attention over all "
                "its tokens, and the copy stands after the needle."
            )


def _strongest(text: WatchedNeedle, name: str, batch: int) -> Tensor:
    """The key of largest weight for each query that predicts a token of the answer; (H, length)."""
    weights = one_text("retrieval_roles", text.maps[name], batch)
    return weights.tile(rows=slice(text.answer - 1, text.answer - 1 + text.length))[0].argmax(-1).cpu()


def _hits(keys: Tensor, needle: int) -> Tensor:
    """1 where key number t of `keys` (H, length) is token t of a needle that begins at this place, else 0."""
    return (keys == needle + torch.arange(keys.shape[-1])).double()


def _elsewhere(keys: Tensor, text: WatchedNeedle, watched: Sequence[WatchedNeedle]) -> Tensor:
    """The mean score at the places of the needles of the other texts; (H,)."""
    places = sorted({other.needle for other in watched} - {text.needle})
    return torch.stack([_hits(keys, place).mean(-1) for place in places]).mean(0)
