"""The list of commands, and how one of them is started.

Importing typer takes five times as long as starting Python, so a command line of paths and flags only, as most are, is
parsed without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from ckptools.cli.printing import show

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Look": {
        "inspect": ("Show what a checkpoint is, and whether it is whole.", "paths*"),
        "doctor": ("Answer the first questions about a checkpoint in one go.", "paths*"),
        "ls": ("List a run's checkpoints, and the newest that is whole.", "folder"),
        "tree": ("Show every key: shape, dtype, size and layout, or its value.", "paths*"),
        "show": ("Show a value in full, or a tensor with its shards.", "path keys*"),
        "browse": ("Look around in a checkpoint, in the terminal.", "path"),
    },
    "Check": {
        "verify": ("Check that a checkpoint is whole, unharmed and coherent.", "paths*"),
        "watch": ("Verify each new checkpoint of a run, and report problems.", "folder"),
        "stats": ("Show what the values are like: rms, norm, extremes, NaN.", "paths*"),
    },
    "Compare": {
        "diff": ("Show what differs between two checkpoints.", "a b"),
        "match": ("Say why a checkpoint does not load into a model.", ""),
    },
    "Write": {
        "consolidate": ("Write full tensors into a .pt, .safetensors or DCP.", ""),
        "report": ("Write a page of HTML about a checkpoint, to mail or keep.", ""),
    },
    "Learn": {
        "explain": ("Say what a problem code means, and what to do.", "codes*"),
        "create": ("Train a small transformer and save a real checkpoint.", ""),
        "shell": ("Open a Python prompt with a checkpoint opened.", ""),
        "formats": ("List the formats that are read and written.", ""),
    },
}
"""Every command by its group, in the order of `--help`: the first line of its docstring, and its positional parameters,
with `*` after a repeated one; "" if typer has to parse them."""

COMMANDS = {name: known for group in GROUPS.values() for name, known in group.items()}
HELP = "Open, check and consolidate distributed PyTorch checkpoints offline."


def start(words: Sequence[str]) -> None:
    """Run a command line; SIGTERM ends it as Ctrl-C does, so that no temporary files are left behind."""
    if "--version" in words and {*words} <= {"--version", "-v", "--verbose"}:
        from ckptools.cli.versions import version_line, version_report

        show(version_line() if len(words) == 1 else version_report())
        raise SystemExit(0)
    import signal

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    name = words[0] if words else ""
    given = plain_arguments(name, words[1:]) if name in COMMANDS else None
    if given is None:
        from ckptools.cli.program import only_listed, program

        if words in ([], ["-h"], ["--help"]) and "_CKPTOOLS_COMPLETE" not in os.environ:
            functions = [only_listed(*command) for command in COMMANDS.items()]
        else:
            functions = [function_of(known) for known in ([name] if name in COMMANDS else COMMANDS)]
        program(HELP, functions, GROUPS)(prog_name="ckptools")
    else:
        from ckptools.cli.running import one_line_errors

        one_line_errors(function_of(name))(**given)


def function_of(name: str) -> Callable[..., None]:
    """Import only the function of this command."""
    function: Callable[..., None] = getattr(import_module(f"ckptools.cli.commands.{name}"), name)
    return function


def plain_arguments(name: str, words: Sequence[str]) -> dict[str, Any] | None:
    """Parse the arguments of a command into parameters; None if typer has to parse them."""
    names = COMMANDS[name][1]
    first, repeats = names.removesuffix("*").split(), names.endswith("*")
    values, options = [w for w in words if w[:1] != "-"], [w for w in words if w[:1] == "-"]
    # On Windows, typer expands a `*` in a path.
    if not first or len(values) < len(first) or (len(values) > len(first) and not repeats) or os.name == "nt":
        return None
    from ckptools.cli.options import flags_of

    known = flags_of(function_of(name))
    if not known.keys() >= set(options):
        return None
    given: dict[str, Any] = dict(zip(first, values, strict=False))
    if repeats:
        given[first[-1]] = values[len(first) - 1 :]
    return given | {known[option]: True for option in options}
