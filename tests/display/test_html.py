"""What a notebook shows: one line in a prompt, a table in a cell; never a script, never a file opened."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from unittest import mock

import pytest
import torch
from torch import nn

import ckptools
from ckptools.api.notebook import checkpoint_html, tensor_html
from ckptools.display.html import MAX_BYTES, MAX_ROWS, Limits, Page, opaque_html, rows_html, values_html
from ckptools.display.screen import WORDS
from ckptools.display.tables import Column
from ckptools.model.records import Rows
from ckptools.text import plural
from tests.display.made import HOSTILE, alone, broken_run7, checkpoint, hostile, plain, run7, sharded, snapshot
from tests.truth import FIXTURES, WHOLE

OBJECTS = FIXTURES / "foreign-objects" / "objects.pt"

ALLOWED = {"div", "style", "details", "summary", "table", "thead", "tbody", "tr", "th", "td", "pre", "br", "wbr"}
DRAWN = {"svg", "title", "desc", "rect", "text", "g", "path", "defs", "pattern", "line", "tspan"}
VOID = {"br", "meta", "wbr"}


class Reader(HTMLParser):
    """Collects tags, attributes and text, and minds that every tag is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open += [tag] if tag not in VOID else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("made", [run7, broken_run7, alone, snapshot, hostile], ids=lambda made: made.__name__)
def test_a_checkpoint_is_a_table_without_a_script(made):
    html = made()._repr_html_()
    page = Reader(html)
    assert set(page.tags) <= ALLOWED | DRAWN
    assert not {name for name in page.attributes if name.startswith("on") or "href" in name or name == "src"}
    assert page.open == []


def test_hostile_names_are_text():
    page = Reader(checkpoint_html(hostile()))
    shown = "".join(page.text)
    assert "<script>alert(1)</script>" in shown
    assert "\\x1b[31mred" in shown and "\\u202e" in shown
    assert not re.search("[\x00-\x1f\x7f-\x9f\u202e\ud800]", shown)


def test_problems_come_first_and_are_open():
    html = checkpoint_html(broken_run7())
    assert (
        html.index('<div class="line bad">NOT WHOLE: ranks 201..203 missing')
        < html.index("<details open><summary>2 problems")
        < html.index("sections")
    )
    assert "ranks 201..203" in html


def test_a_large_checkpoint_is_cut_and_says_so():
    html = checkpoint_html(checkpoint({"model": {f"w{n}": plain(2, record=str(n)) for n in range(1000)}}))
    assert html.count("<tr>") <= MAX_ROWS + 5 and len(html) < MAX_BYTES
    assert re.search(r"\d+ rows left out; all of them: ckptools inspect \S+model.pt --section model<", html)


def test_long_names_do_not_make_it_long():
    names = {f"{n}{'<' * 100_000}": plain(2, record=str(n)) for n in range(300)}
    assert len(checkpoint_html(checkpoint({"model": names}, name="<" * 10**6))) < MAX_BYTES * 1.1
    assert len(values_html(names)) < MAX_BYTES * 1.1


def test_a_part_of_the_tree_is_a_table_too():
    html = snapshot().model._repr_html_()
    page = Reader(html)
    assert {"module.w", "tensor [3, 5]", "fp32", "60 B"} <= set(page.text)


def test_a_tensor_that_cannot_be_put_together_says_why():
    tensor = replace(sharded(8, 2), note="rank 2's piece is of another shape")
    reader = Reader(tensor_html(tensor))
    assert tensor.note in reader.text and not any(
        "rank 2's piece" in text for text in Reader(tensor_html(plain(3))).text
    )


def test_values_of_every_kind_are_shown():
    page = Reader(values_html({"a": 1e-8, "b": {"c": [1, 2]}, "d": None, 3: "1e5", **{n: n for n in HOSTILE}}))
    assert {"1e-08", "{c: [1, 2]}", "None", "'1e5'"} <= set(page.text)


def test_an_object_of_another_class_is_a_table_of_its_fields():
    found = ckptools.open(OBJECTS).raw["point"]
    page = Reader(opaque_html(found))
    assert any(found.name in text for text in page.text)
    assert {plural(len(found.fields), "field"), *map(str, found.fields)} <= {text.strip() for text in page.text}


def test_no_problems_are_no_table():
    reader = Reader(rows_html(Rows()))
    assert (reader.text[-1], "table" in reader.tags) == ("none", False)


def test_nothing_is_opened_to_show_it():
    ck = ckptools.open(WHOLE[0].file)
    with mock.patch("os.open", side_effect=AssertionError), mock.patch("os.pread", side_effect=AssertionError):
        assert "ep0-ba5" in repr(ck)
        assert "16 sharded, 2 whole" in ck._repr_html_()
        assert "model.emb.weight" in ck.model._repr_html_()
        assert "model.emb.weight" in ck.model._ipython_key_completions_()


def test_a_page_holds_so_many_rows_of_all_its_tables():
    page = Page(lambda title: f"all of {title}", Limits(rows=5))
    for title in ("first", "second", "third"):
        page.table(title, [Column("a")], [["x"]] * 4)
    assert page.html().count("<td>x</td>") == 5
    assert "3 rows left out; all of them: all of second<" in page.html()
    assert "4 rows left out; all of them: all of third<" in page.html()


def test_a_page_holds_so_many_bytes_also_of_names_that_grow_when_escaped():
    page = Page("more", Limits(nbytes=20_000))
    page.table("t", [Column("a")], [["<é" * 200]] * 100)
    assert len(page.html().encode()) < 20_500 and page.left_out > 80


def test_a_labelled_line_counts_as_a_row():
    page = Page("more", Limits(rows=3))
    for n in range(5):
        page.line(f"text {n}", label=f"{n}: ")
    page.line("the end")
    shown = "".join(Reader(page.html()).text)
    assert shown.endswith("2: text 2the end2 lines left out; all of them: more")


def test_a_word_is_marked_only_in_a_column_of_verdicts():
    page = Page("")
    words = [word for words in WORDS.values() for word in words]
    page.table("t", [Column("layout"), Column("key", "name"), Column("result", "verdict")], [[w] * 3 for w in words])
    rows = re.findall(r"<tr><td>[^<]*</td><td>[^<]*</td><td class=\"(\w+)\">", page.html())
    assert rows == [mark for mark, words in WORDS.items() for _ in words]


def test_a_name_at_the_beginning_of_a_line_is_no_verdict():
    page = Page("")
    page.line("ok: lr 0.1")
    assert page.blocks[1:] == ['<div class="line">ok: lr 0.1</div>']


def marked(html: str) -> set[tuple[str, str]]:
    """Cells of a page that are marked as a verdict, each with the title of its column."""
    found = set()
    for table in re.findall(r"<table>(.*?)</table>", html):
        titles = re.findall(r"<th[^>]*>([^<]*)</th>", table)
        for row in re.findall(r"<tr>(<td.*?)</tr>", table):
            cells = re.findall(r'<td(?: class="([^"]*)")?>([^<]*)</td>', row)
            found |= {(title, text) for title, (mark, text) in zip(titles, cells, strict=True) if mark in WORDS}
    return found


def test_a_tensor_that_lies_whole_on_every_rank_is_no_verdict(large_world):
    ck = ckptools.open(WHOLE[0].file)
    assert marked(ck._repr_html_()) == set()
    assert {title for title, _ in marked(ck.verify()._repr_html_())} == {"result"}
    assert marked(ck.files._repr_html_()) == {("status", "seen")}
    assert {title for title, _ in marked(ckptools.diff(ck, ck, values=True)._repr_html_())} == {"verdict"}
    assert marked(ckptools.checkpoints_in(WHOLE[0].file.parent)._repr_html_()) == {("whole", "whole")}
    assert '<div class="line good">ok   whole?' in ckptools.doctor(WHOLE[0].file)._repr_html_()
    assert marked(broken_run7()._repr_html_()) == {("severity", "error")}


def test_a_run_in_a_notebook_says_what_is_wrong_with_each_checkpoint(tmp_path):
    folder = shutil.copytree(FIXTURES / "torch2.4.1-fsdp2-w3", tmp_path / "run")
    (folder / "rank1.pt").unlink()
    html = ckptools.checkpoints_in(tmp_path)._repr_html_()
    assert '<div class="line heading">  step 5, run: </div><div class="line">CK001 rank 1 missing' in html


def test_how_the_names_of_an_optimizer_are_known_is_in_its_table(tmp_path):
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    (found,) = ckptools.open(tmp_path / "run.pt").optimizers.values()
    assert found.naming.note and escape(found.naming.note) in found._repr_html_()
