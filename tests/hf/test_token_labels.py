"""Tokens are shown in readable form, with tokenizers that the tests train themselves."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("transformers")
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from regard.hf.text_reader import TextReader

SPACES = {"␣": " ", "⇥": "\t", "↵": "\n"}
TEXT = "def f(x):\n        return x\n\n\n\t\ty = 1\n"


def byte_level():
    """As GPT-2's and Llama 3's, with merges of whitespace and none of the bytes of rare characters."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator([TEXT] * 9, trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    return TextReader(torch.nn.Identity(), PreTrainedTokenizerFast(tokenizer_object=words))


def byte_fallback():
    """As Llama 2's SentencePiece: ▁ for a space, and a token for each byte."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁▁▁▁", "a", "b", "▁a"]
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("▁", "a")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    words = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    words.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    return TextReader(torch.nn.Identity(), PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>"))


def labels(reader, text):
    return reader.labels(reader.tokenizer(text)["input_ids"])


def whitespace(label):
    """The text of a label of whitespace."""
    return "".join(SPACES[sign] * int(count or 1) for sign, count in re.findall(r"(.)(?:×(\d+))?", label))


def test_whitespace_of_byte_level_tokens_is_counted():
    shown = labels(byte_level(), TEXT)
    assert not any(set(label) & set("ĠĊĉ") for label in shown), shown
    blank = [label for label in shown if set(label) & SPACES.keys()]
    assert "".join(map(whitespace, blank)).count("\n") == TEXT.count("\n") and "↵×3" in "".join(shown), shown
    assert "".join(map(whitespace, blank)).count("\t") == 2


def test_each_whitespace_token_is_its_own_text():
    reader = byte_level()
    for token, number in reader.tokenizer.get_vocab().items():
        text = reader.tokenizer.decode([number])
        if text and not text.strip(" \t\n"):
            assert whitespace(reader.labels([number])[0]) == text, token


def test_parts_of_a_character_are_its_bytes():
    shown = labels(byte_level(), "€")
    assert "".join(shown) == "".join(f"\\x{byte:02x}" for byte in "€".encode())
    assert labels(byte_fallback(), "€") == [f"<0x{byte:02X}>" for byte in "€".encode()]


def test_whitespace_of_sentencepiece_tokens_is_counted():
    assert labels(byte_fallback(), "b     a") == ["b", "␣×4", "a"]
    assert labels(byte_fallback(), "b\n") == ["b", "↵"]
