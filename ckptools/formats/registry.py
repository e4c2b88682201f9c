"""The known formats: those of other packages, then the built-in ones in the order in which they are tried.

Built-in formats are imported only when a name suggests them: importing all of them takes as long as reading a rank
file.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ckptools.errors import CkptoolsError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from ckptools.formats.options import Options
    from ckptools.model.checkpoint import Checkpoint


class Format:
    """A built-in format: a module in this folder, imported on first use.

    The module has `NAME`, `READS`, `KNOWN_BY`, `detect` and `read` as described here, and may have `TRIED`, `BY_HAND`
    and `JOINS`. `suggested_by` is a pattern of names of files or folders that may be such a checkpoint. Files of a
    format that is `per_rank` are one rank's torch.save files, which a caller may give one by one. A format `of_folders`
    is not tried on a file. A format that is a `recipe` is in `recipes.py`, under its name in capitals.
    """

    def __init__(
        self, name: str, suggested_by: str, per_rank: bool = False, of_folders: bool = False, recipe: bool = False
    ) -> None:
        self.NAME, self.suggested_by = name, re.compile(suggested_by)
        self.per_rank, self.of_folders, self.recipe = per_rank, of_folders or recipe, recipe

    def _module(self) -> Any:
        if self.recipe:
            from ckptools.formats import recipes

            return getattr(recipes, self.NAME.upper())
        return import_module(f"ckptools.formats.{self.NAME}")

    @property
    def READS(self) -> str:  # noqa: N802
        """The files that the format reads, in one line."""
        return str(self._module().READS)

    @property
    def KNOWN_BY(self) -> str:  # noqa: N802
        """How the format's files are recognised, in one line."""
        return str(self._module().KNOWN_BY)

    @property
    def TRIED(self) -> tuple[str, ...]:  # noqa: N802
        """Writers, with their versions, whose own checkpoints the tests compare with known values."""
        return tuple(getattr(self._module(), "TRIED", ()))

    @property
    def BY_HAND(self) -> tuple[str, ...]:  # noqa: N802
        """Writers, or forms of their checkpoints, that are tested only on files made by hand."""
        return tuple(getattr(self._module(), "BY_HAND", ()))

    @property
    def JOINS(self) -> tuple[str, ...]:  # noqa: N802
        """The parts of a checkpoint that it joins: `model`, `optimizer`, `rest` (scheduler, RNG, counters)."""
        return tuple(getattr(self._module(), "JOINS", ()))

    def detect(self, path: Path) -> bool:
        """Whether `path` looks like this format, by names and a few bytes; never by its pickles."""
        return bool(self._module().detect(path))

    def read(self, path: Path, options: Options) -> Checkpoint:
        """Open a checkpoint of this format."""
        return cast("Checkpoint", self._module().read(path, options))


def recognised(path: Path, formats: Sequence[Format]) -> Format | None:
    """The first format that detects `path`; formats that its names suggest are tried first."""
    names, is_folder = ["/".join(path.parts[-3:])], path.is_dir()
    names += [entry.name for entry in path.iterdir()] if is_folder else []
    formats = [f for f in formats if is_folder or not f.of_folders]
    suited = [f for f in formats if any(map(f.suggested_by.search, names))]
    others = [f for f in formats if f not in suited]
    return next((f for f in (*suited, *others) if f.detect(path)), None)


RANK_FILES = Format("rank_files", r"rank", per_rank=True)
"""The format for files that the caller gives one by one, or by a pattern."""

# Most specific first: any rank file is a torch file too, so the plain file comes last. Training state goes before
# Hugging Face's names, which an export into the same folder has. No name suggests a composite, so it is tried last.
FORMATS: tuple[Format, ...] = (
    Format("deepspeed", r"_states\.pt$|^latest|^global_step|(^|/)zero(/|$)|zero_to_fp32"),
    Format("megatron", r"latest_checkpointed|(^|/)(iter_\d+|release)$|mp_rank_\d|_optim_rng\.pt|model_rng\.pt"),
    Format("megatron_dist", r"latest_checkpointed|(^|/)(iter_\d+|release)$|metadata\.json|common\.pt"),
    Format(
        "nanotron",
        r"^checkpoint_metadata\.json$|(^|/)model_(weight|bias)[^/]*\.safetensors$|(^|/)(pp_block|optimizer|lr_scheduler|random)(/|$)",
    ),
    Format("accelerate", r"^pytorch_model_", of_folders=True),
    Format("nemo_automodel", r"(^|/)epoch_\d+_step_\d+(/|$)|^losses\.json$|_(global|dp)_rank_\d"),
    Format("torchsnapshot", r"^\.snapshot_metadata$|(^|/)(\d+|batched|sharded|replicated)/|(^|/)[^./]+/[^./]*$"),
    Format("torch_checkpointing", r"metadata\.pkl$|_\d+\.(pt|safetensors|json)$"),
    Format("byte_checkpoint", r"^(model|optimizer|extra_state)$", recipe=True),
    Format("colossal_ai", r"^(modeling|optimizer|running_states\.json)$", recipe=True),
    Format("olmo_core", r"^model_and_optim$", recipe=True),
    Format("composer_folder", r"^(composer_metadata\.json|resumption\.pkl)$", recipe=True),
    Format("lerobot", r"^(pretrained_model|training_state(\.pth)?)$", recipe=True),
    Format("transformers_shards", r"(^|/)shard-\d.*\.safetensors$", recipe=True),
    Format("dcp", r"\.metadata|\.distcp$|(ba|step|iter|iteration|checkpoint)[-_]?\d+$"),
    Format("dcp_safetensors", r"(^|/)shard-\d.*\.safetensors$"),
    Format("meta_llama", r"(^|/)consolidated\.\d+\.pth$"),
    Format("olmo_local", r"(^|/)(model|optim|train)(/|$)"),
    Format("fsdp_shards", r"(shard|rank)[-_]?\d"),
    Format(
        "step_files",
        r"(^|[/._-])(model|weights|optim|opt|meta|state|sched|train|rng|ema)|(step|ckpt|iter)[-_.]?\d+\.\w+$",
    ),
    Format("model_parts", r"rank|shard|part|mp|tp|pp|model_\d", of_folders=True),
    RANK_FILES,
    Format("hugging_face", r"\.safetensors|\.bin|^adapter|^diffusion|^trainer_state\.json$"),
    Format("torch_file", r"", per_rank=True),
    Format("composite", r"(?!)", of_folders=True),
)


# -- formats of other packages: installed on purpose, so they are tried before the built-in ones -----------------------

GROUP = "ckptools.formats"
"""The group of entry points, each a module or an object with the attributes in `NEEDS`."""

NEEDS = ("NAME", "READS", "KNOWN_BY", "detect", "read")


class PluginWarning(UserWarning):
    """A format from another package is broken, and is left out."""


class Guarded(Format):
    """A format from another package, whose failures do not end the program."""

    def __init__(self, module: Any) -> None:
        super().__init__(str(module.NAME), "")
        self._given = module

    def _module(self) -> Any:
        return self._given

    def detect(self, path: Path) -> bool:
        """Whether the format detects `path`; False when it fails."""
        try:
            return super().detect(path)
        except Exception as error:
            _warn(self.NAME, f"detect failed on {path.name}", error)
            return False

    def read(self, path: Path, options: Options) -> Checkpoint:
        """Open a checkpoint of this format.

        Raises:
            CkptoolsError: the format raised it, or failed with any other exception.
        """
        try:
            return super().read(path, options)
        except CkptoolsError:
            raise
        except Exception as error:
            text = f"the format {self.NAME}, which another package brings, failed: {type(error).__name__}: {error}"
            raise CkptoolsError(path, text) from error


@lru_cache(maxsize=1)
def formats_from_outside() -> tuple[Format, ...]:
    """All loadable formats of installed packages, sorted by name."""
    # `python -m` puts the current folder on the path; packages beside a checkpoint are never trusted.
    folders = [folder for folder in sys.path if folder and Path(folder) != Path.cwd()]
    from importlib.metadata import distributions

    points = {p.name: p for d in distributions(path=folders) for p in d.entry_points if p.group == GROUP}
    found = (_load(points[name]) for name in sorted(points))
    return tuple(f for f in found if f is not None)


def _load(point: EntryPoint) -> Format | None:
    try:
        format_ = point.load()
        absent = [name for name in NEEDS if not hasattr(format_, name)]
        if absent:
            raise AttributeError(f"has no {', '.join(absent)}")
        return Guarded(format_)
    except Exception as error:
        _warn(point.name, f"{point.value} cannot be used", error)
        return None


def _warn(name: str, what: str, error: Exception) -> None:
    text = f"format {name} from another package: {what}: {type(error).__name__}: {error}; it is left out"
    warnings.warn(text, PluginWarning, stacklevel=3)
