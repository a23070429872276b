"""Tokens in readable form, as a page, a table and a figure show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Marks with which byte-level and SentencePiece tokenizers begin a word.
WORD_STARTS = ("Ġ", "▁")


def token_labels(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The tokens of these ids in readable form; a piece that continues a word starts with ##, as in WordPiece."""
    raw = tokenizer.convert_ids_to_tokens(ids)
    spaced = any(token.startswith(WORD_STARTS) for token in raw)
    labels: list[str] = []
    for token, index in zip(raw, ids, strict=True):
        text = tokenizer.convert_tokens_to_string([token])
        label = token if token.startswith("##") else text.strip() or ("↵" if "\n" in text else token)
        after_word = bool(labels) and labels[-1][-1].isalnum() and index not in tokenizer.all_special_ids
        inside = spaced and after_word and label.isalnum() and not token.startswith(WORD_STARTS)
        labels.append(f"##{label}" if inside else label)
    return labels
