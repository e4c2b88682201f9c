"""`ckptools tree`: list every key of a checkpoint, with kind, shape, dtype, size and layout."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptools.cli.options import AnswerOptions, OpeningOptions, RowOptions, SelectionOptions
from ckptools.cli.printing import answered_in_json, arranged, opened, remark, remark_private, show_answer
from ckptools.errors import UsageError
from ckptools.option import option

if TYPE_CHECKING:
    from ckptools.cli.arguments import CheckpointPaths
    from ckptools.contents.record import Keys
    from ckptools.display.screen import Screen


def tree(
    paths: CheckpointPaths,
    *,
    expand: bool = option(False, "Show each layer, also where many are the same.", common=True),
    depth: int | None = option(None, "Show this many levels; that of the sections is the first.", common=True),
    all_ranks: bool = option(False, "Read the structure of every rank, and compare them.", common=True),
    private: bool = option(False, "Show also values whose names begin with '_'.", common=True),
    selection: SelectionOptions,
    rows: RowOptions,
    form: AnswerOptions,
    opening: OpeningOptions,
) -> None:
    """Show every key: shape, dtype, size and layout, or its value.

    Layers are folded into one line (blocks.{0..23}) where they have the same keys of the same shape, dtype and layout.
    Reads the structure of one rank, and of the others only if that is not enough or with --all-ranks; no tensor values.

    Exit code: 0 shown, 2 usage (also a section that is not there), 3 unreadable.

    Examples:
        ckptools tree PATH
        ckptools tree PATH --filter '*.weight' --sort bytes
    """
    from ckptools.contents.tree import keys_of
    from ckptools.display.next_command import command_arguments

    if depth is not None and depth < 1:
        raise UsageError(None, f"--depth {depth}: the sections are level 1, so that 1 is the least")
    with answered_in_json(form.json, "ckptools/tree/1", "whole", paths):
        checkpoint = opened(paths, opening, all_ranks)
        keys = keys_of(checkpoint, selection.selection, private)
    limited = replace(rows, limit=None) if form.is_text else rows
    keys = replace(keys, rows=arranged(keys.rows, limited))

    def text(found: Keys, screen: Screen) -> str:
        from ckptools.contents.text import TreeForm, glyphs, tree_text

        drawn = TreeForm(expand, depth, rows.limit, glyphs(sys.stdout.encoding))
        return tree_text(found, drawn, screen)

    show_answer(form, "tree", keys, keys.rows, text)
    if not keys.rows and not keys.private:
        remark("no key matches")
    if keys.whole is False:
        remark(f"this checkpoint is not whole: ckptools inspect {command_arguments(checkpoint) or 'FILES'}")
    remark_private(keys.private)
