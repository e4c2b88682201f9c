"""Records in columns: the same as those of each shard, and compared with their CRC-32 in one pass through a file."""

from __future__ import annotations

import zlib
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptools.files.opening import OpenFiles
from ckptools.model.extents import Extents
from ckptools.model.regions import Box
from ckptools.model.shards import Shard, Source
from ckptools.model.tensor import Tensor
from ckptools.tensor_io import checksums
from ckptools.tensor_io.checksums import Record, count_without, damaged_records, records_of
from ckptools.tensor_io.fetch_ahead import no_progress

LENGTHS = (4, 4, 0, 40, 1, 12)
"""Bytes of the records of a file, one behind the other."""

ENDS = (*accumulate(LENGTHS),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("records")
    for rank in range(3):
        (made / f"{rank}.bin").write_bytes(bytes((rank + byte) % 5 for byte in range(ENDS[-1])))
    return made


whats = st.sampled_from(("right", "wrong", "none"))
numbers = st.integers(0, len(LENGTHS) - 1)
any_shards = st.lists(st.tuples(st.integers(0, 2), numbers, whats), min_size=1, max_size=8)
one_record = st.tuples(numbers, whats).map(lambda one: [(rank, *one) for rank in (2, 0, 1)])
"""One of each rank, as in tensors that are cut alike."""


def tensors(folder, drawn, shared):
    """One-byte elements of records, in the tensors that list them; of one record all say the same."""
    lists = {}
    says = {(rank, number): what for rank, number, what in (one for listed in drawn for one in listed)}
    for listed in drawn:
        shards = []
        for rank, number, _ in listed:
            path, length = folder / f"{rank}.bin", LENGTHS[number]
            start = ENDS[number] - length
            crc = zlib.crc32(path.read_bytes()[start:][:length]) ^ (says[rank, number] == "wrong")
            crc = 0 if says[rank, number] == "none" else crc
            source = Source(path, start, "uint8", (length,), (1,), f"data/{number}", (start, length), crc)
            shards.append(Shard(Box((0,), (length,)), rank, source))
        kept = Extents.of(shards, "uint8")
        if shared:
            kept.files = lists.setdefault(tuple(kept.files), kept.files)
        yield Tensor((40,), "uint8", kept, "chunks")


@pytest.mark.parametrize("together", [1, 10, 1 << 20])
@given(drawn=st.lists(any_shards | one_record, max_size=5))
@settings(deadline=None)
def test_records_in_columns_are_those_of_each_shard(together, folder, drawn):
    sources = {Record.of(s.source) for tensor in tensors(folder, drawn, False) for s in tensor.found}
    for shared in (False, True):
        found = records_of(tensors(folder, drawn, shared))
        columns_of = {path: (of.names, of.starts, of.lengths, of.crcs) for path, of in found.items()}
        rows = [(path, *row) for path, of in columns_of.items() for row in zip(*of, strict=True)]
        assert rows == sorted((tuple(r) for r in sources if r.crc), key=lambda r: (str(r[0]), r[2], r[3]))
        assert count_without(tensors(folder, drawn, shared)) == sum(not r.crc and r.nbytes > 0 for r in sources)
        with pytest.MonkeyPatch.context() as patched, OpenFiles() as files:
            patched.setattr(checksums, "CHUNK", together)
            damaged = damaged_records(found, files, 2, no_progress)
        actual = {r: zlib.crc32(r.path.read_bytes()[r.offset : r.end]) for r in sources if r.crc}
        assert damaged == {r: crc for r, crc in actual.items() if crc != r.crc}
