"""Checkpoints in a bucket: what is opened there is what is opened on disk, by ranges."""

from __future__ import annotations

import pytest

import ckptools
from ckptools.cli.arguments import keys_beginning, sections_beginning
from ckptools.errors import ReadError, UsageError
from ckptools.files.remote.store import Store
from ckptools.formats import options as limits
from ckptools.formats.shared import checkpoint_builder
from ckptools.model.tree import tensors_in
from tests.fake_world import create_rank
from tests.object_store import BUCKET
from tests.truth import FIXTURES, SEVERAL

FSDP1 = "torch2.13.0-fsdp1-sharded-w4"
FOLDERS = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir() and path not in SEVERAL)


pytestmark = pytest.mark.usefixtures("bucket")


@pytest.fixture
def requests(monkeypatch) -> list[tuple[object, ...]]:
    """What is asked of the server from now on."""
    asked: list[tuple[object, ...]] = []
    for name in ("_fetch", "_list", "_look"):
        monkeypatch.setattr(Store, name, _noted(getattr(Store, name), asked))
    return asked


def _noted(ask, asked):
    def noting(*arguments):
        asked.append(arguments[1:])
        return ask(*arguments)

    return noting


def sources(tree: object) -> list[tuple[object, ...]]:
    """Where every shard lies, with the file's name in place of its path."""
    shards = [s.source for _, tensor in tensors_in(tree) for s in tensor.shards if s.source is not None]
    return [(s.path.name, s.offset, s.record, s.crc) for s in shards]


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_in_a_bucket_is_opened_as_on_disk(name, s3):
    there = ckptools.open(s3.put(FIXTURES / name), all_ranks=True)
    here = ckptools.open(FIXTURES / name, all_ranks=True)
    assert there.format == here.format and there.world_size == here.world_size and there.step == here.step
    assert [str(p) for p in there.problems] == [str(p) for p in here.problems]
    assert sources(there.tree) == sources(here.tree) != []


@pytest.mark.slow
def test_values_come_out_of_a_bucket(s3):
    there, here = ckptools.open(s3.put(FIXTURES / FSDP1)).model, ckptools.open(FIXTURES / FSDP1).model
    key = next(iter(here))
    assert there[key].numpy().tobytes() == here[key].numpy().tobytes()


def test_what_is_not_there_is_told_with_bucket_and_key(s3):
    with pytest.raises(ReadError, match=rf"s3://{BUCKET}/nothing/rank0\.pt: no such file or folder"):
        ckptools.open(f"s3://{BUCKET}/nothing/rank0.pt")


def test_files_of_a_bucket_and_of_this_machine_are_no_one_checkpoint(s3):
    s3.put(FIXTURES / FSDP1)
    here, there = FIXTURES / FSDP1 / "rank0.pt", f"s3://{BUCKET}/{FSDP1}/rank1.pt"
    for given in ([here, there], [there, here]):
        with pytest.raises(UsageError, match="some of the paths are of this machine and some are URLs"):
            ckptools.open(given)


def test_completion_asks_no_store(s3, requests):
    s3.put(FIXTURES / FSDP1)
    assert keys_beginning(f"s3://{BUCKET}/{FSDP1}/rank0.pt", "") == []
    assert sections_beginning(f"s3://{BUCKET}/{FSDP1}/rank0.pt", "sched") == ["scheduler"] and not requests


def test_a_bucket_that_is_not_there_is_told_in_one_line(s3):
    with pytest.raises(ReadError, match=r"s3://elsewhere/rank0\.pt: cannot be read: .*NoSuchBucket") as error:
        ckptools.open("s3://elsewhere/rank0.pt")
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_rank_file_of_256_is_opened_by_six_requests_and_little_more_than_is_read_on_disk(s3, tmp_path, requests):
    file = create_rank(tmp_path / "world", 256, 7, parameters=17)
    for rank in range(256):
        s3.put_bytes(f"world/{file.name.replace('7', str(rank))}", file.read_bytes() if rank == 7 else b"not looked at")
    there, here = ckptools.open(f"s3://{BUCKET}/world/{file.name}"), ckptools.open(file)
    assert len(requests) <= 6
    assert there.cost.nbytes <= 1.3 * here.cost.nbytes


def test_a_file_that_is_replaced_while_it_is_read_is_no_mixture(s3):
    name = "torch2.13.0-fsdp1-sharded-w4"
    url = s3.put(FIXTURES / name)
    opened = ckptools.open(url)
    s3.put_bytes(f"{name}/rank0.pt", (FIXTURES / name / "rank1.pt").read_bytes())
    with pytest.raises(ReadError, match=r"rank0\.pt: .*was replaced by another version"):
        [opened.model[key].numpy() for key in opened.model]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepspeed-z3-bf16/ckpt", "megatron-tp2pp2-fp32/legacy", FSDP1])
def test_of_many_files_that_are_not_read_only_the_list_is_asked_for(name, s3, monkeypatch):
    url = f"{s3.put(FIXTURES / name.partition('/')[0])}/{name.partition('/')[2]}".rstrip("/")
    monkeypatch.setattr(limits, "MAX_RANKS", 0)  # so that not all are read
    few = {f.path: f.status for f in ckptools.open(url).files if f.status != "read"}
    monkeypatch.setattr(checkpoint_builder, "MAX_FILES", 1)
    many = {f.path: f.status for f in ckptools.open(url).files if f.status != "read"}
    assert set(few.values()) == {"seen"} and many == dict.fromkeys(few, "listed")
