"""DCP folders whose `.metadata` and files contradict themselves."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.hostile.cases.build import BIG, Build, written


def cases() -> Iterator[tuple[str, Build]]:
    from dataclasses import replace

    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata

    def item(change: Callable[[Any], Any]) -> Callable[[Any], None]:
        def apply(md: Any) -> None:
            index = next(i for i in md.storage_data if i.fqn == "w")
            md.storage_data[index] = change(md.storage_data[index])

        return apply

    def transformed(stored: Any) -> Any:
        stored.transform_descriptors = ["stream.rot13"]  # up to 2.6 torch has no such field
        return stored

    def tensor_of(change: Callable[[Any], Any]) -> Callable[[Any], None]:
        return lambda md: md.state_dict_metadata.update(w=change(md.state_dict_metadata["w"]))

    def chunks(*boxes: tuple[int, int]) -> Callable[[Any], None]:
        made = [ChunkStorageMetadata(torch.Size((a,)), torch.Size((n,))) for a, n in boxes]
        return tensor_of(lambda t: replace(t, chunks=made))

    changes: dict[str, Callable[[Any], None]] = {
        "path with ..": item(lambda s: replace(s, relative_path="../secret")),
        "absolute path": item(lambda s: replace(s, relative_path="/etc/passwd")),
        "path of a URL": item(lambda s: replace(s, relative_path="https://example.org/x")),
        "empty path": item(lambda s: replace(s, relative_path="")),
        "path with NUL": item(lambda s: replace(s, relative_path="a\0b")),
        "path that is a number": item(lambda s: replace(s, relative_path=7)),
        "file that is missing": item(lambda s: replace(s, relative_path="__9_0.distcp")),
        "offset of 2^62": item(lambda s: replace(s, offset=BIG)),
        "offset of -1": item(lambda s: replace(s, offset=-1)),
        "length of 2^62": item(lambda s: replace(s, length=BIG)),
        "length of 0": item(lambda s: replace(s, length=0)),
        "item of another tensor": item(lambda s: replace(s, offset=0)),
        "unknown transform": item(transformed),
        "size of 2^62": tensor_of(lambda t: replace(t, size=torch.Size((BIG,)))),
        "another dtype": tensor_of(lambda t: replace(t, properties=replace(t.properties, dtype=torch.float64))),
        "no chunks": tensor_of(lambda t: replace(t, chunks=[])),
        "chunks that leave a gap": chunks((0, 2)),
        "chunks that overlap": chunks((0, 3), (2, 2)),
        "chunk outside": chunks((2, 4)),
        "chunk of 2^62": chunks((0, BIG)),
        "a list index of 2^40": lambda md: md.planner_data.update(w=("w", 1 << 40)),
        "a list index of -1": lambda md: md.planner_data.update(w=("w", -1)),
        "one place for two": lambda md: md.planner_data.update(w=("v",)),
        "a path of 5000 levels": lambda md: md.planner_data.update(w=("w",) * 5000),
        "a path of floats": lambda md: md.planner_data.update(w=(1.5,)),
        "a tensor that is called bytes": tensor_of(lambda t: BytesStorageMetadata()),
        "no storage data": lambda md: md.storage_data.clear(),
        "a name that paints": lambda md: md.state_dict_metadata.update({"\x1b[31mred": md.state_dict_metadata["w"]}),
    }
    for name, change in changes.items():
        yield f"dcp: {name}", _metadata_with(change)
    for percent in (0, 30, 99):
        yield f"dcp: .metadata cut at {percent} %", _metadata_cut(percent)
    yield "dcp: another save's file of the same size", _stale
    yield "dcp: a link out of the folder", _linked


def _saved(folder: Path) -> Path:
    from torch.distributed import checkpoint as dcp

    dcp.save({"v": torch.zeros(3), "w": torch.arange(4.0), "n": 7}, checkpoint_id=str(folder / "dcp"))
    return folder / "dcp"


def _metadata_with(change: Callable[[Any], None]) -> Build:
    def build(folder: Path) -> Path:
        out = _saved(folder)
        with (out / ".metadata").open("rb") as file:
            metadata = pickle.load(file)
        change(metadata)
        with (out / ".metadata").open("wb") as file:
            pickle.dump(metadata, file)
        return out

    return build


def _metadata_cut(percent: int) -> Build:
    def build(folder: Path) -> Path:
        out = _saved(folder)
        data = (out / ".metadata").read_bytes()
        written(out / ".metadata", data[: len(data) * percent // 100])
        return out

    return build


def _stale(folder: Path) -> Path:
    out = _saved(folder)
    file = out / "__0_0.distcp"
    written(file, bytes(file.stat().st_size))
    return out


def _linked(folder: Path) -> Path:
    out = _saved(folder)
    outside = folder.parent / f"outside-{folder.name}"
    shutil.move(out / "__0_0.distcp", outside)
    (out / "__0_0.distcp").symlink_to(outside)
    return out
