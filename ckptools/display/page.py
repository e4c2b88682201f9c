"""A page of HTML for a notebook or as a file: lines, and tables that fold, up to a number of rows and bytes.

There is no script, because notebooks strip those of files that they do not trust. Every text is made printable and
then escaped here, also our own. Colours are those of JupyterLab where it has some, else of the reader's light or dark
scheme, and never the only sign: the words stay, and mean the same.

A document stands alone: one file without network or script, which a program can read again. All of it is ASCII, other
characters as references, so that no server, mail or editor can take it for another encoding. The answers that it shows
lie in it as JSON, in elements that no browser runs, and a policy in its head forbids all that could run or load, should
a name from a file ever get through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from ckptools.display.drawing import Picture
from ckptools.display.tables import Column
from ckptools.model.verdict import Level
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
.ckpt table{border-collapse:collapse;margin:2px 0 8px 16px;table-layout:auto;width:auto;border:0;font-size:inherit}
.ckpt th,.ckpt td{text-align:left;vertical-align:top;padding:1px 14px 1px 0;white-space:pre;border:0;
max-width:none;font-variant-numeric:tabular-nums}
.ckpt th{border-bottom:1px solid var(--jp-border-color1,var(--ckpt-rule));font-weight:normal;
color:var(--jp-content-font-color2,var(--ckpt-dim))}
.ckpt .n{text-align:right}
.ckpt .w{white-space:pre-wrap;overflow-wrap:anywhere;min-width:28ch}
.ckpt .line,.ckpt summary{white-space:pre-wrap;overflow-wrap:anywhere}
.ckpt summary{cursor:pointer}
.ckpt pre{margin:2px 0 8px 16px;padding:0;background:none;color:inherit;font:inherit;overflow-x:auto}
.ckpt .bad{color:var(--jp-error-color1,var(--ckpt-bad));font-weight:bold}
.ckpt .warn{color:var(--jp-warn-color0,var(--ckpt-warn))}
.ckpt .good{color:var(--jp-success-color0,var(--ckpt-good))}
.ckpt .dim{color:var(--jp-content-font-color2,var(--ckpt-dim))}
</style>
""".replace("\n", "")

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The policy that lets the document use its own style and nothing else."""


DOCUMENT_STYLE = """
:root{color-scheme:light dark}
body{margin:24px auto;padding:0 20px;max-width:1100px;font-family:system-ui,sans-serif;font-size:14px;line-height:1.5}
h1{font-size:20px;margin:0 0 2px;overflow-wrap:anywhere}
body .ckpt{font-size:13px}
body .ckpt h2,body .ckpt>details>summary{font:600 15px/1.5 system-ui,sans-serif;margin:18px 0 4px}
body .ckpt .ckpt-picture{margin:0 0 18px}
body .ckpt>.dim:last-child{margin-top:24px}
body .ckpt .verdict{font-family:system-ui,sans-serif;font-size:17px;margin:10px 0 4px;overflow-wrap:anywhere}
body .ckpt svg{max-width:100%;height:auto}
@media print{
@page{margin:12mm}
body{margin:0;padding:0;max-width:none;font-size:9pt}
body .ckpt{font-size:7pt}
body .ckpt h2,body .ckpt summary{break-after:avoid}
body .ckpt tr,body .ckpt svg{break-inside:avoid}
body .ckpt .wide,body .ckpt pre{overflow:visible}
body .ckpt table{margin-left:0}
body .ckpt td,body .ckpt th{padding-right:7px}
body .ckpt .w{min-width:12ch}
body .ckpt pre{white-space:pre-wrap;margin-left:0}
details::details-content{content-visibility:visible;block-size:auto}
}
"""
"""How the document looks. The style of its tables stands behind this, and gives way to `body .ckpt`; on paper folds are
open, and what is wide goes on in the next line."""


WORDS = {
    "bad": ("FAIL", "BAD", "error", "NOT WHOLE", "NONE", "MISSING", "missing", "cut", "bad", "unreadable", "no: ",
            "DOES NOT LOAD", "differs", "only in A", "only in B", "cannot be compared", "DIFFERENT", "different:",
            "LEFT OUT", "left out: ", "filled: ", "whole, but "),
    "warn": ("warn", "warning", "not compared", "same checksum", "whole, "),
    "good": ("ok", "yes", "whole", "loads", "same", "the same"),
    "dim": ("skip", "seen", "listed"),
}  # fmt: skip
"""Words that a cell is, or a line begins with, and how they are marked."""


MARKS: Mapping[Level, str] = {"bad": "bad", "doubtful": "warn", "good": "good"}
"""The mark of a verdict of each level."""


class Limits(NamedTuple):
    """The largest size of a page: rows of all tables together, and bytes of all HTML in UTF-8."""

    rows: int = MAX_ROWS
    nbytes: int = MAX_BYTES


NOTEBOOK = Limits()


class Page:
    """The HTML of one output, which grows until its rows or bytes run out.

    `rest` says how to see the rows that were left out, by the title of the table that lost some first.
    """

    def __init__(self, rest: Callable[[str], str] | str, limits: Limits = NOTEBOOK) -> None:
        self.blocks = [STYLE]
        self.left_out = 0
        self._rest = rest
        self._rows = limits.rows
        self._nbytes = limits.nbytes - len(STYLE)
        self._cut = ""

    def line(self, text: str, mark: str = "") -> None:
        """One line of text; `mark` is `bad`, `warn`, `good` or `dim`."""
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
        opening = f"<details{' open' if opened else ''}><summary>{safe(picture.title)}</summary>"
        self.drawing(f"{opening}{drawn}</details>")

    def table(
        self,
        title: str,
        columns: Sequence[Column],
        rows: Sequence[Sequence[str]],
        total: int | None = None,
        opened: bool = False,
    ) -> None:
        """A table that folds, names left and numbers right; the title stands on the fold.

        `total` is the number of its rows, where `rows` are only the first of them.
        """
        head = "".join(f"<th{_classes(column, '')}>{safe(column.title)}</th>" for column in columns)
        kept = list(self._that_fit(columns, rows))
        lost = (len(rows) if total is None else total) - len(kept)
        self._cut = self._cut or (title if lost else "")
        self.left_out += lost
        body = f'<div class="wide"><table><tr>{head}</tr>{"".join(kept)}</table></div>' if kept else ""
        self.drawing(f"<details{' open' if opened else ''}><summary>{safe(title)}</summary>{body}</details>", len(body))

    def html(self) -> str:
        """The finished HTML, with a line about rows that were left out."""
        if self.left_out:
            rest = self._rest if isinstance(self._rest, str) else self._rest(self._cut)
            self.line(f"{plural(self.left_out, 'row')} left out; all of them: {rest}", "dim")
        return f'<div class="ckpt">{"".join(self.blocks)}</div>'

    def _that_fit(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> Iterator[str]:
        for row in rows:
            html = f"<tr>{''.join(map(_cell, columns, row))}</tr>"
            if self._rows < 1 or self._nbytes < len(html.encode()):
                return
            self._rows -= 1
            self._nbytes -= len(html.encode())
            yield html


def safe(text: str, width: int = MAX_TEXT) -> str:
    """Clip a text for HTML, with markup and invisible characters escaped."""
    return escape(clip(printable(text), width))


def mark_of(text: str) -> str:
    """The mark of a verdict or status: `bad`, `warn`, `good` or `dim`; "" for other words.

    Only what is known to be one is asked for: a layout may be `whole`, and a key of a checkpoint has any name.
    """
    return next((mark for mark, words in WORDS.items() if any(_begins(text, word) for word in words)), "")


def _begins(text: str, word: str) -> bool:
    return text == word or text.startswith((f"{word}:", f"{word};", word if word.endswith((" ", ":")) else f"{word}: "))


def _cell(column: Column, text: str) -> str:
    shown = clip_middle(printable(text), MAX_NAME) if column.name else text
    return f"<td{_classes(column, text)}>{safe(shown)}</td>"


def _classes(column: Column, text: str) -> str:
    """The class of a cell; only in a column of verdicts does a word say whether all is well."""
    wide = "w" if len(text) > SHORT and not column.right else ""
    found = ["n" if column.right else wide, mark_of(text) if column.verdict else ""]
    return f' class="{" ".join(filter(None, found))}"' if any(found) else ""


def document(title: str, head: str, page: str, answers: Mapping[str, str]) -> str:
    """A whole document: its title and heading as text, what it shows as HTML.

    `answers` has JSON objects by the name of the command that prints them; each is in an element of that id.
    """
    data = "".join(
        f'<script type="application/json" id="{name}">\n{_quoted(json)}\n</script>\n' for name, json in answers.items()
    )
    html = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{safe(title, 200)}</title>\n<style>{DOCUMENT_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{safe(head)}</h1>\n{page}\n{data}</body>\n</html>\n"
    )
    return html.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _quoted(json: str) -> str:
    """JSON that ends no element and opens no comment: `<` is in none but its strings, which may have it escaped."""
    return json.replace("<", "\\u003c")
