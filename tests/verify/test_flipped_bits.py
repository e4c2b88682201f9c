"""One flipped bit, anywhere in a file that has checksums: `verify --deep` says so, or nothing that counts changed."""

from __future__ import annotations

import shutil
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckptools
from ckptools.errors import CkptoolsError
from ckptools.model.tensor import Tensor
from ckptools.model.tree import walk
from tests.thorough import examples
from tests.truth import FIXTURES

pytestmark = pytest.mark.slow

CHECKPOINTS = {
    "one file of Lightning": ("lightning-trainer-ddp/ckpt", "last.ckpt"),
    "rank files": ("torch2.4.1-fsdp2-w3", ""),
    "rank files of ShardedTensors": ("torch2.13.0-fsdp1-sharded-w4", ""),
    "rank files of DTensors on a 2-D mesh": ("torch2.13.0-fsdp2-tp2x2-w4", ""),
    "a DCP": ("torch2.13.0-fsdp2-dcp-w3/ckpt", ""),
}
"""Folder among the fixtures, and what to open in it."""

FORMS: dict[str, dict[str, Any]] = {
    "out.pt": {},
    "bf16.pt": {"dtype": "bfloat16", "only": "model"},
    "out.safetensors": {},
    "out.dcp": {},
}
"""Outputs that must not take over a flipped bit, and the options for each."""

CHECKED = (".pt", ".ckpt", ".distcp")
"""Files whose bytes all have a checksum; a `.metadata` has none, and says less than its items do."""


def content(path: Path) -> list[tuple[str, Any]]:
    """Everything that a checkpoint holds: values of tensors as bytes, anything else as text."""
    ck = ckptools.open(path, all_ranks=True)
    return [(repr(p), v.numpy().tobytes() if isinstance(v, Tensor) else repr(v)) for p, v in walk(ck.tree)]


@dataclass(frozen=True)
class Copy:
    """A copy of a checkpoint, with what it holds and what comes out of it."""

    path: Path
    content: list[tuple[str, Any]]
    consolidated: dict[str, list[tuple[str, Any]]]

    @property
    def files(self) -> list[Path]:
        folder = self.path if self.path.is_dir() else self.path.parent
        return sorted(p for p in folder.iterdir() if p.suffix in CHECKED)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def copied(request, tmp_path_factory):
    folder, file = CHECKPOINTS[request.param]
    place = tmp_path_factory.mktemp("flipped")
    path = Path(shutil.copytree(FIXTURES / folder, place / "ckpt")) / file
    assert ckptools.verify(path, deep=True).ok
    consolidated = {}
    for form, options in FORMS.items():
        ckptools.consolidate(path, place / form, **options)
        consolidated[form] = content(place / form)
    return Copy(path, content(path), consolidated)


FLIPS = settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))


@contextmanager
def flipped(copied: Copy, data: st.DataObject) -> Iterator[None]:
    """Flip one bit of one file, and put it back."""
    file = data.draw(st.sampled_from(copied.files), "file")
    before = file.read_bytes()
    at, bit = data.draw(st.integers(0, len(before) - 1), "byte"), data.draw(st.integers(0, 7), "bit")
    file.write_bytes(before[:at] + bytes([before[at] ^ 1 << bit]) + before[at + 1 :])
    try:
        yield
    finally:
        file.write_bytes(before)


@FLIPS
@given(data=st.data())
def test_verify_finds_it_or_nothing_has_changed(copied, data):
    with flipped(copied, data):
        assert found(copied.path) or content(copied.path) == copied.content


@FLIPS
@given(data=st.data(), form=st.sampled_from(list(FORMS)))
def test_consolidation_refuses_it_or_writes_the_same(copied, tmp_path_factory, data, form):
    out = tmp_path_factory.getbasetemp() / f"again-{form}"
    with flipped(copied, data):
        try:
            ckptools.consolidate(copied.path, out, force=True, **FORMS[form])
        except CkptoolsError:
            return
        assert content(out) == copied.consolidated[form]


def found(path: Path) -> bool:
    """Whether verify finds an error."""
    try:
        return not ckptools.verify(path, deep=True).ok
    except CkptoolsError:
        return True


def framing(path: Path) -> list[int]:
    """The bytes of an archive that hold no tensor, no pickle and no padding."""
    raw = path.read_bytes()
    with zipfile.ZipFile(path) as opened:
        entries, directory = opened.infolist(), opened.start_dir
    bytes_ = list(range(directory, len(raw)))
    for entry in entries:
        n_name, n_extra = struct.unpack_from("<HH", raw, entry.header_offset + 26)
        start = entry.header_offset + 30 + n_name
        bytes_ += range(entry.header_offset, start)
        bytes_ += range(start + n_extra, start + n_extra + entry.file_size) if entry.file_size < 64 else ()
    return bytes_


def loaded(path: Path) -> Any:
    """What torch reads of a file, as text; None where it refuses."""
    try:
        return repr(torch.load(path, weights_only=True, mmap=False))
    except Exception:
        return None


def test_every_bit_of_the_container_that_changes_what_torch_loads_is_found(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"w": torch.arange(3.0) + 1, "n": 5}, path)
    raw, before, missed = path.read_bytes(), loaded(path), []
    for at in framing(path):
        for bit in range(8):
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :])
            if loaded(path) != before and not found(path):
                missed.append((at, bit))
    assert not missed


@pytest.mark.parametrize("bit", [0x10, 0x20])
def test_the_folder_bit_of_an_item_of_a_dcp_is_found(tmp_path, bit):
    folder = Path(shutil.copytree(FIXTURES / "torch2.13.0-fsdp2-dcp-w3/ckpt", tmp_path / "ckpt"))
    file = folder / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[raw.index(b"PK\1\2") + 38] ^= bit
    file.write_bytes(raw)
    assert found(folder) == (bit == 0x10)


def test_a_record_that_torch_looks_at_first_is_checked_in_an_item(tmp_path):
    folder = Path(shutil.copytree(FIXTURES / "torch2.13.0-fsdp2-dcp-w3/ckpt", tmp_path / "ckpt"))
    file = folder / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    name = raw.index(b"archive/version")
    raw[name - 30] ^= 1
    file.write_bytes(raw)
    checks = ckptools.verify(folder, deep=True).checks
    assert any("record version" in p.message for check in checks for p in check.problems)
