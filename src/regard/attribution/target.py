"""`Target`: the number that an attribution explains, such as the logit of a token at a position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.attribution.inputs import TextInputs, without_adapters
from regard.base.checks import checked
from regard.base.errors import RegardError, nearest
from regard.hf.token_labels import label_of

#: A token by its id or by its text.
Token = int | str


@checked
@dataclass(frozen=True)
class Target:
    """The logit of `token` at `position`, minus that of `against` if it is given.

    A language model predicts at position p the token p + 1. `token` is an id, a text (with a tokenizer), or the class
    of a classifier; by default the model's own prediction. `position` is by default the last token, or the only
    [MASK]; a model of classes has none. `against` asks why this token and not that one (Yin & Neubig 2022,
    arXiv:2202.10419).

    >>> import regard as rg
    >>> rg.Target("cat", position=4, against="dog")
    Target(token='cat', position=4, against='dog')
    """

    token: Token | None = None
    position: int | None = None
    against: Token | None = None


@dataclass(frozen=True, eq=False)
class Explained:
    """A target whose tokens and positions are known: `number(outputs)` is L of each sequence, (B,).

    `outputs` is what the model returns. `label` is the target in words, and `tokens` are the ids that it names, one for
    each sequence (empty for a function).
    """

    number: Callable[[Any], Tensor]
    label: str
    #: The probability of the target in each sequence, (B,); None for a target that is a function.
    probability: Callable[[Any], Tensor] | None = None
    #: The position of the target in each sequence; empty if it has none.
    positions: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()

    def score(self, outputs: Any) -> Tensor:
        """The number that a test of faithfulness follows: the probability, or L itself."""
        return (self.number if self.probability is None else self.probability)(outputs).detach().float()

    @property
    def measure(self) -> str:
        """What `score` is, in words."""
        return (
            f"the probability of {self.label.partition(' against ')[0]}" if self.probability is not None else self.label
        )


def explained(target: Any, model: nn.Module, inputs: TextInputs, outputs: Any, tokenizer: Any = None) -> Explained:
    """Find the tokens and the positions of a target.

    `outputs` is the result of the model on `inputs`. It gives the default token, the most probable one, and decides
    between spellings of a text (`_id_of_text`).
    """
    if callable(target) and not isinstance(target, Target | Tensor):
        return Explained(_function(target, inputs.batch_size), getattr(target, "__name__", "the target"))
    logits = logits_of(outputs)
    if logits is None:
        raise RegardError(
            f"attribute: {type(model).__name__} returns no logits, so it predicts nothing that a token or a class "
            "could name. Give a model with a head, or a function of the output: target=lambda output: "
            "output.last_hidden_state[:, -1].norm(dim=-1)."
        )
    wanted = target if isinstance(target, Target) else Target(position=None)  # a plain token has the default position
    ids = _each_token(target, len(logits)) if not isinstance(target, Target) else None
    positions = _positions(wanted, model, inputs, logits, tokenizer)
    rows = _rows(logits, positions)
    if ids is None:
        tokens = [
            _token_id(wanted.token if isinstance(target, Target) else target, row, model, tokenizer) for row in rows
        ]
    else:
        tokens = [_token_id(number, row, model, tokenizer) for number, row in zip(ids, rows, strict=True)]
    others = [None if wanted.against is None else _token_id(wanted.against, row, model, tokenizer) for row in rows]
    label = " and ".join(dict.fromkeys(_label(token, logits, model, tokenizer) for token in tokens[:3]))
    if wanted.against is not None and others[0] is not None:
        label += f" against {_label(others[0], logits, model, tokenizer)}"
    return _of_logits(tokens, others, positions, label)


def logits_of(outputs: Any) -> Tensor | None:
    """Logits (B, n, V) or (B, C) in the output of a model."""
    logits = getattr(outputs, "logits", outputs)
    return logits if isinstance(logits, Tensor) and logits.ndim in (2, 3) else None


def _of_logits(tokens: list[int], others: list[int | None], positions: tuple[int, ...], label: str) -> Explained:
    """The target as functions of the model's output.

    `tokens`, `others` (tokens to compare with, or None) and `positions` have an entry for each sequence of the request;
    `positions` is empty for a classifier. `label` is the target in words. Outputs may hold several versions of the only
    sequence, as in a test of faithfulness, so the entries are repeated up to the batch size of the output.
    """

    def at(outputs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """The logits at the target positions (B, V), the tokens (B,), and the tokens to compare with (B,) or None."""
        logits = logits_of(outputs)
        assert logits is not None
        B = len(logits)
        repeat = B // len(tokens)
        rows = _rows(logits, positions * repeat)
        chosen = torch.tensor(tokens * repeat, device=logits.device)
        other = None if others[0] is None else torch.tensor(others * repeat, device=logits.device)
        return rows, chosen, other

    def number(outputs: Any) -> Tensor:
        """L (B,): the logit of each token, minus that of the token to compare with."""
        rows, chosen, other = at(outputs)
        picked = rows.gather(-1, chosen[:, None])[:, 0]
        return picked if other is None else picked - rows.gather(-1, other[:, None])[:, 0]

    def probability(outputs: Any) -> Tensor:
        """The probability of each token (B,), without the token to compare with."""
        rows, chosen, _ = at(outputs)
        return rows.float().softmax(-1).gather(-1, chosen[:, None])[:, 0]

    return Explained(number, label, probability, positions, tuple(tokens))


def _function(target: Callable[..., object], batch_size: int) -> Callable[[Any], Tensor]:
    """The target function of a user, with a check that it returns a tensor of floats with at most one axis.

    `batch_size` is for the error only: outputs may hold several versions of a sequence, so a length is not checked.
    """

    def number(outputs: Any) -> Tensor:
        result = target(outputs)
        if not isinstance(result, Tensor) or result.ndim > 1 or not result.is_floating_point():
            shape = f"a tensor {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise RegardError(
                f"attribute: the target function must return one number, or one for each sequence ({batch_size},), as "
                f"a tensor of floats; got {shape}."
            )
        return result

    return number


def _each_token(target: Any, batch_size: int) -> list[int] | None:
    """The targets as a list (ids or texts, one for each sequence), if the target is a list, a tuple or a tensor.

    None for any other target, which then counts for every sequence.
    """
    if isinstance(target, Tensor):
        target = target.tolist()
    if not isinstance(target, list | tuple):
        return None
    if len(target) != batch_size or not all(isinstance(n, int | str) and not isinstance(n, bool) for n in target):
        raise RegardError(f"attribute(target={target!r}): a list has one token for each of the {batch_size} sequences.")
    return list(target)


def _rows(logits: Tensor, positions: tuple[int, ...]) -> Tensor:
    """The logits (B, V) at a position of each sequence, from (B, n, V). Those of a classifier, (B, C), have no
    position.
    """
    if logits.ndim == 2:
        return logits
    return logits[torch.arange(len(logits), device=logits.device), torch.tensor(positions, device=logits.device)]


def _positions(target: Target, model: nn.Module, inputs: TextInputs, logits: Tensor, tokenizer: Any) -> tuple[int, ...]:
    """The position of the target in each sequence; nothing for a classifier.

    In this order: the position that the user gave, the only mask token, the last token that is no padding.
    """
    if logits.ndim == 2:
        if target.position is not None:
            raise RegardError(
                f"attribute: {type(model).__name__} predicts a class of the whole text, so a target has no position; "
                f"got position={target.position}."
            )
        return ()
    B, n = logits.shape[:2]
    if target.position is not None:
        if not -n <= target.position < n:
            raise RegardError(
                f"attribute: position {target.position} is out of range; the model predicts at 0 to {n - 1}."
            )
        return (target.position % n,) * B
    masked = _masked_positions(inputs, tokenizer)
    if masked is not None:
        return masked
    if inputs.decoder_ids is None and not predicts_next(model):
        raise RegardError(
            f"attribute: {type(model).__name__} predicts every token of the text. Say which: "
            "target=regard.Target(token, position=...), or put one [MASK] into the text and give tokenizer=."
        )
    return tuple(inputs.last_real().tolist())


def _masked_positions(inputs: TextInputs, tokenizer: Any) -> tuple[int, ...] | None:
    """The position of the mask token in each sequence.

    None if a sequence has none or several, or if the tokenizer has no mask token.
    """
    number = getattr(tokenizer, "mask_token_id", None)
    ids = inputs.ids
    if number is None or ids is None or not bool(((ids == number).sum(1) == 1).all()):
        return None
    return tuple((ids == number).int().argmax(1).tolist())


def predicts_next(model: nn.Module) -> bool:
    """Whether the last position predicts the next token. Models that are not of transformers are taken to do so."""
    config = getattr(model, "config", None)
    if config is None:
        return True
    endings = "LMHeadModel", "ForCausalLM", "ForConditionalGeneration"
    named = any(kind.__name__.endswith(endings) for kind in type(without_adapters(model)).__mro__)
    return named or bool(getattr(config, "is_decoder", False))


def _token_id(token: Any, row: Tensor, model: nn.Module, tokenizer: Any) -> int:
    """The id of a target token or class, from 0; without a token that of the largest logit of `row` (V,).

    Negative ids count from the end.
    """
    if token is None:
        return int(row.argmax())
    if isinstance(token, str):
        token = _id_of_text(token, row, model, tokenizer)
    if isinstance(token, bool) or not isinstance(token, int) or not -len(row) <= token < len(row):
        raise RegardError(
            f"attribute: the target {token!r} is none of the {len(row)} tokens or classes that the model predicts; ids "
            f"are 0 to {len(row) - 1}."
        )
    return token % len(row)


def _id_of_text(text: str, row: Tensor, model: nn.Module, tokenizer: Any) -> int:
    """The id of a text that is one token, or of a class by its name.

    Of "cat" and " cat", which are different tokens, it is the one with the larger logit in `row` (V,).
    """
    labels = getattr(getattr(model, "config", None), "label2id", None) or {}
    if len(labels) == len(row):  # the model predicts classes, and a tokenizer knows nothing of them
        if text in labels:
            return int(labels[text])
        raise RegardError(f"attribute(target={text!r}): the model has no such class. {nearest(text, labels)}")
    if tokenizer is None:
        raise RegardError(
            f"attribute(target={text!r}): a text needs tokenizer=..., which knows its token. Or give the id of the "
            "token."
        )
    if not text.strip():
        raise RegardError(f"attribute(target={text!r}): the text is empty. Give a token, or its id.")
    pieces = {form: tokenizer(form, add_special_tokens=False)["input_ids"] for form in (text, f" {text}")}
    single = [ids[0] for ids in pieces.values() if len(ids) == 1 and ids[0] != tokenizer.unk_token_id]
    if not single:
        parts = tokenizer.convert_ids_to_tokens(pieces[text])
        known = (label_of(tokenizer, index) for index in row.topk(min(5, len(row))).indices.tolist())
        raise RegardError(
            f"attribute(target={text!r}): this is no single token; the tokenizer splits it into {parts}. Give one of "
            f"them. The model finds these most probable here: {', '.join(map(repr, known))}."
        )
    # an id that the model does not predict is refused later
    return max(single, key=lambda number: float(row[number]) if number < len(row) else -torch.inf)


def _label(token: int, logits: Tensor, model: nn.Module, tokenizer: Any) -> str:
    """A token or a class in words. `logits` (B, C) come from a classifier, (B, n, V) from a language model."""
    if logits.ndim == 2:
        names = getattr(getattr(model, "config", None), "id2label", None) or {}
        return f"class {names.get(token, token)!r}" if token in names else f"class {token}"
    if tokenizer is None:
        return f"token {token}"
    return repr(label_of(tokenizer, token))
