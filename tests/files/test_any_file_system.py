"""URLs of any file system that fsspec knows, by the one that it keeps in memory."""

from __future__ import annotations

import fsspec
import pytest

import ckptools
from ckptools.consolidate.options import ConsolidateOptions
from ckptools.consolidate.run import consolidate
from ckptools.errors import ReadError, WriteError
from ckptools.files.remote import store
from tests.truth import FIXTURES

RUN7 = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"


@pytest.fixture
def memory():
    found = fsspec.filesystem("memory")
    for file in RUN7.iterdir():
        found.pipe_file(f"run7/{file.name}", file.read_bytes())
    yield found
    found.store.clear()
    found.pseudo_dirs[:] = [""]


def test_a_folder_is_opened_as_on_disk(memory):
    there, here = ckptools.open("memory://run7").model, ckptools.open(RUN7).model
    assert [there[key].numpy().tobytes() for key in here] == [here[key].numpy().tobytes() for key in here]


def test_a_file_that_is_replaced_while_it_is_read_is_no_mixture(memory):
    opened = ckptools.open("memory://run7")
    memory.pipe_file("run7/rank0.pt", (RUN7 / "rank1.pt").read_bytes())
    with pytest.raises(ReadError, match=r"rank0\.pt: .*was replaced by another version"):
        [opened.model[key].numpy() for key in opened.model]


def test_an_output_is_there_once_it_is_whole(memory):
    consolidate("memory://run7", "memory://out/model.safetensors", ConsolidateOptions(check=True))
    there, here = ckptools.open("memory://out").model, ckptools.open(RUN7).model
    assert [there[key].numpy().tobytes() for key in here] == [here[key].numpy().tobytes() for key in here]
    assert [name for name in memory.store if name.startswith("/out")] == ["/out/model.safetensors"]


def test_an_output_that_fails_leaves_nothing(memory, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(type(memory), "mv", refuse)
    with pytest.raises(WriteError, match=r"^memory://out/model\.safetensors: cannot be written: access denied"):
        consolidate("memory://run7", "memory://out/model.safetensors", ConsolidateOptions())
    assert not any(name.startswith("/out") for name in memory.store)


def test_what_fails_for_a_moment_is_tried_again(memory, monkeypatch):
    monkeypatch.setattr(store, "FIRST_WAIT", 0.01)
    good, failures = memory.cat_file, [ConnectionResetError, TimeoutError]
    monkeypatch.setattr(
        type(memory), "cat_file", lambda _, *a, **k: raised(failures.pop()) if failures else good(*a, **k)
    )
    assert ckptools.open("memory://run7").model and not failures


def raised(error: type[Exception]) -> bytes:
    raise error


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (
            "s4://bucket/x",
            "is not read; s3://, gs://, .* fsspec has a file system for: Protocol not known: s4",
        ),
        ("sftp://me:secret@host/x", "a URL with a user's name or password is not read"),
        ("memory://nothing/x", "no such file or folder"),
    ],
)
def test_what_cannot_be_opened_is_told_in_one_line(memory, url, reason):
    with pytest.raises(ReadError, match=reason) as error:
        ckptools.open(url)
    assert "\n" not in str(error.value) and "secret" not in str(error.value)
