"""What consolidating returns: the files, and everything that a user should know about them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ckptools.errors import NoSpaceError
from ckptools.model.records import displayed, to_dict
from ckptools.model.regions import Box, Ints
from ckptools.model.rows import Rows
from ckptools.model.verdict import Verdict
from ckptools.text import clip_middle, plural, size


@dataclass(frozen=True)
class SourceChecksums:
    """The source's checksums, compared.

    Attributes:
        right: how many records have the CRC-32 that they state.
        without: how many state none.
    """

    right: int
    without: int


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """Consecutive bytes of the output, and where they come from.

    Attributes:
        fqn: the tensor that they belong to.
        source: file and byte offset; or the region of the tensor, where it is put together from several shards.
        target: file of the output.
        offset: byte offset in it.
        nbytes: how many.
    """

    fqn: str
    source: tuple[Path, int] | Box
    target: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class PlannedReading:
    """What would be read to write an output.

    Attributes:
        nbytes: bytes of tensors.
        files: number of files that they are in.
        copies: every copy of the plan, made anew each time they are gone through: there may be millions.
        no_room: the error that writing would end in before it begins; None where the output fits on its disk.
    """

    nbytes: int
    files: int
    copies: Iterable[PlannedCopy] = field(repr=False)
    no_room: NoSpaceError | None = None


@displayed
class OutputRow(NamedTuple):
    """A tensor of the checkpoint, and where it is in the output.

    Attributes:
        name: its name in the output; that in the checkpoint where it was left out.
        dtype: in the output, torch's name.
        shape: its sizes.
        file: of the output; "" where it was left out.
        offset: byte offset of its first element in the file; None where it was left out.
        bytes: in the output.
        missing: regions that no file of the checkpoint holds.
        left_out: why it was not written; "" where it was.
    """

    name: str
    dtype: str
    shape: Ints | None
    file: str
    offset: int | None
    bytes: int
    missing: tuple[str, ...] = ()
    left_out: str = ""


@displayed
@dataclass(frozen=True, repr=False)
class ConsolidationReport:
    """What was written, or would be.

    Attributes:
        files: paths of the output, data files first; a folder that is one output stands for what is in it.
        data_files: number of files that tensors are in.
        nbytes: bytes of the tensors' files.
        tensors: number of tensors.
        seconds: wall time, opening included; 0 for a dry run.
        left_out: names that were not written, with the reason.
        missing: names of tensors with holes, left out or filled, with the regions that no file holds.
        needs: classes in a `.pt` that plain `torch.load` does not make; none without `keep_types`.
        tied: names that share the bytes of an earlier name, with that name.
        notes: what the user should know.
        load: the line of Python that loads the output.
        converted: number of tensors by the dtype that they have in the source, and another that they get.
        planned: what would be read, for a dry run; None where the output was written.
        not_asked: sections that were not written because nobody asked for them, with how many tensors each has.
        checksums: how the source's checksums were compared; None when they were not.
        verdict: on the source.
        odd: names of tensors in which NaN or infinity was seen on the way.
        read_back: how the output was read back and compared; empty when it was not.
    """

    files: tuple[Path, ...]
    data_files: int
    nbytes: int
    tensors: int
    seconds: float
    left_out: dict[str, str]
    missing: dict[str, tuple[str, ...]]
    needs: tuple[str, ...]
    tied: dict[str, str]
    notes: tuple[str, ...]
    load: str
    verdict: Verdict
    converted: dict[tuple[str, str], int] = field(default_factory=dict)
    planned: PlannedReading | None = None
    checksums: SourceChecksums | None = None
    odd: tuple[str, ...] = ()
    read_back: str = ""
    not_asked: dict[str, int] = field(default_factory=dict)

    @property
    def dry_run(self) -> bool:
        """Whether nothing was written."""
        return self.planned is not None

    @property
    def rows(self) -> Rows[OutputRow]:
        """A row for each tensor that is, or would be, in the output, and for each name that was left out."""
        return Rows(OutputRow(name, "", None, "", None, 0, (), why) for name, why in self.left_out.items())

    def to_dicts(self) -> list[dict[str, Any]]:
        """A plain dict per tensor, such as pandas takes."""
        return self.rows.to_dicts()

    def to_dict(self) -> dict[str, Any]:
        """What was written and what was not, without a row for each tensor."""
        return to_dict(self)

    def _record(self) -> dict[str, Any]:
        names = ("files", "data_files", "nbytes", "tensors", "seconds", "dry_run", "left_out", "missing", "tied", "odd",
                 "notes", "checksums", "read_back", "not_asked", "needs", "load", "verdict")  # fmt: skip
        converted = [{"from": old, "to": new, "tensors": n} for (old, new), n in self.converted.items()]
        return {**{name: getattr(self, name) for name in names}, "converted": converted}

    def _told(self) -> str:
        verb = "would write" if self.dry_run else "wrote"
        left = f", {plural(len(self.left_out), 'name')} LEFT OUT" if self.left_out else ""
        holes = f", {plural(len(self.missing), 'tensor')} WITH HOLES" if self.missing else ""
        facts = f"{plural(self.tensors, 'tensor')}, {size(self.nbytes)}{left}{holes}"
        return f"{verb} {clip_middle(str(self.files[0]), 60) if self.files else 'nothing'}: {facts}"
