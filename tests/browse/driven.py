"""Textual's pilot in the hands of a test: press keys, wait until nothing runs, read the lists."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from textual.pilot import Pilot
from textual.widgets import Static

from ckptools.browse.app import Browser
from ckptools.browse.row_list import RowList, text_of
from ckptools.browse.session import CheckpointReport
from ckptools.inspect.record import inspect_report
from ckptools.model.checkpoint import Checkpoint

SECONDS = 60
"""Nothing in these tests takes so long."""


class Driven:
    """A browser that runs, and what is on its screen."""

    def __init__(self, app: Browser, pilot: Pilot[None]) -> None:
        self.app, self.pilot = app, pilot

    async def press(self, *keys: str) -> None:
        """Press keys, and wait after each until nothing runs."""
        for key in keys:
            await self.pilot.press(key)
            await self.settled()

    async def clear(self) -> None:
        """Delete what stands in the line of a dialog, by two keys: the pilot waits 40 ms and more after each."""
        await self.pilot.press("home", "ctrl+k")

    async def settled(self) -> None:
        """Wait until no job runs, and the cursor has rested."""
        await self.until(lambda: not self.app.jobs.running)
        await self.pilot.pause(0.06)
        await self.until(lambda: not self.app.jobs.running)

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait for something; a test that waits for nothing fails."""
        for _ in range(SECONDS * 50):
            if done() or self.app.bug is not None:
                break
            await self.pilot.pause(0.02)
        assert self.app.bug is None, self.app.bug
        assert done()

    def rows(self, name: str = "left") -> list[str]:
        """The rows of a list, seen or not."""
        found = self.app.screen_stack[0].query_one(f"#{name}", RowList)
        return [text_of(found.source.line(n, 60)) for n in range(len(found.source))]

    def text(self, name: str) -> str:
        """The text of `title`, `tabs`, `message` or `status`."""
        return str(self.app.screen_stack[0].query_one(f"#{name}", Static).render())

    def pictured(self) -> str:
        """What is on the screen, as text: of the picture in SVG that textual makes of it."""
        strips = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text for strip in strips)

    @property
    def row(self) -> str:
        """The row under the cursor."""
        return self.rows()[self.app.left.cursor]


Script = Callable[[Driven], Awaitable[None]]


def drive(path: Path | str | Checkpoint, script: Script, other: str | Path = "", size: tuple[int, int] = (80, 24),
          wait: bool = True, how: Any = None) -> Browser:  # fmt: skip
    """Run a script with a browser of a path, or of a checkpoint made by hand."""

    async def run() -> Browser:
        made = isinstance(path, Checkpoint)
        app = Browser("/ckpt/run7" if made else str(path), str(other), how)
        if isinstance(path, Checkpoint):
            looked = CheckpointReport(path, inspect_report(path))
            app.session.open = lambda _: looked  # type: ignore[method-assign]
        async with app.run_test(size=size) as pilot:
            driven = Driven(app, pilot)
            if wait:
                await driven.settled()
            await script(driven)
        return app

    return asyncio.run(run())


def pressed(path: Path | str | Checkpoint, *keys: str, **how: Any) -> Sequence[str]:
    """The rows of the list on the left after some keys."""
    found: list[str] = []

    async def script(driven: Driven) -> None:
        await driven.press(*keys)
        found.extend(driven.rows())

    drive(path, script, **how)
    return found
