"""Files of torch 0.1: read as torch reads them, and refused where they contradict themselves."""

from __future__ import annotations

import io
import struct
import tarfile
from pathlib import Path

import pytest
import torch

from ckptools.api.tensor import with_lazy_tensors
from ckptools.pickles import reader
from tests.files.test_tar_archive import tar_of
from tests.pickles.forge import one_line
from tests.pickles.test_tensors import same_bits


def ancient(path: Path, protocol: int = 2, ndim: int = 2, view: tuple[int, int, int, int] = (9, 7, 4, 8)) -> Path:
    """A file as torch 0.1 wrote it: a storage, a view of it, three tensors, one of them used twice."""
    import pickle

    def dumps(value: object) -> bytes:
        return pickle.dumps(value, protocol)

    kind = torch.FloatStorage
    storages = dumps(2) + dumps((7, "cpu", kind)) + struct.pack("<q12f", 12, *range(12))
    storages += dumps((8, "cpu", torch.LongStorage)) + struct.pack("<q2q", 2, -1, 5) + dumps([view])
    tensors = dumps(3)
    for key, of, sizes, strides, offset in (
        (1, 7, (3, 4), (4, 1), 0),
        (2, 9, (2, 2), (1, 2), 1),
        (3, 8, (2,), (1,), 0),
    ):
        n = ndim if key == 1 else len(sizes)
        tensors += dumps((key, of, torch.FloatTensor)) + struct.pack("<ii", n, 0)
        tensors += struct.pack(f"<{2 * len(sizes) + 1}q", *sizes, *strides, offset)

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> str | None:
            return str(value.key) if isinstance(value, Persistent) else None

    buffer = io.BytesIO()
    Pickler(buffer, protocol).dump({"w": Persistent(1), "v": Persistent(2), "tied": Persistent(1), "n": Persistent(3)})
    system = dumps({"protocol_version": 1000, "little_endian": True, "type_sizes": {"int": 4}})
    parts = {"sys_info": system, "pickle": buffer.getvalue(), "tensors": tensors, "storages": storages}
    return tar_of(path, *parts.items())


class Persistent:
    def __init__(self, key: int) -> None:
        self.key = key


def test_a_file_of_torch_0_1_is_read_as_torch_reads_it(tmp_path):
    path = ancient(tmp_path / "old.pt")
    wanted, tree = torch.load(path, weights_only=False), with_lazy_tensors(reader.read(path).tree)
    assert list(tree) == list(wanted)
    for name, tensor in wanted.items():
        same_bits(tree[name].load(), tensor)
    assert tree["w"].shards == tree["tied"].shards


@pytest.mark.parametrize(("changed", "told"), [({"ndim": 99}, "99 dimensions"), ({"ndim": -1}, "-1 dimensions")])
def test_a_file_of_torch_0_1_with_odd_tensors_is_refused(changed, told, tmp_path):
    assert told in one_line(ancient(tmp_path / "old.pt", **changed))


@pytest.mark.parametrize("view", [(9, 7, 4, 80), (9, 6, 0, 1), (7, 7, 0, 1), (9, 7, -1, 2), (9, "7", 0, 1)])
def test_a_file_of_torch_0_1_with_odd_views_is_refused(view, tmp_path):
    assert one_line(ancient(tmp_path / "old.pt", view=view))


@pytest.mark.parametrize("member", ["storages", "tensors", "pickle", "sys_info"])
def test_a_file_of_torch_0_1_that_is_cut_is_refused(member, tmp_path):
    path = ancient(tmp_path / "old.pt")
    with tarfile.open(path) as tar:
        parts = {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    for keep in (0, 5, len(parts[member]) - 3):
        assert one_line(tar_of(path, *(parts | {member: parts[member][:keep]}).items()))
