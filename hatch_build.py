"""What the wheel brings besides the package: a manual page, and completions for three shells.

They are made from the program itself when the wheel is built, so that they have its commands and options.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPLETIONS = {
    "bash": "share/bash-completion/completions/ckptools",
    "zsh": "share/zsh/site-functions/_ckptools",
    "fish": "share/fish/vendor_completions.d/ckptools.fish",
}
MANUAL = "share/man/man1/ckptools.1"

RUN = "import sys; sys.argv[0] = 'ckptools'; from ckptools.__main__ import main; main()"


class ManualAndCompletions(BuildHookInterface[Any]):
    """Adds them to a wheel that is installed for good; an editable one is called from its checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the files into a folder for built things, and name them to the builder."""
        if version == "editable":
            return
        made = {MANUAL: manual(self.root, self.metadata.version)}
        made |= {path: _printed(self.root, _CKPTOOLS_COMPLETE=f"source_{sh}") for sh, path in COMPLETIONS.items()}
        for path, text in made.items():
            file = Path(self.root, "build", path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
            build_data["shared_data"][str(file)] = path


def manual(root: str | Path, version: str) -> str:
    """The manual page: what it is for, the help of every command, exit codes."""
    sys.path.insert(0, str(root))
    from ckptools.cli.start import COMMANDS, HELP

    parts = [
        f'.TH CKPTOOLS 1 "" "ckptools {version}"',
        ".SH NAME",
        f"ckptools \\- {HELP[0].lower()}{HELP[1:-1]}",
        ".SH SYNOPSIS",
        ".B ckptools",
        "COMMAND [ARGS]...",
        ".SH DESCRIPTION",
        "Reads checkpoints of distributed PyTorch trainings without torch, without a GPU and without the framework",
        "that wrote them. Never runs code from a file.",
        ".SH COMMANDS",
    ]
    for name in COMMANDS:
        parts += [f".SS ckptools {name}", ".nf", _escaped(_printed(root, name, "--help-all")), ".fi"]
    parts += [".SH EXIT STATUS", ".nf", EXIT, ".fi"]
    return "\n".join(parts) + "\n"


EXIT = """\
0    done; nothing is wrong, or nothing differs
1    problems were found, or two checkpoints differ
2    wrong usage
3    cannot be read
4    refused: the result would be wrong, unsafe or in the way
70   a bug in ckptools
130  interrupted"""


def _printed(root: str | Path, *words: str, **environment: str) -> str:
    """What the program prints, on a terminal of 78 columns."""
    # What the build requires is on this process's path alone: pip builds in an environment of its own.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path]), "COLUMNS": "78", **environment}
    done = subprocess.run([sys.executable, "-c", RUN, *words], env=env, capture_output=True, text=True, check=True)
    return done.stdout.lstrip("\n")


def _escaped(text: str) -> str:
    r"""Text as roff shows it unchanged: `\` and `-` are themselves, and no line begins with a request."""
    lines = text.replace("\\", "\\e").replace("-", "\\-").split("\n")
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in lines).rstrip()
