"""Pages that show every weight of a model: as one file, from a server, in a notebook."""

from typing import TYPE_CHECKING

from regard.base.other_libraries import answers_for
from regard.stats import PatchGrid
from regard.viewer.lecture import write_lecture
from regard.viewer.page import write_page
from regard.viewer.pictures import picture_sheets
from regard.viewer.saved import load_run, save_run
from regard.viewer.sheet import Sheet, page_reductions
from regard.viewer.story import Step, Story

__all__ = [
    "PatchGrid",
    "Sheet",
    "Step",
    "Story",
    "load_run",
    "page_reductions",
    "picture_sheets",
    "save_run",
    "write_lecture",
    "write_page",
]

if not TYPE_CHECKING:
    __getattr__ = answers_for(__name__, __all__)
