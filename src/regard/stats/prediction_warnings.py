"""Warnings about what a whole model predicts: it reads later tokens, or it predicts another token than the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from regard.base.checks import checked
from regard.base.errors import RegardError
from regard.stats.warnings import Finding

#: Logits count as changed above this share of the largest logit.
CHANGED = 1e-4
#: Which tokens are compared with the next one, by their distance from the token that is read.
OFFSETS = {-1: "the token before the one that they read", 0: "the token that they read", 2: "the next token but one"}
#: Another token is predicted if it has a loss this much smaller than the next one, in nats a token.
SMALLER = 0.5
#: The number of the layer in a finding about the whole model.
WHOLE_MODEL = -1
#: Fewest tokens of a text: each offset needs a position where all tokens exist.
SHORTEST = 5


@checked
@torch.no_grad()
def prediction_findings(model: Callable[[Tensor], Tensor], ids: Tensor) -> list[Finding]:
    """Warnings about a trained model of the next token: "leak" and "offset". No map is needed.

    `model` maps ids (B, I) to logits (B, I, V). `ids` (B, I + 1) are texts of one length without padding: the model
    reads all but the last token, and position t should predict token t + 1. For an encoder and decoder, ids are those
    of the target: `lambda ids: model(source, ids)`.

    - "leak": a change of the last token changes earlier outputs, so the model reads later tokens. The sentence
      gives the loss at the last position, where no later token can be read.
    - "offset": the logits fit another token better than the next one, so the labels were shifted wrongly.

    Findings are about the whole model: `layer` is -1 and `heads` are empty. `number` is the largest change of a logit,
    or the distance from the token that is read to the token that is predicted.

    >>> import torch
    >>> ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [3, 1, 4, 2, 7, 0, 5]])
    >>> def repeats_its_input(ids):
    ...     return 9.0 * torch.nn.functional.one_hot(ids, 8)
    >>> [finding.kind for finding in prediction_findings(repeats_its_input, ids)]
    ['offset']
    """
    _check_ids(ids)
    read = ids[:, :-1]
    logits = _logits(model, read)
    if not torch.equal(logits, _logits(model, read)):
        raise RegardError(
            "prediction_findings: two calls with equal ids gave different logits. Call model.eval() to switch off "
            "dropout."
        )
    changed = _logits(model, torch.cat([read[:, :-1], _other_tokens(read)[:, None]], 1))
    return [*_leak(logits, changed, ids), *_offset(logits, ids)]


def _leak(logits: Tensor, changed: Tensor, ids: Tensor) -> Iterator[Finding]:
    change = (logits - changed)[:, :-1].abs().amax((0, 2))
    count = int((change > CHANGED * logits.abs().max()).sum())
    if count:
        loss = cross_entropy(logits.mT, ids[:, 1:], reduction="none").mean(0)
        yield Finding(
            "leak",
            WHOLE_MODEL,
            (),
            float(change.max()),
            f"The model reads later tokens: a change of the last token changes the outputs at {count} of the "
            f"{len(change)} positions before it. The loss is {float(loss[:-1].mean()):.2f} nats a token at these "
            f"positions and {float(loss[-1]):.2f} at the last, where no later token can be read. Look for a missing "
            "causal mask (mask_findings) and for cross-attention whose keys are those of the target.",
        )


def _offset(logits: Tensor, ids: Tensor) -> Iterator[Finding]:
    positions = torch.arange(1, ids.shape[1] - 2, device=ids.device)  # where every offset has a token
    losses = {o: float(cross_entropy(logits[:, positions].mT, ids[:, positions + o])) for o in (1, *OFFSETS)}
    best = min(losses, key=losses.__getitem__)
    if losses[best] < losses[1] - SMALLER:
        yield Finding(
            "offset",
            WHOLE_MODEL,
            (),
            float(best),
            f"The logits predict {OFFSETS[best]} ({losses[best]:.2f} nats a token) rather than the next token "
            f"({losses[1]:.2f}). The labels of position t must be the token t + 1: shift them once, either in the data "
            "or in the model.",
        )


def _other_tokens(read: Tensor) -> Tensor:
    """For each text a token that differs from its last one, and that the texts contain."""
    known = read.unique()
    if len(known) < 2:
        raise RegardError("prediction_findings: all ids are equal, so no token can be replaced. Give a text.")
    return known[(torch.searchsorted(known, read[:, -1].contiguous()) + 1) % len(known)]


def _logits(model: Callable[[Tensor], Tensor], read: Tensor) -> Tensor:
    logits = model(read)
    if not isinstance(logits, Tensor) or logits.shape[:2] != read.shape or logits.ndim != 3:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise RegardError(
            f"prediction_findings: model(ids) must return logits (B, I, V), here {(*read.shape, 'V')}, got {got}. "
            "For a model of transformers give lambda ids: model(ids).logits."
        )
    return logits.float()


def _check_ids(ids: Tensor) -> None:
    if ids.ndim != 2 or ids.dtype not in (torch.int32, torch.int64) or not len(ids) or ids.shape[1] < SHORTEST:
        raise RegardError(
            f"prediction_findings: ids are integers (B, I + 1) with at least {SHORTEST} tokens a text, "
            f"got {ids.dtype} of shape {tuple(ids.shape)}."
        )
