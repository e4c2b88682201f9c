"""A hollow model as safetensors: true headers, and nothing behind them."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

from ckptools.dtypes import ITEMSIZE, SAFETENSORS
from ckptools.training.hollow.state import DTYPE, NOTE, HollowRun
from ckptools.training.layouts.huggingface import whole_files


def write(run: HollowRun, folder: Path) -> None:
    """Write the files of the whole model, and their index where they are several."""
    dtype = str(DTYPE).removeprefix("torch.")
    sizes = {name: prod(shape) * ITEMSIZE[dtype] for name, shape in run.shapes.items()}
    for file, fqns in whole_files(sizes, folder, run.options.files).items():
        entries, end = {}, 0
        for fqn in fqns:
            spans = [end, end + sizes[fqn]]
            entries[fqn] = {"dtype": SAFETENSORS[dtype], "shape": run.shapes[fqn], "data_offsets": spans}
            end += sizes[fqn]
        text = json.dumps({"__metadata__": {"format": "pt", "values": NOTE}} | entries)
        header = text.encode().ljust(-(-len(text) // 8) * 8)
        with (folder / file).open("wb") as out:
            out.write(len(header).to_bytes(8, "little") + header)
            out.truncate(out.tell() + end)
