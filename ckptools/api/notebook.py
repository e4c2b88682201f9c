"""How what users hold is shown in a notebook: views are imported when one asks, and not before."""

from __future__ import annotations

from typing import Any

from ckptools.model.records import show_with


def _html_of(value: Any) -> str:
    from ckptools.views.html.notebook import html_of

    return html_of(value)


def show_in_notebooks() -> None:
    """Let every record show itself as a table where a notebook asks for one."""
    show_with(_html_of)
