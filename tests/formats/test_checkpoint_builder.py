"""One place makes the record of a checkpoint for every format."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ckptools
from ckptools.errors import ReadError
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, file_now
from ckptools.model.facts import Fact, ModuleOrder
from ckptools.model.problems import Code, Problem

FORMATS = Path(ckptools.__file__).parent / "formats"
OWN = {
    "name": "run",
    "saved_as": "one .pt",
    "tree": {},
    "files": [],
    "world_size": Fact(1),
    "step": Fact(None),
    "module_order": ModuleOrder(True, ""),
    "bytes_expected": None,
}


def test_no_format_makes_the_record_by_itself():
    made = {
        path.relative_to(FORMATS).as_posix()
        for path in FORMATS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Checkpoint"
    }
    assert made == {"shared/checkpoint_builder.py"}


def test_what_was_read_is_counted_and_names_come_once_in_their_order():
    builder = CheckpointBuilder("torch_file", Path("m.pt"))
    builder.add_read(1, 10, ["b", "a"])
    builder.add_read(2, 5, ["a", "c"])
    made = builder.checkpoint(**OWN)
    assert (made.format, made.path, made.names) == ("torch_file", Path("m.pt"), ("b", "a", "c"))
    assert (made.cost.files, made.cost.nbytes) == (3, 15) and made.cost.seconds >= 0


def test_the_worst_is_told_first_also_of_parts_that_were_found_apart():
    builder, other = CheckpointBuilder("accelerate", Path("run")), CheckpointBuilder("accelerate", Path("run"))
    builder.problems += [Problem(Code.LAYOUT_INFERRED, "n"), Problem(Code.ODD_FILE_SIZE, "w")]
    other.problems += [Problem(Code.FILE_CUT, "e")]
    other.add_read(1, 7, ["x"])
    other.differing.append(("step",))
    other.per_rank["step",] = {0: 1, 1: 2}
    builder.add(other)
    made = builder.checkpoint(**OWN)
    assert [p.message for p in made.problems] == ["e", "w", "n"]
    assert (made.differing, made.per_rank, made.cost.files, made.names) == (
        (("step",),),
        {("step",): {0: 1, 1: 2}},
        1,
        ("x",),
    )


def test_a_file_that_is_gone_is_named_where_its_size_is_wanted(tmp_path):
    path = tmp_path / "rank0.pt"
    path.write_bytes(b"abc")
    assert file_now(path, 3, "model", "cut")[:5] == (path, 3, "model", "cut", 3)
    path.unlink()
    with pytest.raises(ReadError) as error:
        file_now(path, 3, "model", "bad")
    assert (error.value.path, error.value.kind) == (path, "absent")
