"""One torch.save file that holds everything: DDP's `snapshot.pt`, Lightning `.ckpt`, `pytorch_model.bin`, any `.pt`.

Also as torch wrote it before 1.6 (a row of pickles), in a tar (Composer's `.tar`), and compressed; see
`ckptools.pickles.legacy`, `tar_checkpoint` and `ckptools.files.compressed`. The first bytes say which.

What is inside is told from the content by `sections`; a single file without a rank in its name has no siblings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ckptools.files.file_type import HEAD, content_of
from ckptools.formats.options import Options
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder
from ckptools.formats.shared.file_status import was_read
from ckptools.formats.shared.rank_names import COMPRESSED
from ckptools.model.checkpoint import Checkpoint, Fact
from ckptools.model.problems import Code, Problem
from ckptools.model.tree import tensors_in
from ckptools.training_state.module_order import AS_SAVED
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

NAME = "torch_file"
READS = "one torch.save file: .pt, .pth, .bin, .ckpt (DDP snapshots, Lightning, plain state dicts)"
KNOWN_BY = "its first bytes, whatever the file is called"


PART = re.compile(r"(?<!\d)(\d+)-of-(\d+)(?!\d)|(?<![A-Za-z])rank[_-]?(\d+)")


def detect(path: Path) -> bool:
    """A regular file that begins as a zip archive, an older torch.save file, a tar or a compressed file does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return bool(content_of(file.read(HEAD)))


def read(path: Path, options: Options) -> Checkpoint:
    """Open a torch.save file that stands alone.

    Raises:
        ReadError: it cannot be read.
    """
    builder = CheckpointBuilder(NAME, path)
    saved = options.read_file(path)
    builder.add_saved([saved])
    builder.problems += _part_of_more(path)
    claims = sorted({world for _, world in saved.claims})
    sections = find_sections(saved.tree)
    sharded = any(t.sharded for _, t in tensors_in(saved.tree))
    return builder.checkpoint(
        name=stem(path.name),
        saved_as=in_form("one .pt with shards of one rank" if sharded else "one .pt, every tensor whole", saved.form),
        tree=saved.tree,
        files=[was_read(saved)],
        world_size=Fact(claims[-1], ("layout",)) if claims else Fact(1, ("one file",)),
        step=find_step(path, sections),
        module_order=AS_SAVED,
        bytes_expected=saved.nbytes,
    )


def stem(name: str) -> str:
    """A file name without its suffix, and without that of a compression behind it."""
    plain = Path(name)
    return Path(plain.stem).stem if plain.suffix in COMPRESSED else plain.stem


def in_form(saved_as: str, form: str) -> str:
    """Add to how something was saved what it is beside a zip archive."""
    return f"{saved_as} ({form})" if form else saved_as


def _part_of_more(path: Path) -> Iterator[Problem]:
    """A name such as `x-00001-of-00004.bin` or `mp_rank_00_x.pt` speaks of files that this format does not join."""
    found = PART.search(path.name)
    if found:
        yield Problem(Code.ONE_OF_SEVERAL, f"its name says {found[0]}: one file of several, and only this one is read")
