"""Rank files by names of the user's choice: several that are named together, or those that fit a pattern."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import ckptools
from ckptools.cli import app
from ckptools.errors import NotWholeError, ReadError, UnsafePathError, UsageError
from ckptools.formats.rank_search.rank_groups import files_matching, group_of_files
from tests.truth import FIXTURES

RANKS = FIXTURES / "torch2.4.1-fsdp2-w3"
WORLD = 3


def copies(folder: Path, *names: str, order: tuple[int, ...] = (0, 1, 2)) -> list[Path]:
    """The three ranks' files under other names; `order` says whose content each gets."""
    for name, rank in zip(names, order, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(RANKS / f"rank{rank}.pt", folder / name)
    return [folder / name for name in names]


def as_usual(ck: ckptools.Checkpoint) -> bool:
    """Whether it is what the same files are under their own names."""
    usual = ckptools.open(RANKS, all_ranks=True)
    same = all(t.load().equal(usual.model[name].load()) for name, t in ck.model.items())
    return same and list(ck.model) == list(usual.model) and ck.ranks == usual.ranks == (0, 1, 2)


NAMES = {
    "a number": ("node0.state", "node1.state", "node2.state"),
    "from one": ("part1.pt", "part2.pt", "part3.pt"),
    "of world": ("model-1-of-3.pt", "model-2-of-3.pt", "model-3-of-3.pt"),
    "padded": ("model-00001-of-00003.pt", "model-00002-of-00003.pt", "model-00003-of-00003.pt"),
    "folders": ("p0/model.pt", "p1/model.pt", "p2/model.pt"),
    "nodes": ("a/rank0.pt", "b/rank1.pt", "c/rank2.pt"),
    "no number": ("alpha.pt", "beta.pt", "gamma"),
}


@pytest.mark.slow
@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_several_files_are_one_checkpoint_by_whatever_name(tmp_path, names):
    found = copies(tmp_path / "x", *names)
    for all_ranks in (False, True):
        ck = ckptools.open(found, all_ranks=all_ranks)
        assert as_usual(ck) and ck.problems == () and ck.world_size.value == WORLD and ck.path.is_dir()
        assert {f.path for f in ck.files} == set(found)
    ckptools.consolidate(RANKS, tmp_path / "usual.safetensors", provenance=False)
    words = [*map(str, found), "-o", str(tmp_path / "any.safetensors"), "--no-provenance"]
    assert CliRunner().invoke(app, ["consolidate", *words]).exit_code == 0
    assert (tmp_path / "any.safetensors").read_bytes() == (tmp_path / "usual.safetensors").read_bytes()
    done = CliRunner().invoke(app, ["inspect", str(found[0]), str(found[2])])
    assert done.exit_code == 1 and "rank 1  CK001  no file of this rank among the named ones" in done.stdout


def test_numbers_that_are_no_ranks_are_ignored_where_contents_have_the_rank(tmp_path):
    files = copies(tmp_path, "x3.pt", "x10.pt", "x17.pt")
    assert as_usual(ckptools.open(files)) and ckptools.open(files).whole
    assert ckptools.open(files[:2]).whole is False


@pytest.mark.slow
@pytest.mark.parametrize("order", [(2, 0, 1), (1, 0, 2)])
def test_content_decides_which_rank_a_file_is(tmp_path, order):
    ck = ckptools.open(copies(tmp_path, "alpha.pt", "beta.pt", "gamma.pt", order=order))
    assert as_usual(ck) and ck.problems == ()
    ck = ckptools.open(copies(tmp_path, "n0.pt", "n1.pt", "n2.pt", order=order), all_ranks=True)
    assert as_usual(ck) and {p.code for p in ck.problems} == {"CK010"}


def test_a_lazy_tensor_finds_the_rest_of_it_in_the_files_that_were_named(tmp_path, large_world):
    files = copies(tmp_path, "p0/x.pt", "p1/x.pt", "p2/x.pt")
    ck = ckptools.open(files)
    assert ck.cost.files == 1 and as_usual(ck)
    files[2].unlink()
    with pytest.raises((NotWholeError, ReadError)):
        ckptools.consolidate(ck, tmp_path / "out.safetensors")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_two_files_of_one_rank_are_told(tmp_path, command):
    found = copies(tmp_path, "a.pt", "b.pt", "c.pt", order=(0, 1, 1))
    done = CliRunner().invoke(app, [command, *map(str, found)])
    assert done.exit_code == 1 and "2 files say they are rank 1" in done.stdout


def test_files_that_nothing_tells_apart_are_refused(tmp_path):
    for name in ("a.pt", "b.pt"):
        torch.save({"model": {"w": torch.ones(3)}}, tmp_path / name)
    with pytest.raises(UsageError, match="neither name nor content has its rank; give it with ranks"):
        ckptools.open([tmp_path / "a.pt", tmp_path / "b.pt"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([], "no path was given"),
        (["a.pt", "a.pt"], r"a\.pt: was given twice"),
        (["a.pt", "link.pt"], r"link\.pt: was given twice"),
        (["a.pt", "folder"], "is a folder"),
        (["w.safetensors", "a.pt"], "this is hugging_face"),
    ],
    ids=str,
)
def test_what_cannot_be_one_checkpoint_is_one_line(tmp_path, given, why):
    copies(tmp_path, "a.pt", "b.pt", "folder/c.pt")
    (tmp_path / "link.pt").symlink_to("a.pt")
    ckptools.consolidate(RANKS, tmp_path / "w.safetensors")
    with pytest.raises(UsageError, match=why):
        ckptools.open([tmp_path / name for name in given])


def test_paths_may_be_relative_and_absolute_together(tmp_path, monkeypatch):
    files = copies(tmp_path, "a.pt", "b.pt", "c.pt")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["inspect", "a.pt", *map(str, files[1:])])
    assert done.exit_code == 0
    assert done.stdout == CliRunner().invoke(app, ["inspect", *map(str, files)]).stdout


def test_options_that_need_one_path_say_so(tmp_path):
    files = copies(tmp_path, "a.pt", "b.pt", "c.pt")
    with pytest.raises(UsageError, match="only_this_file goes with one path, and 3 were given"):
        ckptools.open(files, only_this_file=True)
    with pytest.raises(UsageError, match="ranks goes with one path"):
        ckptools.open(files, ranks="{rank}.pt")
    with pytest.raises(UsageError, match="ranks goes with a folder"):
        ckptools.open(files[0], ranks="{rank}.pt")


# -- patterns ------------------------------------------------------------------------------------------------------

PATTERNS = {
    "a number": "node{rank}.state",
    "from one": "part{rank}.pt",
    "of world": "model-{rank}-of-{world}.pt",
    "padded": "model-{rank}-of-{world}.pt",
    "folders": "p{rank}/model.pt",
    "twice": "p{rank}/rank_{rank}[x].pt",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", PATTERNS)
def test_a_pattern_says_what_rank_files_are_called(tmp_path, what):
    files = copies(tmp_path, *NAMES.get(what, [f"p{n}/rank_{n}[x].pt" for n in range(WORLD)]))
    (tmp_path / "notes.txt").write_text("x")
    ck = ckptools.open(tmp_path, ranks=PATTERNS[what])
    assert as_usual(ck) and ck.problems == () and ck.path == tmp_path
    assert ckptools.verify(ckptools.open(tmp_path, ranks=PATTERNS[what])).ok
    files[1].unlink()
    (problem,) = ckptools.open(tmp_path, ranks=PATTERNS[what]).problems
    assert (problem.code, problem.rank, problem.message) == ("CK001", 1, f"no file {files[1].name}")


@pytest.mark.parametrize(
    ("numbers", "ranks"),
    [((1, 2, 3, 4), [0, 1, 2, 3]), ((2, 3, 4), [1, 2, 3]), ((0, 2, 3), [0, 2, 3]), ((1, 2, 3), [1, 2, 3])],
)
def test_numbers_up_to_the_world_size_begin_at_one_whichever_is_missing(numbers, ranks, tmp_path):
    for number in numbers:
        (tmp_path / f"model-{number}-of-4.pt").touch()
    assert [n.rank for n in files_matching(tmp_path, "model-{rank}-of-{world}.pt", False)] == ranks
    assert [n.rank for n in group_of_files(sorted(tmp_path.iterdir(), reverse=True))] == ranks


@pytest.mark.parametrize(
    "pattern", ["model.pt", "../{rank}", "/{rank}", "", "{rank", "a/../{rank}", "{world}", "a\0-{rank}.pt"]
)
def test_a_pattern_that_is_none_is_one_line(tmp_path, pattern):
    with pytest.raises(UsageError, match=r"expected a name in the folder with \{rank\} in it"):
        ckptools.open(tmp_path, ranks=pattern)


def test_a_pattern_that_nothing_fits_says_what_is_here(tmp_path):
    copies(tmp_path, "a.pt", "b.pt", "c.pt")
    with pytest.raises(ReadError, match=r"no file fits ranks 'x\{rank\}'; here are 'a.pt', 'b.pt', 'c.pt'"):
        ckptools.open(tmp_path, ranks="x{rank}")


def test_a_file_behind_a_link_out_of_the_folder_is_refused(tmp_path):
    copies(tmp_path, "far/n0.pt", "run/p1/n1.pt", "run/p2/n2.pt")
    (tmp_path / "run" / "p0").symlink_to(tmp_path / "far")
    with pytest.raises(UnsafePathError, match="follow_symlinks"):
        ckptools.open(tmp_path / "run", ranks="p{rank}/n{rank}.pt")
    assert as_usual(ckptools.open(tmp_path / "run", ranks="p{rank}/n{rank}.pt", follow_symlinks=True))


@given(st.sets(st.integers(0, 40), min_size=2, max_size=8), st.sampled_from(["a{}b", "x-{:05d}-of-3", "r{}/m"]))
def test_the_one_number_that_differs_is_the_rank(numbers, spelled):
    files = [Path(spelled.format(n)) for n in numbers]
    assert [(n.rank + n.first, n.path) for n in group_of_files(files)] == sorted(
        (n, Path(spelled.format(n))) for n in numbers
    )


def test_a_pattern_finds_exactly_what_fits_it(tmp_path):
    for name in ("r1-1.pt", "r2-2.pt", "r3-4.pt", "r4-4.pt.bak", "xr5-5.pt"):
        (tmp_path / name).touch()
    assert [n.path.name for n in files_matching(tmp_path, "r{rank}-{rank}.pt", False)] == ["r1-1.pt", "r2-2.pt"]


# -- what is not here --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["s4://host/x.pt", "rsync://host/x.pt"])
def test_a_url_of_what_is_not_read_is_told_to_be_one(url):
    for command in ("inspect", "verify"):
        done = CliRunner().invoke(app, [command, url])
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (3, "", 1)
        assert done.stderr.startswith(f"error: {url}: is not read; s3://, ")


@pytest.mark.slow
@pytest.mark.parametrize("url", ["ftp://b/x.pt", "https://b/x.pt", "hf://a/b/x.pt"])
def test_an_output_where_nothing_can_be_written_is_told_to_be_one(url):
    done = CliRunner().invoke(app, ["consolidate", str(RANKS), "-o", url])
    assert done.exit_code in (2, 3) and done.stderr.startswith(f"error: {url}: ") and done.stderr.count("\n") == 1


def test_a_local_folder_may_be_called_like_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copies(Path("s3:/b"), "rank0.pt", "rank1.pt", "rank2.pt")
    assert ckptools.open("s3://b").ranks == (0, 1, 2)


def test_json_of_several_files_names_every_one(tmp_path):
    files = copies(tmp_path, "p0/x.pt", "p1/x.pt", "p2/x.pt")
    shown = json.loads(CliRunner().invoke(app, ["inspect", *map(str, files), "--json", "--all-ranks"]).stdout)
    assert shown["path"] == str(tmp_path) and shown["world_size"]["value"] == WORLD
