"""Ranks of a job that load checkpoints which are damaged, do not fit, or change while they are read."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor

import ckptools
from tests.failing_calls import PREADV, PREADV2, fail

WORLD = 4
WIDTH = 64
"""Rows and columns of each weight: a rank's part of it is a record of 4 KiB."""

WAYS = ("load", "dcp")
"""`ckptools.load`, and `dcp.load` with a `ckptools.StorageReader`."""


class Ended(NamedTuple):
    """How a load ended on one rank.

    Attributes:
        error: the class of what was raised; empty if it loaded.
        text: its message.
        seconds: until then.
        same: whether the model has the values that it had before.
    """

    error: str
    text: str
    seconds: float
    same: bool


# -- a model over four ranks, and its checkpoints ----------------------------------------------------------------------


def model_of(width: int = WIDTH, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Three layers, with the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, dtype=dtype) for _ in range(3)))


def spread(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Spread every parameter over the ranks by rows."""

    def by_rows(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))

    return distribute_module(model, mesh, by_rows)


def trained(model: nn.Module, steps: int) -> torch.optim.Optimizer:
    """Take steps with a gradient that is the same everywhere; other numbers of them make other values."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * steps)
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5 + step)
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def save(out: Path, mesh: DeviceMesh) -> None:
    """Save steps 3 and 4 as rank files, step 3 as a DCP folder, and its model as one file; a collective."""
    for steps in (3, 4):
        model = spread(model_of(), mesh)
        optimizer = trained(model, steps)
        folder = out / f"step-{steps}"
        folder.mkdir(exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": steps}
        torch.save(state, folder / f"rank{dist.get_rank()}.pt")
        if steps == 3:
            of_model, of_optimizer = get_state_dict(model, optimizer)
            dcp.save({"model": of_model, "optimizer": of_optimizer, "step": 3}, checkpoint_id=out / "dcp")
    if dist.get_rank() == 0:
        whole = model_of()
        trained(whole, 3)
        torch.save({"model": whole.state_dict(), "step": 3}, out / "one.pt")
        (out / "hf").mkdir()
        save_file(whole.state_dict(), out / "hf" / "model.safetensors")
    dist.barrier()


# -- what is wrong with a copy of one ----------------------------------------------------------------------------------


def flip_a_bit(file: Path) -> None:
    """Flip a bit in the middle of a file, where a weight or a moment lies."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    """Halve a file."""
    os.truncate(file, file.stat().st_size // 2)


def rewrite(file: Path) -> None:
    """Overwrite a file in place, with as many bytes."""
    file.write_bytes(bytes(file.stat().st_size))


def replace_by(other: Path) -> Callable[[Path], None]:
    """Let another file take the name of one."""

    def replace(file: Path) -> None:
        new = file.with_suffix(".new")
        shutil.copy(other, new)
        new.replace(file)

    return replace


def be_a_fifo(file: Path) -> None:
    """Put a pipe in the place of a file, that nobody writes to."""
    file.unlink()
    os.mkfifo(file)


def another_step(file: Path) -> None:
    """Put the file of another step in the place of one."""
    shutil.copy(file.parent.parent / "step-4" / file.name, file)


DAMAGED: dict[str, tuple[str, str, Callable[[Path], None]]] = {
    "a rank file is missing": ("step-3", "rank2.pt", Path.unlink),
    "a .distcp is missing": ("dcp", "__2_0.distcp", Path.unlink),
    "a rank file is cut": ("step-3", "rank1.pt", cut),
    "a .distcp is cut": ("dcp", "__1_0.distcp", cut),
    "a rank file is a pipe": ("step-3", "rank3.pt", be_a_fifo),
    "a rank file is of another step": ("step-3", "rank2.pt", another_step),
    "a bit is flipped in a record of one rank": ("step-3", "rank1.pt", flip_a_bit),
    "a bit is flipped in a .distcp": ("dcp", "__1_0.distcp", flip_a_bit),
    "a bit is flipped in a record of all ranks": ("one.pt", "", flip_a_bit),
}
"""By what is wrong: the checkpoint, its file, and the damage."""


# -- what happens while one is read ------------------------------------------------------------------------------------


class Happening(NamedTuple):
    """What happens on one rank when it opens a file; `do` may raise."""

    rank: int
    file: str
    do: Callable[[Path], object]
    source: str = "step-3"


expected: list[Happening] = []
"""What has not happened yet in this process."""


def happen(event: str, arguments: tuple[object, ...]) -> None:
    """Be an audit hook: these cannot be taken away, so that one serves all cases."""
    if event == "open" and expected and str(arguments[0]).endswith(expected[0].file):
        expected.pop().do(Path(str(arguments[0])))


def raises(error: BaseException) -> Callable[[Path], None]:
    """Raise an error where a file would be opened."""

    def do(_: Path) -> None:
        raise error

    return do


def interrupt(_: Path) -> None:
    """Press Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


def die(*_: object) -> None:
    """End this process as the kernel does if memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def disk_fails(_: Path) -> None:
    """Let every later read into memory at an offset fail in this process, for good."""
    for call in (PREADV, PREADV2):  # os.preadv calls either
        fail(call, errno.EIO)


def happenings(out: Path) -> dict[str, Happening]:
    """Rank 0 opens the checkpoint, which reads every rank's file; the other ranks open files to read values alone."""
    return {
        "a file is cut while it is read": Happening(1, "rank1.pt", cut),
        "a file is rewritten while it is read": Happening(1, "rank1.pt", rewrite),
        "a file is replaced while it is read": Happening(1, "rank1.pt", replace_by(out / "step-4" / "rank1.pt")),
        "a file is deleted while it is read": Happening(1, "rank1.pt", Path.unlink),
        "one rank cannot read a file without checksums": Happening(
            1, "model.safetensors", raises(OSError(errno.EIO, "Input/output error")), "hf"
        ),
        "rank 0 has no memory to open it": Happening(0, "rank2.pt", raises(MemoryError())),
        "rank 0 meets a bug as it opens it": Happening(0, "rank2.pt", raises(ZeroDivisionError("division by zero"))),
        "rank 0 is interrupted as it opens it": Happening(0, "rank2.pt", interrupt),
        "rank 2 has no memory to read it": Happening(2, "rank2.pt", raises(MemoryError())),
        "rank 2 is interrupted as it reads it": Happening(2, "rank2.pt", interrupt),
        # The last one: the disk of rank 1 does not come back.
        "a disk fails": Happening(1, "rank1.pt", disk_fails),
    }


# -- be one of the ranks -----------------------------------------------------------------------------------------------


def join() -> DeviceMesh:
    """Meet the other ranks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    return init_device_mesh("cpu", (WORLD,))


def local(model: nn.Module) -> list[torch.Tensor]:
    """This rank's parts of a model's parameters."""
    return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def attempt(
    way: str,
    path: Path,
    mesh: DeviceMesh,
    with_optimizer: bool = True,
    when_asked: Callable[..., None] | None = None,
    changed: Callable[[dict[str, Any]], object] | None = None,
    **sizes: Any,
) -> Ended:
    """Load a checkpoint into a model that is spread over the ranks, and its optimizer.

    Args:
        way: one of `WAYS`.
        path: the checkpoint.
        mesh: of all ranks.
        with_optimizer: load the optimizer too.
        when_asked: called when the model is asked for its state dict.
        changed: changes what this rank asks of `dcp.load`.
        sizes: of the model.
    """
    model = spread(model_of(**sizes), mesh)
    if when_asked is not None:
        model.register_state_dict_pre_hook(when_asked)
    optimizer = trained(model, 1) if with_optimizer else None
    before = [part.clone() for part in local(model)]
    start, error, text = time.monotonic(), "", ""
    try:
        if way == "load":
            ckptools.load(model, path, optimizer)
        else:
            state: dict[str, Any] = {"model": get_model_state_dict(model)}
            if optimizer is not None:
                state["model"], state["optimizer"] = get_state_dict(model, optimizer)
            if changed is not None:
                changed(state)
            dcp.load(state, storage_reader=ckptools.StorageReader(path))
    except BaseException as failure:
        error, text = type(failure).__name__, str(failure)
    same = all(torch.equal(a, b) for a, b in zip(before, local(model), strict=True))
    return Ended(error, text, time.monotonic() - start, same)


def load_all(out: Path) -> None:
    """Load every damaged and every changing checkpoint in both ways; `ended.json` gets how each ended on each rank."""
    mesh = join()
    rank = dist.get_rank()
    save(out, mesh)
    sys.addaudithook(happen)
    found: dict[str, list[Any]] = {}

    def told(case: str, way: str, ended: Ended) -> None:
        of_ranks: list[Any] = [None] * WORLD
        dist.all_gather_object(of_ranks, ended)
        found[f"{case}: {way}"] = of_ranks

    for way in WAYS:
        told("sound", way, attempt(way, out / "step-3", mesh))
        told("other sizes", way, attempt(way, out / "step-3", mesh, width=32))
        told("other dtypes", way, attempt(way, out / "dcp", mesh, dtype=torch.bfloat16))
    alone = model_of()
    before = [part.clone() for part in local(alone)]
    if rank == 2:
        ckptools.load(alone, out / "one.pt", no_dist=True)
        assert all(map(torch.equal, ckptools.load_state_dict(out / "one.pt").values(), alone.state_dict().values()))
    told("alone", "load", Ended("", "", 0.0, all(map(torch.equal, before, local(alone)))))
    one_more = {"changed": lambda state: state["model"].update(more=torch.ones(2))} if rank == 1 else {}
    one_less = {"changed": lambda state: state["model"].pop("1.weight")} if rank == 1 else {}
    told("rank 1 asks for more", "dcp", attempt("dcp", out / "step-3", mesh, **one_more))
    told("rank 1 asks for less", "dcp", attempt("dcp", out / "step-3", mesh, **one_less))
    for case, (source, file, damage) in DAMAGED.items():
        copy = out / case
        if rank == 0:
            (shutil.copytree if (out / source).is_dir() else shutil.copy)(out / source, copy)
            damage(copy / file)
        dist.barrier()
        for way in WAYS:
            told(case, way, attempt(way, copy, mesh, with_optimizer=source != "one.pt"))
    for case, happening in happenings(out).items():
        for way in WAYS:
            copy = out / f"{case}: {way}"
            if rank == 0:
                shutil.copytree(out / happening.source, copy)
            dist.barrier()
            expected[:] = [happening] if happening.rank == rank else []
            told(case, way, attempt(way, copy, mesh, with_optimizer=happening.source != "hf"))
            expected.clear()
    if rank == 0:
        (out / "ended.json").write_text(json.dumps(found))
    # The group is not destroyed: with gloo of torch 2.6 that hangs now and then, and each process ends here anyway.
    dist.barrier()


def lose_a_rank(out: Path, when: str) -> None:
    """Be killed as the checkpoint is opened, asked for, or read; the others write how they ended."""
    mesh = join()
    rank = dist.get_rank()
    save(out, mesh)
    sys.addaudithook(happen)
    victim = {"opening": 0, "planning": 2, "reading": 1}[when]
    if rank == victim and when != "planning":
        expected.append(Happening(rank, "rank1.pt", die))
    dies = die if rank == victim and when == "planning" else None
    ended = attempt("load", out / "step-3", mesh, when_asked=dies)
    (out / f"{when}-{rank}.json").write_text(json.dumps(ended))
