"""Line breaks between words, and inside of names that are longer than a line."""

from __future__ import annotations

import re
from textwrap import TextWrapper

PARTS = re.compile(r"[^./,]*[./,]+|[^./,]+")
"""Parts of a name or path, each with what ends it."""


class LineBreaks(TextWrapper):
    """Breaks at blanks; in a word that is longer than a line, behind a dot, a slash or a comma."""

    def __init__(self, width: int) -> None:
        super().__init__(width, break_on_hyphens=False)

    def _split(self, text: str) -> list[str]:
        chunks = super()._split(text)
        return [part for chunk in chunks for part in (PARTS.findall(chunk) if len(chunk) > self.width else [chunk])]
