"""What consolidating returns: the report, and the plan that it was written by."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptools.consolidate.writers.layout import Layout
from ckptools.model.consolidation import ConsolidationReport


@dataclass(frozen=True)
class Consolidated(ConsolidationReport):
    """What was written, or would be, and the plan of it.

    Attributes:
        layout: the plan: every tensor with its place, and every copy.
    """

    layout: Layout = field(kw_only=True)
