"""What diff does not look at, because there is too much of it, it names."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.diff import sides
from ckptools.keys import entries, value_digests
from tests.diff.values import Thing, with_attributes


def files_line(found):
    return next((row.verdict, row.detail) for row in found.subjects if row.subject == "files")


@pytest.mark.parametrize(("most", "count"), [(3, "2 keys"), (2, "at least 2 keys")])
def test_keys_of_a_model_that_are_too_many_are_named_as_not_compared(tmp_path, monkeypatch, most, count):
    for module in (entries, sides):
        monkeypatch.setattr(module, "MAX_ENTRIES", most)
    for name, last in (("a.pt", 1.0), ("b.pt", 2.0)):
        torch.save({f"w{n}": torch.full((1,), last if n == 4 else 0.0) for n in range(5)}, tmp_path / name)
    found = ckptools.diff(tmp_path / "a.pt", tmp_path / "b.pt", every_byte=True)
    verdict, detail = files_line(found)
    assert found.same is False and verdict == "cannot be compared" and f"at most {most} of a checkpoint are" in detail
    assert f"A: not compared: {count} of model" in detail and f"B: not compared: {count} of model" in detail
    assert CliRunner().invoke(app, ["diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]).exit_code == 1
    digests = ckptools.open(tmp_path / "a.pt").write_digests(tmp_path / "a.json")
    assert files_line(ckptools.diff(digests, tmp_path / "b.pt")) == (verdict, detail)


def test_as_many_keys_as_are_compared_are_enough(tmp_path, monkeypatch):
    for module in (entries, sides):
        monkeypatch.setattr(module, "MAX_ENTRIES", 5)
    torch.save({f"w{n}": torch.zeros(1) for n in range(5)}, tmp_path / "a.pt")
    assert ckptools.diff(tmp_path / "a.pt", tmp_path / "a.pt", every_byte=True).same is True


def test_attributes_of_a_dict_that_are_too_many_are_not_called_equal(tmp_path, monkeypatch):
    for name, v in (("a.pt", 1), ("b.pt", 2)):
        tree = OrderedDict(a=1)
        torch.save({"w": torch.ones(1), "extra": with_attributes(tree, hello=[{}, {}, {}, {"v": v}])}, tmp_path / name)
    monkeypatch.setattr(value_digests, "MAX_ITEMS", 4)
    found = ckptools.diff(tmp_path / "a.pt", tmp_path / "b.pt", every_byte=True)
    (row,) = [row for row in found.values if row.verdict != "same"]
    assert (found.same, row.verdict) == (False, "cannot be compared") and "attributes" in row.detail


@pytest.mark.parametrize("section", ["model", "extra"])
def test_attributes_of_a_tensor_that_are_too_many_are_not_called_equal(tmp_path, monkeypatch, section):
    for name, v in (("a.pt", 1), ("b.pt", 2)):
        tensor = with_attributes(torch.nn.Parameter(torch.ones(2)), note=[{}, {}, {}, {"v": v}])
        torch.save({"model": {"w": torch.ones(1)}} | {section: {"x": tensor}}, tmp_path / name)
    monkeypatch.setattr(value_digests, "MAX_ITEMS", 4)
    found = ckptools.diff(tmp_path / "a.pt", tmp_path / "b.pt", every_byte=True)
    (row,) = [row for row in found.rows if row.verdict != "same"]
    assert (found.same, row.verdict) == (False, "cannot be compared") and "more than 4 values" in row.detail


@pytest.mark.parametrize("v", [1, 2])
def test_objects_that_share_objects_are_compared_without_unfolding_them(tmp_path, v):
    for name, inside in (("a.pt", 1), ("b.pt", v)):
        node = Thing(a=inside)
        for _ in range(40):
            node = Thing(a=node, b=node)
        torch.save({"w": torch.ones(1), "extra": {"x": node}}, tmp_path / name)
    found = ckptools.diff(tmp_path / "a.pt", tmp_path / "b.pt", every_byte=True)
    assert found.same is (v == 1) and len(found.values) < 5
