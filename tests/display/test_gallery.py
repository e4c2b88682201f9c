"""The pictures of `docs/pictures.md` are drawn as checkpoints are drawn today; `python -m tools.gallery` makes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.gallery import PICTURES, pictures, trained


def words(svg: str) -> set[str]:
    """The texts of a picture and its style; values are those of one processor."""
    return {re.sub(r"\d[\d.]*(e-?\d+)?", "N", text) for text in re.findall(r">([^<]+)<", svg)}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_gallery_shows_what_is_drawn_today(tmp_path: Path) -> None:
    drawn = pictures(trained(tmp_path))
    shown = {path.stem: path.read_text() for path in PICTURES.glob("*.svg")}
    assert shown.keys() == drawn.keys()
    assert [name for name, picture in drawn.items() if words(shown[name]) != words(picture.svg)] == []
