"""Masks: which keys each query may attend to. They are joined by `&`, `|` and `~`."""

from typing import TYPE_CHECKING

from regard.base.other_libraries import answers_for
from regard.pieces.chosen import chosen_keys
from regard.pieces.data_masks import bigbird, documents, global_tokens, mask_mod, mask_tensor, padding, random_blocks
from regard.pieces.mask import Mask, block_local, causal, dilated, prefix, window
from regard.pieces.neighborhoods import neighborhood, sliding_tiles
from regard.pieces.trees import shared_prefix, tree

__all__ = [
    "Mask",
    "bigbird",
    "block_local",
    "causal",
    "chosen_keys",
    "dilated",
    "documents",
    "global_tokens",
    "mask_mod",
    "mask_tensor",
    "neighborhood",
    "padding",
    "prefix",
    "random_blocks",
    "shared_prefix",
    "sliding_tiles",
    "tree",
    "window",
]

if not TYPE_CHECKING:
    __getattr__ = answers_for(__name__, __all__)
