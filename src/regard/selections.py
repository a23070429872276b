"""Selections: the keys that another score chooses for each query."""

from typing import TYPE_CHECKING

from regard.base.other_libraries import answers_for
from regard.pieces.selection import BlockIndexer, BlockMeans, CompressedBlocks, HashBuckets, Selection, TokenIndexer

__all__ = ["BlockIndexer", "BlockMeans", "CompressedBlocks", "HashBuckets", "Selection", "TokenIndexer"]

if not TYPE_CHECKING:
    __getattr__ = answers_for(__name__, __all__)
