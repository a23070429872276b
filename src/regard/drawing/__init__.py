"""Weights as a picture and as a text table, for the maps of any model and for weights of your own."""

from regard.drawing.picture import heatmap
from regard.drawing.table import weight_table

__all__ = ["heatmap", "weight_table"]
