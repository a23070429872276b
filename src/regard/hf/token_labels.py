"""Tokens in readable form: whitespace as signs with counts, and bytes that are no whole character as their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

#: Marks with which byte-level and SentencePiece tokenizers begin a word.
WORD_STARTS = ("Ġ", "▁")
#: Signs of characters that cannot be seen.
SIGNS = {" ": "␣", "\t": "⇥", "\n": "↵", "\r": "␍"}
#: Bytes that byte-level tokenizers write as the character of the same number; the others follow from number 256.
VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
BYTES = {chr(byte): byte for byte in VISIBLE} | {chr(256 + n): byte for n, byte in enumerate(HIDDEN)}


def token_label(tokenizer: Any, token: str) -> str:
    r"""A token of the vocabulary as it is read, without the space before a word.

    >>> from types import SimpleNamespace
    >>> llama = SimpleNamespace(convert_tokens_to_string=lambda tokens: tokens[0].replace("▁", " "))
    >>> token_label(llama, "▁cat"), token_label(llama, "▁▁▁"), token_label(llama, "\n\t")
    ('cat', '␣×3', '↵⇥')
    """
    text = tokenizer.convert_tokens_to_string([token]) if token.strip("▁") else " " * len(token)
    if "\ufffd" in text and BYTES.keys() >= set(token):
        text = bytes(BYTES[character] for character in token).decode("utf-8", "backslashreplace")
    if text and not text.strip():
        runs = ((SIGNS.get(character, repr(character)[1:-1]), len(list(run))) for character, run in groupby(text))
        return "".join(sign if count == 1 else f"{sign}×{count}" for sign, count in runs)
    return text.strip() or token


def tokens_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The tokens of these ids; <id> where the tokenizer knows none, as in a vocabulary padded to a round size."""
    pieces = tokenizer.convert_ids_to_tokens(list(ids))
    return [f"<{index}>" if token is None else token for token, index in zip(pieces, ids, strict=True)]


def label_of(tokenizer: Any, index: int) -> str:
    """The token of one id in readable form."""
    return token_label(tokenizer, *tokens_of(tokenizer, [index]))


def token_labels(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The tokens of these ids in readable form; a piece that continues a word starts with ##, as in WordPiece."""
    raw = tokens_of(tokenizer, ids)
    spaced = any(token.startswith(WORD_STARTS) for token in raw)
    labels: list[str] = []
    for token, index in zip(raw, ids, strict=True):
        label = token if token.startswith("##") else token_label(tokenizer, token)
        after_word = bool(labels) and labels[-1][-1].isalnum() and index not in tokenizer.all_special_ids
        inside = spaced and after_word and label.isalnum() and not token.startswith(WORD_STARTS)
        labels.append(f"##{label}" if inside else label)
    return labels
