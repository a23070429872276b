"""Pages that show every weight of a model, and open without a network."""

from regard.viewer.page import write_page

__all__ = ["write_page"]
