"""JSON and YAML beside a checkpoint are read as plain values, within bounds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import ckptools
from ckptools.errors import ReadError
from ckptools.files.values import MAX_YAML, read_values


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_yaml_has_numbers_text_lists_and_dicts(tmp_path):
    text = "a: 1\nb: [1.5, null, yes]\nc: {d: x}\nwhen: 2024-05-01\nshared: &s [1]\nagain: *s\n"
    expected = {"a": 1, "b": [1.5, None, True], "c": {"d": "x"}, "when": "2024-05-01", "shared": [1], "again": [1]}
    assert read_values(written(tmp_path, text)) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: !!python/object/apply:os.system [touch made]", "python/object/apply:os.system' in line 1 is no plain"),
        ("a: !!binary aGk=", "is no plain value"),
        ("a: 1\na: 2", "twice"),
        ("a: &a {k: 1}\nb: {<<: *a}", "merged"),
        ("a: &a [*a]", "contains itself"),
        ("a0: &a0 [0]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)), "values"),
        ("a: !!bool x", "tag"),
        ("a: [1,", "in line 1"),
        ("a: \x07", "characters"),
        ("a: 1\n---\nb: 1", "another document"),
        ("[" * 9000, "too deep"),
        ("a: " + "9" * 9000, "digits"),
        ("#" * (MAX_YAML + 1), "at most"),
    ],
)
def test_other_yaml_is_refused_in_one_line(text, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ReadError) as caught:
        read_values(written(tmp_path, text))
    assert why in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "made").exists()


def test_without_its_reader_a_yaml_is_named_and_the_checkpoint_is_whole(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    step = tmp_path / "step_10"
    step.mkdir()
    torch.save({"w": torch.ones(2)}, step / "model.pt")
    written(step, "a: 1\n")
    ck = ckptools.open(step)
    assert ck.whole and "config" not in ck.tree
    assert any("config.yaml" in p.message and "ckptools[yaml]" in p.message for p in ck.problems)
