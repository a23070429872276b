"""Tokenizers from text to ids and back: subwords learned by sentencepiece, or whole words."""

from __future__ import annotations

import io
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from regard.base.checks import checked
from regard.base.errors import MissingPackage, RegardError, nearest
from regard.base.whole_files import write_whole
from regard.lab.data.vocabulary import BOS, EOS, PAD, SPECIALS, UNK
from regard.lab.data.words import cut

__all__ = ["SentencePiece", "Tokenizer", "WordTokenizer", "load_tokenizer", "train_tokenizer"]

#: The character that sentencepiece writes for a space.
SPACE = "▁"
#: The text that sentencepiece writes for UNK. Its spaces would cut a word with an unknown character in three.
UNKNOWN = " ⁇ "
#: The kinds of subwords: Kudo 2018; Sennrich, Haddow & Birch 2016.
SUBWORDS = ("unigram", "bpe")
#: The smoothing of `sample` (Kudo 2018, §3.3), or its share of dropped merges (Provilkov et al. 2020).
SMOOTHING = 0.1
#: The number of seeds of sentencepiece. The next number means no seed.
SEEDS = 2**32 - 1
#: The smallest value in bytes that sentencepiece accepts as the length of the longest sentence.
SHORTEST = 10


class Tokenizer(ABC):
    """Converts text to ids and back. Ids 0 to 3 are PAD, UNK, BOS and EOS. `encode` adds no id but UNK.

    `save` writes one file. `load_tokenizer` reads it, for every kind of tokenizer.

    >>> from regard.lab.data import train_tokenizer
    >>> tokenizer = train_tokenizer(["the dog sees", "the cat"], kind="words")
    >>> len(tokenizer), tokenizer.pieces(tokenizer.encode("the bird")), tokenizer.decode(tokenizer.encode("the dog"))
    (8, ['the', '<unk>'], 'the dog')
    """

    @abstractmethod
    def __len__(self) -> int:
        """The size of the vocabulary, with the four special ids."""

    @abstractmethod
    def encode(self, text: str, sample: bool = False, seed: int | None = None) -> list[int]:
        """The ids of a text, without BOS and EOS.

        `sample` draws a random segmentation in place of the best one. The same seed gives the same segmentation.
        """

    def unknown(self, text: str) -> list[str]:
        """The parts of a text that `encode` turns into UNK, as they are written."""
        return [word for word in text.split() if UNK in self.encode(word)]

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids up to the first EOS, without PAD and BOS."""

    @abstractmethod
    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The written piece of each id, also of PAD, BOS and EOS."""

    @abstractmethod
    def word_numbers(self, ids: Iterable[int]) -> list[int]:
        """The number of each id's word in `decode(ids).split()`; -1 for ids without a word."""

    def cut(self, text: str) -> list[str]:
        """The words of a text, as alignments count them; see `regard.lab.data.words.cut`."""
        return cut(text)

    @abstractmethod
    def to_bytes(self) -> bytes:
        """The content of the file that `save` writes."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file, completely or not at all."""
        write_whole(Path(path), self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a file, of any kind."""
        return load_tokenizer(path)

    @staticmethod
    def train(sentences: Iterable[str], size: int | None = None, kind: str = "unigram") -> Tokenizer:
        """The same as `train_tokenizer`, under its usual name in other libraries."""
        return train_tokenizer(sentences, size, kind)


class SentencePiece(Tokenizer):
    """Subwords by sentencepiece (Kudo & Richardson 2018). Every word of known characters has ids.

    `model` is the content of a .model file, with pad, unk, bos and eos at ids 0, 1, 2 and 3.

    >>> from regard.lab.data import SentencePiece
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
    def train(  # type: ignore[override]  # a size is required
        sentences: Iterable[str], size: int | None = 2000, kind: str = "unigram", coverage: float = 1.0
    ) -> SentencePiece:
        """Learn `size` pieces from sentences. Give only sentences of the training split.

        `kind` is "unigram" or "bpe". `coverage` is the share of all characters in the text whose character gets an id.
        For scripts with thousands of characters, 0.9995 leaves out the rarest characters.
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
                num_threads=1,  # sums depend on the number of threads: one thread gives the same model on every machine
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

    def unknown(self, text: str) -> list[str]:
        pieces = zip(self.encode(text), self._processor.encode(text, out_type=str), strict=True)
        return [piece for number, piece in pieces if number == UNK]

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode(_plain(ids)).replace(UNKNOWN, UNKNOWN.strip())

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [self._processor.id_to_piece(int(number)) for number in ids]

    def word_numbers(self, ids: Iterable[int]) -> list[int]:
        return _numbered(self.pieces(ids))

    def to_bytes(self) -> bytes:
        return self._model


class WordTokenizer(Tokenizer):
    """A vocabulary of whole words between spaces, for the synthetic tasks.

    >>> words = WordTokenizer.train(["the dog sees", "the cat"])
    >>> words.encode("the bird sees"), words.decode(words.encode("the cat"))
    ([7, 1, 6], 'the cat')
    """

    def __init__(self, words: Sequence[str]):
        self.words = tuple(words)
        self._ids = {word: number for number, word in enumerate(self.words, len(SPECIALS))}
        wrong = any(word.split() != [word] or word in SPECIALS for word in self.words)
        if wrong or len(self._ids) != len(self.words):
            raise RegardError(
                "WordTokenizer: the words must be different, without spaces, and none of the four special words."
            )

    @staticmethod
    def train(sentences: Iterable[str], size: int | None = None, kind: str = "words") -> WordTokenizer:
        """The vocabulary of all words, or of the `size` - 4 most frequent words, in alphabetical order."""
        counts: dict[str, int] = {}
        for sentence in sentences:
            for word in sentence.split():
                counts[word] = counts.get(word, 0) + 1
        known = sorted(counts.keys() - set(SPECIALS), key=lambda word: (-counts[word], word))
        largest = len(known) + len(SPECIALS)
        if not known:
            raise RegardError(
                "WordTokenizer.train: there are no words to learn from. Give sentences that are not empty."
            )
        if size is not None and not len(SPECIALS) < size <= largest:
            raise RegardError(
                f"WordTokenizer.train: a vocabulary of {size} is not possible. These sentences, with the "
                f"{len(SPECIALS)} special ids, allow {len(SPECIALS) + 1} to {largest}. Without a "
                "size, every word is taken."
            )
        return WordTokenizer(sorted(known if size is None else known[: size - len(SPECIALS)]))

    def __len__(self) -> int:
        return len(SPECIALS) + len(self.words)

    def encode(self, text: str, sample: bool = False, seed: int | None = None) -> list[int]:
        return [self._ids.get(word, UNK) for word in text.split()]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self.pieces(_plain(ids)))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [(*SPECIALS, *self.words)[int(number)] for number in ids]

    def word_numbers(self, ids: Iterable[int]) -> list[int]:
        # each id is one word, so the number of a word is that of the words up to it, minus 1
        is_word = [number not in (PAD, BOS, EOS) for number in ids]
        return [count - 1 if counts else -1 for counts, count in zip(is_word, accumulate(is_word), strict=True)]

    def cut(self, text: str) -> list[str]:
        return text.split()

    def to_bytes(self) -> bytes:
        return json.dumps({"kind": "words", "words": self.words}, ensure_ascii=False).encode()


#: The kinds of tokenizers of `train_tokenizer`.
KINDS = (*SUBWORDS, "words")


@checked
def train_tokenizer(sentences: Iterable[str], size: int | None = None, kind: str = "unigram") -> Tokenizer:
    """Learn a vocabulary: "unigram" or "bpe" subwords (by default 2,000), or whole "words".

    >>> train_tokenizer(["a b a"], kind="words").encode("b a")
    [5, 4]
    """
    if kind not in KINDS:
        raise RegardError(f"train_tokenizer: there is no kind {kind!r}. {nearest(kind, KINDS)}")
    if kind == "words":
        return WordTokenizer.train(sentences, size)
    return SentencePiece.train(sentences, size, kind)


@checked
def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a file that `save` wrote, or of a .model file of sentencepiece.

    >>> import tempfile
    >>> from regard.lab.data import WordTokenizer, load_tokenizer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     WordTokenizer(["cat", "dog"]).save(f"{folder}/words.json")
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
        return WordTokenizer([str(word) for word in data["words"]])
    except (ValueError, KeyError, TypeError) as error:  # RegardError is a ValueError
        # sentencepiece is not installed: the file may be right
        if isinstance(error, RegardError) and "pip install" in str(error):
            raise
        raise RegardError(
            f"load_tokenizer: {path} is not a tokenizer, or it is truncated ({error}). Copy the file again, or "
            "train the tokenizer again."
        ) from None


def _sentencepiece() -> Any:
    """The module sentencepiece; the error for a missing package names the extra that has it."""
    try:
        import sentencepiece  # type: ignore[import-not-found]
    except ImportError:
        raise MissingPackage("SentencePiece", "sentencepiece", "lab") from None
    return sentencepiece


class ImpossibleSize(RegardError):
    """No vocabulary of this size can be learned from the text; `possible` is the nearest size that can."""

    def __init__(self, message: str, possible: int):
        super().__init__(message)
        self.possible = possible


def _wrong_size(size: int | None, count: int, message: str) -> RegardError:
    """The error of sentencepiece about a size, with a rule and a remedy. `count` is the number of sentences."""
    if largest := re.search(r"value <= (\d+)", message):
        return ImpossibleSize(
            f"SentencePiece.train: a vocabulary of {size} is more than {count} sentences allow; the largest possible "
            f"is {largest[1]}. Give a size of at most {largest[1]}, or more text.",
            int(largest[1]),
        )
    if smallest := re.search(r"\d+ vs (\d+)", message):
        return ImpossibleSize(
            f"SentencePiece.train: a vocabulary of {size} cannot hold the characters of the text; the smallest "
            f"possible is {smallest[1]}. Give a size of at least {smallest[1]}, or lower `coverage`.",
            int(smallest[1]),
        )
    return RegardError(f"SentencePiece.train: sentencepiece could not learn {size} pieces ({message}).")


def _plain(ids: Iterable[int]) -> list[int]:
    """The ids up to the first EOS, without PAD and BOS."""
    plain: list[int] = []
    for number in map(int, ids):
        if number == EOS:
            break
        if number not in (PAD, BOS):
            plain.append(number)
    return plain


def _numbered(pieces: Iterable[str]) -> list[int]:
    """The number of each piece's word; -1 for PAD, BOS and EOS, and for spaces that no word follows.

    A word begins with the sign of a space. A piece of this sign alone belongs to the next word.
    """
    numbers: list[int] = []
    word, spaces = -1, []  # spaces before the next word
    for index, piece in enumerate(pieces):
        numbers.append(-1)
        if piece in SPECIALS and piece != SPECIALS[UNK]:
            continue
        if not piece.strip(SPACE):
            spaces.append(index)
            continue
        word += (
            piece.startswith(SPACE) or bool(spaces) or word < 0
        )  # the first piece of a translation may lack its space
        for member in (*spaces, index):
            numbers[member] = word
        spaces.clear()
    return numbers
