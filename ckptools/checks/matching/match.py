"""`match`: the names and shapes of a checkpoint beside those of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckptools.checks.matching.comparison import rows_of
from ckptools.checks.matching.name_groups import groups_of
from ckptools.checks.matching.rename_search import find_renames
from ckptools.checks.matching.saved_shapes import saved_shapes
from ckptools.checks.matching.targets import shapes_expected
from ckptools.contents.selection import Selection, pattern
from ckptools.errors import UsageError
from ckptools.formats.opening import with_all_ranks
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.matching import Match, MatchRow, StateDictShapes
from ckptools.model.rows import Rows
from ckptools.training_state.verdict import verdict_of


def match(checkpoint: Checkpoint | str | Path, to: Any, selection: Selection | None = None) -> Match:
    """Compare the names and shapes of a checkpoint's model with those that another one expects; no values are read.

    Args:
        checkpoint: an opened checkpoint, or its path.
        to: what is expected; see `targets.shapes_expected`.
        selection: which names count, on either side; and which section is the model, where there are several.

    Raises:
        ReadError: one of the two cannot be read, or has no model.
        UsageError: one of the two has several models; or no name counts.
    """
    whole = with_all_ranks(checkpoint)
    chosen = selection or Selection()
    saved = saved_shapes(whole, chosen.section)
    model = shapes_expected(to, chosen.section, bool(whole.options and whole.options.follow_symlinks))
    return compared(saved, model, verdict_of(whole).whole, chosen)


def compared(saved: StateDictShapes, model: StateDictShapes, whole: bool | None, selection: Selection) -> Match:
    """What two lists of names and shapes have in common, and what would give them more.

    Args:
        saved: what the checkpoint holds.
        model: what the model expects.
        whole: whether the checkpoint is whole.
        selection: which names count.

    Raises:
        UsageError: no name counts.
    """
    found = find_renames(saved, model)
    rows = _chosen(list(rows_of(saved, model, found.names)), selection)
    if not rows:
        raise UsageError(None, f"no name of {saved.told_by} or {model.told_by} is one that was asked for")
    names = {row.name for row in rows if row.name is not None}
    fit = [len(names.intersection(some)) for some in found.fit]
    fine = ("same", "tied") if model.ties_optional else ("same",)
    return Match(
        path=saved.told_by,
        to=model.told_by,
        loads=whole is not False and all(row.status in fine for row in rows),
        whole=whole,
        model_names=len(names),
        checkpoint_names=sum(row.checkpoint_name is not None for row in rows),
        same=fit[0],
        renamed=fit[-1] - fit[0],
        renames=tuple(step._replace(fit=count) for step, count in zip(found.steps, fit[1:], strict=True)),
        alternatives=found.alternatives,
        groups=Rows(groups_of(rows)),
        rows=Rows(rows),
        fix={old: new for old, new in found.names.items() if old != new and old not in found.assumed},
        assumed={old: found.names[old] for old in found.assumed},
    )


def _chosen(rows: list[MatchRow], selection: Selection) -> Sequence[MatchRow]:
    """The rows of which one of the names was asked for, and none was not wanted."""
    wanted, unwanted = pattern(selection.include or ("*",)), pattern(selection.exclude)
    named = [(row, [name for name in (row.name, row.checkpoint_name) if name is not None]) for row in rows]
    return [
        row
        for row, names in named
        if any(map(wanted.fullmatch, names)) and not (selection.exclude and any(map(unwanted.fullmatch, names)))
    ]
