"""The table of problem codes: one place, no row without a use, and a severity unless one is given."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

import ckptools
from ckptools.model.problems import Code, Problem

PACKAGE = Path(ckptools.__file__).parent
TABLE = "model/problems.py"


@functools.cache
def sources() -> dict[str, ast.Module]:
    """The modules of the package, by their paths."""
    return {p.relative_to(PACKAGE).as_posix(): ast.parse(p.read_text()) for p in PACKAGE.rglob("*.py")}


def spelled(tree: ast.AST) -> set[str]:
    """Codes that stand in a module as text of their own; a help text may give one as an example."""
    texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return {text for text in texts if re.fullmatch(r"CK\d+", text)}


def test_the_table_alone_spells_codes():
    assert spelled(sources()[TABLE]) == {kind.code for kind in Code}
    assert [file for file, tree in sources().items() if file != TABLE and spelled(tree)] == []


def test_no_two_kinds_share_a_code():
    assert len({kind.code for kind in Code}) == len(Code)


@pytest.mark.slow
def test_every_kind_is_told_of_somewhere():
    used = {
        node.attr
        for file, tree in sources().items()
        if file != TABLE
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Code"
    }
    assert used == set(Code.__members__)


def test_what_is_lacking_may_be_left_out_and_a_contradiction_never():
    lacking = [kind for kind in Code if kind.lacks != "nothing"]
    assert {kind.forbids for kind in lacking} == {"complete output"}
    unless_error = {kind for kind in Code if kind.forbids != "nothing" and kind.severity != "error"}
    assert unless_error == {Code.TENSOR_NOT_JOINED, Code.SIZE_UNSTATED}, "what is here is all that is known of"


def test_a_problem_is_as_grave_as_its_kind_unless_it_says_otherwise():
    assert Problem(Code.FILE_MISSING, "no file").severity == "error"
    assert Problem(Code.FILE_MISSING, "no file", severity="note").severity == "note"
    assert str(Problem(Code.FILE_MISSING, "no file", 3, "w")) == "CK001  rank 3  w  no file"
