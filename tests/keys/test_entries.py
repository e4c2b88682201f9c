"""Every key of a checkpoint, by name."""

from __future__ import annotations

import pytest

from ckptools import api
from ckptools.errors import UsageError
from ckptools.keys.entries import Selection, brief_args, containers_of, entries_of, leaves_of, path_text, tensor_entries
from ckptools.model.tree import Opaque, tensors_in
from tests.display.made import checkpoint, plain
from tests.truth import FIXTURES, SEVERAL

COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"
FOLDERS = sorted(path for path in FIXTURES.iterdir() if path.is_dir() and path not in SEVERAL)


@pytest.fixture(scope="module")
def composer():
    return api.open(COMPOSER, all_ranks=True)


def test_the_only_model_is_named_by_its_fqns(composer):
    names = {e.name for e in entries_of(composer) if e.kind == "model"}
    assert names == set(composer.model)


def test_an_optimizers_state_is_named_by_parameter_and_slot(composer):
    name, optimizer = next(iter(composer.optimizers.items()))
    fqn = next(iter(optimizer.state))
    found = {e.name: e for e in entries_of(composer) if e.kind == "optimizer"}
    entry = found[f"optimizers.{name}.state.{fqn}.exp_avg"]
    assert (entry.parameter, entry.slot, entry.value.shape) == (fqn, "exp_avg", composer.model[fqn].shape)


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_tensor_of_every_fixture_has_an_entry_and_no_name_is_there_twice(folder):
    ck = api.open(folder, all_ranks=True)
    names = [e.name for e in entries_of(ck)]
    assert len(set(names)) == len(names)
    wanted = {id(t) for _, t in tensors_in(ck.tree)}
    assert {id(e.value) for e in tensor_entries(ck)} >= wanted


def test_two_keys_that_spell_alike_have_names_of_their_own():
    ck = checkpoint({"model": {"a.b": plain(2), "c": plain(3)}, "c": 1, "other": {"x.y": 1, "x": {"y": 2}}})
    names = [e.name for e in entries_of(ck)]
    assert sorted(names) == sorted(set(names)) and len(names) == 5


def names_of(ck, **wanted):
    return [e.name for e in Selection(**wanted).of(ck)]


def test_globs_and_sections_choose_entries():
    ck = checkpoint({"model": {"a.w": plain(2), "a.b": plain(2), "z.w": plain(3)}, "epoch": 3})
    assert names_of(ck, include=("*.w",)) == ["a.w", "z.w"]
    assert names_of(ck, include=("a.*", "epoch"), exclude=("*.b",)) == ["a.w", "epoch"]
    assert names_of(ck, section="other") == ["epoch"]
    assert names_of(ck, section="model", exclude=("a.[!w]",)) == ["a.w", "z.w"]


def test_a_section_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(UsageError, match="has no section 'nodel'; there are model, optimizer"):
        names_of(checkpoint({"model": {"w": plain(2)}}), section="nodel")


@pytest.mark.parametrize(
    ("name", "args", "text", "shown"),
    [
        ("pathlib.PosixPath", ("/", "data", "run 7"), "/data/run 7", ("/data/run 7",)),
        ("pathlib._local.PosixPath", ("/data", "run 7"), "/data/run 7", ("/data/run 7",)),  # Python 3.13
        ("pathlib.PurePosixPath", (), ".", ()),
        ("pathlib.PureWindowsPath", ("C:\\", "a"), "C:\\a", ("C:\\", "a")),
        ("pathlib.PosixPath", (3,), "", (3,)),
        ("some.Phase", ("main",), "", ("main",)),
    ],
)
def test_a_path_is_spelled_as_python_does(name, args, text, shown):
    assert (path_text(Opaque(name, args)), brief_args(Opaque(name, args))) == (text, shown)


def test_leaves_lie_in_the_containers_that_are_entered():
    node = Opaque("omegaconf.nodes.AnyNode")
    node.state = {"_val": [{"a": 1}, {}]}
    tree = {"x": node, "y": (1, 2), "z": Opaque("some.Class", ([{"b": 3}],))}
    assert [path for path, _ in leaves_of(tree)] == [("x", 0, "a"), ("x", 1), ("y",), ("z",), ("z", 0, 0, "b")]
    assert [path for path, _ in containers_of(tree)] == [(), ("x",), ("x", 0), ("z", 0), ("z", 0, 0)]
