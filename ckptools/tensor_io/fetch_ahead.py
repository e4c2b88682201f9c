"""Small records of many files in a store, fetched for all files at once before they are read one by one.

Whoever compares the copies of a tensor reads them rank by rank, and would wait for each file's request in turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ckptools.errors import ReadError
from ckptools.files.opening import OpenFiles
from ckptools.files.remote_file import LARGE
from ckptools.files.remote_path import RemotePath, stores_are_used
from ckptools.model.tensor import Tensor
from ckptools.tensor_io.records import stored_records
from ckptools.tensor_io.threads import in_threads

Range = tuple[int, int]


def fetch_small(tensors: Iterable[tuple[str, Tensor]], files: OpenFiles, threads: int) -> None:
    """Fetch the records of some tensors, where they are small and lie in a store; an error is left to who reads them.

    Args:
        tensors: with their fqns.
        files: where they are opened.
        threads: how many files at once.
    """
    if not stores_are_used():
        return
    found: dict[Path, list[Range]] = {}
    for record in (one.record for one in stored_records(tensors) if isinstance(one.record.path, RemotePath)):
        found.setdefault(record.path, []).append((record.offset, record.end))

    def fetch(wanted: tuple[Path, list[Range]]) -> None:
        with suppress(ReadError), files.open(wanted[0]) as file:
            file.prefetch(wanted[1], LARGE)

    in_threads(fetch, found.items(), threads)
