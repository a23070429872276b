"""Pages that show every weight of a model: as one file, from a server, in a notebook."""

from regard.viewer.page import write_page
from regard.viewer.saved import load_run, save_run
from regard.viewer.sheet import Sheet, page_folds

__all__ = ["Sheet", "load_run", "page_folds", "save_run", "write_page"]
