"""A page of HTML for a notebook or as a file: lines, and tables that fold, up to a number of rows and bytes.

There is no script, because notebooks strip those of files that they do not trust. Every text is made printable and
then escaped here, also our own. Colours are those of JupyterLab where it has some, else of the reader's light or dark
scheme, and never the only sign: the words stay, and mean the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import NamedTuple

from ckptools.display.drawing import Picture
from ckptools.display.palette import mark_of
from ckptools.display.tables import Column
from ckptools.text import clip, clip_middle, plural, printable

DICTS = "to_dicts() of this"
"""The call that gives the rows that a page leaves out, of most records."""

MAX_ROWS = 200
"""Rows of all tables of one output together."""

MAX_BYTES = 200_000
"""Bytes of an output, in UTF-8; a notebook keeps it in its file."""

MAX_LINE = 1000
MAX_NAME = 160
MAX_TEXT = 600
SHORT = 28
"""Characters of a cell that stays on one line; a longer one takes several where a page is narrow."""

STYLE = """
<style>
.ckpt{--ckpt-bad:#b3261e;--ckpt-warn:#8a5100;--ckpt-good:#1b6e33;--ckpt-dim:#5f6368;--ckpt-rule:#9aa0a6}
@media (prefers-color-scheme:dark){
.ckpt{--ckpt-bad:#ff8a80;--ckpt-warn:#ffcc66;--ckpt-good:#81c995;--ckpt-dim:#a8adb3;--ckpt-rule:#70757a}}
.ckpt{font-family:var(--jp-code-font-family,ui-monospace,monospace);font-size:12px;line-height:1.45;max-width:100%}
.ckpt .wide{overflow-x:auto;max-width:100%}
.ckpt.ckpt.ckpt table{border-collapse:collapse;margin:2px 0 8px 16px;table-layout:auto;width:auto;border:0;
font-size:inherit}
.ckpt.ckpt.ckpt th,.ckpt.ckpt.ckpt td{text-align:left;vertical-align:top;padding:1px 14px 1px 0;white-space:pre;
border:0;max-width:none;font-variant-numeric:tabular-nums}
.ckpt.ckpt.ckpt tr{background:none}
.ckpt.ckpt.ckpt th{border-bottom:1px solid var(--jp-border-color1,var(--ckpt-rule));font-weight:normal;
color:var(--jp-content-font-color2,var(--ckpt-dim))}
.ckpt.ckpt.ckpt .n{text-align:right}
.ckpt.ckpt.ckpt .w{white-space:pre-wrap;overflow-wrap:anywhere;min-width:28ch}
.ckpt .line,.ckpt summary{white-space:pre-wrap;overflow-wrap:anywhere}
.ckpt summary{cursor:pointer}
.ckpt details details{margin-left:16px}
.ckpt.ckpt.ckpt pre{margin:2px 0 8px 16px;padding:0;background:none;color:inherit;font:inherit;overflow-x:auto}
.ckpt.ckpt.ckpt .bad{color:var(--jp-error-color1,var(--ckpt-bad));font-weight:bold}
.ckpt.ckpt.ckpt .warn{color:var(--jp-warn-color0,var(--ckpt-warn))}
.ckpt.ckpt.ckpt .good{color:var(--jp-success-color0,var(--ckpt-good))}
.ckpt .change{font-weight:bold}
.ckpt .dim{color:var(--jp-content-font-color2,var(--ckpt-dim))}
</style>
""".replace("\n", "")
"""The style of every output. A class stands three times where the rules of JupyterLab for every table would outrank
one (`:not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon td`)."""


class Limits(NamedTuple):
    """The largest size of a page: rows of all tables together, and bytes of all HTML in UTF-8."""

    rows: int = MAX_ROWS
    nbytes: int = MAX_BYTES


NOTEBOOK = Limits()


class Page:
    """The HTML of one output, which grows until its rows or bytes run out.

    `rest` says how to see the rows that were left out of a table, by its title. In a document (`headed`) titles are
    headings, which `headings` lists by their id, and cells name their column, for narrow screens.
    """

    def __init__(self, rest: Callable[[str], str] | str, limits: Limits = NOTEBOOK, headed: bool = False) -> None:
        self.blocks = [STYLE]
        self.left_out = 0
        self.headings: dict[str, str] = {}
        self._headed = headed
        self._rest = rest
        self._rows = limits.rows
        self._nbytes = limits.nbytes - len(STYLE)

    def line(self, text: str, mark: str = "") -> None:
        """One line of text; `mark` is one of the palette's."""
        self.drawing(f'<div class="line{f" {mark}" if mark else ""}">{safe(text, MAX_LINE)}</div>')

    def verdict(self, text: str) -> None:
        """One line of text of our own, whose first words say whether all is well."""
        self.line(text, mark_of(text))

    def lines(self, texts: Sequence[str]) -> None:
        """Lines of a drawing of characters, such as a strip of shards."""
        if texts:
            self.drawing(f"<pre>{'<br>'.join(safe(text, MAX_LINE) for text in texts)}</pre>")

    def drawing(self, html: str, counted: int = 0) -> None:
        """A finished piece of HTML, all of whose texts are escaped; `counted` of its bytes have been counted before."""
        self.blocks.append(html)
        self._nbytes -= len(html.encode()) - counted

    def picture(self, picture: Picture, opened: bool = True) -> None:
        """A picture that folds; its words where it is too large for what is left of the page."""
        fits = len(picture.svg.encode()) < self._nbytes // 2
        drawn = picture.svg if fits else f"<pre>{'<br>'.join(map(safe, picture.text.splitlines()))}</pre>"
        self.drawing(f"{self._fold(picture.title, opened)}{drawn}</details>")

    def heading(self, title: str) -> str:
        """The heading of a part of a document, with an id; the title alone in a notebook."""
        if not self._headed:
            return safe(title)
        name = f"part-{len(self.headings) + 1}"
        self.headings[name] = title
        return f'<h2 id="{name}">{safe(title)}</h2>'

    def _fold(self, title: str, opened: bool) -> str:
        return f"<details{' open' if opened else ''}><summary>{self.heading(title)}</summary>"

    @contextmanager
    def folded(self, title: str, opened: bool = False) -> Iterator[bool]:
        """A fold around what is added meanwhile, which counts as a row; False where there is no room for it."""
        room = self._rows > 0
        if room:
            self._rows -= 1
            self.drawing(self._fold(title, opened))
        yield room
        if room:
            self.drawing("</details>")

    def table(
        self,
        title: str,
        columns: Sequence[Column],
        rows: Sequence[Sequence[str]],
        total: int | None = None,
        opened: bool = False,
        rest: str = "",
    ) -> None:
        """A table that folds, names left and numbers right; the title stands on the fold.

        `total` is the number of its rows, where `rows` are only the first of them. A line below it counts those that
        were left out, and says how to see them: `rest`, or what the page has for it.
        """
        kept = list(self._that_fit(columns, rows))
        lost = (len(rows) if total is None else total) - len(kept)
        self.left_out += lost
        body = _table(columns, kept) if kept else ""
        if lost:
            rest = rest or (self._rest if isinstance(self._rest, str) else self._rest(title))
            left = f"{plural(lost, 'row')} left out; all of them: {rest}"
            body += f'<div class="line dim">{safe(left)}</div>'
        self.drawing(f"{self._fold(title, opened)}{body}</details>", sum(len(row.encode()) for row in kept))

    def html(self) -> str:
        """The finished HTML."""
        return f'<div class="ckpt">{"".join(self.blocks)}</div>'

    def _that_fit(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> Iterator[str]:
        for row in rows:
            cells = (_cell(column, text, self._headed) for column, text in zip(columns, row, strict=True))
            html = f"<tr>{''.join(cells)}</tr>"
            if self._rows < 1 or self._nbytes < len(html.encode()):
                return
            self._rows -= 1
            self._nbytes -= len(html.encode())
            yield html


def _table(columns: Sequence[Column], rows: Iterable[str]) -> str:
    head = "".join(f'<th scope="col"{_classes(column, "")}>{safe(column.title)}</th>' for column in columns)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def safe(text: str, width: int = MAX_TEXT) -> str:
    """Clip a text for HTML, with markup and invisible characters escaped."""
    return escape(clip(printable(text), width))


def _cell(column: Column, text: str, titled: bool) -> str:
    shown = clip_middle(printable(text), MAX_NAME) if column.role == "name" else text
    title = f' data-t="{safe(column.title)}"' if titled and column.title else ""
    return f"<td{_classes(column, text, titled)}{title}>{safe(shown)}</td>"


def _classes(column: Column, text: str, titled: bool = False) -> str:
    """The class of a cell; only in a column of verdicts does a word say whether all is well."""
    wide = "w" if len(text) > SHORT and column.role != "number" else ""
    found = [
        "n" if column.role == "number" else wide,
        mark_of(text) if column.role == "verdict" else "",
        "k" if titled and column.role == "name" else "",
    ]
    return f' class="{" ".join(filter(None, found))}"' if any(found) else ""
