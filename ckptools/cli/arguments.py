"""Arguments and options of several commands, with help and completion; further options: `options.py`.

A line of paths and flags only, the most frequent, is not parsed by typer, and does not import this module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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


# readable=False everywhere: ckptools reports unreadable paths itself, with exit code 3 in place of typer's 2.
CheckpointPaths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH...",
        show_default=False,
        help="A rank file (its siblings are found), a folder (of a run: what its tracker names, or the only checkpoint"
        " in it), any checkpoint file; or several rank files, by any name.",
    ),
]
CheckpointPath = Annotated[
    str,
    typer.Argument(metavar="PATH", show_default=False, help="A rank file, a folder, or any checkpoint file."),
]
ShownKeys = Annotated[
    list[str],
    typer.Argument(
        metavar="KEY...",
        show_default=False,
        autocompletion=complete_keys,
        help="A name as `tree` has it, its beginning, or a glob.",
    ),
]
FirstSide = Annotated[
    str, typer.Argument(metavar="A", show_default=False, help="A checkpoint, or a file of digests that --hash wrote.")
]
SecondSide = Annotated[
    str | None,
    typer.Argument(metavar="[B]", show_default=False, help="Another one; left out with --hash."),
]
OtherCheckpoint = Annotated[
    str | None, typer.Argument(metavar="[OTHER]", show_default=False, help="A checkpoint to compare it with.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for other programs.")]
SectionName = Annotated[
    str | None,
    typer.Option(
        autocompletion=complete_sections,
        help="Show one section in full: model, optimizer, scheduler, rng, other, or a section's own name.",
    ),
]
AllRanks = Annotated[bool, typer.Option("--all-ranks", help="Read the structure of every rank, and compare them.")]
RunFolderPath = Annotated[
    str, typer.Argument(metavar="DIR", show_default=False, help="The folder of a run, in which its checkpoints are.")
]
DeepOfNewest = Annotated[
    bool, typer.Option("--deep", help="Compare the CRC-32s of the newest too, and of older ones until one is whole.")
]
AnyPaths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH...",
        show_default=False,
        help="A checkpoint, as for inspect; or the folder of a run, or a file that cannot be opened.",
    ),
]
LoadsInto = Annotated[
    str | None, typer.Option("--to", metavar="MODEL", help="What it should load into, as match takes it.")
]
Engine = Annotated[
    Literal["inert", "torch"],
    typer.Option(help="inert: names are only names, nothing is run. torch: through torch.load, as a check."),
]
Trust = Annotated[
    bool, typer.Option("--trust", help="With --engine torch: let the file name any class. Runs its code.")
]
Deep = Annotated[bool, typer.Option("--deep", help="Read every tensor; compare the CRC-32 that files carry.")]
DeepAnswers = Annotated[
    bool, typer.Option("--deep", help="Read every byte: compare checksums, and name values that are worth a look.")
]
Private = Annotated[bool, typer.Option("--private", help="Show also values whose names begin with '_'.")]
Values = Annotated[bool, typer.Option("--values", help="Read every tensor; look for NaN and infinities.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an output that exists.")]
ReportFile = Annotated[
    str, typer.Option("--out", "-o", metavar="FILE", help="The page to write, x.html; - for standard output.")
]
WithFigures = Annotated[
    bool, typer.Option("--values", help="Read every tensor; look for NaN, and put figures of each on the page.")
]
Interactive = Annotated[
    bool,
    typer.Option("--interactive", help="Let one script in the page sort and filter tables, and link what is related."),
]
ManifestFile = Annotated[
    Path | None,
    typer.Option(readable=False, help="A JSON that consolidate --manifest wrote: compare every digest in it."),
]
Ignored = Annotated[
    list[str] | None,
    typer.Option(
        help="Problem codes that do not count, such as CK206,CK105; `ckptools explain CK206` says what one is."
    ),
]
ProblemCodes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CODE]...", show_default=False, autocompletion=complete_codes, help="A problem code, such as CK101."
    ),
]
