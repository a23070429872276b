"""The four special ids, the same in every vocabulary."""

from __future__ import annotations

__all__ = ["BOS", "EOS", "PAD", "SPECIALS", "UNK"]

#: Fills rows up to the longest of a batch; never predicted, never attended to.
PAD = 0
#: Stands for text that is not in the vocabulary.
UNK = 1
#: The first input of the decoder.
BOS = 2
#: Ends every source and every translation.
EOS = 3
#: The written forms of the special ids, in order.
SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")
