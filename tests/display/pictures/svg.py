"""Reading a picture back as XML, as every program that shows it does."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from ckptools.display.drawing import Picture

SVG = "{http://www.w3.org/2000/svg}"
ELEMENTS = {"svg", "title", "desc", "style", "g", "rect", "text", "path", "polyline", "circle"}
ATTRIBUTES = {
    "class", "role", "viewBox", "width", "height", "style", "x", "y", "rx", "fill", "transform", "text-anchor",
    "pointer-events", "d", "points", "cx", "cy", "r",
}  # fmt: skip


def parsed(picture: Picture) -> ElementTree.Element:
    """The picture as XML; it has no element or attribute but those of a drawing, and no character that acts."""
    root = ElementTree.fromstring(picture.svg)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= ELEMENTS
    assert {name for element in root.iter() for name in element.attrib} <= ATTRIBUTES
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", picture.svg + picture.text + picture.title)
    return root


def shown(picture: Picture) -> str:
    """Every text of a picture that is drawn or hovers, one a line."""
    return "\n".join(e.text or "" for e in parsed(picture).iter() if e.tag in (f"{SVG}text", f"{SVG}title"))


def hovers(picture: Picture) -> list[str]:
    """What a pointer over each cell shows, in the order of the cells."""
    return [e.text or "" for cell in parsed(picture).iter(f"{SVG}rect") for e in cell.iter(f"{SVG}title")]
