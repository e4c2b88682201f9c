"""What consolidating returns: the files, and everything that a user should know about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ckptools.consolidate.sources import SourceChecksums
from ckptools.consolidate.writers.layout import Layout


@dataclass(frozen=True)
class Consolidated:
    """What was written, or would be.

    Attributes:
        files: paths of the output, data files first; a folder that is one output stands for what is in it.
        nbytes: bytes of the tensors' files.
        tensors: number of tensors.
        seconds: wall time; 0 for a dry run.
        left_out: names that were not written, with the reason.
        missing: names of tensors with holes, left out or filled, with the regions that no file holds.
        needs: classes in a `.pt` that plain `torch.load` does not make; none without `keep_types`.
        tied: names that share the bytes of an earlier name, with that name.
        notes: what the user should know.
        layout: the plan: every tensor with its place, and every copy.
        not_asked: sections that were not written because nobody asked for them, with how many tensors each has.
        checksums: how the source's checksums were compared; None when they were not.
        odd: names of tensors in which NaN or infinity was seen on the way.
        read_back: how the output was read back and compared; empty when it was not.
    """

    files: tuple[Path, ...]
    nbytes: int
    tensors: int
    seconds: float
    left_out: dict[str, str]
    missing: dict[str, tuple[str, ...]]
    needs: tuple[str, ...]
    tied: dict[str, str]
    notes: tuple[str, ...]
    layout: Layout
    checksums: SourceChecksums | None = None
    odd: tuple[str, ...] = ()
    read_back: str = ""
    not_asked: dict[str, int] = field(default_factory=dict)

    @property
    def load(self) -> str:
        """The line of Python that loads the output."""
        return self.layout.load
