"""A checkpoint in a tar: Composer's, and any other that holds one torch.save file. Nothing is extracted.

Composer writes `ep0-ba5-rank0.tar` (or `.tar.gz`, `.tgz`, `.tar.bz2`, `.tar.lzma`) where a file name asks for it. The
state is the member `composer_states.pt`; in DeepSpeed runs a folder `deepspeed` lies beside it, in the tar of every
rank. Source: composer/utils/checkpoint.py of Composer 0.7 to 0.28 (`tarball.add(tmpdir, arcname="")`, so the folder
itself is a member called `/`).
"""

from __future__ import annotations

from typing import Any

from ckptools.errors import ReadError
from ckptools.files.file_type import content_of, head_of
from ckptools.files.opening import File, Window
from ckptools.files.tar_archive import Member, members
from ckptools.model.values import describe_for_error
from ckptools.pickles.archive import read_archive
from ckptools.pickles.machine import Machine

STATES = "composer_states.pt"
DEEPSPEED = "deepspeed"
TORCH_0_1 = frozenset({"sys_info", "pickle", "tensors", "storages"})
"""The members of a file of torch 0.1. Source: torch/serialization.py (`legacy_load`)."""


def read_tar(file: File) -> tuple[Machine, Any]:
    """Read the torch.save file in a tar; return the machine that read it, and its tree.

    Raises:
        ReadError: it holds none, several, or a DeepSpeed run's.
    """
    found = members(file)
    if found.keys() >= TORCH_0_1:
        from ckptools.pickles.torch_0_1 import read_torch_0_1

        return read_torch_0_1(file, {name: Window(file, m.start, m.size) for name, m in found.items()})
    member = _checkpoint_of(file, found)
    part = Window(file, member.start, member.size)
    if content_of(head_of(part)) not in ("zip", "legacy"):
        raise ReadError(
            file.path, f"its member {describe_for_error(member.name)} is no torch.save file; unpack the tar first"
        )
    return read_archive(part)


def _checkpoint_of(file: File, found: dict[str, Member]) -> Member:
    if any(name.startswith(f"{DEEPSPEED}/") for name in found):
        text = "a Composer tar of a DeepSpeed run: unpack the tars of all ranks into one folder and open that"
        raise ReadError(file.path, text)
    if STATES in found:
        return found[STATES]
    if len(found) == 1:
        return next(iter(found.values()))
    listed = (
        f" ({', '.join(describe_for_error(name) for name in list(found)[:4])}{' …' if len(found) > 4 else ''})"
        if found
        else ""
    )
    raise ReadError(file.path, f"a tar of {len(found)} files{listed}: unpack it, and open what is inside")
