"""The hostile corpus: every way to lie, to run something, or to exhaust a reader that we know of, by name.

A case writes its files into a folder of its own and returns the path that a user would name. Groups of cases are made
from one list put into several places, since a reader is as safe as its least looked-at door.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.pickles.forge import Member, archive, members_of, number, storage, tensor, text, with_pickle
from tests.pickles.test_hostile import BOMBS, PERSISTENT, ROUTES, TRAP
from tests.truth import FIXTURES

__all__ = ["CASES", "REFUSED", "TRAP"]

Build = Callable[[Path], Path]

DCP = FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt"
HF = FIXTURES / "hf-llama-safetensors-bf16" / "ckpt"


def cases() -> Iterator[tuple[str, Build]]:
    yield from _pickles()
    yield from _archives()
    yield from _numbers()
    yield from _safetensors()
    yield from _dcp()
    yield from _paths()
    yield from _files()
    yield from _words()


# -- pickles, wherever there are some -------------------------------------------------------------------------------


def _pickles() -> Iterator[tuple[str, Build]]:
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
    return lambda folder: _written(folder / ".metadata", data).parent


def _in_legacy(route: bytes) -> Build:
    head = b"".join(
        pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True, "type_sizes": {}})
    )
    data = head + b"\x80\x02}" + text("bad") + route + b"s." + pickle.dumps([], 2)
    return lambda folder: _written(folder / "x.pt", data)


def _in_dcp_object(route: bytes) -> Build:
    """A real DCP in which one object's item is replaced by another archive of the same length, or longer."""

    def build(folder: Path) -> Path:
        from torch.distributed import checkpoint as dcp

        out = folder / "dcp"
        dcp.save({"w": torch.ones(4), "note": ["x" * 4000]}, checkpoint_id=str(out), no_dist=True)
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


# -- archives ------------------------------------------------------------------------------------------------------

TREE = {"w": torch.arange(6.0).reshape(2, 3), "step": 3}


def _archives() -> Iterator[tuple[str, Build]]:
    for percent in (0, 1, 10, 50, 90, 99):
        yield f"archive cut at {percent} %", _cut(percent)
    changes: dict[str, Callable[[list[Member]], None]] = {
        "duplicate data.pkl": lambda m: m.append(m[0]),
        "duplicate storage": lambda m: m.append(next(x for x in m if b"data/0" in x.name)),
        "two roots": lambda m: m.append(Member(b"other/data.pkl", b"N.")),
        "name with ..": lambda m: m.append(Member(b"x/../../etc/passwd", b"x")),
        "absolute name": lambda m: m.append(Member(b"/etc/passwd", b"x")),
        "name with a newline": lambda m: m.append(Member(b"x/data/1\nerror: all is well", b"x")),
        "name with NUL": lambda m: m.append(Member(b"x/data/\0", b"x")),
        "name that is no UTF-8": lambda m: m.append(Member(b"x/data/\xff", b"x")),
        "wrong CRC of the pickle": lambda m: setattr(m[0], "crc", 1),
        "declared size of 2^40": lambda m: setattr(m[1], "size", 0xFFFFFFFF),
        "size beyond the file": lambda m: setattr(m[1], "size", 1 << 30),
        "header beyond the file": lambda m: setattr(m[1], "header", 1 << 30),
        "overlapping records": lambda m: setattr(m[1], "header", 0),
        "compressed record": lambda m: setattr(m[0], "method", 8),
        "encrypted record": lambda m: setattr(m[0], "flags", 1),
        "local name that differs": lambda m: setattr(m[0], "local_name", b"x/data.pkx"),
        "local size that differs": lambda m: setattr(m[0], "local_size", 1),
        "no data.pkl": lambda m: m.__delitem__(0),
        "TorchScript": lambda m: m.append(Member(m[0].name.replace(b"data.pkl", b"constants.pkl"), b"N.")),
    }  # fmt: skip
    for name, change in changes.items():
        yield f"archive: {name}", _changed(change)
    for name, front, back in (
        ("bytes in front", b"#!/bin/sh\n", b""),
        ("bytes behind", b"", b"PK" * 100),
        ("a shell script around", b"MZ", b"exit"),
    ):
        yield f"archive: {name}", _around(front, back)
    for count in (0, 1, 65_535):
        yield f"archive: entry count {count}", _counted(count)
    yield "archive of deflated bombs", _deflated


def _cut(percent: int) -> Build:
    def build(folder: Path) -> Path:
        torch.save(TREE, folder / "x.pt")
        data = (folder / "x.pt").read_bytes()
        return _written(folder / "x.pt", data[: len(data) * percent // 100])

    return build


def _changed(change: Callable[[list[Member]], None]) -> Build:
    def build(folder: Path) -> Path:
        members = members_of(TREE, folder / "x.pt")
        change(members)
        return archive(folder / "x.pt", members)

    return build


def _around(front: bytes, back: bytes) -> Build:
    return lambda folder: archive(folder / "x.pt", members_of(TREE, folder / "x.pt"), front, back)


def _counted(count: int) -> Build:
    return lambda folder: archive(folder / "x.pt", members_of(TREE, folder / "x.pt"), count=count)


def _deflated(folder: Path) -> Path:
    import zipfile

    with zipfile.ZipFile(folder / "x.pt", "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("x/data.pkl", b"\x80\x02N." + bytes(64 << 20))
    return folder / "x.pt"


# -- numbers that lie ----------------------------------------------------------------------------------------------

BIG = 1 << 62


def _numbers() -> Iterator[tuple[str, Build]]:
    forms: dict[str, bytes] = {
        "storage shorter than its tensor": tensor(size=(5,)),
        "storage of 2^62 elements": tensor(of=storage(numel=BIG)),
        "storage of -1 elements": tensor(of=storage(numel=-1)),
        "storage that is missing": tensor(of=storage(key="7")),
        "storage key that leads out": tensor(of=storage(key="../../etc/passwd")),
        "size of -4": tensor(size=(-4,)),
        "size of 2^62": tensor(size=(BIG,)),
        "sizes whose product wraps to 0": tensor(size=(1 << 32, 1 << 32), stride=(0, 0)),
        "stride of -1": tensor(stride=(-1,)),
        "stride of 2^62": tensor(stride=(BIG,)),
        "stride times size wraps": tensor(size=(2, 2), stride=(1 << 63, 1)),
        "offset of -1": tensor(offset=-1),
        "offset of 2^62": tensor(offset=BIG),
        "expanded to 2^50 elements": tensor(size=(1 << 50,), stride=(0,)),
        "more strides than sizes": tensor(size=(4,), stride=(1, 1)),
        "100 000 dimensions": tensor(size=(1,) * 100_000, stride=(1,) * 100_000),
        "sizes of 5000 digits": tensor(size=(10**5000,)),
    }
    for name, form in forms.items():
        yield f"tensor: {name}", _with_tensor(form)


def _with_tensor(form: bytes) -> Build:
    data = b"\x80\x02}" + text("w") + form + b"s."
    return lambda folder: with_pickle(folder / "x.pt", data, bytes(16))


# -- safetensors ---------------------------------------------------------------------------------------------------

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def _safetensors() -> Iterator[tuple[str, Build]]:
    headers: dict[str, tuple[Any, int]] = {
        "data cut short": ({"x": ENTRY}, 7),
        "data added": ({"x": ENTRY}, 9),
        "hole before": ({"x": {**ENTRY, "data_offsets": [4, 12]}}, 12),
        "overlap": ({"x": ENTRY, "y": ENTRY}, 8),
        "end before begin": ({"x": {**ENTRY, "data_offsets": [8, 0]}}, 8),
        "shape that does not fit": ({"x": {**ENTRY, "shape": [3]}}, 8),
        "shape of 2^80": ({"x": {**ENTRY, "shape": [1 << 40, 1 << 40]}}, 8),
        "negative shape": ({"x": {**ENTRY, "shape": [-2]}}, 8),
        "float shape": ({"x": {**ENTRY, "shape": [2.0]}}, 8),
        "offset of 2^64": ({"x": {**ENTRY, "data_offsets": [0, 1 << 64]}}, 8),
        "unknown dtype": ({"x": {**ENTRY, "dtype": "F128"}}, 8),
        "no dtype": ({"x": {"shape": [2]}}, 8),
        "metadata of numbers": ({"__metadata__": {"step": 5}}, 0),
        "a list": (b"[]", 0),
        "half an object": (b'{"x":', 0),
        "no UTF-8": (b'{"\xff": 1}', 0),
        "nested 90 000 deep": (b'{"a": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", 0),
        "a number of 5000 digits": (b'{"a": ' + b"9" * 5000 + b"}", 0),
        "duplicate name": (b'{"x":%s,"x":%s}' % ((json.dumps(ENTRY).encode(),) * 2), 8),
    }
    for name, (header, size) in headers.items():
        yield f"safetensors: {name}", _header(header, size)
    for length in (100_000_001, BIG, (1 << 64) - 1, 3000):
        yield f"safetensors: header of {length} bytes", _header({"x": ENTRY}, 8, length)


def _header(header: Any, size: int, length: int | None = None) -> Build:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = struct.pack("<Q", len(data) if length is None else length)
    return lambda folder: _written(folder / "x.safetensors", head + data + bytes(size))


# -- DCP -----------------------------------------------------------------------------------------------------------


def _dcp() -> Iterator[tuple[str, Build]]:
    from dataclasses import replace

    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata

    def item(change: Callable[[Any], Any]) -> Callable[[Any], None]:
        def apply(md: Any) -> None:
            index = next(i for i in md.storage_data if i.fqn == "w")
            md.storage_data[index] = change(md.storage_data[index])

        return apply

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
        "unknown transform": item(lambda s: replace(s, transform_descriptors=["stream.rot13"])),
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

    dcp.save({"v": torch.zeros(3), "w": torch.arange(4.0), "n": 7}, checkpoint_id=str(folder / "dcp"), no_dist=True)
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
        _written(out / ".metadata", data[: len(data) * percent // 100])
        return out

    return build


def _stale(folder: Path) -> Path:
    out = _saved(folder)
    file = out / "__0_0.distcp"
    _written(file, bytes(file.stat().st_size))
    return out


def _linked(folder: Path) -> Path:
    out = _saved(folder)
    outside = folder.parent / f"outside-{folder.name}"
    shutil.move(out / "__0_0.distcp", outside)
    (out / "__0_0.distcp").symlink_to(outside)
    return out


# -- paths in other files ------------------------------------------------------------------------------------------

LEADING_OUT = ("../secret", "/etc/passwd", "a/../../secret", "", ".", "..", "x\0y", "C:\\secret", "\\\\host\\share")


def _paths() -> Iterator[tuple[str, Build]]:
    for name in LEADING_OUT:
        yield f"weight_map: {name!r}", _weight_map(name)
        yield f"DeepSpeed's latest: {name!r}", _tracker("latest", name, "global_step5/mp_rank_00_model_states.pt")
        yield f"Megatron's tracker: {name!r}", _tracker(MEGATRON, name, "iter_0000005/mp_rank_00/model_optim_rng.pt")
    for index in (b"[]", b"{", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}', b"\xff", b'{"weight_map": {}}'):
        yield f"index: {index!r}", _index(index)
    for name, kind in (("a link", tarfile.SYMTYPE), ("a device", tarfile.CHRTYPE), ("a FIFO", tarfile.FIFOTYPE)):
        yield f"tar member that is {name}", _tar_of(kind)
    yield "rank file that is a link out of the folder", _linked_rank


def _weight_map(name: str) -> Build:
    def build(folder: Path) -> Path:
        shutil.copytree(HF, folder / "hf")
        path = folder / "hf" / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"][next(iter(index["weight_map"]))] = name
        return _written(path, json.dumps(index).encode()).parent

    return build


def _index(data: bytes) -> Build:
    def build(folder: Path) -> Path:
        shutil.copytree(HF, folder / "hf")
        return _written(folder / "hf" / "model.safetensors.index.json", data)

    return build


MEGATRON = "latest_checkpointed_iteration.txt"


def _tracker(file: str, name: str, saved: str) -> Build:
    """A run with one good checkpoint, and a tracker file that names another."""

    def build(folder: Path) -> Path:
        state = folder / "run" / saved
        state.parent.mkdir(parents=True)
        torch.save({"module": {"w": torch.ones(2)}, "model": {"w": torch.ones(2)}, "iteration": 5}, state)
        return _written(folder / "run" / file, name.encode()).parent

    return build


def _tar_of(kind: bytes) -> Build:
    def build(folder: Path) -> Path:
        with tarfile.open(folder / "x.tar", "w") as tar:
            member = tarfile.TarInfo("composer_states.pt")
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member, io.BytesIO())
        return folder / "x.tar"

    return build


def _linked_rank(folder: Path) -> Path:
    source = FIXTURES / "torch2.4.1-fsdp2-w3"
    for rank in range(3):
        shutil.copy(source / f"rank{rank}.pt", folder)
    outside = folder.parent / f"outside-{folder.name}"
    shutil.move(folder / "rank1.pt", outside)
    (folder / "rank1.pt").symlink_to(outside)
    return folder / "rank0.pt"


# -- files that are none -------------------------------------------------------------------------------------------


def _files() -> Iterator[tuple[str, Build]]:
    contents = {
        "empty": b"", "one byte": b"P", "zeros": bytes(4096), "text": b"buy milk\n", "HTML": b"<html><b>404</b></html>",
        "git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "GGUF": b"GGUF" + bytes(60),
        "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(60), "gzip of nothing": b"\x1f\x8b\x08", "xz of nothing": b"\xfd7zXZ\0",
        "zstd of nothing": b"\x28\xb5\x2f\xfd", "lz4 of nothing": b"\x04\x22\x4d\x18", "bzip2 of nothing": b"BZh9",
        "a lone pickle": pickle.dumps({"a": 1}), "legacy magic alone": pickle.dumps(0x1950A86A20F9469CFC6C, 2),
    }  # fmt: skip
    for name, data in contents.items():
        yield f"file: {name}", _file(data)
    yield "file: a folder", lambda folder: _made(folder / "x.pt")
    yield "file: an empty folder of a rank", lambda folder: _made(folder / "rank0.pt")
    yield "file: a FIFO", _fifo
    yield "file: a FIFO among ranks", _fifo_among_ranks
    yield "file: nothing there", lambda folder: folder / "x.pt"
    yield "file: a link in a circle", _circle
    yield "file: a gzip bomb", _gzip_bomb


def _file(data: bytes) -> Build:
    return lambda folder: _written(folder / "x.pt", data)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "x.pt")
    return folder / "x.pt"


def _fifo_among_ranks(folder: Path) -> Path:
    shutil.copy(FIXTURES / "torch2.4.1-fsdp2-w3" / "rank0.pt", folder)
    os.mkfifo(folder / "rank1.pt")
    return folder / "rank0.pt"


def _circle(folder: Path) -> Path:
    (folder / "x.pt").symlink_to(folder / "x.pt")
    return folder / "x.pt"


def _gzip_bomb(folder: Path) -> Path:
    import gzip

    with gzip.open(folder / "x.pt.gz", "wb") as file:
        file.write(b"PK\3\4")
        for _ in range(64):
            file.write(bytes(1 << 20))
    return folder / "x.pt.gz"


# -- words that act ------------------------------------------------------------------------------------------------

WORDS = {
    "terminal colours": "\x1b[31mred\x1b[0m",
    "a title": "\x1b]0;owned\x07", "C1": "\x9b31m", "carriage return": "ok\rbad",
    "newlines": "a\nerror: all is well\nb", "markup": "[bold]x[/bold][/]", "HTML": "<script>alert(1)</script>",
    "bidi": "a\u202egnp.exe", "surrogate": "a\udc80b", "zero width": "a\u200bb", "NUL": "a\0b",
    "a megabyte": "k" * 1_000_000,
    "a number": "1e5", "a path": "../../etc/passwd", "nothing": "", "dots": "a..b", "backspace": "good\b\b\b\bevil",
}  # fmt: skip


def _words() -> Iterator[tuple[str, Build]]:
    for name, word in WORDS.items():
        yield f"key: {name}", _key(text(word))
        yield f"class: {name}", _class(word)
    for name, value in (("NaN", float("nan")), ("infinity", float("-inf"))):
        yield f"value: {name}", _value(value)
    yield "keys that fall together", lambda folder: _torch(folder, {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})
    yield "keys 1 and '1'", lambda folder: _torch(folder, {"m": {1: torch.ones(1), "1": torch.ones(1)}})
    yield "key of 300 kB of an int", _key(number(1 << 2_400_000))


def _key(key: bytes) -> Build:
    data = b"\x80\x02}" + key + tensor() + b"s" + text("plain") + tensor() + b"s."
    return lambda folder: with_pickle(folder / "x.pt", data, bytes(16))


def _class(word: str) -> Build:
    name = text(word) + text(word) + b"\x93" + b")R"
    return lambda folder: with_pickle(
        folder / "x.pt", b"\x80\x02}" + text("o") + name + b"s" + text("w") + tensor() + b"s.", bytes(16)
    )


def _value(value: float) -> Build:
    return lambda folder: _torch(folder, {"optimizer": {"state": {}, "param_groups": [{"lr": value, "params": []}]}})


def _torch(folder: Path, tree: Any) -> Path:
    torch.save(tree, folder / "x.pt")
    return folder / "x.pt"


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


CASES: dict[str, Build] = dict(cases())

HARMLESS = ("archive: name with a newline", "index: b'{\"weight_map\": {}}'")
"""Odd, and read as it is: a record that no tensor uses is nobody's."""

REFUSED = [
    name
    for name in CASES
    if name.startswith(
        ("tensor: ", "archive: ", "safetensors: ", "dcp: ", "weight_map: ", "DeepSpeed's latest: ", "Megatron's")
    )
    and name not in HARMLESS
]
"""Cases of which no part may be written as if it were whole."""
