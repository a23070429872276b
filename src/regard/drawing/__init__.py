"""Weights as pictures, figures for papers and text tables: of the maps of any model, and of weights of your own."""

from regard.drawing.panels import weight_table
from regard.drawing.paper_figure import figure
from regard.drawing.picture import heatmap, show_or_save
from regard.drawing.rich_forms import maps_svg, mask_svg
from regard.drawing.shown import show

__all__ = ["figure", "heatmap", "maps_svg", "mask_svg", "show", "show_or_save", "weight_table"]
