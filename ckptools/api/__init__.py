"""The Python interface: functions that open and write checkpoints, and methods of checkpoints and tensors.

Other packages return plain data; this package adds the methods, which import their code when they are called, so that
`import ckptools` stays cheap.
"""

from __future__ import annotations

from typing import Any

from ckptools.api.functions import checkpoints_in as checkpoints_in
from ckptools.api.functions import consolidate as consolidate
from ckptools.api.functions import diff as diff
from ckptools.api.functions import doctor as doctor
from ckptools.api.functions import match as match
from ckptools.api.functions import open as open
from ckptools.api.functions import report as report
from ckptools.api.functions import stats as stats
from ckptools.api.functions import verify as verify
from ckptools.api.watching import watch as watch
from ckptools.errors import CkptoolsError as CkptoolsError
from ckptools.model.checkpoint import Checkpoint as Checkpoint
from ckptools.model.problems import Problem as Problem
from ckptools.model.records import show_with
from ckptools.model.shards import Shard as Shard
from ckptools.model.tensor import Tensor as Tensor
from ckptools.model.tree import Opaque as Opaque
from ckptools.torch_engine.offline import load_shard as load_shard
from ckptools.torch_engine.offline import offline as offline


def _html_of(value: Any) -> str:
    from ckptools.api.notebook import html_of

    return html_of(value)


def _table_of(rows: Any, table_format: str) -> str:
    from ckptools.display.tables import rows_text

    return rows_text(rows, table_format)


show_with(_html_of, _table_of)
