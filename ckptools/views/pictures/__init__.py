"""Pictures of a checkpoint as SVG of our own drawing, each with the same facts in words.

Rectangles, lines and text need no library: a plotting one would be imported for hundreds of times the cost, and write
ten times the bytes. Each picture is made in two steps, records to cells and cells to SVG, and both are pure: no file is
read here.
"""

from __future__ import annotations

from ckptools.views.pictures.picture import Picture
from ckptools.views.pictures.rank_map import rank_map
from ckptools.views.pictures.tensor_layout import tensor_layout

__all__ = ["Picture", "rank_map", "tensor_layout"]
