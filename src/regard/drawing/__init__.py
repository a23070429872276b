"""Weights as pictures, figures for papers and text tables: of the maps of any model, and of weights of your own."""

from regard.drawing.paper_figure import figure
from regard.drawing.picture import heatmap
from regard.drawing.shown import show
from regard.drawing.table import weight_table

__all__ = ["figure", "heatmap", "show", "weight_table"]
