"""Errors in the words of Python: what commands call `--prefer-rank` is the argument `prefer_rank` here."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from ckptools.errors import CkptoolsError

P = ParamSpec("P")
R = TypeVar("R")

COMMAND = re.compile(
    r"ckptools (?:consolidate|create|diff|doctor|formats|inspect|ls|match|report|shell|show|stats|tree|verify)\b[^;:)]*"
)
"""A command line in a message, which stays as it is typed."""

CHOICE = re.compile(r"--(only|fill|dtype|weights|format) ([a-z0-9_]+)(?![a-z0-9_.-])")
OPTION = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)")


def in_python(function: Callable[P, R]) -> Callable[P, R]:
    """Let the errors of a public function name its arguments as Python does."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except CkptoolsError as error:
            error.args = tuple(python_words(a) if isinstance(a, str) else a for a in error.args)
            error.reason = python_words(error.reason)
            raise

    return called


def python_words(text: str) -> str:
    """A message without the dashes of options, but in commands."""
    commands = COMMAND.findall(text)
    parts = (CHOICE.sub(r"\1='\2'", part) for part in COMMAND.split(text))
    rest = [OPTION.sub(lambda option: option[1].replace("-", "_"), part) for part in parts]
    return "".join(part for pair in zip(rest, [*commands, ""], strict=True) for part in pair)
