"""What every command takes: how much it says, and whether in colour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from ckptools.cli.printing import Output
from ckptools.option import option

Color = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class OutputOptions:
    """How much a command says beside its answer, and whether in colour."""

    quiet: bool = option(False, "Say nothing but the answer, and errors.", flag="--quiet -q")
    verbose: bool = option(False, "Say also what was read, and how long it took.", flag="--verbose -v")
    debug: bool = option(False, "Where something goes wrong, show Python's traceback too.")
    color: Color = option("auto", "Colour beside the words: auto (on a terminal), always or never; NO_COLOR is never.")


AS_ALWAYS = OutputOptions()
"""What a command says where nothing else was asked for."""


def with_output(given: Mapping[str, Any]) -> dict[str, Any]:
    """Let this process say as much as was asked for; what a command got, without the options for that."""
    names = [field.name for field in fields(OutputOptions)]
    options = replace(AS_ALWAYS, **{name: given[name] for name in names if name in given})
    Output.quiet, Output.verbose, Output.debug = options.quiet, options.verbose, options.debug
    Output.color = options.color
    return {name: value for name, value in given.items() if name not in names}
