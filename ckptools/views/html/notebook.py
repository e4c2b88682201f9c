"""What a notebook shows of anything that users get hold of, by its class."""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch
from typing import Any

from ckptools.model.checkpoint import Checkpoint
from ckptools.model.consolidation import ConsolidationReport
from ckptools.model.diagnosis import Diagnosis
from ckptools.model.difference import Difference
from ckptools.model.keys import Keys
from ckptools.model.matching import Match
from ckptools.model.rows import Rows
from ckptools.model.run_folder import RunFolder
from ckptools.model.shown import Shown
from ckptools.model.statistics import Statistics
from ckptools.model.tensor import Tensor
from ckptools.model.values import Opaque
from ckptools.model.verification import Verification
from ckptools.training_state.optimizers import Optimizer
from ckptools.training_state.sections import Section
from ckptools.views.html import answers, records, tensor, values
from ckptools.views.html.checkpoint import checkpoint_html


@singledispatch
def html_of(value: Any) -> str:
    """What a notebook shows of a value; of a record of no class that is named here each of its fields."""
    return records.record_html(value)


html_of.register(Checkpoint, checkpoint_html)
html_of.register(Tensor, tensor.tensor_html)
html_of.register(Mapping, values.values_html)
html_of.register(Section, values.section_html)
html_of.register(Opaque, values.opaque_html)
html_of.register(Rows, records.rows_html)
html_of.register(Optimizer, answers.optimizer_html)
html_of.register(Verification, answers.verification_html)
html_of.register(Diagnosis, answers.diagnosis_html)
html_of.register(RunFolder, answers.run_folder_html)
html_of.register(Keys, answers.keys_html)
html_of.register(Shown, answers.shown_html)
html_of.register(Statistics, answers.statistics_html)
html_of.register(Difference, answers.difference_html)
html_of.register(Match, answers.match_html)
html_of.register(ConsolidationReport, answers.consolidation_html)
