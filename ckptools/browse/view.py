"""The screen of `browse`: the verdict, tabs, a list or map with details beside it, and the keys of the pane."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.timer import Timer
from textual.widgets import Input, Static

from ckptools.browse import pages
from ckptools.browse.footer import footer
from ckptools.browse.pages import HomePage, KeyPage, ListPage, PageRows, RankPage, TextPage
from ckptools.browse.rank_map import RankMap
from ckptools.browse.row_list import RowList, coloured
from ckptools.browse.session import BackgroundJob, Jobs, JobStoppedError, Session
from ckptools.display.screen import MARKS
from ckptools.display.tables import wrapped
from ckptools.errors import CkptoolsError
from ckptools.text import duration, printable, size

if TYPE_CHECKING:
    from ckptools.ls.record import RunFolder

    Page = TextPage | ListPage | KeyPage | HomePage | RankPage

TABS = ("overview", "keys", "ranks", "optimizer", "values", "files", "run")
OVERVIEW, KEYS, RANKS, TRAINING, VALUES, FILES, RUN = range(len(TABS))


DETAIL_SECONDS = 0.03
"""Details are shown once the cursor has rested for so long."""

WIDE = 80
"""From this width in columns, details stand beside the list."""

MESSAGE_SECONDS = 12.0
"""A message goes away after so long; the footer stays."""

READS = "reads every rank"
"""Name of the job that reads the structure of every rank."""

OPENS = "opens ..."
STOPPED = "not opened; r opens it"
SEVERAL = "several checkpoints; 7 lists them, Enter opens one"

STATUS_SECONDS = 0.2


class View(App[None]):
    """Shows one checkpoint in tabs.

    Attributes:
        session: the checkpoint and its records.
        error: why it cannot be opened; None if it can, or is still being opened.
        bug: an exception that is a fault of ckptools.
        waits: text shown in place of the verdict until there is one.
        first_screen: `time.perf_counter` when the verdict was first shown; 0 before.
        only: whether only keys, ranks and files with problems are shown.
        list_id: of the list of the tab: `left`, or `map` of ranks.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #title, #tabs, #status, #keys { height: 1; width: 100%; text-wrap: nowrap; text-overflow: ellipsis; }
    #title { text-style: bold; }
    #message { width: 100%; height: auto; max-height: 3; color: $text-accent; display: none; }
    #message:light { color: $foreground; }
    #main { height: 1fr; }
    #filter { height: 1; border: none; padding: 0; display: none; }
    #filter.typing { display: block; }
    #counted { height: 1; width: 100%; background: $panel; text-wrap: nowrap; text-overflow: ellipsis; }
    #map { display: none; }
    #side { width: 3fr; }
    #right { width: 2fr; border-left: solid $primary; padding-left: 1; }
    #main.wide #right { display: none; }
    .narrow #main, #main.map { layout: vertical; }
    .narrow #side, .narrow #right { width: 100%; height: 1fr; }
    .narrow #right, #main.map #right { border-left: none; border-top: solid $primary; padding-left: 0; }
    #main.map #left { display: none; }
    #main.map #map { display: block; }
    #main.map #side { width: 100%; height: auto; max-height: 85%; }
    #main.map #right { width: 100%; height: 1fr; }
    #status { color: $text-muted; }
    #keys { background: $panel; }
    """ + coloured("#title.{mark}{light}")
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(n + 1), f"tab({n})", name, show=False) for n, name in enumerate(TABS)),
    ]

    def __init__(self, path: str, other: str = "", how: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.session = Session(path, other, how or {})
        self.jobs = Jobs(self._deliver)
        self.error: CkptoolsError | None = None
        self.bug: Exception | None = None
        self.first_screen = 0.0
        self.told = self.told_keys = ""
        self._silence: Timer | None = None
        self.waits = OPENS
        self.tab = OVERVIEW
        self.only = False
        self.list_id = "left"
        self.pages: dict[int, Page] = {}
        self.key_page: KeyPage | None = None
        self.at: dict[int, int] = {}

    # -- the screen ---------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """Lay out title, tabs, list, map, details, message, status line and footer."""
        yield Static(id="title", markup=False)
        yield Static(id="tabs", markup=False)
        with Horizontal(id="main", classes="wide"):
            with Vertical(id="side"):
                yield Static(id="counted", markup=False)
                yield RowList("left")
                yield RankMap("map")
                yield Input(id="filter", placeholder="part of a name, or a glob")
            yield RowList("right", has_cursor=False)
        yield Static(id="message", markup=False)
        yield Static(id="status", markup=False)
        yield Static(id="keys", markup=False)

    def on_mount(self) -> None:
        """Choose light or dark as the terminal is, and start updating the status line."""
        # Source: rxvt's COLORFGBG, also set by other terminals; its last number is the background colour.
        found = re.fullmatch(r"\d+;(?:\w+;)?(\d+)", os.environ.get("COLORFGBG", ""))
        is_light = found is not None and int(found[1]) in (7, 15)
        self.theme = "textual-light" if is_light else "textual-dark"
        self.set_interval(STATUS_SECONDS, self.tell_status)
        self.left.focus()

    @property
    def left(self) -> RowList:
        """The list of the tab, or its map of ranks."""
        return self.query_one(f"#{self.list_id}", RowList)

    @property
    def right(self) -> RowList:
        """The details of a row."""
        return self.query_one("#right", RowList)

    def say(self, text: str) -> None:
        """Show a text in the line of messages, which is there for a while."""
        if self._silence is not None:
            self._silence.stop()
        message = self.query_one("#message", Static)
        message.update(printable(text))
        message.display = bool(text)
        self._silence = self.set_timer(MESSAGE_SECONDS, lambda: self.say("")) if text else None

    def tell_keys(self) -> None:
        """Show the keys of the pane that has the focus, or of the dialog over it."""
        for keys in self.screen_stack[0].query("#keys").results(Static) if self.screen_stack else ():
            focused = self.screen_stack[0].focused
            name = focused.id if focused is not None else None
            pane = {"right": "details", "filter": "filter"}.get(name or "", TABS[self.tab])
            line = footer(pane if len(self.screen_stack) == 1 else "dialog", not self.page.wide, self.size.width)
            if line.plain != self.told_keys:
                self.told_keys = line.plain
                keys.update(line, layout=False)

    def on_descendant_focus(self) -> None:
        """Show the keys of the pane that got the focus."""
        self.tell_keys()

    def tell_status(self) -> None:
        """Update the status line, the map of ranks and the footer: bytes read, and running jobs."""
        if not self.is_running or not self.screen_stack:
            return
        self.tell_ranks()
        self.tell_keys()
        running = [job.words for job in list(self.jobs.running.values()) if job.shown]
        read = f"read {size(self.session.nbytes)} in {duration(self.session.seconds)}"
        more = f"  {'; '.join(running)}  (x stops it)" if running else ""
        if read + more != self.told:  # the terminal may be remote, so send only changes
            self.told = read + more
            for status in self.screen_stack[0].query("#status").results(Static):
                status.update(self.told, layout=False)

    def tell_ranks(self) -> None:
        """Colour the ranks on the map that were read so far, if they are being read."""
        page, job = self.pages.get(RANKS), self.jobs.running.get(READS)
        if self.tab == RANKS and isinstance(page, RankPage) and job is not None:
            files = page.looked.checkpoint.files
            read = {file.rank for file in files if file.path in job.files or file.status == "read"}
            self.query_one(RankMap).show_read(read)
            self.tell_counted(f"{len(read):,} of {len({file.rank for file in files}):,} read")

    def _tell_title(self) -> None:
        title = self.query_one("#title", Static)
        looked = self.session.looked
        if looked is not None:
            text = f"{looked.report.name}: {looked.report.verdict.headline}"
        else:
            text = str(self.error or f"{self.session.path}: {self.waits}")
        title.update(printable(text), layout=False)
        title.set_classes(MARKS[looked.report.verdict.level] if looked is not None else "bad" if self.error else "")
        self.query_one("#tabs", Static).update(_tabs(self.tab, self.size.width), layout=False)

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def begin(
        self, name: str, work: Callable[[BackgroundJob], Any], then: Callable[[Any], None], shown: bool = True
    ) -> None:
        """Run `work` in a thread, then `then` with its result in the thread of the screen."""
        self.jobs.start(name, work, then, self.failed, shown)

    def _deliver(self, hand_over: Callable[[], None]) -> None:
        """Hand over a job's result in the thread of the screen, and update the status line at once."""

        def deliver() -> None:
            hand_over()
            self.tell_status()

        self.call_from_thread(deliver)

    def failed(self, error: Exception) -> None:
        """Show the error of a job; an error that is a fault of ckptools ends the program."""
        if isinstance(error, CkptoolsError):
            self.say(f"error: {error}")
        elif not isinstance(error, JobStoppedError):
            self.bug = error
            self.exit()

    # -- tabs ---------------------------------------------------------------------------------------------------------

    @property
    def page(self) -> Page:
        """The page of the current tab; until data is loaded, a text that says so."""
        if self.tab not in self.pages:
            made = self._made()
            if made is None:
                words = "looks for checkpoints ..." if self.tab == RUN else printable(self.why_unknown())
                command = f"ckptools inspect {self.session.arguments}"
                return TextPage(lambda screen: "\n".join(wrapped("", words, screen)), command)
            self.pages[self.tab] = made
        return self.pages[self.tab]

    def why_unknown(self) -> str:
        """Why the checkpoint cannot be shown yet, or at all."""
        if self.session.looked is not None or (self.error is None and self.waits == OPENS):
            return "is being read ..."
        return f"cannot be opened: {self.error}" if self.error is not None else self.waits

    def _made(self) -> Page | None:
        looked = self.session.looked
        if looked is None or self.tab in (KEYS, RUN):
            return None
        if self.tab == VALUES:
            full = self.key_page.full if self.key_page is not None else {}
            return pages.unshared(self.session, looked, full)
        if self.tab == OVERVIEW:
            return HomePage(looked, self.session.arguments)
        if self.tab == TRAINING:
            return pages.training(self.session, looked)
        return (pages.ranks if self.tab == RANKS else pages.files)(self.session, looked, self.only)

    def action_tab(self, n: int) -> None:
        """Switch to a tab."""
        self.at[self.tab] = self.left.cursor
        self.tab = n
        self.show_tab()
        if n == RUN and RUN not in self.pages and "looks for checkpoints" not in self.jobs.running:
            self.begin("looks for checkpoints", self.session.list_run, self._run)

    def _run(self, run: RunFolder) -> None:
        self.session.run = run
        self.pages[RUN] = pages.checkpoints(self.session, run)
        self.show_tab()

    def show_tab(self) -> None:
        """Show the page of the current tab, with the cursor where it was."""
        self._tell_title()
        page = self.page
        had_focus = self.left.has_focus
        self.list_id = "map" if isinstance(page, RankPage) else "left"
        self.query_one("#main").set_class(page.wide, "wide").set_class(self.list_id == "map", "map")
        page.fit(max(self.size.width - 1, 20))
        at = self.at.get(self.tab, 0)
        if isinstance(page, RankPage):
            self.query_one(RankMap).show_ranks(page.cells, page.how, page.kept, at)
        else:
            self.left.has_cursor = not isinstance(page, TextPage)
            self.left.show(page.rows, at)
        if had_focus or page.wide:
            self.left.focus()
        self.tell_counted()
        self.tell_keys()

    def tell_counted(self, progress: str = "") -> None:
        """Say how much a filter for problems leaves, and how many ranks have been read."""
        filtered = "" if isinstance(self.page, TextPage | HomePage) else self.page.counted
        counted = self.query_one("#counted", Static)
        counted.update("  ".join(filter(None, (progress, f"{filtered} (Esc: all)" if filtered else ""))))
        counted.display = bool(progress or filtered)

    def on_resize(self, event: events.Resize) -> None:
        """Render for the new width; on a narrow screen, details go below the list."""
        self.screen_stack[0].set_class(event.size.width < WIDE, "narrow")
        self.at[self.tab] = self.left.cursor
        self.call_after_refresh(self.show_tab)

    def on_row_list_moved(self, event: RowList.Moved) -> None:
        """Show details of the row under the cursor, once it rests."""
        if event.rows.id == self.list_id:
            self.at[self.tab] = event.rows.cursor
            self.set_timer(DETAIL_SECONDS, self.look_up)

    def look_up(self, keep: bool = False) -> None:
        """Show details of the row under the cursor."""
        if self.page.wide or not self.query("#right"):  # the timer may fire while the screen closes
            return
        width = max(self.right.scrollable_content_region.width - 1, 20)  # leave room for a scroll bar
        work = self.page.detail(self.left.cursor, width)
        place = self.right.scroll_offset.y if keep else 0
        self.begin("looks up", lambda _: work(), lambda rows: self._found(rows, place), shown=False)

    def _found(self, rows: PageRows, place: int) -> None:
        self.right.show(rows, place)


def _tabs(chosen: int, width: int) -> str:
    """Render the names of the tabs, the chosen one in brackets; more closely on a narrow screen."""
    text = "".join(f"[{n + 1} {name}]" if n == chosen else f" {n + 1} {name} " for n, name in enumerate(TABS))
    if len(text) > width:
        for long, short in (("optimizer", "optim"), ("  ", " "), ("] ", "]"), (" [", "[")):
            text = text.replace(long, short)
    return text
