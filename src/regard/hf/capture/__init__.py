"""`watch` captures every attention map of a model while the model runs on its own backend."""

from regard.hf.capture.model_maps import WatchedAttention
from regard.hf.capture.watch_block import watch

__all__ = ["WatchedAttention", "watch"]
