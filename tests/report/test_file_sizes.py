"""The sizes on a report: files are tensors and overhead, to the byte, whatever is stored twice or is not here."""

from __future__ import annotations

import re
import shutil
import zipfile
from itertools import accumulate
from pathlib import Path

import pytest

import ckptools
from ckptools.report.file_sizes import FileSizes, file_sizes
from ckptools.report.html import findings, report_page
from tests.display.test_report_page import shown
from tests.truth import FIXTURES

COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"
FOLDERS = (
    COMPOSER,
    FIXTURES / "torch2.13.0-fsdp2-dcp-w3" / "ckpt",
    FIXTURES / "torch2.0.1-fsdp1-hsdp2x2-st-w4",
    FIXTURES / "hf-llama-safetensors-bf16" / "ckpt",
    FIXTURES / "megatron-tp2dp2-distopt" / "ckpt",
    FIXTURES / "torchao-int8" / "ckpt",
    FIXTURES / "fairscale-fsdp-tied-w3" / "ckpt",
)


def sizes_of(path: Path) -> FileSizes:
    found = file_sizes(ckptools.open(path, all_ranks=True))
    assert found is not None
    return found


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(FIXTURES).parts[0])
def test_each_total_is_the_sum_of_the_lines_above_it_and_the_last_is_the_size_of_the_files(folder):
    found = sizes_of(folder)
    parts = [0 if line.total else line.nbytes for line in found.lines]
    assert [line.nbytes for line in found.lines if line.total] == [
        total for total, line in zip(accumulate(parts), found.lines, strict=True) if line.total
    ]
    assert found.lines[-1].nbytes == sum(one.file.path.stat().st_size for one in found.files)
    assert all(0 <= one.tensors <= one.file.nbytes for one in found.files)


def test_the_bytes_of_tensors_are_those_that_the_directory_of_a_rank_file_states():
    for one in sizes_of(COMPOSER).files:
        with zipfile.ZipFile(one.file.path) as archive:
            stored = sum(entry.file_size for entry in archive.infolist() if "/data/" in entry.filename)
        assert one.tensors == stored > 0


def test_what_is_in_a_missing_file_is_subtracted(tmp_path):
    folder = shutil.copytree(COMPOSER, tmp_path / "run")
    whole = sizes_of(folder)
    (folder / "ep0-ba5-rank2.pt").unlink()
    found = sizes_of(folder)
    absent = {line.name: line.nbytes for line in found.lines}["in no file here"]
    lost = whole.files[2].tensors
    assert -lost <= absent < 0 and found.lines[-1].nbytes == whole.lines[-1].nbytes - whole.files[2].file.nbytes


def test_bytes_of_a_damaged_file_are_no_overhead(tmp_path):
    folder = shutil.copytree(FIXTURES / "hf-llama-safetensors-bf16" / "ckpt", tmp_path / "ckpt")
    whole = sizes_of(folder)
    cut = folder / "model-00002-of-00004.safetensors"
    cut.write_bytes(cut.read_bytes()[:-300])
    found = sizes_of(folder)
    (damaged,) = [one for one in found.files if one.file.path == cut]
    assert damaged.overhead is None and found.unknown == damaged.others > 0
    assert found.overhead == whole.overhead - sum(one.others for one in whole.files if one.file.path == cut)
    assert found.words.endswith(f" + {found.unknown:,} B in damaged files, outside of readable tensors")
    assert sum(line.nbytes for line in found.lines if not line.total) == found.lines[-1].nbytes


def test_of_compressed_files_no_sum_is_stated():
    ck = ckptools.open(FIXTURES / "dcp-zstd" / "ckpt", all_ranks=True)
    assert file_sizes(ck) is None
    text = shown(report_page(findings(ck)))
    assert "are not known, so sizes are not added up here" in text and "of overhead" not in text


@pytest.mark.parametrize("folder", FOLDERS[:3], ids=lambda folder: folder.relative_to(FIXTURES).parts[0])
def test_what_the_page_prints_adds_up(folder):
    page = report_page(findings(ckptools.open(folder, all_ranks=True)))
    files, tensors, overhead = (
        int(part.replace(",", ""))
        for part in re.findall(r"([\d,]+) B of (?:files|tensors|overhead)", shown(page).partition("sizes: ")[2])[:3]
    )
    assert files == tensors + overhead == sum(file.nbytes for file in ckptools.open(folder, all_ranks=True).files)
    cells = re.findall(r'data-t="what">([^<]*)</td><td class="n" data-t="bytes">(-?[\d,]+)<', page)
    lines = [(name, int(nbytes.replace(",", ""))) for name, nbytes in cells]
    own = sum(nbytes for name, nbytes in lines if not name.startswith("= "))
    assert lines[-1] == ("= files", own) and own == files
