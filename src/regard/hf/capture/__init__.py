"""`watch` captures every attention map of a model while the model runs on its own backend."""

from regard.hf.capture.generation import Generation
from regard.hf.capture.generation_steps import WatchedStep
from regard.hf.capture.model_maps import WatchedAttention
from regard.hf.capture.watch_block import watch

__all__ = ["Generation", "WatchedAttention", "WatchedStep", "watch"]
