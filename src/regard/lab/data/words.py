"""Cuts text into words, also in scripts without spaces between words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

__all__ = ["cut", "script_without_spaces", "word_characters"]

#: Characters of scripts without spaces between words, as ranges of a regular expression.
KANJI = "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
HIRAGANA = "\u3041-\u309f"
KATAKANA = "\u30a0-\u30ff\u31f0-\u31ff\uff66-\uff9f"
#: Thai, Lao, Myanmar, Khmer: a letter with its vowels and marks is one cluster.
CLUSTERED = "\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0ece\u0edc-\u0edf\u1000-\u103f\u1050-\u108f\u1780-\u17d3\u17dd"
TIBETAN = "\u0f00-\u0f0c\u0f40-\u0fbc"
#: Punctuation of these scripts. It follows words without a space.
PUNCTUATION = (
    "\u0e2f\u0e46\u0e4f-\u0e5b\u0f0d-\u0f14\u104a-\u104f\u17d4-\u17da"
    "\u3001-\u3003\u3008-\u3020\u30fb\uff01-\uff0f\uff1a-\uff20"
)
SPACELESS = KANJI + HIRAGANA + KATAKANA + CLUSTERED + TIBETAN

#: Vowels before their letter, signs that stack the next letter, and vowels and marks after their letter.
BEFORE, STACKS = "\u0e40-\u0e44\u0ec0-\u0ec4", "\u1039\u17d2"
BEHIND = (
    "\u0e30-\u0e3a\u0e45\u0e47-\u0e4e\u0eb0-\u0ebc\u0ec8-\u0ece"
    "\u102b-\u103e\u1056-\u1059\u105e-\u1060\u1062-\u108f\u17b4-\u17d3\u17dd"
)
#: In Myanmar, a letter under U+103A ends a syllable.
CLUSTER = f"[{BEFORE}]?[{CLUSTERED}](?:[{STACKS}][{CLUSTERED}]|[{BEHIND}]|[\u1000-\u1021](?=\u103a))*"
JAPANESE = f"[{KANJI}\u30f6]+|[{HIRAGANA}\u30fc]+|[{KATAKANA}]+"
#: The rest of such a text: a word of another script, or one sign.
OTHER = f"[^\\W{SPACELESS}]+|[^{SPACELESS}]"

_spaceless = re.compile(f"[{SPACELESS}]")
#: A letter of these scripts before a space, if the next word is of these scripts, too.
_gap = re.compile(f"[{SPACELESS}]\\s+(?=[{SPACELESS}{PUNCTUATION}])")
_kana = re.compile(f"[{HIRAGANA}{KATAKANA}]")
#: What a text is cut into, for Japanese (True) and for all other scripts.
_parts = {
    True: re.compile(f"{JAPANESE}|{CLUSTER}|[{TIBETAN}]+?(?:\u0f0b|$|(?=[^{TIBETAN}]))|{OTHER}"),
    False: re.compile(f"[{KANJI}]|{CLUSTER}|[{TIBETAN}]+?(?:\u0f0b|$|(?=[^{TIBETAN}]))|{OTHER}"),
}
#: The least spaces per character of a segmented text: words of ten characters.
SEGMENTED = 0.1


def cut(text: str) -> list[str]:
    """The words of a text: split at spaces, and cut further in scripts without spaces.

    Japanese is cut where the kind of letter changes, Chinese into characters, Tibetan into syllables, and Thai, Lao,
    Khmer and Myanmar into clusters of letters. If such a text has spaces between its words, it is split only there.

    >>> cut("Go on, then."), cut("私は学生です。"), cut("我爱你"), cut("私 は 学生 です")
    (['Go', 'on,', 'then.'], ['私', 'は', '学生', 'です', '。'], ['我', '爱', '你'], ['私', 'は', '学生', 'です'])
    """
    words = text.split()
    if text.isascii() or not _spaceless.search(text) or is_segmented([text]):
        return words
    parts = _parts[_kana.search(text) is not None]
    return [part for word in words for part in (parts.findall(word) if _spaceless.search(word) else [word])]


def begins_spaceless(text: str) -> bool:
    """Whether the first letter belongs to a script without spaces."""
    return _spaceless.match(text) is not None


def is_segmented(texts: Iterable[str]) -> bool:
    """Whether texts have spaces between words although their script has no spaces."""
    letters = gaps = 0
    for text in texts:
        letters += len(_spaceless.findall(text))
        gaps += len(_gap.findall(text))
    return gaps >= SEGMENTED * max(letters, 1)


def script_without_spaces(texts: Iterable[str]) -> str:
    """The script of most letters if it has no spaces between words: "Japanese", "Chinese" or "other"; otherwise "".

    >>> [script_without_spaces([text]) for text in ("東京へ行きます。", "ฉันรักคุณ", "Go on.")]
    ['Japanese', 'other', '']
    """
    texts = list(texts)
    whole = "".join(texts)
    letters = sum(map(str.isalpha, whole))
    count = len(_spaceless.findall(whole))
    if count <= letters / 2 or is_segmented(texts):
        return ""
    if len(_kana.findall(whole)) > count / 20:  # Japanese always has kana, Chinese hardly any
        return "Japanese"
    return "Chinese" if len(re.findall(f"[{KANJI}]", whole)) > count / 2 else "other"


class _WordCharacters(dict[int, str]):
    """A table for `str.translate`: keeps letters, digits and marks, and turns every other character into a space."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        is_part = character.isalnum() or character == "_" or unicodedata.category(character).startswith("M")
        self[code] = character if is_part else " "
        return self[code]


_word_characters = _WordCharacters()


def word_characters(text: str) -> str:
    """The text with a space for every character that is not part of a word.

    >>> word_characters("Ça va ?"), word_characters("हिन्दी।").split()
    ('Ça va  ', ['हिन्दी'])
    """
    return text.translate(_word_characters)
