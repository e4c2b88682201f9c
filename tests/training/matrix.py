"""`torchrun -m tests.training.matrix OUT OPTIONS LAYOUT ...`: train once, save in each of the layouts, and the truth.

OPTIONS is what `options.to_json` writes. Every layout gets a folder of its name in OUT; `full.pt` is beside them.
A layout with options of its own is spelled `FOLDER=LAYOUT:JSON`, with the fields of `FileOptions`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from ckptools.training import full_state, layouts, options
from ckptools.training.file_options import FileOptions
from ckptools.training.run import prepare, train


def main(out: Path, text: str, names: list[str]) -> None:
    """Be one rank; every rank of the run is called alike."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    asked = dataclasses.replace(options.from_json(text), layout=parse(names[0])[1]).completed()
    run = prepare(asked, lambda line: None)
    train(run, lambda line: None, lambda run: None)
    for name, layout, files in map(parse, names):
        run.options = dataclasses.replace(asked, layout=layout, files=files)
        (out / name).mkdir(parents=True, exist_ok=True)
        layouts.BY_NAME[layout].save(run, out / name)
    full_state.save(run, out)
    dist.barrier()
    dist.destroy_process_group()


def parse(name: str) -> tuple[str, str, FileOptions]:
    """The folder, the layout and its options of one argument."""
    folder, _, rest = name.partition("=")
    layout, _, fields = (rest or folder).partition(":")
    return folder, layout, FileOptions(**json.loads(fields or "{}"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
