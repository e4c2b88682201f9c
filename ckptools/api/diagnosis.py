"""Asking the first questions about a checkpoint in one go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptools.api.python_words import in_python

if TYPE_CHECKING:
    from ckptools.formats.options import Weights
    from ckptools.formats.shared.given_names import NamesFrom
    from ckptools.model.diagnosis import Diagnosis


@in_python
def doctor(
    path: str | Path | Sequence[str | Path],
    to: Any = None,
    *,
    only_this_file: bool = False,
    follow_symlinks: bool = False,
    jobs: int | None = None,
    shapes: str | Path | None = None,
    weights: Weights = "fp32",
    rules: str | Path | None = None,
    ranks: str | None = None,
    names: NamesFrom | None = None,
) -> Diagnosis:
    """Answer the first questions about a checkpoint, with what says so, and with what to type next.

    It asks `verify`, `checkpoints_in` and, with `to`, `match`. What cannot be opened has an answer too.

    Args:
        path: as for `open`; of a folder of several the newest whole one is looked at.
        to: what it should load into, as `Checkpoint.match` takes it; None leaves that out.
        only_this_file: do not look for siblings.
        follow_symlinks: accept links out of the folder.
        jobs: threads, and processes that read rank files.
        shapes: what tells shapes that the checkpoint lacks, as in `open`.
        weights: where the model is held twice, `fp32` (master copy) or `module`.
        rules: a JSON file that says how tensor-parallel weights are joined.
        ranks: what the rank files in the folder `path` are called.
        names: what names the parameters of an optimizer that is keyed by number, as in `open`.

    Raises:
        UsageError: options that do not fit together.
        ReadError: `to` cannot be read.
    """
    from ckptools.api import examination

    return examination.doctor(
        path,
        to,
        only_this_file=only_this_file,
        follow_symlinks=follow_symlinks,
        jobs=jobs,
        shapes=shapes,
        weights=weights,
        rules=rules,
        ranks=ranks,
        names=names,
    )
