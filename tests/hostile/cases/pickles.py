"""Code and bombs in pickles, wherever there are some."""

from __future__ import annotations

import pickle
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.hostile.cases.build import Build, written
from tests.pickles.forge import tensor, text, with_pickle
from tests.pickles.test_hostile import BOMBS, PERSISTENT, ROUTES
from tests.truth import FIXTURES

HF = FIXTURES / "hf-llama-safetensors-bf16" / "ckpt"


def cases() -> Iterator[tuple[str, Build]]:
    for name, route in ROUTES.items():
        yield f"route in a .pt: {name}", _in_pt(route)
        yield f"route in .metadata: {name}", _in_metadata(route)
        yield f"route in a file from before torch 1.6: {name}", _in_legacy(route)
    for name in ("REDUCE", "INST", "NEWOBJ_EX", "BUILD", "getattr", "EXT4", "eval", "a dict key"):
        yield f"route in a DCP object: {name}", _in_dcp_object(ROUTES[name])
        yield f"route in optimizer.bin: {name}", _beside("optimizer.bin", ROUTES[name])
        yield f"route in random_states: {name}", _beside("random_states_0.pkl", ROUTES[name])
        yield f"route in a tar member: {name}", _in_tar(ROUTES[name])
    for name, route in PERSISTENT.items():
        yield f"persistent id: {name}", _in_pt(route)
    for name, bomb in BOMBS.items():
        yield f"bomb: {name}", _bomb(bomb)


def _evil(route: bytes) -> bytes:
    return b"\x80\x02}" + text("bad") + route + b"s" + text("w") + tensor() + b"s."


def _in_pt(route: bytes) -> Build:
    return lambda folder: with_pickle(folder / "x.pt", _evil(route), bytes(16))


def _bomb(bomb: bytes) -> Build:
    return lambda folder: with_pickle(folder / "rank0.pt", b"\x80\x02" + bomb)


def _in_metadata(route: bytes) -> Build:
    """A `.metadata` whose planner data holds the route, and nothing else is odd."""
    state = text("state_dict_metadata") + b"}" + text("storage_data") + b"}" + text("planner_data") + route
    data = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(" + state + b"ub."
    return lambda folder: written(folder / ".metadata", data).parent


def _in_legacy(route: bytes) -> Build:
    head = b"".join(
        pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True, "type_sizes": {}})
    )
    data = head + b"\x80\x02}" + text("bad") + route + b"s." + pickle.dumps([], 2)
    return lambda folder: written(folder / "x.pt", data)


def _in_dcp_object(route: bytes) -> Build:
    """A real DCP in which one object's item is replaced by another archive of the same length, or longer."""

    def build(folder: Path) -> Path:
        from torch.distributed import checkpoint as dcp

        out = folder / "dcp"
        dcp.save({"w": torch.ones(4), "note": ["x" * 4000]}, checkpoint_id=str(out))
        item = with_pickle(folder / "item.pt", b"\x80\x02" + route + b".").read_bytes()
        file = out / "__0_0.distcp"
        data = file.read_bytes()
        at = data.index(b"x" * 100)
        start = data.rindex(b"PK\3\4", 0, data.rindex(b"data.pkl", 0, at))
        end = data.index(b"PK\5\6", at) + 22
        # Longer or shorter than what `.metadata` says of it: the comment of the zip is no place to hide in either.
        file.write_bytes(data[:start] + item[: end - start].ljust(end - start, b"\0") + data[end:])
        return out

    return build


def _beside(name: str, route: bytes) -> Build:
    def build(folder: Path) -> Path:
        shutil.copytree(HF, folder / "hf")
        with_pickle(folder / "hf" / name, b"\x80\x02}" + text("bad") + route + b"s.")
        return folder / "hf"

    return build


def _in_tar(route: bytes) -> Build:
    def build(folder: Path) -> Path:
        inner = with_pickle(folder / "composer_states.pt", _evil(route), bytes(16))
        with tarfile.open(folder / "x.tar", "w") as tar:
            tar.add(inner, "composer_states.pt")
        inner.unlink()
        return folder / "x.tar"

    return build
