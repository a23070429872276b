"""Text for the translation lab: corpora of sentence pairs, tokenizers, and batches."""

from typing import TYPE_CHECKING

from regard.base.other_libraries import answers_for
from regard.lab.data.batches import Batch, Batches, Epoch
from regard.lab.data.corpus import Corpus, Pair, encode_pairs
from regard.lab.data.loading import load_corpus
from regard.lab.data.retrieval import Nearest, nearest_pairs, without_near
from regard.lab.data.splits import split_pairs
from regard.lab.data.synthetic import synthetic_pairs
from regard.lab.data.tokenizer import SentencePiece, Tokenizer, WordTokenizer, load_tokenizer, train_tokenizer
from regard.lab.data.vocabulary import BOS, EOS, PAD, UNK

__all__ = [
    "BOS",
    "EOS",
    "PAD",
    "UNK",
    "Batch",
    "Batches",
    "Corpus",
    "Epoch",
    "Nearest",
    "Pair",
    "SentencePiece",
    "Tokenizer",
    "WordTokenizer",
    "encode_pairs",
    "load_corpus",
    "load_tokenizer",
    "nearest_pairs",
    "split_pairs",
    "synthetic_pairs",
    "train_tokenizer",
    "without_near",
]

if not TYPE_CHECKING:
    __getattr__ = answers_for(__name__, __all__)
