"""`ckptools match`: explain why a checkpoint does not load into a model."""

from __future__ import annotations

from dataclasses import MISSING, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.cli.options import AnswerOptions, OpeningOptions, RowOptions, SelectionOptions
from ckptools.cli.printing import answered_in_json, arranged, opened, remark, show_answer
from ckptools.option import option
from ckptools.text import plural, printable

if TYPE_CHECKING:
    from ckptools.cli.arguments import CheckpointPaths
    from ckptools.match.record import Match


def match(
    paths: CheckpointPaths,
    *,
    to: str = option(
        MISSING,
        "What it should load into: another checkpoint, a .safetensors or its index, a Hugging Face config.json, a"
        " JSON of name to shape, or package.module:function, which is imported and called without arguments.",
        common=True,
        metavar="MODEL",
    ),
    write_map: Path | None = option(None, "Write the renames, old name to new, for consolidate --map.", common=True),
    optimizer: bool = option(
        False, "Will it resume? --to returns (model, optimizer): compare groups and state too.", common=True
    ),
    world_size: int | None = option(
        None, "Will it resume on N ranks? Random states, files and torch too.", common=True
    ),
    selection: SelectionOptions,
    rows: RowOptions,
    form: AnswerOptions,
    opening: OpeningOptions,
) -> None:
    """Say why a checkpoint does not load into a model.

    Names and shapes are compared, no values are read. A rename is found and shown; none is applied.

    With --optimizer and --world-size it says whether a run resumes from it.

    Exit code: 0 every name exists with its shape (and the run resumes), 1 otherwise, 2 usage, 3 unreadable or no
    model, 4 the map file exists already.

    Examples:
        ckptools match PATH --to MODEL
        ckptools match PATH --to MODEL --write-map map.json
    """
    from ckptools.display.next_command import command_arguments
    from ckptools.match.record import next_lines
    from ckptools.match.run import match as run

    with answered_in_json(form.json, "ckptools/match/1", "loads", paths):
        checkpoint = opened(paths, opening)
        found = run(checkpoint, to, selection.selection, optimizer, world_size)
    if form.is_text:
        shown = replace(found, groups=arranged(found.groups, replace(rows, limit=None)))
    else:
        shown = replace(found, rows=arranged(found.rows, rows))
    show_answer(form, "match", shown, shown.rows, limit=rows.limit)
    if write_map is not None:
        _write(found, write_map)
    if found.chosen:
        remark(found.chosen)
    for line in next_lines(found, command_arguments(checkpoint), write_map):
        remark(line)
    if not found.resumes:
        raise SystemExit(1)


def _write(found: Match, path: Path) -> None:
    from ckptools.keys.renames import write_map

    if not found.fix:
        what = "several renames fix as many, and none was chosen" if found.alternatives else "no rename was found"
        what = "every rename is assumed" if found.assumed else what
        remark(f"{what}: {printable(str(path))} is not written")
        return
    write_map(path, found.fix)
    remark(f"wrote {printable(str(path))}: {plural(len(found.fix), 'name')}")
