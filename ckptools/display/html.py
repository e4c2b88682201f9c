"""Render records and plain values as HTML: a table with a row for each record, field or key."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib.metadata import PackageNotFoundError, metadata
from itertools import islice
from typing import Any, NamedTuple

from ckptools._version import __version__
from ckptools.display.drawing import Picture
from ckptools.display.page import ScreenPage
from ckptools.display.screen import HEADLINES, mark_of
from ckptools.display.tables import ON_THE_RIGHT, Column, cell_text, columns_of, fields_of, key_name, value_text
from ckptools.dtypes import short
from ckptools.model.facts import RankFile
from ckptools.model.incidents import Cause, Consequence, causes_of, consequences_of, incidents_of
from ckptools.model.problems import Problem
from ckptools.model.records import Rows, record_fields
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Opaque
from ckptools.model.verdict import Verdict
from ckptools.text import clip, clip_middle, count, moment, plural, printable, shape, size
from ckptools.training_state.sections import Section, measure

# -- a page of HTML for a notebook or a file: lines and folded tables, within limits of rows and bytes -----------------
# It has no script, since notebooks strip scripts from untrusted files. Every text is made printable and then escaped
# here, also texts of ckptools. Colours follow JupyterLab, or else the reader's light or dark scheme, and only repeat
# the meaning of words.


DICTS = "to_dicts() of this"
"""How to get all rows of most records, shown below a table that was cut."""

MAX_ROWS = 200
"""Most rows of all tables of one output together."""

MAX_BYTES = 200_000
"""Most bytes of an output, in UTF-8; a notebook saves the output in its file."""

MAX_LINE = 1000
MAX_NAME = 160
MAX_TEXT = 600
SHORT = 28
"""Characters of a cell that stays on one line; a longer cell wraps on a narrow page."""

STYLE = """
<style>
.ckpt{--ckpt-bad:#b3261e;--ckpt-warn:#8a5100;--ckpt-good:#1b6e33;--ckpt-dim:#5f6368;--ckpt-rule:#9aa0a6}
@media (prefers-color-scheme:dark){
.ckpt{--ckpt-bad:#ff8a80;--ckpt-warn:#ffcc66;--ckpt-good:#81c995;--ckpt-dim:#a8adb3;--ckpt-rule:#70757a}}
.ckpt{font-family:var(--jp-code-font-family,ui-monospace,monospace);font-size:12px;line-height:1.45;max-width:100%}
.ckpt .wide{overflow-x:auto;max-width:100%}
.ckpt.ckpt.ckpt table{border-collapse:collapse;margin:2px 0 8px 16px;table-layout:auto;width:auto;border:0;
font-size:inherit}
.ckpt.ckpt.ckpt th,.ckpt.ckpt.ckpt td{text-align:left;vertical-align:top;padding:1px 12px 1px 0;white-space:pre;
border:0;max-width:none;font-variant-numeric:tabular-nums}
.ckpt.ckpt.ckpt tr{background:none}
.ckpt.ckpt.ckpt th{border-bottom:1px solid var(--jp-border-color1,var(--ckpt-rule));font-weight:normal;
color:var(--jp-content-font-color2,var(--ckpt-dim))}
.ckpt.ckpt.ckpt .n{text-align:right}
.ckpt.ckpt.ckpt .w{white-space:pre-wrap;overflow-wrap:anywhere;min-width:18ch}
.ckpt.ckpt.ckpt .w.k{min-width:24ch}
.ckpt .line,.ckpt summary{white-space:pre-wrap;overflow-wrap:anywhere}
.ckpt summary{cursor:pointer}
.ckpt details details{margin-left:16px}
.ckpt.ckpt.ckpt pre{margin:2px 0 8px 16px;padding:0;background:none;color:inherit;font:inherit;overflow-x:auto}
.ckpt.ckpt.ckpt .bad,.ckpt .doubtful,.ckpt .sound{color:var(--jp-error-color1,var(--ckpt-bad));font-weight:bold}
.ckpt.ckpt.ckpt .warn,.ckpt.ckpt.ckpt .doubtful{color:var(--jp-warn-color0,var(--ckpt-warn))}
.ckpt.ckpt.ckpt .good,.ckpt.ckpt.ckpt .sound{color:var(--jp-success-color0,var(--ckpt-good))}
.ckpt .labelled{display:flex}
.ckpt .labelled .line:first-child{flex:none;max-width:60%;white-space:break-spaces;
font-family:var(--jp-code-font-family,ui-monospace,monospace)}
.ckpt .change,.ckpt .heading{font-weight:bold}
.ckpt .dim{color:var(--jp-content-font-color2,var(--ckpt-dim))}
</style>
""".replace("\n", "")
"""The style of every output. A class is tripled where JupyterLab's rules for all tables would otherwise win
(`:not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon td`)."""


class Limits(NamedTuple):
    """Limits of a page: rows of all tables together, and bytes of all HTML in UTF-8."""

    rows: int = MAX_ROWS
    nbytes: int = MAX_BYTES


NOTEBOOK = Limits()


class Page(ScreenPage):
    """Collects the HTML of one output until its limits of rows and bytes are reached.

    `rest` says how to see rows that were left out, by the table's title. In a document (`headed`), titles are headings,
    listed in `headings` by id, and cells state their column, for narrow screens.
    """

    def __init__(self, rest: Callable[[str], str] | str, limits: Limits = NOTEBOOK, headed: bool = False) -> None:
        super().__init__()
        self.blocks = [STYLE]
        self.left_out = 0
        self._lines_left_out = 0
        self.headings: dict[str, str] = {}
        self._headed = headed
        self._rest = rest
        self._rows = self._labelled = limits.rows
        self._nbytes = limits.nbytes - len(STYLE)

    def line(self, text: str, mark: str = "", label: str = "", label_mark: str = "heading") -> None:
        """Add a sentence behind a label; the marks colour them. A page has at most as many labels as rows."""
        made = f'<div class="line{f" {mark}" if mark else ""}">{safe(text, MAX_LINE)}</div>'
        if label:
            made = f'<div class="labelled"><div class="line {label_mark}">{safe(label)}</div>{made}</div>'
            if self._labelled < 1 or self._nbytes < len(made.encode()):
                self._lines_left_out += 1
                return
            self._labelled -= 1
        self.drawing(made)

    def lines(self, texts: Iterable[str]) -> None:
        """Add lines that are never wrapped: commands, or lines drawn with characters, such as a strip of shards."""
        if shown := [safe(text, MAX_LINE) for text in texts]:
            self.drawing(f"<pre>{'<br>'.join(shown)}</pre>")

    def verdict(self, verdict: Verdict) -> None:
        """Add the headline of a verdict in its colour, and its remark."""
        self.line(verdict.headline, HEADLINES[verdict.level])
        if verdict.remark:
            self.line(verdict.remark)

    def incidents(self, causes: Sequence[Cause], consequences: Sequence[Consequence], opened: bool = True) -> None:
        """Add a row for each cause, with culprit and next step at the first; then the consequences of missing files."""
        found = incidents_of(causes)
        rows: list[tuple[str, str, str, str, str]] = []
        for one in found:
            for n, cause in enumerate(one.causes):
                who, remedy = ("", "") if n else (one.culprit or "-", one.remedy)
                rows.append((who, cause.code, cause.severity, cause.evidence, remedy))
        rows += [("-", c.code, "", f"follows from {', '.join(c.causes)}: {c.text}", "") for c in consequences]
        if rows:
            title = ", ".join([plural(len(found), "problem"), *(one.text for one in consequences)])
            self.table(title, PROBLEM_COLUMNS, rows, opened=opened)

    def drawing(self, html: str, counted: int = 0) -> None:
        """Add finished HTML with all texts escaped; `counted` of its bytes were counted before."""
        self.blocks.append(html)
        self._nbytes -= len(html.encode()) - counted

    def picture(self, picture: Picture, opened: bool = True) -> None:
        """Add a folded picture; only its text if it is too large for the rest of the page."""
        fits = len(picture.svg.encode()) < self._nbytes // 2
        drawn = picture.svg if fits else f"<pre>{'<br>'.join(map(safe, picture.text.splitlines()))}</pre>"
        self.drawing(f"{self._fold(picture.title, opened)}{drawn}</details>")

    def heading(self, title: str, link: str = "") -> str:
        """Make the heading of a part of a document, with an id; in a notebook, just the title.

        `link` is the title in the line of contents; if it is "", the title up to a colon.
        """
        if not self._headed:
            return safe(title)
        name = f"part-{len(self.headings) + 1}"
        self.headings[name] = link or title.partition(":")[0]
        return f'<h2 id="{name}">{safe(title)}</h2>'

    def _fold(self, title: str, opened: bool) -> str:
        return f"<details{' open' if opened else ''}><summary>{self.heading(title)}</summary>"

    @contextmanager
    def folded(self, title: str, opened: bool = False) -> Iterator[bool]:
        """Fold everything added within the block, counted as one row; yields False, and does not fold, without room."""
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
    ) -> None:
        """Add a folded table, names left and numbers right, with the title on the fold.

        `total` is the number of its rows, if `rows` are only the first ones. A line below counts the rows left out, and
        says how to see them.
        """
        kept = list(self._that_fit(columns, rows))
        lost = (len(rows) if total is None else total) - len(kept)
        self.left_out += lost
        body = _table(columns, kept) if kept else ""
        if lost:
            left = f"{plural(lost, 'row')} left out; all of them: {self._how_to_see(title)}"
            body += f'<div class="line dim">{safe(left)}</div>'
        self.drawing(f"{self._fold(title, opened)}{body}</details>", sum(len(row.encode()) for row in kept))

    def short_table(self, title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        """Add a folded table."""
        self.table(title, columns, rows)

    def subjects(self, title: str, rows: Sequence[tuple[str, str, str]]) -> None:
        """Add a table of subjects, verdicts and details."""
        self.table(title, (Column("subject"), Column("verdict", "verdict"), Column("detail")), rows, opened=True)

    def html(self) -> str:
        """Return the finished HTML."""
        if self._lines_left_out:
            self.line(f"{plural(self._lines_left_out, 'line')} left out; all of them: {self._how_to_see('')}", "dim")
        return f'<div class="ckpt">{"".join(self.blocks)}</div>'

    def _how_to_see(self, title: str) -> str:
        return self._rest if isinstance(self._rest, str) else self._rest(title)

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
    shown = clip_middle(printable(text), MAX_NAME) if column.role in ("name", "place") else text
    title = f' data-t="{safe(column.title)}"' if titled and column.title else ""
    html = safe(shown)
    if column.role == "name" and len(shown) > SHORT:
        html = html.replace(".", ".<wbr>")  # a long name continues in the next line after a dot
    return f"<td{_classes(column, text, titled)}{title}>{html}</td>"


def _classes(column: Column, text: str, titled: bool = False) -> str:
    """Return the class attribute of a cell; only cells in a column of verdicts are coloured by their words."""
    wide = "w" if len(text) > SHORT and column.role not in ON_THE_RIGHT else ""
    found = [
        "n" if column.role in ON_THE_RIGHT else wide,
        mark_of(text) if column.role == "verdict" else "",
        "k" if column.role in ("name", "place") and (titled or wide) else "",
    ]
    return f' class="{" ".join(filter(None, found))}"' if any(found) else ""


# -- a page of HTML as a file ------------------------------------------------------------------------------------------
# A document is one self-contained file, without network, and without script unless one is given. It is pure ASCII, with
# character references, so that no server, mail or editor can mistake its encoding. The records it shows are included as
# JSON, in elements that browsers do not run. A policy in its head forbids everything that could run or load, should a
# name from a file ever get through the escaping.


POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Policy that allows the document its own style and nothing else."""


DOCUMENT_STYLE = """
:root{color-scheme:light dark;--page:#fff;--card:#f6f8fa;--line:#dfe3e8;--badbg:#fdecea;--warnbg:#fdf3e0;
--goodbg:#e8f5ec}
@media(prefers-color-scheme:dark){
:root{--page:#121416;--card:#1a1d20;--line:#2b3036;--badbg:#3a1614;--warnbg:#33270f;--goodbg:#10301c}}
*{box-sizing:border-box}
body{margin:0 auto;padding:0 24px 48px;max-width:1240px;font:14px/1.5 system-ui,sans-serif;overflow-wrap:anywhere;
background:var(--page)}
h1{font-size:20px;margin:20px 0 0}
.where,footer{color:GrayText;font-size:13px;margin:0}
footer{border-top:1px solid var(--line);margin-top:28px;padding-top:8px}
footer code{font:12px ui-monospace,monospace}
body .ckpt{font:inherit}
body .ckpt h2,body .ckpt h3{display:inline;font-size:16px;margin:0;line-height:2}
body .ckpt section>h2,body .ckpt .said>h2{display:block}
body .ckpt h3{font-size:14px;font-weight:600}
body .ckpt section,body .ckpt>details{margin-top:18px}
body .ckpt [id]{scroll-margin-top:52px}
body .ckpt.ckpt.ckpt td{white-space:pre-wrap}
body .ckpt.ckpt.ckpt .n,body .ckpt.ckpt.ckpt .k{font:12.5px/1.6 ui-monospace,monospace}
body .ckpt.ckpt.ckpt .n{white-space:pre}
body .ckpt.ckpt.ckpt pre,body .ckpt code{font:12.5px/1.5 ui-monospace,monospace}
body .ckpt nav{position:sticky;top:0;z-index:1;background:var(--page);border-bottom:1px solid var(--line);
margin:8px 0 0;padding:8px 0;display:flex;gap:16px;overflow-x:auto;white-space:nowrap}
body .ckpt a{color:inherit}
body .ckpt .band{border-left:6px solid var(--ckpt-rule);border-radius:6px;padding:12px 18px;margin:12px 0;
background:var(--card)}
body .ckpt .band>b{display:block;font-size:18px}
body .ckpt .band .dim{font-size:13px}
body .ckpt .band.is-bad{background:var(--badbg);border-color:var(--ckpt-bad)}
body .ckpt .band.is-warn{background:var(--warnbg);border-color:var(--ckpt-warn)}
body .ckpt .band.is-good{background:var(--goodbg);border-color:var(--ckpt-good)}
body .ckpt .next{margin-top:8px}
body .ckpt .tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px}
body .ckpt .tile{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:8px 12px}
body .ckpt .tile span,body .ckpt .tile i{display:block;font-size:12px;font-style:normal;color:var(--ckpt-dim)}
body .ckpt .tile b{font-size:18px;font-weight:600}
body .ckpt .two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:0 28px}
body .ckpt .cause{background:var(--page);border:1px solid var(--line);border-radius:6px;padding:8px 14px;margin:8px 0}
body .ckpt .cause a{font:600 12px ui-monospace,monospace;margin-right:8px}
body .ckpt .cause .do{margin-top:2px}
body .ckpt .code{margin:10px 0 16px;max-width:100ch}
body .ckpt .code .step{padding-left:4ch;text-indent:-2ch}
body .ckpt .ckpt-picture{margin:0 0 12px;max-width:600px}
body .ckpt svg{width:100%;height:auto}
@media(max-width:640px){
body{padding:0 12px 32px}
body .ckpt .band{padding:10px}
body .ckpt .band .ckpt-picture{margin:8px -4px 0}
body .ckpt.ckpt.ckpt table,body .ckpt.ckpt.ckpt tbody,body .ckpt.ckpt.ckpt tr,body .ckpt.ckpt.ckpt td{display:block;
margin-left:0;width:auto;min-width:0;text-align:left;white-space:pre-wrap}
body .ckpt.ckpt.ckpt thead{position:absolute;clip-path:inset(50%);height:1px;width:1px;overflow:hidden}
body .ckpt.ckpt.ckpt tbody tr{border:1px solid var(--line);border-radius:6px;padding:6px 10px;margin:6px 0}
body .ckpt.ckpt.ckpt .n{text-align:left;white-space:normal}
body .ckpt.ckpt.ckpt td:empty{display:none}
body .ckpt.ckpt.ckpt td[data-t]::before{content:attr(data-t) " ";color:var(--ckpt-dim);font:12px system-ui,sans-serif}
}
@media print{
@page{margin:12mm}
:root{color-scheme:light}
body{margin:0;padding:0;max-width:none;font-size:9pt}
body .ckpt h2,body .ckpt summary{break-after:avoid}
body .ckpt tr,body .ckpt .ckpt-picture,body .ckpt .cause:not(:has(details)),body .ckpt .tile{break-inside:avoid}
body .ckpt .wide,body .ckpt pre{overflow:visible}
body .ckpt.ckpt.ckpt table{margin-left:0;font-size:7pt}
body .ckpt.ckpt.ckpt thead{display:table-header-group}
body .ckpt.ckpt.ckpt td,body .ckpt.ckpt.ckpt th{padding-right:7px}
body .ckpt.ckpt.ckpt .n,body .ckpt.ckpt.ckpt .k{font-size:7pt}
body .ckpt.ckpt.ckpt .w{min-width:12ch}
body .ckpt.ckpt.ckpt pre{white-space:pre-wrap;margin-left:0;font-size:7pt}
body .ckpt nav{display:none}
body .ckpt,body .ckpt *{print-color-adjust:exact}
}
"""
"""Style of a document: prose in a proportional font, names and numbers in a monospaced one; below 640 pixels, rows of
tables become cards. In print, folds stay as they are, table heads are repeated, and wide tables wrap."""


SCRIPT_STYLE = """
.ckpt th[tabindex],.ckpt rect[role]{cursor:pointer}
.ckpt th[aria-sort=ascending]::after{content:" \\25b2"}
.ckpt th[aria-sort=descending]::after{content:" \\25bc"}
.ckpt .find{display:block;margin:4px 0 2px 16px;font:inherit}
.ckpt tr.lit,.ckpt .cause.lit{outline:2px solid}
.ckpt rect.lit,.ckpt rect[aria-pressed=true]{stroke:CanvasText;stroke-width:3}
.ckpt .off:not(rect){display:none}
.ckpt rect.off{opacity:.3}
.ckpt .pin{font:inherit;font-weight:600;padding:2px 10px;border-radius:6px;border:2px solid;cursor:pointer;
background:var(--page);color:inherit;position:sticky;left:0}
@media print{.ckpt .find,.ckpt .hint{display:none}}
"""
"""Further style of a document with a script."""


SHORT_TITLE = 59
"""Most characters of a document's title, so that a browser's tab and a list of bookmarks show it whole."""


def short_title(name: str, words: str) -> str:
    """Make the title of a document of a name, cut in the middle, and of words, cut at the end."""
    shown = clip_middle(printable(name), max(SHORT_TITLE // 2, SHORT_TITLE - len(words) - 2))
    return f"{shown}: {clip(printable(words), SHORT_TITLE - len(shown) - 2)}"


def document(
    title: str, head: str, page: str, answers: Mapping[str, str], below: str = "", script: str = "", made: str = ""
) -> str:
    """Make a whole HTML document from plain texts (title, heading, a text below it) and the HTML of its page.

    `answers` maps names of commands to their JSON objects; each gets an element with that id. The policy allows only
    `script`, ASCII from ckptools, by its SHA-256. `made` is HTML that says how the document was made (`how_made`).
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"{POLICY}; script-src 'sha256-{digest}'" if script else POLICY
    style, runs = (DOCUMENT_STYLE + SCRIPT_STYLE, f"<script>{script}</script>\n") if script else (DOCUMENT_STYLE, "")
    below = f'<p class="where">{safe(below, MAX_LINE)}</p>\n' if below else ""
    foot = f"<footer>{made}</footer>\n" if made else ""
    data = "".join(
        f'<script type="application/json" id="{name}">\n{_quoted(json)}\n</script>\n' for name, json in answers.items()
    )
    html = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{safe(title, SHORT_TITLE)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{safe(clip_middle(printable(head), SHORT_TITLE))}</h1>\n{below}{page}\n</main>\n{foot}{data}{runs}"
        "</body>\n</html>\n"
    )
    return html.encode("ascii", "xmlcharrefreplace").decode("ascii")


def how_made(command: str, *facts: str) -> str:
    """Say in a line of HTML how a document was made: the command, ckptools' version, facts, and its home page.

    The home page is the one that the metadata of the installed package names, if it names one.
    """
    parts = [f"made by <code>{safe(command)}</code>", safe(f"ckptools {__version__}"), *map(safe, facts)]
    home = _home_page()
    return " · ".join([*parts, *([f'<a href="{escape(home)}" rel="noreferrer">{safe(home)}</a>'] if home else [])])


def _home_page() -> str:
    """Find the home page in the metadata of the package (core metadata, `Project-URL: Homepage, https://…`)."""
    try:
        urls = metadata("ckptools").get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    found = (url.strip() for name, _, url in (one.partition(",") for one in urls) if name.lower() == "homepage")
    return next((url for url in found if url.startswith("https://")), "")


def _quoted(json: str) -> str:
    """Escape `<` in JSON, where it occurs only in strings, so that it cannot end its element or open a comment."""
    return json.replace("<", "\\u003c")


# -- records and values ------------------------------------------------------------------------------------------------


PROBLEM_COLUMNS = (
    Column("who", "name"), Column("code"), Column("severity", "verdict"), Column("what"), Column("what to do")
)  # fmt: skip
FIELD_COLUMNS = (Column("field"), Column("value"))
VALUE_COLUMNS = (Column("key", "name"), Column("value"), Column("dtype"), Column("size", "number"))


@dataclass(frozen=True)
class RecordForm:
    """How to render a class of records as a table: its noun, the columns, and the cells of a record."""

    noun: str
    columns: Sequence[Column]
    cells: Callable[[Any], Sequence[str]]


def rows_html(rows: Sequence[Any]) -> str:
    """Render several records as a table."""
    page = Page(".to_dicts() of these")
    if rows:
        row_table(page, "", rows, opened=True)
    else:
        page.line("none")
    return page.html()


def row_table(page: Page, title: str, rows: Sequence[Any], opened: bool = False) -> None:
    """Add a row for each record, in the form of its class; other classes get a column for each nonempty field.

    Without a title, it states the number of records.
    """
    cls = type(rows[0]) if rows else None
    if cls in TABLES:
        TABLES[cls](page, title, rows, opened)
        return
    form = FORMS.get(cls) or _form_of(rows)
    some = [form.cells(row) for row in rows[:MAX_ROWS]]
    kept = [n for n in range(len(form.columns)) if any(cells[n] for cells in some)]
    columns, filled = [form.columns[n] for n in kept], [[row[n] for n in kept] for row in some]
    page.table(title or plural(len(rows), form.noun), columns, filled, len(rows), opened)


def problem_table(page: Page, problems: Sequence[Problem], opened: bool = True) -> None:
    """Add a row for each cause of the problems, then the consequences of missing files; nothing without problems."""
    page.incidents(causes_of(problems, ("error", "warning", "note")), consequences_of(problems), opened)


def record_html(record: Any) -> str:
    """Render one record: a row for each of its fields."""
    page = Page(".to_dict() of this")
    page.line(repr(record))
    known = {name: value for name, value in fields_of(record).items() if value is not None and value not in ("", ())}
    rows = [(name, cell_text(name, value)) for name, value in known.items()]
    page.table(plural(len(rows), "field"), FIELD_COLUMNS, rows, opened=True)
    for value in known.values():
        if isinstance(value, tuple) and value and record_fields(value[0]) is not None:
            row_table(page, "", Rows(value))
    return page.html()


def _form_of(rows: Sequence[Any]) -> RecordForm:
    """Make a form for a class without one: a column for each field that is nonempty in some record."""
    columns = columns_of(list(map(fields_of, rows[:MAX_ROWS])))
    noun = type(rows[0]).__name__ if rows else "row"
    return RecordForm(
        f"row of {noun}", columns, lambda row: [cell_text(c.title, fields_of(row).get(c.title)) for c in columns]
    )


def _file_cells(file: RankFile) -> list[str]:
    rank = "-" if file.rank is None else str(file.rank)
    saved = moment(file.modified) if file.modified else "-"
    return [rank, file.status, size(file.nbytes), saved, file.part, file.path.name]


def _section_cells(section: Section) -> list[str]:
    amount = measure(section.value)
    numbers = [str(amount.tensors), count(amount.params), size(amount.nbytes)] if amount.tensors else ["-", "-", "-"]
    return [section.name, section.kind, *numbers, "" if amount.tensors else value_text(section.value, MAX_TEXT)]


FORMS: dict[type | None, RecordForm] = {
    RankFile: RecordForm(
        "file",
        (Column("rank", "number"), Column("status", "verdict"), Column("size", "number"), Column("saved"),
         Column("part"), Column("file", "name")),
        _file_cells,
    ),
    Section: RecordForm(
        "section",
        (Column("section", "name"), Column("kind"), Column("tensors", "number"), Column("params", "number"),
         Column("size", "number"), Column("value")),
        _section_cells,
    ),
}  # fmt: skip
"""Forms of common records; features and `api/notebook.py` add others."""

TABLES: dict[type | None, Callable[[Page, str, Sequence[Any], bool], None]] = {
    Problem: lambda page, _, rows, opened: problem_table(page, rows, opened)
}
"""Functions that add a table of records, for classes that need more than a row for each record."""


def values_html(values: Mapping[Any, Any]) -> str:
    """Render a mapping of a checkpoint's tree: a row for each key, with its value, dtype and size."""
    page = Page("dict(...) of this")
    value_tree(page, plural(len(values), "key"), values, opened=len(values) <= MOST_OPEN)
    return page.html()


BRANCHES: dict[type, Callable[[Any], Mapping[Any, Any]]] = {}
"""Functions that turn a value of a class into a mapping, to unfold it."""

MOST_OPEN = 24
"""A mapping with more keys is folded."""

DEPTH = 6
"""Most folds inside each other."""


def value_tree(page: Page, title: str, values: Mapping[Any, Any], opened: bool = False, depth: int = DEPTH) -> None:
    """Add a fold for each mapping in a mapping, and a table of its other values."""
    branches = {key: found for key, value in values.items() if (found := _branch(value)) is not None} if depth else {}
    if not branches:
        value_table(page, title, values, opened)
        return
    with page.folded(title, opened) as room:
        others = {key: value for key, value in values.items() if key not in branches}
        if room and others:
            value_table(page, plural(len(others), "value"), others, opened=True)
        for key, found in islice(branches.items(), MAX_ROWS if room else 0):
            value_tree(page, f"{key_name(key)}: {plural(len(found), 'key')}", found, depth=depth - 1)
        if room and len(branches) > MAX_ROWS:
            page.line(f"{len(branches) - MAX_ROWS} more are not shown", "dim")


def _branch(value: Any) -> Mapping[Any, Any] | None:
    """Return a value as a mapping, to unfold it: a list of mappings, or a mapping with more than `FEW` plain values."""
    made = next((unfold(value) for cls, unfold in BRANCHES.items() if isinstance(value, cls)), value)
    if isinstance(made, (list, tuple)) and made and all(isinstance(item, Mapping) for item in islice(made, MAX_ROWS)):
        return dict(enumerate(made))
    deep = isinstance(made, Mapping) and any(isinstance(item, (Mapping, Tensor)) for item in made.values())
    return made if isinstance(made, Mapping) and (deep or len(made) > FEW) else None


FEW = 3
"""A mapping with at most this many plain values stays on one line."""


def section_html(section: Section) -> str:
    """Render a section of a checkpoint: its kind, and its contents."""
    page = Page(f"ckptools.open(...).records({section.name!r})")
    page.line(repr(section))
    if isinstance(section.value, Mapping):
        value_table(page, plural(len(section.value), "key"), section.value)
    else:
        page.line(value_text(section.value, MAX_LINE))
    return page.html()


def opaque_html(value: Opaque) -> str:
    """Render an object of a foreign class, which was never built, as the file describes it."""
    page = Page(".fields of this")
    page.line(f"an object of {value.name}, kept as data: its class is not imported and nothing of it was run")
    value_table(page, plural(len(value.fields), "field"), value.fields)
    return page.html()


def value_table(page: Page, title: str, values: Mapping[Any, Any], opened: bool = True) -> None:
    """Add a row for each of the first keys of a mapping."""
    rows = [_cells(key, value) for key, value in islice(values.items(), MAX_ROWS)]
    columns = VALUE_COLUMNS if any(row[2] for row in rows) else VALUE_COLUMNS[:2]
    page.table(title, columns, [row[: len(columns)] for row in rows], len(values), opened)


def _cells(key: Any, value: Any) -> tuple[str, ...]:
    if isinstance(value, Tensor):
        return key_name(key), f"tensor {shape(value.shape)}", short(value.dtype), size(value.nbytes)
    return key_name(key), value_text(value, MAX_TEXT), "", ""
