"""One torch.save file that holds everything: DDP's `snapshot.pt`, Lightning `.ckpt`, `pytorch_model.bin`, any `.pt`.

Also in torch's form of before 1.6 (a row of pickles), in a tar (Composer's `.tar`, NeMo's `.nemo`), and compressed; see
`ckptools.pickles.legacy`, `ckptools.files.tar_archive` and `ckptools.files.compressed`. The first bytes decide.

The content decides which parts are inside (`sections`). A file without a rank in its name has siblings if its content
and theirs prove it (`rank_search.rank_groups`).
"""

from __future__ import annotations

from pathlib import Path

from ckptools.files.opening import content_of, head_at
from ckptools.formats import rank_files
from ckptools.formats.options import Options
from ckptools.formats.rank_search.one_of_several import signs_in_torch_file
from ckptools.formats.rank_search.rank_groups import siblings_by_content
from ckptools.formats.rank_search.rank_names import COMPRESSED
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, find_step_with_beside, in_form, was_read
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import Fact
from ckptools.model.tree import tensors_in
from ckptools.pickles.reader import Saved, holds_ranks
from ckptools.training_state.optimizers import AS_SAVED
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import step_in

NAME = "torch_file"
READS = "one torch.save file: .pt, .pth, .bin, .ckpt, .nemo (DDP snapshots, Lightning, NeMo, plain state dicts)"
KNOWN_BY = "its first bytes, whatever the file is called"
TRIED = ("torch 2.13.0", "Lightning 2.6.6", "bitsandbytes 0.50.2")
BY_HAND = ("NeMo's .nemo",)
JOINS = ("model", "optimizer", "rest")


NEMO = ".nemo"
"""The suffix of NeMo's tars; one with the weights of several ranks is read by `model_parts`."""


def detect(path: Path) -> bool:
    """Whether a regular file begins like a zip archive, an older torch.save file, a tar or a compressed file."""
    return path.is_file() and bool(content_of(head_at(path)))


def read(path: Path, options: Options) -> Checkpoint:
    """Open a torch.save file that stands alone.

    Raises:
        ReadError: it cannot be read.
    """
    if path.suffix == NEMO and holds_ranks(path):
        from ckptools.formats import model_parts

        return model_parts.read(path, options)
    builder = CheckpointBuilder(NAME, path)
    saved = options.read_file(path)
    tensors = [t for _, t in tensors_in(saved.tree)]
    sharded = any(t.sharded for t in tensors)
    if sharded and options.looks_around:
        group = siblings_by_content(path, saved, options.follow_symlinks)
        if group:
            return rank_files.read_group(path, path, group, options)
    builder.add_saved([saved])
    builder.problems += signs_in_torch_file(saved, sharded, options.looks_around, options.read_file)
    claims = sorted({world for _, world in saved.claims})
    sections = find_sections(saved.tree)
    return builder.checkpoint(
        name=stem(path.name),
        saved_as=in_form("one .pt with shards of one rank" if sharded else "one .pt, every tensor whole", saved.form),
        tree=saved.tree,
        files=[was_read(saved)],
        world_size=Fact(claims[-1], ("layout",), at_least=saved.at_least) if claims else Fact(1, ("one file",)),
        step=find_step_with_beside(_without_rank(path, saved), sections),
        module_order=AS_SAVED,
        bytes_expected=saved.nbytes,
    )


def stem(name: str) -> str:
    """A file name without its suffix, and without the suffix of a compression behind it."""
    plain = Path(name)
    return Path(plain.stem).stem if plain.suffix in COMPRESSED else plain.stem


def _without_rank(path: Path, saved: Saved) -> Path:
    """The folder, if the number in the file's name is the rank in its content, not a step; else the path."""
    return path.parent / "-" if step_in(path.name) in {rank for rank, _ in saved.claims} - {None} else path
