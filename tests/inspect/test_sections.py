"""Sections in full: how many values are listed, and what is said of those that are not."""

from __future__ import annotations

import pytest

from ckptools.inspect import sections
from ckptools.inspect.record import inspect_report
from ckptools.inspect.sections import section_details, section_text
from tests.display.made import checkpoint, plain


@pytest.mark.parametrize(("count", "listed", "left_out"), [(2, 2, False), (3, 3, False), (4, 3, True), (9, 3, True)])
def test_at_most_so_many_values_of_a_section_are_listed(monkeypatch, count, listed, left_out):
    monkeypatch.setattr(sections, "MAX_VALUES", 3)
    ck = checkpoint({"model": {"w": plain(2)}, "extra": {f"k{n}": n for n in range(count)}})
    (detail,) = section_details(ck, "extra")
    assert [(row.path, row.value) for row in detail.values] == [((f"k{n}",), n) for n in range(listed)]
    assert (detail.left_out, detail.private) == (left_out, 0)
    text = section_text(inspect_report(ck), [detail])
    assert text.endswith("\nextra: only the first 3 values") is left_out


def test_values_with_a_private_name_are_counted_and_shown_when_asked():
    ck = checkpoint({"model": {"w": plain(2)}, "extra": {"_a": 1, "b": 2, "_c": {"d": 3}}})
    (few,), (every,) = section_details(ck, "extra", private=False), section_details(ck, "extra")
    assert ([row.path for row in few.values], few.private) == ([("b",)], 2)
    assert ([row.path for row in every.values], every.private) == ([("_a",), ("b",), ("_c", "d")], 0)
