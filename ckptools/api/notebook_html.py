"""HTML for a notebook of anything that users get hold of, by its class."""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch
from typing import Any

from ckptools.consolidate.record import Consolidated, consolidation_html
from ckptools.contents import html as contents_html
from ckptools.contents.record import Keys, Shown
from ckptools.diff.record import Difference
from ckptools.diff.text import difference_html
from ckptools.display import html as record_html
from ckptools.doctor.answers import Diagnosis, diagnosis_html
from ckptools.inspect.html import checkpoint_html, optimizer_html
from ckptools.ls.record import COLUMNS, CheckpointRow, RunFolder, cells_of, run_folder_html
from ckptools.match.record import Match, match_html
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.problems import RowMethods
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Opaque
from ckptools.stats.record import Statistics, statistics_html
from ckptools.training_state.optimizers import Optimizer
from ckptools.training_state.sections import Section
from ckptools.verify.record import Check, Verification, check_table, verification_html


@singledispatch
def html_of(value: Any) -> str:
    """The HTML of a value; for a record of an unlisted class each of its fields."""
    return record_html.record_html(value)


html_of.register(Checkpoint, checkpoint_html)
html_of.register(Tensor, contents_html.tensor_html)
html_of.register(Mapping, record_html.values_html)
html_of.register(Section, record_html.section_html)
html_of.register(Opaque, record_html.opaque_html)
html_of.register(RowMethods, record_html.rows_html)
html_of.register(Optimizer, optimizer_html)
html_of.register(Verification, verification_html)
html_of.register(Diagnosis, diagnosis_html)
html_of.register(RunFolder, run_folder_html)
html_of.register(Keys, contents_html.keys_html)
html_of.register(Shown, contents_html.shown_html)
html_of.register(Statistics, statistics_html)
html_of.register(Difference, difference_html)
html_of.register(Match, match_html)
html_of.register(Consolidated, consolidation_html)

# Their texts do not import what makes HTML, for the sake of the command line.
record_html.FORMS[CheckpointRow] = record_html.RecordForm("checkpoint", COLUMNS, cells_of)
record_html.TABLES[Check] = check_table
record_html.BRANCHES[Optimizer] = lambda found: {"param_groups": found.param_groups, "state": found.state}
