"""Rank files read in processes: the same checkpoint as without, whatever happens to a process."""

from __future__ import annotations

import gzip
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ckptools.errors import ReadError
from ckptools.formats import file_reader, reader_processes
from ckptools.formats.file_reader import MIN_FILES, FileReader
from ckptools.formats.open import open_checkpoint
from ckptools.formats.reader_processes import Receiver, Sender
from ckptools.model.regions import Box
from ckptools.model.shards import Shard, ShardList, Source
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in
from ckptools.pickles.machine import Machine
from ckptools.pickles.machine_state import RepeatedRecords
from ckptools.pickles.reader import AlikeFiles, Saved, first_of_many
from ckptools.training_state import modules
from tests.pickles.test_shard_runs import spelled
from tests.truth import FIXTURES
from tools.benchmarks.load import MANY

WORLD = 20
FILES = sorted(p for p in FIXTURES.glob("**/*.pt") if p.stat().st_size)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint of 20 ranks, written by real FSDP1 in another process."""
    folder = tmp_path_factory.mktemp("world") / "run"
    subprocess.run([sys.executable, "-c", MANY, str(folder), "0", str(WORLD), str(WORLD)], check=True)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def rank_file(folder, rank):
    return folder / f"ep0-ba1-rank{rank}.pt"


def told(folder, jobs):
    """Everything about a checkpoint but the seconds that it took."""
    ck = open_checkpoint(folder, all_ranks=True, jobs=jobs)
    cost = (ck.cost.files, ck.cost.nbytes)
    return spelled(ck.tree), ck.files, ck.problems, ck.world_size, ck.step, ck.names, ck.differing, cost


def fields(saved):
    return spelled(saved.tree), saved._replace(tree=None)


def read_by_processes(paths, count=2):
    """What processes answer for each path, in order."""
    processes = reader_processes.started(paths, count, AlikeFiles(first_of_many(paths)))
    try:
        return [processes.take(path) for path in paths]
    finally:
        processes.close()


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [2, 3, 16])
def test_a_checkpoint_is_the_same_with_processes_and_without(whole, jobs):
    assert told(whole, jobs) == told(whole, 1)


def test_every_file_of_it_was_read_by_a_process(whole):
    paths = [rank_file(whole, rank) for rank in range(WORLD)]
    found = read_by_processes(paths)
    assert [fields(saved) for saved in found] == [fields(modules.read_file(path)) for path in paths]


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 7], ids=["the first file", "a file in the middle"])
@pytest.mark.parametrize("damage", ["cut", "no archive", "another pickle", "gone"])
def test_one_damaged_file_among_twenty_is_the_same_problem(folder, damage, first):
    path = rank_file(folder, first)
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        at = data.index(b"shards_metadata")
        kinds = {"cut": data[:2000], "no archive": b"x" * 3000, "another pickle": data[:at] + b"?" + data[at + 1 :]}
        path.write_bytes(kinds[damage])
    without = told(folder, 1)
    assert told(folder, 2) == without and any(problem.rank == first for problem in without[2])


def test_the_error_of_a_file_that_was_named_is_the_same(folder):
    path = rank_file(folder, 3)
    path.write_bytes(b"x" * 3000)
    errors = []
    for jobs in (1, 2):
        with pytest.raises(ReadError) as raised:
            open_checkpoint(path, all_ranks=True, jobs=jobs)
        errors.append((str(raised.value), raised.value.kind))
    assert errors[0] == errors[1]


def test_files_of_a_process_that_dies_are_read_by_who_asked(whole):
    paths = [rank_file(whole, rank) for rank in range(WORLD)]
    with FileReader(modules.read_file, jobs=2) as reader:
        reader.ahead(paths)
        found = [reader(paths[0])]
        for process in reader._processes._processes:
            os.kill(process._process.pid, signal.SIGKILL)
        found += map(reader, paths[1:])
    assert [saved.path for saved in found] == paths
    assert [spelled(saved.tree) for saved in found] == [spelled(modules.read_file(path).tree) for path in paths]


def test_a_compressed_file_is_left_to_who_asked_for_its_tensors_lie_in_a_temporary_file(folder):
    path = rank_file(folder, 0).with_suffix(".pt.gz")
    path.write_bytes(gzip.compress(rank_file(folder, 0).read_bytes()))
    assert [saved is None for saved in read_by_processes([path, rank_file(folder, 1)])] == [True, False]


def test_files_are_told_of_in_order_as_they_are_read(whole):
    seen = []
    open_checkpoint(whole, all_ranks=True, jobs=2, on_file=seen.append)
    assert seen == [rank_file(whole, rank) for rank in range(WORLD)]


@pytest.mark.parametrize("jobs, count", [(1, WORLD), (2, MIN_FILES - 1), (None, MIN_FILES - 1)])
def test_few_files_or_one_job_start_no_process(whole, monkeypatch, jobs, count):
    monkeypatch.setattr(file_reader, "MIN_SECONDS", 0.0)
    paths = [rank_file(whole, rank) for rank in range(count)]
    with FileReader(modules.read_file, jobs) as reader:
        reader.ahead(paths)
        assert [reader(path).path for path in paths] == paths and reader._processes is None


@pytest.mark.parametrize("seconds", [0.0, 1000.0], ids=["a while", "no time"])
def test_unless_told_how_many_processes_are_started_only_for_files_that_take_a_while(whole, monkeypatch, seconds):
    monkeypatch.setattr(file_reader, "MIN_SECONDS", seconds)
    monkeypatch.setattr(file_reader, "_cores", lambda: 2)
    paths = [rank_file(whole, rank) for rank in range(WORLD)]
    with FileReader(modules.read_file) as reader:
        reader.ahead(paths)
        assert [reader(path).path for path in paths] == paths
        assert (reader._processes is not None) == (seconds == 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(FIXTURES)))
def test_what_a_process_answers_is_what_was_read(path):
    sender, receiver, repeated = Sender(), Receiver({}), RepeatedRecords()
    for _ in range(2):
        saved = modules.read_file(path, repeated)
        assert fields(receiver.decode(sender.encode(saved))) == fields(saved)


def test_a_list_of_the_shards_of_all_ranks_is_sent_once_and_held_once(whole):
    sender, repeated = Sender(), RepeatedRecords()
    paths = [rank_file(whole, rank) for rank in range(3)]
    sent = [sender.encode(modules.read_file(path, repeated)) for path in paths]
    assert len(sent[0]) > len(sent[1]) + 300 and abs(len(sent[1]) - len(sent[2])) < 100
    receiver = Receiver({})
    lists = [
        [t.shards.listed for _, t in tensors_in(receiver.decode(data).tree) if isinstance(t.shards, ShardList)]
        for data in sent
    ]
    assert lists[0] and all(a is b is c for a, b, c in zip(*lists, strict=True))


def states(*seeds):
    """Random states as the inert reader gives those of all ranks: one tuple and one bytes for a seed, for all files."""
    repeated = RepeatedRecords()
    made = [(random.Random(seed).getstate(), np.random.RandomState(seed).get_state()[1]) for seed in seeds]
    return [Machine(pickle.dumps(made, 2), repeated=repeated).load() for _ in range(2)]


def sent(trees, same):
    """What is received of trees that one process sends, and how long each answer is."""
    sender, receiver = Sender(), Receiver(same)
    answers = [sender.encode(SAVED._replace(tree=tree)) for tree in trees]
    return [receiver.decode(answer).tree for answer in answers], [len(answer) for answer in answers]


SAVED = Saved(Path("a.pt"), None, frozenset(), (), 0, 0.0, 0)


def test_random_states_are_sent_once_by_a_process_and_held_once_for_all():
    same, trees = {}, states(1, 2)
    received, lengths = sent(trees, same)
    others, _ = sent(states(2), same)
    assert spelled(received) == spelled(trees) and lengths[1] < lengths[0] / 20
    second = [tree[-1] for tree in (*received, *others)]
    assert len({id(python[1]) for python, _ in second}) == len({id(array.data) for _, array in second}) == 1


def test_what_is_told_by_its_number_inside_a_list_of_shards_is_told_apart_from_the_list():
    box = Box((1,) * 300, (2,) * 300)
    whole = [Source(Path("a.pt"), n, "float32", box.sizes, box.offsets, f"record {n}", (0, 8)) for n in range(12)]
    lists = [tuple(Shard(box, n, source) for n, source in enumerate(some)) for some in (whole, whole[:10])]
    tree = [Tensor(box.sizes, "float32", lists[n]) for n in (0, 1, 0)] + ["record 3", "another record"]
    received, _ = sent([tree, tree[::-1]], {})
    assert [spelled(one) for one in received] == [spelled(tree), spelled(tree[::-1])]


@pytest.mark.parametrize("most", [0, 300, 10_000])
def test_large_values_that_are_equal_and_not_the_same_stay_apart(monkeypatch, most):
    monkeypatch.setattr(reader_processes, "MAX_SENT", most)
    large = [(1,) * 300, (True,) * 300, (1.0,) * 300, b"\1" * 300, (1,) * 299 + ((1,) * 300,), [1] * 300]
    received, lengths = sent([large, large, large[:3]], {})
    assert repr(received) == repr([large, large, large[:3]])
    assert (lengths[1] < lengths[0]) == (most > 0)


@pytest.mark.parametrize("value", [os.system, subprocess.Popen, Receiver, pickle.loads])
def test_an_answer_with_any_other_name_in_it_is_refused(value):
    with pytest.raises(pickle.UnpicklingError, match="does not belong"):
        Receiver({}).decode(pickle.dumps(value))


def test_an_answer_that_is_no_structure_is_refused():
    with pytest.raises(pickle.UnpicklingError, match="no file's structure"):
        Receiver({}).decode(pickle.dumps({"a": 1}))


# -- whole programs ----------------------------------------------------------------------------------------------

FOREVER = """
import sys
sys.path.append(sys.argv[2])
import ckptools.formats.open as opening
while True:
    opening.open_checkpoint(sys.argv[1], all_ranks=True, jobs=2)
    print("opened", flush=True)
"""


def alive(word):
    """The processes with a word among their arguments."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_program_that_is_interrupted_leaves_no_process(whole, tmp_path, number):
    word = str(tmp_path / "no-such-folder")
    program = subprocess.Popen(
        [sys.executable, "-c", FOREVER, str(whole), word], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    program.stdout.readline()
    deadline = time.monotonic() + 20
    while len(alive(word)) < 3 and time.monotonic() < deadline:
        pass  # until it reads again, with its two processes
    program.send_signal(number)
    assert program.wait(20) != 0
    program.stdout.close()
    while alive(word) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(word) == []


def test_a_script_without_a_guard_is_run_once(whole, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom ckptools.formats.open import open_checkpoint\n"
        "open('runs', 'a').write('once ')\n"
        "print(open_checkpoint(sys.argv[1], all_ranks=True, jobs=2).world_size.value)\n"
    )
    done = subprocess.run([sys.executable, script, whole], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr, (tmp_path / "runs").read_text()) == (f"{WORLD}\n", "", "once ")


def test_a_folder_that_a_program_imports_from_stands_before_none_of_pythons_modules(whole, tmp_path):
    for name in ("struct", "pickle", "queue", "ckptools"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w').write('yes')\n")
    code = (
        "import os, queue, pickle, struct, sys\nimport ckptools.formats.open as opening\n"
        "sys.path.insert(0, os.getcwd())\nopening.open_checkpoint(sys.argv[1], all_ranks=True, jobs=2)"
    )
    subprocess.run([sys.executable, "-I", "-c", code, str(whole)], cwd=tmp_path, check=True)
    assert not (tmp_path / "imported").exists()
