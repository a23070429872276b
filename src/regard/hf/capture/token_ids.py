"""`token_id`: a token given as an id, or as a text with its tokenizer."""

from __future__ import annotations

from operator import index
from typing import Any

from regard.base.errors import RegardError


def token_id(token: Any, tokenizer: Any = None) -> int:
    """The id of a token; a text must be an entry of the vocabulary, or be one token.

    >>> token_id(7)
    7
    """
    if isinstance(token, str):
        return _of_text(token, tokenizer)
    try:
        number = -1 if isinstance(token, bool) else index(token)
    except TypeError:
        number = -1
    if number < 0:
        raise RegardError(f"seen.logit_effect(token={token!r}): a token is an id of the vocabulary, or its text.")
    return number


def _of_text(token: str, tokenizer: Any) -> int:
    if tokenizer is None:
        raise RegardError(
            f"seen.logit_effect(token={token!r}): a text needs its tokenizer. Watch with it, "
            "rg.watch(model, tokenizer), give tokenizer=, or give the id of the token."
        )
    vocabulary = tokenizer.get_vocab()
    if token in vocabulary:
        return vocabulary[token]
    ids = tokenizer(token, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        pieces = " ".join(map(repr, tokenizer.convert_ids_to_tokens(ids)))
        raise RegardError(
            f"seen.logit_effect(token={token!r}): this text is {len(ids)} tokens: {pieces}. Give one of them; a word "
            "inside a sentence often begins with a space."
        )
    return ids[0]
