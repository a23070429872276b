"""Hugging Face models: their weights seen while their own backend runs. transformers is imported at use."""

from regard.hf.watch import watch
from regard.hf.watched import Watched

__all__ = ["Watched", "watch"]
