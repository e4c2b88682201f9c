"""Positional arguments of commands, with help, and the words that a shell completes; options: `options.py`.

A line of paths and flags only, the most frequent, is not parsed by typer, and does not import this module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ckptools.model.checkpoint import Checkpoint

# -- completion --------------------------------------------------------------------------------------------------------


MANY = 100
"""With more keys than this, complete only up to the next dot."""


def complete_keys(context: typer.Context, incomplete: str) -> list[str]:
    """Complete a key of the checkpoint on the command line; no keys if it cannot be read."""
    path = _path(context)
    return keys_beginning(path, incomplete) if path else []


def complete_sections(context: typer.Context, incomplete: str) -> list[str]:
    """Complete a kind of section, or the name of a section of the checkpoint on the command line."""
    return sections_beginning(_path(context), incomplete)


def complete_codes(incomplete: str) -> list[str]:
    """Complete a problem code."""
    from ckptools.model.problems import Code

    return [kind.code for kind in Code if kind.code.startswith(incomplete.upper())]


def _path(context: typer.Context) -> str:
    """Return the first path on the command line; "" if there is none yet."""
    given = context.params.get("path") or context.params.get("a") or context.params.get("paths")
    # If the line ends in an option without its value, typer does not parse it and leaves all words in `args`.
    given = given or [word for word in context.args if not word.startswith("-")] or [""]
    return str(given[0] if isinstance(given, (list, tuple)) else given)


def keys_beginning(path: str | Path, text: str) -> list[str]:
    """List the keys of a checkpoint that begin with a text, cut at the next dot if there are many.

    Reads the structure of one rank only and never raises: a file that cannot be read has no keys, and URLs are not
    opened, since completion must not wait for a network. Names with control characters are left out, since they cannot
    be typed.
    """
    from ckptools.files.opening import local_path

    with contextlib.suppress(Exception):
        from ckptools.keys.entries import entries_of
        from ckptools.training_state.sections import sections_of

        ck = _opened(local_path(path))
        sections = (section.name for section in sections_of(ck) if section.path)
        return sorted(_cut([*(entry.name for entry in entries_of(ck)), *sections], text))
    return []


def sections_beginning(path: str | Path, text: str) -> list[str]:
    """List the kinds and names of sections of a checkpoint that begin with a text; never raises."""
    from ckptools.files.opening import local_path
    from ckptools.keys.entries import KINDS

    found = list(KINDS)
    with contextlib.suppress(Exception):
        from ckptools.training_state.sections import sections_of

        found += [section.name for section in sections_of(_opened(local_path(path)))] if path else []
    return sorted({name for name in found if name.startswith(text) and name.isprintable()})


def _opened(path: Path) -> Checkpoint:
    from ckptools.formats.open import open_checkpoint

    return open_checkpoint([str(path)], all_ranks=False, only_this_file=path.is_file())


def _cut(names: Iterable[str], text: str) -> set[str]:
    found = {name for name in names if name.startswith(text) and name.isprintable()}
    if len(found) <= MANY:
        return found
    ends = ((name, name.find(".", len(text) + 1)) for name in found)
    return {name if end < 0 else name[:end] for name, end in ends}


# -- arguments ---------------------------------------------------------------------------------------------------------


def _argument(metavar: str, help: str, autocompletion: Callable[..., list[str]] | None = None) -> Any:
    return typer.Argument(metavar=metavar, show_default=False, help=help, autocompletion=autocompletion)


CheckpointPaths = Annotated[
    list[str],
    _argument(
        "PATH...",
        "A rank file (its siblings are found), a folder (of a run: what its tracker names, or the only checkpoint in "
        "it), any checkpoint file; or several rank files, by any name.",
    ),
]
CheckpointPath = Annotated[str, _argument("PATH", "A rank file, a folder, or any checkpoint file.")]
ReportedPaths = Annotated[
    list[str],
    _argument(
        "PATH...",
        "A checkpoint, as for inspect; the folder of a run; two checkpoints to compare; or the rank files of one.",
    ),
]
AnyPaths = Annotated[
    list[str],
    _argument("PATH...", "A checkpoint, as for inspect; or the folder of a run, or a file that cannot be opened."),
]
RunFolderPath = Annotated[str, _argument("DIR", "The folder of a run, in which its checkpoints are.")]
ShownKeys = Annotated[
    list[str], _argument("KEY...", "A name as `tree` has it, its beginning, or a glob.", complete_keys)
]
FirstSide = Annotated[str, _argument("A", "A checkpoint, or a file of digests that --hash wrote.")]
SecondSide = Annotated[str | None, _argument("[B]", "Another one; left out with --hash.")]
OtherCheckpoint = Annotated[str | None, _argument("[OTHER]", "A checkpoint to compare it with.")]
ProblemCodes = Annotated[list[str] | None, _argument("[CODE]...", "A problem code, such as CK101.", complete_codes)]
