"""`ckptools explain`: say what a problem code means, and how to fix it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ckptools.cli.options import JsonOptions
from ckptools.cli.printing import screen, show

if TYPE_CHECKING:
    from ckptools.cli.arguments import ProblemCodes


def explain(codes: ProblemCodes = None, *, form: JsonOptions) -> None:
    """Say what a problem code means, and what to do.

    What is wrong, what causes it, and what helps. Without a code, all codes are listed.

    Examples:
        ckptools explain CK101
        ckptools explain
    """
    from ckptools.explain import explanation, explanations, list_text, pages_json, pages_text

    pages = [explanation(code) for code in codes] if codes else explanations()
    if form.json:
        show(pages_json(pages))
    else:
        show(pages_text(pages, screen(sys.stdout)) if codes else list_text(pages, screen(sys.stdout)))
