"""What an edit changes in the prediction of a model that reads a text."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.base.checks import checked
from regard.base.errors import RegardError, first_few
from regard.edits.values import AttentionEdit
from regard.hf.editing import edit
from regard.hf.text_reader import TextReader
from regard.hf.token_labels import label_of

NEXT, MASKED, SENTENCE = "next token", "masked token", "sentence embedding"


@dataclass(frozen=True, eq=False)
class EditResult:
    """What a model predicts for one text without and with an edit.

    `kind` is "next token" or "masked token", with the probabilities of all tokens before and after, or "sentence
    embedding", with the states (n, C) of all tokens. `place` is the token at which a language model predicts.
    `left_out` has the layers that the edit selects but cannot change, with their class.

    >>> import regard as rg
    >>> reader = rg.TextReader.load("minilm")
    >>> effect = rg.hf.edit_effect(reader, "The cat sat.", rg.KnockOut(rg.Where.parse("cat -> the")))
    >>> effect.kind, effect.before.shape, 0 < effect.change < 1
    ('sentence embedding', torch.Size([6, 384]), True)
    """

    edit: AttentionEdit
    kind: str
    tokens: list[str]
    place: int
    before: Tensor
    after: Tensor
    vocabulary: Any
    left_out: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return "\n".join([f"EditResult of {self.edit!r}", *self.sentences])

    def top(self, count: int = 5) -> list[tuple[str, float, float]]:
        """The most probable tokens before or after the edit, with both probabilities."""
        best = torch.cat([self.before.topk(count).indices, self.after.topk(count).indices]).unique()
        best = best[torch.maximum(self.before, self.after)[best].argsort(descending=True)]
        return [(self.vocabulary(int(n)), float(self.before[n]), float(self.after[n])) for n in best]

    @property
    def best(self) -> tuple[str, str]:
        """The most probable token before and after the edit."""
        return self.vocabulary(int(self.before.argmax())), self.vocabulary(int(self.after.argmax()))

    @property
    def divergence(self) -> float:
        """sum p log(p / q) in nats, of the prediction p before from q after (Kullback and Leibler 1951)."""
        # Where p is 0, its logarithm becomes a finite number, so that the product is 0.
        return float((self.before * (self.before / self.after.clamp_min(1e-30)).log().nan_to_num()).sum())

    @property
    def cosine(self) -> float:
        """The cosine of the mean states of all tokens, before and after."""
        return float(F.cosine_similarity(self.before.mean(0), self.after.mean(0), 0))

    @property
    def change(self) -> float:
        """The length of the change of the mean state, as a share of its length before."""
        mean = self.before.mean(0)
        return float((self.after.mean(0) - mean).norm() / mean.norm())

    def moved(self, count: int = 3) -> list[tuple[str, float]]:
        """The tokens whose states changed most, and the length of each change as a share of the state's length."""
        changes = (self.after - self.before).norm(dim=-1) / self.before.norm(dim=-1)
        return [(self.tokens[n], float(changes[n])) for n in changes.argsort(descending=True)[:count].tolist()]

    @property
    def sentences(self) -> list[str]:
        """What changes, in plain words, and which layers the edit could not change."""
        left_out = f"The edit could not change {first_few(self.left_out)}."
        return [*self._changes, *([left_out] if self.left_out else [])]

    @property
    def _changes(self) -> list[str]:
        """Two sentences on what changes in the prediction."""
        if self.kind == SENTENCE:
            moved = ", ".join(f'"{token}" ({_percent(change)})' for token, change in self.moved())
            size, cosine = _percent(self.change), self.cosine
            whole = f"The sentence embedding changes by {size} of its length (cosine {cosine:.6f})."
            return [whole, f"The states that change most: {moved}."]
        before, after = self.best
        same = "stays" if before == after else f"was {before!r} and is"
        return [
            f"The most probable {self.kind} {same} {after!r}.",
            f"The prediction moves by {max(0.0, self.divergence):.3f} nats (Kullback-Leibler divergence).",
        ]


@checked
@torch.no_grad()
def edit_effect(
    reader: TextReader, text: str, edits: AttentionEdit, length: int | None = None, roles: Any = None
) -> EditResult:
    """Run a model on a text without and with an edit: what it predicts at one token, or the states of all tokens.

    Words of the edit are words of the text. `length` is the most tokens that are read, special tokens included; None
    reads all. `roles` is for edits that name roles of heads: a table of `regard.roles`, or a mapping from names to
    heads (layer, head).

    >>> import regard as rg
    >>> reader = TextReader.load("minilm")
    >>> text = "The animal did not cross the street because it was tired."
    >>> effect = edit_effect(reader, text, rg.KnockOut(rg.Where.parse("L2.H1: it -> animal")))
    >>> effect.kind, effect.moved(1)[0][0]
    ('sentence embedding', 'it')
    """
    inputs = reader.tokenize(text, length)
    model, ids = reader._encoder(), inputs["input_ids"][0].tolist()
    tokens = reader.labels(ids)
    before = model(**inputs)
    with edit(model, edits, tokens, roles=roles) as run:
        after = model(**inputs)
    kind, place = _prediction(reader, model, before, ids)
    if kind == SENTENCE:
        states = _states(before), _states(after)
    else:  # the probabilities of all tokens (vocabulary,)
        states = tuple(output.logits[0, place].float().softmax(-1) for output in (before, after))
    shown = partial(label_of, reader.tokenizer)
    return EditResult(edits, kind, tokens, place, states[0], states[1], shown, run.left_out)


def _prediction(reader: TextReader, model: Any, output: Any, ids: list[int]) -> tuple[str, int]:
    """What the model predicts for a text, and at which token: the first masked one, or else the last.

    A model whose tokenizer has a mask token does not predict the next token.
    """
    mask = getattr(reader.tokenizer, "mask_token_id", None)
    if mask is not None and mask in ids and _is_over_vocabulary(model, output):
        return MASKED, ids.index(mask)
    is_causal = _is_over_vocabulary(model, output) and mask is None
    return (NEXT if is_causal else SENTENCE), len(ids) - 1


def _is_over_vocabulary(model: Any, output: Any) -> bool:
    """Whether a model returned logits of words for each token, (B, n, vocabulary), and not those of classes."""
    logits = getattr(output, "logits", None)
    return logits is not None and logits.ndim == 3 and logits.shape[-1] == model.config.vocab_size


def _states(output: Any) -> Tensor:
    """The last states (n, C) of a model, or its logits (n, classes) if it returns no states."""
    states = getattr(output, "last_hidden_state", None)
    if states is None:
        states = getattr(output, "logits", None)
    if states is None or states.ndim != 3:
        raise RegardError(
            f"edit: the output {type(output).__name__} has neither logits of tokens nor states, so its change "
            "cannot be shown. Run the model inside `with rg.edit(model, edit):` and compare its output."
        )
    return states[0].float()


def _percent(share: float) -> str:
    """A share in percent, with two digits or as a whole number.

    >>> _percent(0.02), _percent(0.00034), _percent(1.204)
    ('2.0 %', '0.034 %', '120 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:#.2g} %"
