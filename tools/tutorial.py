"""The tutorial notebook: run as a reader would, and what its cells show.

`python -m tools.tutorial` runs docs/tutorial.ipynb and writes into it what its cells show now.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from tools.documents import masked

TUTORIAL = Path(__file__).parent.parent / "docs" / "tutorial.ipynb"

MASKS = (
    (r"(?<!\.)\b[0-9a-f]{8}\b", "CHECKSUM"),
    (r"(?<= )\d{4,6}(?= CHECKSUM)", "OFFSET"),
    (r"\b\d{6} bytes", "SIZE"),
    (r"\b0:00:\d\d\.\d+", "DURATION"),
    (r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) \.\. (\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d", r"\1"),
)
"""Beside those of documents: checksums of trained weights, where a record lies, sizes that times make longer, how long
steps took, and whether files were written within a second."""


def executed(folder: Path) -> nbformat.NotebookNode:
    """The tutorial as it is after running in an empty folder, with the commands of this environment."""
    notebook = nbformat.read(TUTORIAL, as_version=4)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "COLUMNS": "120", "IPYTHONDIR": str(folder / ".ipython")}
    client = NotebookClient(notebook, timeout=250, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment, cleanup_kc=True)
    return notebook


def outputs(notebook: nbformat.NotebookNode, kind: str) -> Iterator[tuple[int, str]]:
    """What cells show of a kind, `text/plain` or `text/html`; printed text counts as plain. Each with its cell."""
    for n, cell in enumerate(notebook.cells):
        printed = ""
        for output in cell.get("outputs", ()):
            if output.output_type == "stream":
                printed += output.text if kind == "text/plain" else ""
            elif kind in output.get("data", {}):
                yield n, output["data"][kind]
        if printed:
            yield n, printed


def shown(notebook: nbformat.NotebookNode) -> list[tuple[int, list[str]]]:
    """What cells show, as lines without what differs from run to run."""
    plain = [(n, _masked(text)) for n, text in outputs(notebook, "text/plain")]
    return plain + [(n, _masked(text_of(html))) for n, html in outputs(notebook, "text/html")]


def _masked(text: str) -> list[str]:
    for pattern, word in MASKS:
        text = re.sub(pattern, word, text)
    return masked(text)


class _Text(HTMLParser):
    """The text of HTML: a line for each row of a table, and for whatever else stands on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._hidden += tag in ("style", "svg")
        self.text += "\n" if tag in ("tr", "div", "summary", "pre", "br") else " "

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("style", "svg")

    def handle_data(self, data: str) -> None:
        self.text += "" if self._hidden else data


def text_of(html: str) -> str:
    """The text that HTML shows; pictures have theirs in `desc`, which their own tests read."""
    reader = _Text()
    reader.feed(html)
    return reader.text


def page_of(notebook: nbformat.NotebookNode) -> str:
    """A page of what the cells show, one below the other."""
    shown = "".join(f"<div class=cell>{html}</div>" for _, html in outputs(notebook, "text/html"))
    return f"<!doctype html><meta charset=utf-8><title>tutorial</title><body>{shown}</body>"


def main() -> None:
    """Run the tutorial and keep what its cells show, without times and numbers of runs."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = executed(Path(folder))
    for cell in notebook.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [_without_count(output) for output in cell.outputs]
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    TUTORIAL.write_text(nbformat.writes(notebook) + "\n")


def _without_count(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    if "execution_count" in output:
        output.execution_count = None
    return output


if __name__ == "__main__":
    main()
