"""Archives as torch opens them: the small records that it reads of each before any tensor.

A value can be right and torch still refuse its file: the reader looks at `version` and others first, through the
local header of each. Source: caffe2/serialize/inline_container.cc (`PyTorchStreamReader::init`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from ckptools.errors import ReadError
from ckptools.files.opening import File, OpenFiles, Window
from ckptools.files.zip_archive import Container
from ckptools.files.zip_directory import EOCD, archive_before
from ckptools.model.checkpoint import Checkpoint, RankFile
from ckptools.model.problems import Code, Problem

VERSIONS = ("version", ".data/version")
"""Where an archive has its version; without one torch refuses it."""

SMALL = (*VERSIONS, ".format_version", ".storage_alignment", ".data/serialization_id", "byteorder")
"""Records that torch reads of every archive that has them, beside the pickle and the storages."""

MAX_SMALL = 1 << 10
"""Bytes of one of them."""


def damaged_archives(ck: Checkpoint, files: OpenFiles) -> list[Problem]:
    """Archives that torch would refuse or read otherwise, though their pickle and tensors are right."""
    return [p for file in ck.files if file.status == "read" for p in _damaged_in(file, files)]


def _damaged_in(rank_file: RankFile, files: OpenFiles) -> Iterator[Problem]:
    with suppress(ReadError), files.open(rank_file.path) as file:  # other checks tell of a file that is gone
        for window in _archives(file):
            item = f", item at byte {window.start}:" if window.start else ""
            for why in _refused(window):
                text = f"{rank_file.path.name}{item} {why}; torch.load may refuse it"
                yield Problem(Code.BAD_CHECKSUM, text, rank_file.rank)


def _archives(file: File) -> Iterator[Window]:
    """The archives that a file consists of, last first: one, or those of the items of a `.distcp`.

    In a store each item would be some requests, so there a file is looked at that is one archive.
    """
    end = file.size
    while end > EOCD.size:
        begins = archive_before(file, end - EOCD.size)
        if begins is None or (begins and file.descriptor is None):
            return
        yield Window(file, begins, end - begins)
        end = begins


def _refused(window: Window) -> Iterator[str]:
    """Why torch refuses an archive that was opened; what is wrong with its directory was told then."""
    with suppress(ReadError):
        archive = Container(window)
        spelled = {name.lower(): name for name in archive.records}
        if spelled.keys().isdisjoint(VERSIONS):
            yield "has no record version"
        for name in SMALL:
            if name in spelled:
                yield from _damage(archive, spelled[name])


def _damage(archive: Container, name: str) -> Iterator[str]:
    try:
        archive.read(name, MAX_SMALL)
    except ReadError as error:
        yield error.reason
