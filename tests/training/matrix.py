"""Train once, save in each of several layouts, and the truth.

Every layout gets a folder of its name; `full.pt` is beside them. A layout with options of its own is spelled
`FOLDER=LAYOUT:JSON`, with the fields of `FileOptions`.
"""

from __future__ import annotations

import dataclasses
import json
import warnings

import torch
import torch.distributed as dist

from ckptools.training import layouts
from ckptools.training.options import CreateOptions, FileOptions
from ckptools.training.run import prepare, save_full_state, train


def train_and_save(options: CreateOptions, names: tuple[str, ...]) -> None:
    """Be one rank; every rank of the run is called alike."""
    out = options.out
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    asked = dataclasses.replace(options, layout=parse(names[0])[1]).completed()
    run = prepare(asked, lambda line: None)
    train(run, lambda line: None, lambda run: None)
    for name, layout, files in map(parse, names):
        run.options = dataclasses.replace(asked, layout=layout, files=files)
        (out / name).mkdir(parents=True, exist_ok=True)
        layouts.SAVE[layout](run, out / name)
    save_full_state(run, out)
    dist.barrier()
    # As every rank does: see `ckptools.training.rank`.
    del run
    dist.destroy_process_group()


def parse(name: str) -> tuple[str, str, FileOptions]:
    """The folder, the layout and its options of one argument."""
    folder, _, rest = name.partition("=")
    layout, _, fields = (rest or folder).partition(":")
    return folder, layout, FileOptions(**json.loads(fields or "{}"))
