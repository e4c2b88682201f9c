"""A page at a screen: gaps are left only before lines, and tables that a notebook folds are left out."""

from __future__ import annotations

from dataclasses import dataclass

from ckptools.display.page import PagedRecord, page_text
from ckptools.display.screen import Screen
from ckptools.display.tables import Column


@dataclass(frozen=True)
class Made(PagedRecord):
    words: str

    def _fill(self, page):
        page.line(self.words, label="label  ")
        page.gap()
        page.table("folded", [Column("a")], [["x"]])
        page.lines([])
        page.lines([f"  ckptools inspect {self.words}"])
        page.gap()


def test_a_gap_stands_only_between_lines():
    assert page_text(Made("p")) == "label  p\n\n  ckptools inspect p"


def test_a_screen_breaks_sentences_but_no_command():
    words = "a path with blanks that is long"
    lines = page_text(Made(words), Screen(30)).splitlines()
    assert lines[:2] == ["label  a path with blanks that", "       is long"] and lines[-1].endswith(words)


def test_a_page_is_printable_and_is_the_text_of_its_record():
    assert str(Made("\x1b[31m")) == "label  \\x1b[31m\n\n  ckptools inspect \\x1b[31m"
