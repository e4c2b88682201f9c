"""Pictures of a checkpoint as SVG of our own drawing, each with the same facts in words.

Rectangles, lines and text need no library: a plotting one would be imported for hundreds of times the cost, and write
ten times the bytes. Each picture is made in two steps, records to cells and cells to SVG, and both are pure: no file is
read here.
"""

from __future__ import annotations

from ckptools.contents.picture import tensor_layout
from ckptools.display.drawing import Picture
from ckptools.inspect.picture import bytes_by_section, rank_map
from ckptools.ls.picture import run_steps
from ckptools.plots.heat_map import change_cells, heat_map, moment_cells, rms_cells
from ckptools.stats.picture import norm_histogram, value_histogram

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
