"""From text to ids and back: subwords learned by sentencepiece, or whole words."""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from regard.checks import checked
from regard.data.vocabulary import BOS, EOS, PAD, SPECIALS, UNK
from regard.data.words import cut
from regard.errors import RegardError, nearest

__all__ = ["SentencePiece", "Tokenizer", "Words", "load_tokenizer", "train_tokenizer"]

#: Written by sentencepiece in the place of a space.
SPACE = "▁"
#: Written by sentencepiece for UNK; its spaces would make three words of one that holds an unknown character.
UNKNOWN = " ⁇ "
#: Kinds of subwords: Kudo 2018, and Sennrich, Haddow & Birch 2016.
SUBWORDS = ("unigram", "bpe")
#: How even the draws of `sample` are (Kudo 2018, §3.3; the share of dropped merges of Provilkov et al. 2020).
SMOOTHING = 0.1
#: Seeds that sentencepiece takes; the one above them stands for none.
SEEDS = 2**32 - 1
#: Bytes that the longest sentence is at least said to have: sentencepiece takes no less.
SHORTEST = 10


class Tokenizer(ABC):
    """Text to ids and back. Ids 0 to 3 are PAD, UNK, BOS and EOS; `encode` adds none of them but UNK.

    What is saved is one file, which `load_tokenizer` reads whatever its kind.

    >>> from regard.data import train_tokenizer
    >>> tokenizer = train_tokenizer(["the dog sees", "the cat"], kind="words")
    >>> len(tokenizer), tokenizer.pieces(tokenizer.encode("the bird")), tokenizer.decode(tokenizer.encode("the dog"))
    (8, ['the', '<unk>'], 'the dog')
    """

    @abstractmethod
    def __len__(self) -> int:
        """How many ids there are, the four special ones among them."""

    @abstractmethod
    def encode(self, text: str, sample: bool = False, seed: int | None = None) -> list[int]:
        """The ids of a text, without BOS and EOS.

        `sample` draws one of its cuts into pieces in place of the best; the same seed draws the same.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids: reads up to the first EOS, leaves out PAD and BOS."""

    @abstractmethod
    def pieces(self, ids: Iterable[int]) -> list[str]:
        """What each id is written as, one for one; PAD, BOS and EOS, too."""

    @abstractmethod
    def word_numbers(self, ids: Iterable[int]) -> list[int]:
        """The number of the word of `decode(ids).split()` that each id is a part of; -1 for those of none."""

    def cut(self, text: str) -> list[str]:
        """The words of a text that alignments link; see `regard.data.words.cut`."""
        return cut(text)

    @abstractmethod
    def to_bytes(self) -> bytes:
        """What `save` writes."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file, whole or not at all."""
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".regard-") as near:
                draft = Path(near) / path.name
                draft.write_bytes(self.to_bytes())
                os.replace(draft, path)
        except OSError as error:
            raise RegardError(
                f"Tokenizer.save: {path} cannot be written: {error.strerror or error}. Make room, or save elsewhere."
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a file, of whatever kind."""
        return load_tokenizer(path)

    @staticmethod
    def train(sentences: Iterable[str], size: int | None = None, kind: str = "unigram") -> Tokenizer:
        """`train_tokenizer`, under the name it has in other libraries."""
        return train_tokenizer(sentences, size, kind)


class SentencePiece(Tokenizer):
    """Subwords by sentencepiece (Kudo & Richardson 2018): no word is unknown whose characters were seen.

    `model` is the content of a .model file, with pad, unk, bos and eos at 0, 1, 2 and 3.

    >>> from regard.data import SentencePiece
    >>> subwords = SentencePiece.train(["the dog sees the cat", "the cat sees a dog"], size=16)
    >>> len(subwords), subwords.decode(subwords.encode("a cat sees"))
    (16, 'a cat sees')
    """

    def __init__(self, model: bytes):
        library = _sentencepiece()
        try:
            self._processor: Any = library.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise RegardError(
                f"SentencePiece: these {len(model)} bytes are no model of sentencepiece, or only a part of one."
            ) from None
        ids = [self._processor.piece_to_id(piece) for piece in SPECIALS]
        if ids != list(range(len(SPECIALS))):
            raise RegardError(
                f"SentencePiece: the model has pad, unk, bos and eos at {ids}; the rule is 0, 1, 2, 3. "
                "Train it with pad_id=0, unk_id=1, bos_id=2 and eos_id=3."
            )
        self._model = model

    @staticmethod
    def train(  # type: ignore[override]  # a size is needed here
        sentences: Iterable[str], size: int | None = 2000, kind: str = "unigram", coverage: float = 1.0
    ) -> SentencePiece:
        """Learn `size` pieces from sentences, in memory; give those of the training split alone.

        `coverage` is the share of all characters that get an id of their own; for scripts of
        thousands of characters 0.9995 leaves out the rarest.
        """
        library, model = _sentencepiece(), io.BytesIO()
        sentences = list(sentences)
        if kind not in SUBWORDS:
            raise RegardError(f"SentencePiece.train: there is no kind {kind!r}. {nearest(kind, SUBWORDS)}")
        if not any(sentence.strip() for sentence in sentences):
            raise RegardError("SentencePiece.train: there is no text to learn from. Give sentences that are not empty.")
        try:
            library.SentencePieceTrainer.train(
                sentence_iterator=iter(sentences),
                model_writer=model,
                vocab_size=2000 if size is None else size,
                model_type=kind,
                character_coverage=coverage,
                pad_id=0,
                unk_id=1,
                bos_id=2,
                eos_id=3,
                num_threads=1,  # sums depend on how the text is shared out: the same model on every machine
                max_sentence_length=max(SHORTEST, *(len(sentence.encode()) + 1 for sentence in sentences)),
                minloglevel=2,
            )
        except RuntimeError as error:
            raise _wrong_size(size, len(sentences), str(error)) from None
        return SentencePiece(model.getvalue())

    def __len__(self) -> int:
        return self._processor.get_piece_size()

    def encode(self, text: str, sample: bool = False, seed: int | None = None) -> list[int]:
        if not sample:
            return self._processor.encode(text, out_type=int)
        if seed is not None:
            _sentencepiece().set_random_generator_seed(seed % SEEDS)
        return self._processor.encode(text, out_type=int, enable_sampling=True, alpha=SMOOTHING, nbest_size=-1)

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode(_plain(ids)).replace(UNKNOWN, UNKNOWN.strip())

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [self._processor.id_to_piece(int(number)) for number in ids]

    def word_numbers(self, ids: Iterable[int]) -> list[int]:
        return _numbered(self.pieces(ids))

    def to_bytes(self) -> bytes:
        return self._model


class Words(Tokenizer):
    """Whole words between spaces, for the synthetic tasks: every id is a word, every word an id.

    >>> words = Words.train(["the dog sees", "the cat"])
    >>> words.encode("the bird sees"), words.decode(words.encode("the cat"))
    ([7, 1, 6], 'the cat')
    """

    def __init__(self, words: Sequence[str]):
        self.words = tuple(words)
        self._ids = {word: number for number, word in enumerate(self.words, len(SPECIALS))}
        wrong = any(word.split() != [word] or word in SPECIALS for word in self.words)
        if wrong or len(self._ids) != len(self.words):
            raise RegardError("Words: a vocabulary is of different words without spaces, none of them a special one.")

    @staticmethod
    def train(sentences: Iterable[str], size: int | None = None, kind: str = "words") -> Words:
        """Every word of the sentences in alphabetical order, or the `size` - 4 most frequent ones."""
        counts: dict[str, int] = {}
        for sentence in sentences:
            for word in sentence.split():
                counts[word] = counts.get(word, 0) + 1
        known = sorted(counts.keys() - set(SPECIALS), key=lambda word: (-counts[word], word))
        largest = len(known) + len(SPECIALS)
        if not known:
            raise RegardError("Words.train: there are no words to learn from. Give sentences that are not empty.")
        if size is not None and not len(SPECIALS) < size <= largest:
            raise RegardError(
                f"Words.train: a vocabulary of {size} is asked for; the sentences, with the {len(SPECIALS)} "
                f"special ids, allow {len(SPECIALS) + 1} to {largest}. Leave the size out to take every word."
            )
        return Words(sorted(known if size is None else known[: size - len(SPECIALS)]))

    def __len__(self) -> int:
        return len(SPECIALS) + len(self.words)

    def encode(self, text: str, sample: bool = False, seed: int | None = None) -> list[int]:
        return [self._ids.get(word, UNK) for word in text.split()]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self.pieces(_plain(ids)))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [(*SPECIALS, *self.words)[int(number)] for number in ids]

    def word_numbers(self, ids: Iterable[int]) -> list[int]:
        real = [number not in (PAD, BOS, EOS) for number in ids]
        return [count - 1 if each else -1 for each, count in zip(real, accumulate(real), strict=True)]

    def cut(self, text: str) -> list[str]:
        return text.split()

    def to_bytes(self) -> bytes:
        return json.dumps({"kind": "words", "words": self.words}, ensure_ascii=False).encode()


#: Kinds that `train_tokenizer` knows.
KINDS = (*SUBWORDS, "words")


@checked
def train_tokenizer(sentences: Iterable[str], size: int | None = None, kind: str = "unigram") -> Tokenizer:
    """Learn a vocabulary: "unigram" or "bpe" subwords (2,000 unless `size` says), or whole "words".

    >>> train_tokenizer(["a b a"], kind="words").encode("b a")
    [5, 4]
    """
    if kind not in KINDS:
        raise RegardError(f"train_tokenizer: there is no kind {kind!r}. {nearest(kind, KINDS)}")
    if kind == "words":
        return Words.train(sentences, size)
    return SentencePiece.train(sentences, size, kind)


@checked
def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a file that `save` wrote, or of a .model file of sentencepiece.

    >>> import tempfile
    >>> from regard.data import Words, load_tokenizer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Words(["cat", "dog"]).save(f"{folder}/words.json")
    ...     words = load_tokenizer(f"{folder}/words.json")
    >>> words.encode("dog cat")
    [5, 4]
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise RegardError(f"load_tokenizer: {path} cannot be read: {error.strerror or error}.") from None
    try:
        if not content.startswith(b"{"):
            return SentencePiece(content)
        data = json.loads(content)
        if data["kind"] != "words":
            raise KeyError(f"kind {data['kind']!r}")
        return Words([str(word) for word in data["words"]])
    except (ValueError, KeyError, TypeError) as error:  # RegardError is a ValueError
        if isinstance(error, RegardError) and "pip install" in str(error):
            raise
        raise RegardError(
            f"load_tokenizer: {path} is no tokenizer, or its end is missing ({error}). Take the file from the run "
            "once more, or train it anew."
        ) from None


def _sentencepiece() -> Any:
    try:
        import sentencepiece  # type: ignore[import-not-found]
    except ImportError:
        raise RegardError(
            "SentencePiece: the library sentencepiece is not installed. pip install 'regard[lab]'"
        ) from None
    return sentencepiece


def _wrong_size(size: int | None, count: int, said: str) -> RegardError:
    """What sentencepiece says of a size, as a rule and a remedy."""
    if largest := re.search(r"value <= (\d+)", said):
        return RegardError(
            f"SentencePiece.train: a vocabulary of {size} is more than {count} sentences allow; the largest possible "
            f"is {largest[1]}. Give a size of at most {largest[1]}, or more text."
        )
    if smallest := re.search(r"\d+ vs (\d+)", said):
        return RegardError(
            f"SentencePiece.train: a vocabulary of {size} cannot hold the characters of the text; the smallest "
            f"possible is {smallest[1]}. Give a size of at least {smallest[1]}, or lower `coverage`."
        )
    return RegardError(f"SentencePiece.train: sentencepiece could not learn {size} pieces ({said}).")


def _plain(ids: Iterable[int]) -> list[int]:
    """The ids of words: up to the first EOS, without PAD and BOS."""
    plain: list[int] = []
    for number in map(int, ids):
        if number == EOS:
            break
        if number not in (PAD, BOS):
            plain.append(number)
    return plain


def _numbered(pieces: Iterable[str]) -> list[int]:
    """Numbers of words whose first piece begins with a space; a space alone belongs to the word that follows it."""
    numbers: list[int] = []
    last, spaces = -1, []  # the places of spaces whose word is not there yet
    for place, piece in enumerate(pieces):
        numbers.append(-1)
        if piece in SPECIALS and piece != SPECIALS[UNK]:
            continue
        if not piece.strip(SPACE):
            spaces.append(place)
            continue
        last += piece.startswith(SPACE) or bool(spaces) or last < 0  # the first may lack its mark in what a model wrote
        for each in (*spaces, place):
            numbers[each] = last
        spaces.clear()
    return numbers
