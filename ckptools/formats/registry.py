"""The formats in the order in which they are tried, each imported only when a name suggests it.

Importing all of them takes as long as reading a rank file does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from ckptools.formats.options import Options
    from ckptools.model.checkpoint import Checkpoint


class Format(Protocol):
    """What every module in this folder that reads a format provides.

    Attributes:
        NAME: an identifier.
        READS: what it reads, in one line.
        KNOWN_BY: by what it is recognised, in one line.
    """

    @property
    def NAME(self) -> str: ...  # noqa: D102, N802
    @property
    def READS(self) -> str: ...  # noqa: D102, N802
    @property
    def KNOWN_BY(self) -> str: ...  # noqa: D102, N802

    def detect(self, path: Path) -> bool:
        """Whether `path` looks like this format, by names and a few bytes; never by its pickles."""

    def read(self, path: Path, options: Options) -> Checkpoint:
        """Open a checkpoint of this format."""


AnyFormat = TypeVar("AnyFormat", bound=Format)


class OnDemand:
    """A format whose module is imported when it is asked something.

    Attributes:
        NAME: its identifier, which is the name of its module in this folder.
        suggested_by: what is found in the name of a file or folder that may be such a checkpoint.
        per_rank: whether its files are torch.save files of a rank each, which a caller may name one by one.
    """

    def __init__(self, name: str, suggested_by: str, per_rank: bool = False) -> None:
        self.NAME = name
        self.suggested_by = re.compile(suggested_by)
        self.per_rank = per_rank

    @cached_property
    def _module(self) -> Format:
        module: Any = import_module(f"ckptools.formats.{self.NAME}")
        return cast("Format", module)

    def suits(self, names: Sequence[str]) -> bool:
        """Whether one of some names suggests this format."""
        return any(map(self.suggested_by.search, names))

    @property
    def READS(self) -> str:  # noqa: N802
        """What the format reads, in one line."""
        return self._module.READS

    @property
    def KNOWN_BY(self) -> str:  # noqa: N802
        """By what the format is recognised, in one line."""
        return self._module.KNOWN_BY

    def detect(self, path: Path) -> bool:
        """Whether `path` looks like this format."""
        return self._module.detect(path)

    def read(self, path: Path, options: Options) -> Checkpoint:
        """Open a checkpoint of this format."""
        return self._module.read(path, options)


def names_of(path: Path) -> list[str]:
    """What suggests a format: the last parts of the path of a file, or a folder's name and what is in it."""
    above = "/".join(path.parts[-3:])
    return [above, *(entry.name for entry in path.iterdir())] if path.is_dir() else [above]


def recognised(path: Path, formats: Sequence[AnyFormat]) -> AnyFormat | None:
    """The first format that detects `path`: of those that its names suggest, then of all others."""
    names = names_of(path)
    suited = [f for f in formats if not isinstance(f, OnDemand) or f.suits(names)]
    others = [f for f in formats if f not in suited]
    return next((f for f in (*suited, *others) if f.detect(path)), None)


RANK_FILES = OnDemand("rank_files", r"rank", per_rank=True)
"""What reads files that the caller names one by one, or whose names the caller tells."""

# Most specific first: any rank file is a torch file too, so the plain file comes last. What training leaves goes before
# Hugging Face's names, which an export into the same folder has.
FORMATS: tuple[OnDemand, ...] = (
    OnDemand("deepspeed", r"_states\.pt$|^latest|^global_step|(^|/)zero(/|$)|zero_to_fp32"),
    OnDemand("megatron", r"latest_checkpointed|(^|/)(iter_\d+|release)$|mp_rank_\d|_optim_rng\.pt|model_rng\.pt"),
    OnDemand("megatron_dist", r"latest_checkpointed|(^|/)(iter_\d+|release)$|metadata\.json|common\.pt"),
    OnDemand(
        "nanotron",
        r"^checkpoint_metadata\.json$|(^|/)model_(weight|bias)[^/]*\.safetensors$|(^|/)(pp_block|optimizer|lr_scheduler|random)(/|$)",
    ),
    OnDemand("accelerate", r"^pytorch_model_"),
    OnDemand("nemo_automodel", r"(^|/)epoch_\d+_step_\d+(/|$)|^losses\.json$|_(global|dp)_rank_\d"),
    OnDemand("torchsnapshot", r"^\.snapshot_metadata$|(^|/)(\d+|batched|sharded|replicated)/|(^|/)[^./]+/[^./]*$"),
    OnDemand("torch_checkpointing", r"metadata\.pkl$|_\d+\.(pt|safetensors|json)$"),
    OnDemand("olmo_core", r"^model_and_optim$"),
    OnDemand("composer_folder", r"^(composer_metadata\.json|resumption\.pkl)$"),
    OnDemand("dcp", r"\.metadata|\.distcp$|(ba|step|iter|iteration|checkpoint)[-_]?\d+$"),
    OnDemand("dcp_safetensors", r"(^|/)shard-\d.*\.safetensors$"),
    OnDemand("meta_llama", r"(^|/)consolidated\.\d+\.pth$"),
    OnDemand("olmo_local", r"(^|/)(model|optim|train)(/|$)"),
    OnDemand("model_parts", r"rank|shard|part|mp|tp|pp|model_\d"),
    RANK_FILES,
    OnDemand("hugging_face", r"\.safetensors|\.bin|^adapter|^diffusion|^trainer_state\.json$"),
    OnDemand("torch_file", r"", per_rank=True),
)
