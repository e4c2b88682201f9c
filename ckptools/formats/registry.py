"""The formats in the order in which they are tried, each imported only when a name suggests it.

Importing all of them takes as long as reading a rank file does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

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
        """Read the structure."""


AnyFormat = TypeVar("AnyFormat", bound=Format)


class OnDemand:
    """A format that is imported when it is asked something.

    Attributes:
        names: what is found in a name that suggests it.
        per_rank: whether its files are torch.save files of a rank each, which a caller may name one by one.
    """

    def __init__(self, load: Callable[[], Format], names: str, per_rank: bool = False) -> None:
        self._load = load
        self.names = re.compile(names)
        self.per_rank = per_rank

    def suits(self, names: Sequence[str]) -> bool:
        """Whether one of some names suggests it."""
        return any(map(self.names.search, names))

    @property
    def NAME(self) -> str:  # noqa: N802
        """As the format has it."""
        return self._load().NAME

    @property
    def READS(self) -> str:  # noqa: N802
        """As the format has it."""
        return self._load().READS

    @property
    def KNOWN_BY(self) -> str:  # noqa: N802
        """As the format has it."""
        return self._load().KNOWN_BY

    def detect(self, path: Path) -> bool:
        """Whether `path` looks like this format."""
        return self._load().detect(path)

    def read(self, path: Path, options: Options) -> Checkpoint:
        """Read the structure."""
        return self._load().read(path, options)


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


def _deepspeed() -> Format:
    from ckptools.formats import deepspeed

    return deepspeed


def _megatron() -> Format:
    from ckptools.formats import megatron

    return megatron


def _megatron_dist() -> Format:
    from ckptools.formats import megatron_dist

    return megatron_dist


def _accelerate() -> Format:
    from ckptools.formats import accelerate

    return accelerate


def _olmo_core() -> Format:
    from ckptools.formats import olmo_core

    return olmo_core


def _composer_folder() -> Format:
    from ckptools.formats import composer_folder

    return composer_folder


def _dcp() -> Format:
    from ckptools.formats import dcp

    return dcp


def _dcp_safetensors() -> Format:
    from ckptools.formats import dcp_safetensors

    return dcp_safetensors


def _hugging_face() -> Format:
    from ckptools.formats import hugging_face

    return hugging_face


def _meta_llama() -> Format:
    from ckptools.formats import meta_llama

    return meta_llama


def _olmo_local() -> Format:
    from ckptools.formats import olmo_local

    return olmo_local


def _rank_files() -> Format:
    from ckptools.formats import rank_files

    return rank_files


def _torch_file() -> Format:
    from ckptools.formats import torch_file

    return torch_file


# Most specific first: any rank file is a torch file too, so the plain file comes last. What training leaves goes before
# Hugging Face's names, which an export into the same folder has.
FORMATS: tuple[OnDemand, ...] = (
    OnDemand(_deepspeed, r"_states\.pt$|^latest|^global_step|(^|/)zero(/|$)|zero_to_fp32"),
    OnDemand(_megatron, r"latest_checkpointed|(^|/)(iter_\d+|release)$|mp_rank_\d|_optim_rng\.pt|model_rng\.pt"),
    OnDemand(_megatron_dist, r"latest_checkpointed|(^|/)(iter_\d+|release)$|metadata\.json|common\.pt"),
    OnDemand(_accelerate, r"^pytorch_model_"),
    OnDemand(_olmo_core, r"^model_and_optim$"),
    OnDemand(_composer_folder, r"^(composer_metadata\.json|resumption\.pkl)$"),
    OnDemand(_dcp, r"\.metadata|\.distcp$|(ba|step|iter|iteration|checkpoint)[-_]?\d+$"),
    OnDemand(_dcp_safetensors, r"(^|/)shard-\d.*\.safetensors$"),
    OnDemand(_meta_llama, r"(^|/)consolidated\.\d+\.pth$"),
    OnDemand(_olmo_local, r"(^|/)(model|optim|train)(/|$)"),
    OnDemand(_rank_files, r"rank", per_rank=True),
    OnDemand(_hugging_face, r"\.safetensors|\.bin|^adapter|^diffusion"),
    OnDemand(_torch_file, r"", per_rank=True),
)
