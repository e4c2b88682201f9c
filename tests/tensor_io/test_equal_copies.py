"""Small copies on many ranks, compared file by file: the same as tensor by tensor."""

from __future__ import annotations

import tempfile
from pathlib import Path
from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from ckptools.files.opening import OpenFiles
from ckptools.model.regions import Box
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.copies import SMALL, equal_copies
from ckptools.tensor_io.replicas import differing_boxes


def tensors_in(folder: Path, values: list[list[bytes]], width: int) -> dict[str, Tensor]:
    """Tensors of `width` bytes whose copy on each rank is one of `values`, in files with a byte in front."""
    shards: dict[str, list[Shard]] = {}
    for rank, of_rank in enumerate(values):
        path = folder / f"rank{rank}.bin"
        path.write_bytes(b"x" + b"".join(of_rank))
        for i in range(len(of_rank)):
            at = 1 + i * width
            source = Source(path, at, "uint8", (width,), (1,), f"data/{i}", (at, width), crc32(of_rank[i]))
            shards.setdefault(f"t{i}", []).append(Shard(Box((0,), (width,)), rank, source))
    return {name: Tensor((width,), "uint8", tuple(own)) for name, own in shards.items()}


VALUES = st.integers(1, 4).flatmap(
    lambda count: st.lists(st.lists(st.sampled_from([b"aaaa", b"aaab"]), min_size=count, max_size=count), min_size=1)
)


@given(VALUES)
def test_tensors_are_found_equal_that_one_by_one_do_not_differ(values: list[list[bytes]]) -> None:
    with tempfile.TemporaryDirectory() as folder, OpenFiles() as files:
        tensors = tensors_in(Path(folder), values, 4)
        one_by_one = {name for name, tensor in tensors.items() if not differing_boxes(tensor.found, files)}
        assert equal_copies(tensors.items(), files) == (one_by_one if len(values) > 1 else set())
        assert equal_copies(tensors.items(), files, right=True) == equal_copies(tensors.items(), files)


def test_of_copies_whose_right_crcs_are_as_long_as_they_nothing_is_read(tmp_path: Path) -> None:
    for width in (4, 5):
        tensors = tensors_in(tmp_path, [[b"a" * width]] * 3, width)
        for rank in range(3):
            (tmp_path / f"rank{rank}.bin").unlink()
        with OpenFiles() as files:
            assert equal_copies(tensors.items(), files, right=True) == ({"t0"} if width == 4 else set())


def test_large_tensors_are_left_to_the_comparison_one_by_one(tmp_path: Path) -> None:
    with OpenFiles() as files:
        assert equal_copies(tensors_in(tmp_path, [[bytes(SMALL)]] * 2, SMALL).items(), files) == {"t0"}
        assert not equal_copies(tensors_in(tmp_path, [[bytes(SMALL + 1)]] * 2, SMALL + 1).items(), files)


def test_of_a_file_that_was_cut_nothing_is_said(tmp_path: Path) -> None:
    tensors = tensors_in(tmp_path, [[b"aaaa"], [b"aaaa"]], 4)
    (tmp_path / "rank1.bin").write_bytes(b"xaa")
    with OpenFiles() as files:
        assert not equal_copies(tensors.items(), files)


def test_shards_of_different_regions_are_no_copies(tmp_path: Path) -> None:
    shards = tensors_in(tmp_path, [[b"aaaa"], [b"aaaa"]], 4)["t0"].extents
    shards.offsets[1] = (4,)
    with OpenFiles() as files:
        assert not equal_copies([("t0", Tensor((8,), "uint8", shards))], files)
