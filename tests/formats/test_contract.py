"""What every format must keep, on every fixture."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import ckptools
from ckptools.errors import CkptoolsError, UnknownFormatError, UsageError, original_of
from ckptools.formats.registry import FORMATS, recognised
from ckptools.model.regions import Box
from ckptools.model.tensor import Tensor
from ckptools.model.tree import Opaque, children_of, tensors_in, walk
from ckptools.tensor_io.read import dequantized, read_box
from tests.truth import ASKED, LOCAL, WHOLE, Known

EVERY = (*WHOLE, *LOCAL, *ASKED)


def ids(known: Known) -> str:
    return known.name


@pytest.fixture(params=EVERY, ids=ids)
def known(request: pytest.FixtureRequest) -> Known:
    """A fixture; `test_contract_in_a_bucket` has the same ones elsewhere."""
    fixture: Known = request.param
    return fixture


@cache
def opened(known: Known, every: bool) -> ckptools.Checkpoint:
    """A fixture, opened once for all tests with what a user would say: by one rank, or by all."""
    return known.open(all_ranks=every)


@cache
def opened_plainly(known: Known, every: bool) -> ckptools.Checkpoint:
    """The same with nothing said."""
    return ckptools.open(known.file, all_ranks=every)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.NAME)
def test_every_format_leaves_an_empty_folder_alone(fmt, tmp_path):
    assert not fmt.detect(tmp_path)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.NAME)
def test_every_format_says_what_it_reads(fmt):
    assert fmt.NAME.isidentifier() and len(fmt.READS) > 20 and len(fmt.KNOWN_BY) > 20
    assert set(fmt.JOINS) <= {"model", "optimizer", "rest"}


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.NAME)
def test_a_format_is_tried_on_its_writers_checkpoints_or_says_that_they_were_made_by_hand(fmt):
    read_by_it = [known.name for known in EVERY if recognised(known.file, FORMATS).NAME == fmt.NAME]
    assert fmt.TRIED or fmt.BY_HAND
    assert bool(read_by_it) == bool(fmt.TRIED), read_by_it


def test_an_empty_folder_is_unknown_and_told_in_one_line(tmp_path):
    with pytest.raises(UnknownFormatError) as error:
        ckptools.open(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, True], ids=["one rank", "all ranks"])
def test_the_shards_of_a_tensor_are_in_rank_order(known, every):
    for _, tensor in tensors_in(opened(known, every).tree):
        ranks = [-1 if s.rank is None else s.rank for s in tensor.shards]
        assert ranks == sorted(ranks)


def test_the_first_format_that_detects_it_reads_it(known):
    first = next(f for f in FORMATS if f.detect(known.file))
    assert opened_plainly(known, False).format == first.NAME


def test_no_format_is_passed_over_because_of_its_names(known):
    for path in (known.file, known.file.parent):
        try:
            first = next((f.NAME for f in FORMATS if f.detect(path)), None)
        except UsageError:
            continue  # the folder holds several
        found = recognised(path, FORMATS)
        assert (found and found.NAME) == first


# A range from a store is more than was asked for; an item that is compressed is unpacked to where its values lie.
@pytest.mark.slow
@pytest.mark.parametrize("known", [k for k in EVERY if k.name != "dcp-zstd"], ids=ids)
def test_opening_reads_no_values(known):
    ck = opened_plainly(known, True)
    values = sum(f.nbytes for f in ck.files) - ck.cost.nbytes
    sources = [source for _, t in tensors_in(ck.tree) for s in t.found for source in s.sources]
    spans = {(source.path, source.record): source.record_span for source in sources}
    assert values >= sum(nbytes for _, nbytes in spans.values())


def test_every_shard_lies_inside_its_file_and_its_tensor(known):
    ck = opened_plainly(known, True)
    files = {f.path for f in ck.files}
    for _, tensor in tensors_in(ck.tree):
        for shard in tensor.found:
            assert shard.sources
            for source in shard.sources:
                start, nbytes = source.record_span
                # An item that was unpacked before is known by the path that was given then, which may be relative.
                assert original_of(source.path).absolute() in files
                assert start + nbytes <= source.path.stat().st_size
                assert start <= source.offset <= start + nbytes
            assert tensor.note or shard.box.inside(tensor.shape)


def one_of_each_kind(known: Known) -> list[Path]:
    """The last of its files whose names differ in numbers only."""
    return list({re.sub(r"\d+", "#", str(f.path)): f.path for f in opened_plainly(known, False).files}.values())


PARTS = {"accelerate", "byte_checkpoint", "composite", "dcp", "deepspeed", "megatron_dist", "transformers_shards"}
"""Formats that have a folder or file in them which another format opens by itself."""


def test_any_file_of_a_checkpoint_opens_all_of_it(known):
    ck = opened_plainly(known, False)
    for path in one_of_each_kind(known):
        try:
            found = ckptools.open(path)
        except UnknownFormatError:
            assert ck.format in PARTS
            continue
        if found.format == ck.format:
            assert ({f.path for f in found.files}, found.whole) == ({f.path for f in ck.files}, ck.whole), path
        else:
            assert ck.format in PARTS, path


def test_one_file_of_several_is_never_whole(known):
    ck = opened_plainly(known, False)
    for path in one_of_each_kind(known):
        try:
            found = ckptools.open(path, only_this_file=True)
        except CkptoolsError:
            continue
        assert not found.whole or found.format != ck.format or len(found.files) == len(ck.files), path


def test_every_leaf_is_in_exactly_one_section(known):
    ck = opened_plainly(known, False)
    paths = [(*s.path, *p) for s in ck.sections for p, _ in walk(s.value)]
    assert sorted(map(repr, paths)) == sorted(repr(p) for p, _ in walk(ck.tree))


@pytest.mark.slow
def test_opening_imports_neither_torch_nor_numpy():
    files = [str(k.file) for k in EVERY]
    code = (
        f"import sys, ckptools\nfor f in {files!r}: repr(ckptools.open(f, all_ranks=True))\nprint(sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'torch'" not in done.stdout and "'numpy'" not in done.stdout


def same(a: object, b: object) -> bool:
    """Whether two trees hold the same values in the same places, tensors bit for bit.

    An object of a foreign class in the first tree is a dict of its attributes in the second one, or was left out.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        a = dequantized(a)
        box = Box.whole(a.shape)
        return (a.shape, a.dtype) == (b.shape, b.dtype) and read_box(a, box).tobytes() == read_box(b, box).tobytes()
    one, two = children_of(a), children_of(b)
    if one is None or two is None:
        return type(a) is type(b) and (hasattr(a, "__slots__") or a == b)
    there = dict(two)
    kept = [(k, v.fields if isinstance(v, Opaque) else v) for k, v in one if not isinstance(v, Opaque) or k in there]
    keys = [k for k, _ in kept] == [k for k, _ in two]
    return keys and type(a) is type(b) and all(same(v, w) for (_, v), (_, w) in zip(kept, two, strict=True))


@pytest.mark.slow
def test_consolidating_and_reopening_gives_the_same_state(known, tmp_path):
    known.open().consolidate(tmp_path / "all.pt", keep_types=True, **known.written_with)
    before, after = opened(known, True), ckptools.open(tmp_path / "all.pt")
    by_rank = {path[:1] for path in before.per_rank}  # written as a list by rank
    for section in before.sections:
        if section.kind != "rng" and section.path[:1] not in by_rank and not isinstance(section.value, Opaque):
            other = next(s for s in after.sections if s.path == section.path)
            assert same(section.value, other.value), section.name
