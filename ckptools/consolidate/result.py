"""What consolidating returns: the report, and the plan that it was written by."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptools.consolidate.plan import Job
from ckptools.consolidate.writers.layout import Layout
from ckptools.model.consolidation import ConsolidationReport, OutputRow
from ckptools.model.records import displayed
from ckptools.model.rows import Rows


@displayed
@dataclass(frozen=True, repr=False)
class Consolidated(ConsolidationReport):
    """What was written, or would be, and the plan of it.

    Attributes:
        layout: the plan: every tensor with its place, and every copy.
    """

    layout: Layout = field(kw_only=True)

    @property
    def rows(self) -> Rows[OutputRow]:
        """A row for each tensor that is, or would be, in the output, and for each name that was left out."""
        return Rows([*map(self._row, self.layout.jobs), *super().rows])

    def _row(self, job: Job) -> OutputRow:
        path, shape = self.layout.files[job.file][0], job.tensor.shape
        missing = self.missing.get(job.fqn, ())
        return OutputRow(job.fqn, job.dtype, shape, str(path), job.offset, job.nbytes, missing)
