"""File names by template, such as `{run_name}-ep{epoch}-ba{batch}-rank{rank}.pt`.

The template is a path below OUT, and a `/` in it makes sub-folders. Where a layout has one file per rank, or one file
in all, it names the file; where a layout is a folder of files, whose names its framework gives, it names the folder.
What follows from a template is known before training: `check` fills it in for a world of 256 ranks on 16 nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from string import Formatter

from ckptools.errors import UsageError

FIELDS = ("run_name", "epoch", "batch", "rank", "local_rank", "node_rank", "world_size")

OF_A_RANK = ("rank", "local_rank", "node_rank", "world_size")

# What each layout's file, or its folder, is called; nothing where the files lie in OUT itself.
NAMES: dict[str, str] = {
    "composer": "ep{epoch}-ba{batch}-rank{rank}.pt",
    "snapshot": "snapshot.pt",
    "verl": "",
    "dcp": "",
    "composer-dcp": "ep{epoch}-ba{batch}",
    "accelerate": "",
    "lightning": "epoch={epoch}-step={batch}.ckpt",
    "fabric": "step-{batch}.ckpt",
    "torchtitan": "step-{batch}",
    "olmo": "step{batch}",
    "huggingface": "",
}

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
MAX_PARTS = 4
MAX_BYTES = 255  # of one name, on the file systems of Linux, macOS and Windows

# `{batch:06d}`: zeros in front, so that names sort as numbers do.
_FORMAT = re.compile(r"(0?\d{1,2})?d?")

_NODES = _RANKS_PER_NODE = 16

Values = Mapping[str, "int | str"]


def of_any_rank(template: str, values: Values) -> str:
    """Make a regular expression for what the template names on any rank of any world, with the other values as here."""
    return "".join(
        re.escape(text)
        + (r"\d+" if field in OF_A_RANK else re.escape(f"{{{field}:{form}}}".format(**values)) if field else "")
        for text, field, form, _ in Formatter().parse(template)
    )


def tells_step(template: str) -> bool:
    """Whether checkpoints of two steps have different names."""
    return any(field == "batch" for _, field, _, _ in Formatter().parse(template))


def check(template: str, layout: str, one_writer: bool, run_name: str) -> None:
    """Refuse a template by which files would lie on each other, or outside of OUT.

    With `one_writer` only rank 0 writes, so that a rank in the name is not needed.

    Raises:
        UsageError: it is none, or does not fit the layout.
    """
    default = NAMES[layout]
    _check_fields(template)
    names = [template.format(**values) for values in _trial_world(run_name)]
    _check_path(template, names[-1])
    if "." in default and not names[0].endswith(SUFFIXES):
        raise _error(template, f"names a file, expected {', '.join(SUFFIXES)} at its end")
    if one_writer:
        return
    if "{rank}" in default and len(set(names)) < len(names):
        raise _error(template, "two ranks would write one file; expected {rank} in it, or {node_rank} and {local_rank}")
    if "{rank}" not in default and len(set(names)) > 1:
        raise _error(template, f"all ranks write into one folder with --layout {layout}; expected no rank in its name")


def check_run_name(name: str) -> None:
    """Refuse a run name that is no part of a file name.

    Raises:
        UsageError: it has a slash in it, or is hidden, empty or too long.
    """
    if "/" in name or (problem := _part_problem(name)):
        problem = "has a / in it" if "/" in name else problem
        raise UsageError(None, f"--run-name {name!r}: {problem}; expected one part of a file name")


def _error(template: str, text: str) -> UsageError:
    return UsageError(None, f"--name {template!r}: {text}")


def _check_fields(template: str) -> None:
    try:
        parsed = list(Formatter().parse(template))
    except ValueError:
        raise _error(template, "a brace without its other half; {{ and }} stand for braces") from None
    for _, field, form, conversion in parsed:
        if field is None:
            continue
        if field not in FIELDS:
            raise _error(template, f"{{{field}}} is not known; choose from {', '.join(f'{{{f}}}' for f in FIELDS)}")
        if conversion or (form and (field == "run_name" or not _FORMAT.fullmatch(form))):
            raise _error(template, f"how {{{field}}} is to be written is not known; expected {{batch:06d}} or the like")


def _check_path(template: str, name: str) -> None:
    if name.startswith("/"):
        raise _error(template, "is an absolute path; expected one below OUT")
    if name.count("/") >= MAX_PARTS:
        raise _error(template, f"has more than {MAX_PARTS} parts")
    for problem in filter(None, map(_part_problem, name.split("/"))):
        raise _error(template, problem)


def _part_problem(part: str) -> str | None:
    """The fault of one part of a path; None for none."""
    if not part:
        return "has an empty part"
    if part == "..":
        return "leads out of OUT by .."
    if part.startswith("."):
        return f"{part} would be hidden"
    if not part.isprintable() or "\\" in part:
        return "has a backslash or a character that cannot be printed"
    return f"has a part of more than {MAX_BYTES} bytes" if len(part.encode()) > MAX_BYTES else None


def _trial_world(run_name: str) -> Iterator[dict[str, int | str]]:
    """Yield what every rank of a large world would fill in."""
    world_size = _NODES * _RANKS_PER_NODE
    for rank in range(world_size):
        node_rank, local_rank = divmod(rank, _RANKS_PER_NODE)
        own = {"rank": rank, "local_rank": local_rank, "node_rank": node_rank}
        yield {"run_name": run_name, "epoch": 0, "batch": 1, **own, "world_size": world_size}
