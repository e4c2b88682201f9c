"""The list of commands. Neither typer nor any command is imported for it."""

from __future__ import annotations

from collections.abc import Callable

HELP = "Open, check and consolidate distributed PyTorch checkpoints offline."

COMMANDS = {
    "inspect": "Show what a checkpoint is, and whether it is whole.",
    "doctor": "Answer the first questions about a checkpoint in one go.",
    "ls": "List a run's checkpoints, and the newest that is whole.",
    "tree": "Show every key: shape, dtype, size and layout, or its value.",
    "show": "Show a value in full, or a tensor with its shards.",
    "verify": "Check that a checkpoint is whole, unharmed and coherent.",
    "match": "Say why a checkpoint does not load into a model.",
    "stats": "Show what the values are like: rms, norm, extremes, NaN.",
    "diff": "Show what differs between two checkpoints.",
    "report": "Write a page of HTML about a checkpoint, to mail or keep.",
    "consolidate": "Write full tensors into a .pt, .safetensors or DCP.",
    "create": "Train a small transformer and save a real checkpoint.",
    "shell": "Open a Python prompt with a checkpoint opened.",
    "formats": "List the formats that are read and written.",
}
"""Every command with the first line of its docstring, in the order in which `--help` has them."""

ARGUMENTS = {
    "inspect": "paths*",
    "verify": "paths*",
    "tree": "paths*",
    "stats": "paths*",
    "ls": "folder",
    "show": "path keys*",
    "diff": "a b",
    "doctor": "paths*",
}
"""Arguments of the commands that are mostly called with nothing to parse; `*` stands behind one that repeats."""


def function_of(name: str) -> Callable[..., None]:
    """Import the function of a command, and no other."""
    match name:
        case "inspect":
            from ckptools.cli.inspect import inspect

            return inspect
        case "doctor":
            from ckptools.cli.doctor import doctor

            return doctor
        case "ls":
            from ckptools.cli.ls import ls

            return ls
        case "tree":
            from ckptools.cli.tree import tree

            return tree
        case "show":
            from ckptools.cli.show import show

            return show
        case "verify":
            from ckptools.cli.verify import verify

            return verify
        case "match":
            from ckptools.cli.match import match

            return match
        case "stats":
            from ckptools.cli.stats import stats

            return stats
        case "diff":
            from ckptools.cli.diff import diff

            return diff
        case "report":
            from ckptools.cli.report import report

            return report
        case "consolidate":
            from ckptools.cli.consolidate import consolidate

            return consolidate
        case "create":
            from ckptools.cli.create import create

            return create
        case "shell":
            from ckptools.cli.shell import shell

            return shell
        case _:
            from ckptools.cli.formats import formats

            return formats


def help_text(program: str) -> str:
    """What typer prints for `--help` on a terminal of 80 columns or more; `program` is how it was called."""
    width = max(map(len, COMMANDS))
    lines = (
        f"Usage: {program} [OPTIONS] COMMAND [ARGS]...",
        f"\n  {HELP}",
        "\nOptions:",
        "  --version             Print the version and exit.",
        "  --install-completion  Install completion for the current shell.",
        "  --show-completion     Show completion for the current shell, to copy it or\n"
        "                        customize the installation.",
        "  -h, --help            Show this message and exit.",
        "\nCommands:",
        *(f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items()),
    )
    return "\n".join(lines)


def version_text() -> str:
    """What `--version` prints: the version, and those of Python and the libraries that matter for a report."""
    from importlib.metadata import PackageNotFoundError, version
    from platform import python_version

    from ckptools._version import __version__

    found = [f"ckptools {__version__}", f"Python {python_version()}"]
    for name in ("torch", "numpy", "safetensors"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)
