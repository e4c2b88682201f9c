"""The files of a hollow checkpoint, written by one process or by several."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path

from ckptools.cluster.waiting import Say
from ckptools.dtypes import ITEMSIZE, SAFETENSORS
from ckptools.training.layouts.huggingface import whole_files
from ckptools.training.options import CreateOptions, run_name
from ckptools.training.simulated.hollow_dcp import HollowDcp
from ckptools.training.simulated.hollow_rank_files import DTYPE, NOTE, HollowRankFile, HollowRun, Shapes, rank_files
from ckptools.training.simulated.world import in_processes

AT_ONCE = 32
"""Ranks that a process writes before it says so."""

Write = Callable[[list[int]], None]


def write_ranks(options: CreateOptions, shapes: Shapes, folder: Path, report: Say) -> None:
    """Write the files of the ranks that are asked for, or with huggingface those of the whole model."""
    run = HollowRun(options, shapes, options.world_size or 1)
    if options.layout == "huggingface":
        _write_safetensors(run, _made(_path(run, folder)))
        return
    ranks, jobs, done = options.simulation.ranks_written, options.simulation.jobs, 0
    tasks = _of_dcp(run, folder) if options.layout == "dcp" else _of_rank_files(run, folder)
    parts = ((write, alike[i : i + AT_ONCE]) for write, alike in tasks for i in range(0, len(alike), AT_ONCE))
    for written in map(_run, parts) if jobs == 1 else in_processes(jobs, _run, parts):
        done += written
        if len(ranks) > AT_ONCE:
            report(f"{done} of {len(ranks)} ranks written")


def _run(part: tuple[Write, list[int]]) -> int:
    write, ranks = part
    write(ranks)
    return len(ranks)


def _of_rank_files(run: HollowRun, folder: Path) -> Iterator[tuple[Write, list[int]]]:
    for alike, ranks in rank_files(run, run.options.simulation.ranks_written):
        yield partial(_write_rank_files, alike, run, folder), ranks


def _write_rank_files(alike: HollowRankFile, run: HollowRun, folder: Path, ranks: list[int]) -> None:
    for rank in ranks:
        path = _path(run, folder, rank)
        _made(path.parent)
        alike.write(path, rank)


def _of_dcp(run: HollowRun, folder: Path) -> Iterator[tuple[Write, list[int]]]:
    place = _made(_path(run, folder))
    HollowDcp(run).write_metadata(place)
    yield partial(_write_dcp, run, place), list(run.options.simulation.ranks_written)


def _write_dcp(run: HollowRun, folder: Path, ranks: list[int]) -> None:
    plan = HollowDcp(run)
    for rank in ranks:
        plan.write_rank(rank, folder)


def _path(run: HollowRun, folder: Path, rank: int = 0) -> Path:
    """The path of a rank's file, or of the folder of all ranks."""
    values: dict[str, int | str] = {"epoch": 0, "batch": 0, "rank": rank, "local_rank": rank, "node_rank": 0}
    values |= {"run_name": run_name(run.options, run.world_size), "world_size": run.world_size}
    return folder / run.options.template.format(**values)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_safetensors(run: HollowRun, folder: Path) -> None:
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
