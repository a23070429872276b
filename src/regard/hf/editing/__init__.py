"""Edits of a running model: `regard.edit`."""

from regard.hf.editing.editor import EditedRun, edit
from regard.hf.editing.streaming import streaming

__all__ = ["EditedRun", "edit", "streaming"]
