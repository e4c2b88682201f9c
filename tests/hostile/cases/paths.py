"""Names that lead out of the checkpoint: in indexes, trackers, tars and links."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.hostile.cases.build import Build, written
from tests.truth import FIXTURES

HF = FIXTURES / "hf-llama-safetensors-bf16" / "ckpt"

LEADING_OUT = ("../secret", "/etc/passwd", "a/../../secret", "", ".", "..", "x\0y", "C:\\secret", "\\\\host\\share")


def cases() -> Iterator[tuple[str, Build]]:
    for name in LEADING_OUT:
        yield f"weight_map: {name!r}", _weight_map(name)
        yield f"DeepSpeed's latest: {name!r}", _tracker("latest", name, "global_step5/mp_rank_00_model_states.pt")
        yield f"Megatron's tracker: {name!r}", _tracker(MEGATRON, name, "iter_0000005/mp_rank_00/model_optim_rng.pt")
    for index in (b"[]", b"{", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b"\xff", b'{"weight_map": {}}'):
        yield f"index: {index!r}", _index(index)
    for name in ("../secret.pt", "/secret.pt", "a/../../composer_states.pt"):
        yield f"tar member called {name!r}", _tar_leading_out(name)
    for value in ("NaN", "Infinity", "1e999", "-0", "9" * 5000):
        yield f"JSON with the number {value[:9]}", _number_in_index(value)
    for name, kind in (("a link", tarfile.SYMTYPE), ("a device", tarfile.CHRTYPE), ("a FIFO", tarfile.FIFOTYPE)):
        yield f"tar member that is {name}", _tar_of(kind)
    yield "rank file that is a link out of the folder", _linked_rank


def _weight_map(name: str) -> Build:
    def build(folder: Path) -> Path:
        shutil.copytree(HF, folder / "hf")
        path = folder / "hf" / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"][next(iter(index["weight_map"]))] = name
        return written(path, json.dumps(index).encode()).parent

    return build


def _index(data: bytes) -> Build:
    def build(folder: Path) -> Path:
        shutil.copytree(HF, folder / "hf")
        return written(folder / "hf" / "model.safetensors.index.json", data)

    return build


MEGATRON = "latest_checkpointed_iteration.txt"


def _tracker(file: str, name: str, saved: str) -> Build:
    """A run with one good checkpoint, and a tracker file that names another."""

    def build(folder: Path) -> Path:
        state = folder / "run" / saved
        state.parent.mkdir(parents=True)
        torch.save({"module": {"w": torch.ones(2)}, "model": {"w": torch.ones(2)}, "iteration": 5}, state)
        return written(folder / "run" / file, name.encode()).parent

    return build


def _tar_of(kind: bytes) -> Build:
    def build(folder: Path) -> Path:
        with tarfile.open(folder / "x.tar", "w") as tar:
            member = tarfile.TarInfo("composer_states.pt")
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member, io.BytesIO())
        return folder / "x.tar"

    return build


def _tar_leading_out(name: str) -> Build:
    def build(folder: Path) -> Path:
        saved = io.BytesIO()
        torch.save({"w": torch.ones(2)}, saved)
        with tarfile.open(folder / "x.tar", "w") as tar:
            member = tarfile.TarInfo(name)
            member.size = saved.tell()
            saved.seek(0)
            tar.addfile(member, saved)
        return folder / "x.tar"

    return build


def _number_in_index(value: str) -> Build:
    """JSON has no NaN, though many writers do; wherever a number can stand, it must not go through unseen."""

    def build(folder: Path) -> Path:
        shutil.copytree(HF, folder / "hf")
        path = folder / "hf" / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["metadata"] = {"total_size": 0.125}
        path.write_text(json.dumps(index).replace("0.125", value))
        state = f'{{"global_step": {value}, "epoch": {value}, "log_history": [{{"loss": {value}}}]}}'
        (folder / "hf" / "trainer_state.json").write_text(state)
        return folder / "hf"

    return build


def _linked_rank(folder: Path) -> Path:
    source = FIXTURES / "torch2.4.1-fsdp2-w3"
    for rank in range(3):
        shutil.copy(source / f"rank{rank}.pt", folder)
    outside = folder.parent / f"outside-{folder.name}"
    shutil.move(folder / "rank1.pt", outside)
    (folder / "rank1.pt").symlink_to(outside)
    return folder / "rank0.pt"
