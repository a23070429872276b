"""The four ids that mean the same in every vocabulary."""

from __future__ import annotations

__all__ = ["BOS", "EOS", "PAD", "SPECIALS", "UNK"]

#: Fills rows up to the longest of a batch; never predicted, never attended to.
PAD = 0
#: Stands for what the vocabulary does not hold.
UNK = 1
#: What the decoder reads before the first word.
BOS = 2
#: Ends every source and every translation.
EOS = 3
#: Their written forms, in the order of their ids.
SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")
