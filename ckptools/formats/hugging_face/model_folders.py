"""Models in folders of their own, beside the training state that Accelerate or the Trainer left for all of them.

    checkpoint-500/unet/  unet_ema/                                     config.json and weights
    checkpoint-500/optimizer.bin  scheduler.bin  random_states_{R}.pkl  as beside a model: see `companions`

diffusers' training scripts write this by a hook, which takes the weights away from Accelerate; transformers' Trainer
does where PEFT's adapter has a name. Nothing says which folders there should be. One that has the config of a model and
no weights has lost them; modules of sentence-transformers, such as `1_Pooling/`, have another config and may have none.

Source: diffusers/examples/text_to_image/train_text_to_image.py, `save_model_hook`; accelerate/accelerator.py,
`save_state`; peft/peft_model.py, `save_pretrained`; diffusers/configuration_utils.py, `to_json_string`. Checked on
files of diffusers 0.42 with Accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ckptools.errors import ReadError, UnsafePathError
from ckptools.files.json_file import read_json
from ckptools.files.location import check_stays_inside
from ckptools.files.opening import reading
from ckptools.formats.hugging_face.files import model_files_in, models_of_folder
from ckptools.formats.hugging_face.model import WeightModel
from ckptools.formats.options import Options
from ckptools.formats.shared.checkpoint_builder import Fault
from ckptools.formats.shared.companions import companions_in
from ckptools.model.problems import Code, Problem
from ckptools.text import few

CONFIGS = {"config.json": ("_class_name", "architectures"), "adapter_config.json": ("peft_type",)}
"""Names of configs, and keys of which the config of a model has one."""

STATES = ("optimizer", "scheduler", "rng")


def model_folders(folder: Path) -> list[Path]:
    """The folders of models beside the training state in `folder`; none where it has no such state.

    A folder called `model` may be the part of a composite, but for the random states, which have other names there.
    """
    states = {companion.key for companion in companions_in(folder)}.intersection(STATES)
    if not states or ("rng" not in states and (folder / "model").exists()):
        return []
    with reading(folder):
        folders = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    return [f for f in folders if model_files_in(f) or _has_config(f)]


def _has_config(folder: Path) -> bool:
    return any(_is_of_a_model(folder / name, keys) for name, keys in CONFIGS.items())


def _is_of_a_model(config: Path, keys: tuple[str, ...]) -> bool:
    try:
        stated = read_json(config) if config.is_file() else None
    except ReadError:
        return False
    return isinstance(stated, Mapping) and any(key in stated for key in keys)


def folders_not_read(folder: Path) -> Iterator[Problem]:
    """Name the folders of models beside weights that are read."""
    names = tuple(f.name for f in model_folders(folder) if model_files_in(f))
    if names:
        text = f"weights in folders beside it, and not read: {few(names)}; name a folder to open it"
        yield Problem(Code.NOT_READ, text, files=names)


def read_model_folders(
    folders: Iterable[Path], options: Options, problems: list[Problem]
) -> Iterator[tuple[str, WeightModel]]:
    """The model of each folder by the folder's name; a problem where it cannot be read.

    Raises:
        UnsafePathError: a file is a link out of its folder, or a folder one out of the folder that it is in.
        UsageError: one of the folders holds several models.
    """
    for one in folders:
        if not options.follow_symlinks:
            check_stays_inside(one, one.parent)
        found = model_files_in(one)
        if not found:
            problems.append(Problem(Code.FILE_MISSING, f"no weights in {one.name}, which has a config", None, one.name))
            continue
        try:
            for name, weights in models_of_folder(one, found).items():
                yield one.name + name.removeprefix("model"), WeightModel(weights, one, options).read()
        except UnsafePathError:
            raise
        except ReadError as error:
            problems.append(Fault.of(error, one).problem(f"{one.name}:", None, one.name))
