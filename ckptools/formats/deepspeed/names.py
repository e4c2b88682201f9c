"""The files of a DeepSpeed checkpoint by their names, and the tag folder of a path.

`<folder>/latest` names a tag, and `<folder>/<tag>/` holds the files; `latest_universal` does so for a universal
checkpoint. Names, from deepspeed/runtime/engine.py (`_get_ckpt_name`, `_get_rank_zero_ckpt_name`,
`_get_expert_ckpt_name`) and runtime/pipe/module.py (`ckpt_layer_path`) of 0.6 to 0.19: D is the rank in the ZeRO
group, M the model-parallel rank, which counts pipeline stages and tensor-parallel ranks together.

* `mp_rank_MM_model_states.pt`; ZeRO-3 `zero_pp_rank_D_mp_rank_MM_model_states.pt`
* `[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt`, formerly also `fp16_`
* `layer_LL[-model_TT]-model_states.pt` of a pipeline
* `layer_L_expert_E_mp_rank_MM_model_states.pt`, `expp_rank_E_mp_rank_MM_optim_states.pt` of experts
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckptools.errors import ReadError, UnsafePathError
from ckptools.files.location import check_stays_inside, is_plain_name
from ckptools.files.opening import reading
from ckptools.formats.shared.several import ASTRAY, several, text_of
from ckptools.model.values import describe_for_error
from ckptools.text import few

N = r"\d{1,7}"
PATTERNS = {
    "model": re.compile(rf"(?:zero_pp_rank_(?P<dp>{N})_)?mp_rank_(?P<mp>{N})_model_states\.pt"),
    "optim": re.compile(rf"(?:[a-z]+16_)?zero_pp_rank_(?P<dp>{N})_mp_rank_(?P<mp>{N})_optim_states\.pt"),
    "layer": re.compile(rf"layer_(?P<layer>{N})(?:-(?P<axes>[A-Za-z]\w*(?:-[A-Za-z]\w*)*))?-model_states\.pt"),
    "expert": re.compile(rf"(?:layer_(?P<layer>{N})_)?expert_(?P<expert>{N})_mp_rank_(?P<mp>{N})_model_states\.pt"),
    "expert optim": re.compile(rf"expp_rank_(?P<expert>{N})_mp_rank_(?P<mp>{N})_optim_states\.pt"),
}

Place = tuple[int, int]
"""`(mp, dp)`: model-parallel rank, and rank in the ZeRO group."""

POINTERS = ("latest", "latest_universal")


@dataclass(frozen=True)
class StateName:
    """A state file of a tag folder, by its name.

    Attributes:
        mp: model-parallel rank; None for a pipeline layer.
        dp: rank in the ZeRO group; None where one file serves all of them.
        layer: index of the pipeline layer, or of the layer of experts.
        axes: further axes of a pipeline layer's name, such as `model_01` for tensor-parallel rank 1.
    """

    path: Path
    part: str
    mp: int | None
    dp: int | None = None
    layer: int | None = None
    expert: int | None = None
    axes: str = ""

    @property
    def place(self) -> Place:
        """`(mp, dp)`, 0 for what the name does not have."""
        return self.mp or 0, self.dp or 0


def parse(path: Path) -> StateName | None:
    """Parse the name of a state file; None when it is no name that DeepSpeed gives."""
    for part, pattern in PATTERNS.items():
        found = pattern.fullmatch(path.name)
        if found:
            words = {key: word for key, word in found.groupdict().items() if word is not None}
            axes, numbers = words.pop("axes", ""), {key: int(word) for key, word in words.items()}
            return StateName(path, part, numbers.pop("mp", None), axes=axes, **numbers)
    return None


def names_in(folder: Path, follow_symlinks: bool = False) -> list[StateName]:
    """The files of a tag folder, in the order of their numbers.

    Raises:
        UnsafePathError: one of them is a link out of the folder.
    """
    with reading(folder):
        found = [name for name in map(parse, folder.iterdir()) if name is not None]
    if not follow_symlinks:
        for name in found:
            check_stays_inside(name.path, folder)
    return sorted(found, key=lambda n: (n.part, *n.place, n.layer or 0, n.expert or 0, n.path.name))


def is_tag_folder(folder: Path) -> bool:
    """Whether a folder itself has files that DeepSpeed writes; False where it cannot be listed."""
    with suppress(OSError):
        return folder.is_dir() and any(parse(p) is not None for p in folder.iterdir())
    return False


def is_deepspeed(path: Path) -> bool:
    """Whether a path leads to a DeepSpeed checkpoint, by names and the few bytes of `latest`."""
    if not path.is_dir():
        return parse(path) is not None or _is_slot_file(path)
    if is_tag_folder(path) or tags_in(path):
        return True
    pointer = _pointer(path)
    return pointer is not None and ((path / "zero_to_fp32.py").exists() or "global_step" in text_of(pointer))


def _is_slot_file(path: Path) -> bool:
    """Whether a file is one of the small ones of a universal checkpoint: `<tag>/zero/<name>/fp32.pt`."""
    zero = path.parent.parent
    return path.suffix == ".pt" and path.is_file() and zero.name == "zero" and is_tag_folder(zero.parent)


def _pointer(folder: Path) -> Path | None:
    return next((folder / name for name in POINTERS if (folder / name).is_file()), None)


def tags_in(folder: Path) -> list[Path]:
    """The tag folders in a folder."""
    return sorted((p for p in folder.iterdir() if p.is_dir() and is_tag_folder(p)), key=lambda p: p.name)


def find_tag(path: Path, follow_symlinks: bool = False) -> Path:
    """Find the tag folder of a path: itself, the folder of a file, or the one that `latest` names.

    Raises:
        ReadError: `latest` names a tag that is not there.
        UnsafePathError: it names something else than a folder beside it.
        UsageError: there are several tags and no `latest`.
    """
    if not path.is_dir():
        return path.parent if parse(path) else path.parent.parent.parent
    if is_tag_folder(path):
        return path
    pointer = _pointer(path)
    if pointer is not None:
        return _pointed(pointer, follow_symlinks)
    tags = tags_in(path)
    if len(tags) > 1:
        raise several(path, tags, " and no file latest")
    return tags[0]


def _pointed(pointer: Path, follow_symlinks: bool) -> Path:
    if not follow_symlinks:
        check_stays_inside(pointer, pointer.parent)
    tag = text_of(pointer)
    if not is_plain_name(tag):
        text = f"names the tag {describe_for_error(tag)}, which is not the plain name of a folder beside it"
        raise UnsafePathError(pointer, text)
    folder = pointer.parent / tag
    if not follow_symlinks:
        check_stays_inside(folder, pointer.parent)
    if not is_tag_folder(folder):
        here = few([tag.name for tag in tags_in(pointer.parent)]) or "no other checkpoint"
        what = f"which {'holds no DeepSpeed files' if folder.is_dir() else 'is not there'} ({ASTRAY}); here are {here}"
        raise ReadError(pointer, f"names the tag {describe_for_error(tag)}, {what}: name the one you mean")
    return folder
