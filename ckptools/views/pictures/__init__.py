"""Pictures of a checkpoint as SVG of our own drawing, each with the same facts in words.

Rectangles, lines and text need no library: a plotting one would be imported for hundreds of times the cost, and write
ten times the bytes. Each picture is made in two steps, records to cells and cells to SVG, and both are pure: no file is
read here.
"""

from __future__ import annotations

from ckptools.views.pictures.byte_bars import bytes_by_section
from ckptools.views.pictures.heat_map import change_cells, heat_map, moment_cells, rms_cells
from ckptools.views.pictures.histogram import norm_histogram, value_histogram
from ckptools.views.pictures.picture import Picture
from ckptools.views.pictures.rank_map import rank_map
from ckptools.views.pictures.run_steps import run_steps
from ckptools.views.pictures.tensor_layout import tensor_layout

__all__ = [
    "Picture",
    "bytes_by_section",
    "change_cells",
    "heat_map",
    "moment_cells",
    "norm_histogram",
    "rank_map",
    "rms_cells",
    "run_steps",
    "tensor_layout",
    "value_histogram",
]
