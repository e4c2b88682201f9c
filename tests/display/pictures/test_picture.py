"""What every picture is: SVG that parses, the same in words, a line in a prompt, and a file that is whole or absent."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

import ckptools
from ckptools.display.drawing import Picture
from ckptools.errors import OutputExistsError, UsageError
from ckptools.pictures.rank_map import rank_map
from ckptools.pictures.tensor_layout import tensor_layout
from ckptools.text import printable
from tests.display.made import HOSTILE, checkpoint, hostile, plain, run7
from tests.display.pictures.svg import SVG, parsed, shown
from tests.truth import WHOLE
from tools.browser import elements_of, needs_browser

LONG = "<&'\">" * 2000


@pytest.mark.slow
@pytest.mark.parametrize("known", WHOLE, ids=lambda known: known.name)
def test_every_real_checkpoint_has_pictures(known):
    ck = known.open()
    tensors = [item for item in ck.model.items() if isinstance(item[1], ckptools.Tensor)]
    name, tensor = max(tensors, key=lambda item: item[1].numel)
    for picture in (rank_map(ck), tensor_layout(tensor, name)):
        root = parsed(picture)
        assert root.find(f"{SVG}title").text == picture.title and root.find(f"{SVG}desc").text == picture.text
        assert "role" in root.attrib and picture.text.startswith(picture.title)


@pytest.mark.parametrize("name", [*HOSTILE, LONG])
def test_a_hostile_name_is_text_in_a_picture(name):
    made = [rank_map(checkpoint({}, name=name)), tensor_layout(plain(2, 3), name)]
    for picture in made:
        assert printable(name)[:20] in shown(picture)
        assert len(repr(picture)) <= 120 and "\n" not in repr(picture) and repr(picture).isprintable()


def test_a_long_name_does_not_make_a_picture_large():
    assert len(tensor_layout(plain(2, 3), LONG).svg) < 10_000


def test_the_html_of_a_picture_closes_what_it_opens_and_runs_nothing():
    class Tags(HTMLParser):
        def __init__(self, html: str) -> None:
            super().__init__()
            self.open: list[str] = []
            self.met: set[str] = set()
            self.feed(html)

        def handle_starttag(self, tag, attrs):
            self.open.append(tag)
            self.met |= {tag, *(name for name, _ in attrs if name.startswith("on"))}

        def handle_endtag(self, tag):
            assert self.open.pop() == tag

    page = Tags(rank_map(hostile()).html())
    assert page.open == [] and not page.met & {"script", "img", "a", "foreignobject", "onload", "onclick"}
    assert {"svg", "details", "pre"} <= page.met


def test_a_picture_is_saved_whole_and_not_over_another_file(tmp_path):
    picture = rank_map(run7())
    saved = picture.save(tmp_path / "ranks.svg")
    assert saved.read_text() == picture.svg + "\n" and [p.name for p in tmp_path.iterdir()] == ["ranks.svg"]
    with pytest.raises(OutputExistsError, match="already there"):
        picture.save(saved)
    assert picture.save(saved, force=True) == saved


@pytest.mark.parametrize("name", ["ranks.png", "absent/ranks.svg"])
def test_a_place_where_no_picture_can_be_is_refused_in_a_line(tmp_path, name):
    with pytest.raises(UsageError):
        rank_map(run7()).save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@needs_browser
def test_hostile_names_are_text_to_a_browser_too(tmp_path):
    name = "<script>document.title='run'</script>\"><img src=x onerror=\"document.title='run'\">]]><b>"
    made = [rank_map(checkpoint({}, name=name)), tensor_layout(plain(2, 3), name)]
    page = tmp_path / "page.html"
    page.write_text("<title>still</title>" + "".join(picture.html() for picture in made))
    alone = made[1].save(tmp_path / "alone.svg")
    for seen in (elements_of(page), elements_of(alone)):
        assert not re.search(r"<(script|img|b)[ >]", seen) and "<title>run" not in seen and "&lt;script&gt;" in seen


def test_a_picture_in_a_prompt_is_a_line():
    assert repr(Picture("t" * 500, "<svg/>", "")).endswith("..., 6 B of SVG>")
