"""Outputs in a bucket: what is written there is what is written on disk, and it appears whole or not at all."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import boto3
import obstore
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptools
from ckptools.consolidate import options
from ckptools.consolidate.publishing.multipart import MultipartOutput
from ckptools.consolidate.run import consolidate
from ckptools.errors import DamagedError, OutputExistsError, UsageError, WriteError
from ckptools.files.remote import store
from ckptools.files.zip_archive import DESCRIPTOR
from tests.object_store import BUCKET, settings
from tests.truth import FIXTURES

SOURCE = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"
Options = options.ConsolidateOptions


@pytest.fixture(autouse=True)
def user(s3, monkeypatch):
    for name, value in settings(s3.address).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def client(s3):
    """The bucket, as another program sees it."""
    return boto3.client("s3", endpoint_url=s3.address, region_name="us-east-1")


@pytest.fixture
def place() -> str:
    """A folder of the bucket for one test."""
    return f"upload-{random.randrange(1 << 40)}"


def url(key: str) -> str:
    return f"s3://{BUCKET}/{key}"


def found(client, place: str) -> dict[str, bytes]:
    """Every object in a folder of the bucket, by name."""
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{place}/").get("Contents", [])
    read = (client.get_object(Bucket=BUCKET, Key=one["Key"])["Body"].read() for one in listed)
    return {one["Key"].removeprefix(f"{place}/"): data for one, data in zip(listed, read, strict=True)}


def under_way(client, place: str) -> list[str]:
    """Uploads in a folder of the bucket that were neither completed nor aborted."""
    uploads = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    return [one["Key"] for one in uploads if one["Key"].startswith(place)]


def downloaded(client, place: str, folder: Path) -> Path:
    for name, data in found(client, place).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("most", [None, 2000])
def test_safetensors_in_a_bucket_are_byte_for_byte_those_on_disk(most, client, place, tmp_path):
    consolidate(SOURCE, tmp_path / "model.safetensors", Options(max_shard_size=most))
    consolidate(SOURCE, url(f"{place}/model.safetensors"), Options(max_shard_size=most))
    here = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert found(client, place) == here and (len(here) > 3) == (most is not None)
    assert under_way(client, place) == []


@pytest.mark.slow
def test_a_pt_in_a_bucket_is_read_by_plain_torch_load_as_the_one_on_disk(client, place, tmp_path):
    consolidate(SOURCE, tmp_path / "here.pt", Options())
    done = consolidate(SOURCE, url(f"{place}/all.pt"), Options(check=True))
    there = downloaded(client, place, tmp_path) / "all.pt"
    archive = zipfile.ZipFile(there)
    assert archive.testzip() is None
    for record in (one for one in archive.infolist() if "/data/" in one.filename):
        described = struct.pack("<4s3L", b"PK\7\x08", record.CRC, record.file_size, record.file_size)
        assert record.flag_bits & DESCRIPTOR and described in there.read_bytes()
    for mapped in (False, True):
        assert_same(torch.load(there, mmap=mapped), torch.load(tmp_path / "here.pt"))
    assert done.read_back == f"{done.tensors} tensors read back from the bucket, all equal"


@pytest.mark.slow
def test_a_dcp_in_a_bucket_is_read_by_torch_as_the_one_on_disk(client, place, tmp_path):
    consolidate(SOURCE, tmp_path / "here.dcp", Options(max_shard_size=40_000))
    consolidate(SOURCE, url(f"{place}/there.dcp"), Options(max_shard_size=40_000))
    downloaded(client, place, tmp_path)
    for name in ("here", "there"):
        dcp_to_torch_save(tmp_path / f"{name}.dcp", tmp_path / f"{name}.pt")
    read = [torch.load(tmp_path / f"{name}.pt", weights_only=False) for name in ("here", "there")]
    assert_same(*read)


def assert_same(one: object, other: object) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other) and one.dtype == other.dtype
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


@pytest.mark.slow
def test_a_bucket_is_copied_into_another_place_of_itself(s3, place):
    consolidate(s3.put(SOURCE), url(f"{place}/"), Options(check=True))
    here, there = ckptools.open(SOURCE).model, ckptools.open(url(f"{place}/model.safetensors")).model
    assert {k: v.numpy().tobytes() for k, v in here.items()} == {k: v.numpy().tobytes() for k, v in there.items()}


@pytest.mark.slow
def test_what_is_there_already_is_replaced_only_if_that_is_asked(client, place):
    out = url(f"{place}/model.safetensors")
    client.put_object(Bucket=BUCKET, Key=f"{place}/model.safetensors", Body=b"old")
    with pytest.raises(OutputExistsError, match=f"{out}: exists; --force overwrites it"):
        consolidate(SOURCE, out, Options())
    assert found(client, place) == {"model.safetensors": b"old"}
    for _ in range(2):  # then the JSON beside it is there too
        consolidate(SOURCE, out, Options(only="all", force=True))
    assert len(found(client, place)["model.safetensors"]) > 1000


@pytest.mark.slow
def test_files_with_an_index_are_replaced_with_it(client, place):
    for most in (2000, 4000):
        consolidate(SOURCE, url(f"{place}/"), Options(max_shard_size=most, force=True, check=True))
        index = json.loads(found(client, place)["model.safetensors.index.json"])
        assert {*index["weight_map"].values(), "model.safetensors.index.json"} == set(found(client, place))


def test_what_appears_meanwhile_is_not_replaced(client, place, monkeypatch):
    finish = MultipartOutput.finish
    put = {"Bucket": BUCKET, "Key": f"{place}/model.safetensors", "Body": b"another's"}
    monkeypatch.setattr(
        MultipartOutput, "finish", lambda output, crcs: (finish(output, crcs), client.put_object(**put))
    )
    with pytest.raises(WriteError, match=r"model\.safetensors: has appeared meanwhile; nothing was written"):
        consolidate(SOURCE, url(f"{place}/model.safetensors"), Options())
    assert found(client, place) == {"model.safetensors": b"another's"} and under_way(client, place) == []


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), r"w differs in the bucket at byte \d+"),
        (lambda data: data[:9] + b"?" + data[10:], "differs in the bucket at byte 0"),
        (lambda data: data[:-4], r"the bucket has (\d+) bytes of it; \d+ were sent"),
    ],
    ids=["value", "header", "length"],
)
def test_what_a_store_gives_back_otherwise_is_named_and_removed(harm, told, client, place, tmp_path, monkeypatch):
    torch.save({"w": torch.arange(9.0)}, tmp_path / "in.pt")
    publish, at = MultipartOutput.publish, {"Bucket": BUCKET, "Key": f"{place}/x.safetensors"}

    def spoiled(output, *rest) -> None:
        publish(output, *rest)
        client.put_object(**at, Body=harm(found(client, place)["x.safetensors"]))

    monkeypatch.setattr(MultipartOutput, "publish", spoiled)
    with pytest.raises(WriteError, match=rf"{place}/x\.safetensors: {told}.* it was removed"):
        consolidate(tmp_path / "in.pt", url(f"{place}/x.safetensors"), Options(check=True))
    assert found(client, place) == {}


@pytest.mark.slow
def test_of_a_dcp_that_is_replaced_no_file_stays(client, place):
    consolidate(SOURCE, url(f"{place}/out.dcp"), Options(max_shard_size=20_000))
    assert len(found(client, place)) > 3
    consolidate(SOURCE, url(f"{place}/out.dcp"), Options(force=True))
    assert sorted(found(client, place)) == ["out.dcp/.metadata", "out.dcp/__0_0.distcp", "out.dcp/ckptools.json"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "told"),
    [("broken", "500 Internal Server Error"), ("refused", "access denied by the store")],
)
@pytest.mark.parametrize("name", ["all.pt", "out.dcp"])
def test_of_a_store_that_fails_one_line_is_told_and_nothing_stays(where, told, name, client, place, monkeypatch):
    monkeypatch.setattr(store, "BUCKET_RETRIES", 1)
    with pytest.raises(
        WriteError, match=rf"^s3://{BUCKET}/{place}/{where}/{name}.*: cannot be written: .*{told}"
    ) as error:
        consolidate(SOURCE, url(f"{place}/{where}/{name}"), Options())
    assert "\n" not in str(error.value) and error.value.exit_code == 3
    assert found(client, place) == {}
    assert under_way(client, place) == [] or obstore.__version__ < "0.12"  # that needs Python 3.11


def test_of_a_source_that_is_damaged_nothing_is_written(client, place, tmp_path):
    torch.save({"w": torch.arange(4096.0)}, tmp_path / "bad.pt")
    data = bytearray((tmp_path / "bad.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "bad.pt").write_bytes(data)
    with pytest.raises(DamagedError):
        consolidate(tmp_path / "bad.pt", url(f"{place}/out.pt"), Options())
    assert found(client, place) == {} and under_way(client, place) == []


@pytest.mark.parametrize("option", ["manifest", "resume"])
def test_what_needs_a_disk_is_refused(option, place):
    with pytest.raises(UsageError, match=f"out.pt: --{option} needs an output on a disk"):
        consolidate(SOURCE, url(f"{place}/out.pt"), Options(**{option: True}))


def test_a_bucket_that_is_not_there_is_told_in_one_line():
    with pytest.raises(WriteError, match=r"^s3://nowhere/out\.pt: .*NoSuchBucket"):
        consolidate(SOURCE, "s3://nowhere/out.pt", Options())


CHILD = """
import re, sys
from pathlib import Path
from ckptools.consolidate.options import ConsolidateOptions
from ckptools.consolidate.run import consolidate
print("begun", flush=True)
consolidate(sys.argv[1], sys.argv[2], ConsolidateOptions(jobs=4))
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def child(source: Path, out: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", CHILD, source, out], stdout=subprocess.PIPE, text=True)


def large(path: Path, mib: int) -> Path:
    """A checkpoint of 8 tensors."""
    torch.save({f"w{n}": torch.full((mib << 17,), float(n), dtype=torch.uint8) for n in range(8)}, path)
    return path


@pytest.mark.slow
def test_memory_stays_bounded_however_large_the_output_is(client, place, tmp_path):
    with child(large(tmp_path / "large.pt", 320), url(f"{place}/out.safetensors")) as process:
        _, kib = process.communicate(timeout=60)[0].split()
    assert int(kib) < 250 << 10
    assert client.head_object(Bucket=BUCKET, Key=f"{place}/out.safetensors")["ContentLength"] > 320 << 20


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_under_the_name(client, place, tmp_path):
    source = large(tmp_path / "large.pt", 64)
    for number in range(3):
        with child(source, url(f"{place}/{number}/out.dcp")) as process:
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
            time.sleep(random.uniform(0, 0.8))
            process.kill()
        left = set(found(client, f"{place}/{number}"))  # the metadata come last: without them nothing opens it
        assert "out.dcp/.metadata" not in left or "out.dcp/__0_0.distcp" in left
