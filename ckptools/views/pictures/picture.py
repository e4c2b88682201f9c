"""A picture as users hold it: it shows itself in a notebook, says in words what is on it, and is saved as SVG."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ckptools.errors import UsageError
from ckptools.files.partial_files import write_text
from ckptools.text import clip, printable, size
from ckptools.views.pictures.drawing import escaped

MAX_LINE = 120
"""Characters of what a prompt shows."""


@dataclass(frozen=True, repr=False)
class Picture:
    """A picture of a checkpoint, of a tensor or of a run.

    Attributes:
        title: what it shows, in a line.
        svg: the picture: one `<svg>` element that needs nothing else, in light and dark, without a script.
        text: the same facts in words, a few lines.
    """

    title: str
    svg: str = field(repr=False)
    text: str

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the picture into an `.svg` file, which appears whole or not at all.

        Args:
            path: the file.
            force: overwrite it.

        Raises:
            UsageError: it is no `.svg`, or there is no folder for it.
            OutputExistsError: it is there already.
            WriteError: it cannot be written.
        """
        out = Path(path)
        if out.suffix.lower() != ".svg":
            raise UsageError(out, "a picture is written as .svg; give it that suffix")
        write_text(out, self.svg + "\n", force)
        return out

    def __repr__(self) -> str:
        tail = f", {size(len(self.svg.encode()))} of SVG>"
        return f"<Picture: {clip(printable(self.title), MAX_LINE - len(tail) - len('<Picture: '))}{tail}"

    def _repr_html_(self) -> str:
        words = f"<details><summary>in words</summary><pre>{escaped(self.text)}</pre></details>"
        return f'<div class="ckpt-picture" style="font:12px/1.45 ui-monospace,monospace">{self.svg}{words}</div>'
