"""Edits of a running model: `regard.edit`."""

from regard.hf.editing.editor import EditedRun, edit

__all__ = ["EditedRun", "edit"]
