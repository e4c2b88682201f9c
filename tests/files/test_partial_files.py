"""Output files appear whole or not at all, and never in the place of something else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptools.errors import OutputExistsError
from ckptools.files.partial_files import sync_folder, write_text


def test_a_link_that_leads_nowhere_is_replaced_only_by_force(tmp_path: Path) -> None:
    link = tmp_path / "out.json"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputExistsError, match="--force"):
        write_text(link, "new")
    assert link.is_symlink() and not (tmp_path / "nowhere").exists()
    write_text(link, "new", force=True)
    assert link.read_text() == "new" and not link.is_symlink()


def test_a_file_system_that_cannot_sync_a_folder_is_no_reason_to_fail() -> None:
    proc = os.open("/proc", os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Invalid argument"):
            os.fsync(proc)
    finally:
        os.close(proc)
    sync_folder(Path("/proc"))
