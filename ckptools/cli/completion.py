"""What a shell completes beside commands and options: keys and sections of the checkpoint that stands before them."""

from __future__ import annotations

import typer


def keys(context: typer.Context, incomplete: str) -> list[str]:
    """The keys of the checkpoint on the command line that begin with what was typed; none where it cannot be read."""
    from ckptools.contents.completion import keys_beginning

    path = _path(context)
    return keys_beginning(path, incomplete) if path else []


def sections(context: typer.Context, incomplete: str) -> list[str]:
    """The kinds of sections, and the names of those in the checkpoint on the command line."""
    from ckptools.contents.completion import sections_beginning

    return sections_beginning(_path(context), incomplete)


def _path(context: typer.Context) -> str:
    """The first path that a user typed; "" before there is one."""
    given = context.params.get("path") or context.params.get("a") or context.params.get("paths")
    # A line that ends in an option without its value is not parsed: what was typed lies in `args` then.
    given = given or [word for word in context.args if not word.startswith("-")] or [""]
    return str(given[0] if isinstance(given, (list, tuple)) else given)
