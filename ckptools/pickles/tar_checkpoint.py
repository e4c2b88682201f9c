"""Read the torch.save files in a tar in place: nothing is extracted.

Composer writes `ep0-ba5-rank0.tar` (or `.tar.gz`, `.tgz`, `.tar.bz2`, `.tar.lzma`) if the file name asks for it. The
state is the member `composer_states.pt`; in DeepSpeed runs a folder `deepspeed` lies beside it, in the tar of every
rank. Source: composer/utils/checkpoint.py of Composer 0.7 to 0.28 (`tarball.add(tmpdir, arcname="")`, so the folder
itself is a member called `/`).

NeMo's `.nemo` is a tar, compressed or not, of `model_config.yaml`, `model_weights.ckpt`, and other files (a
tokenizer's), which are not read. Under model parallelism, and only then, the weights of each rank lie in a folder of
their own, `mp_rank_00`, `tp_rank_00_pp_rank_001`. Sources: nemo/core/connectors/save_restore_connector.py,
nemo/utils/model_utils.py (`inject_model_parallel_rank`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptools.errors import ReadError
from ckptools.files.opening import File, Window, content_of, head_of
from ckptools.files.tar_archive import members
from ckptools.model.tree import describe_for_error
from ckptools.pickles.archive import read_archive
from ckptools.pickles.machine import Machine

STATES = "composer_states.pt"
NEMO_CONFIG, NEMO_WEIGHTS = "model_config.yaml", "model_weights.ckpt"
RANK = re.compile(r"[a-z]+_rank_\d+[^/]*/[^/]+")
PARALLEL = re.compile(rb"^(tensor|pipeline)_model_parallel_size: (\d{1,5})\r?$", re.MULTILINE)
MAX_CONFIG = 1 << 20
DEEPSPEED = "deepspeed"
TORCH_0_1 = frozenset({"sys_info", "pickle", "tensors", "storages"})
"""Members of a file of torch 0.1, which ckptools does not read. Source: torch/serialization.py (`legacy_load`)."""


def read_tar(file: File) -> tuple[Machine, Any]:
    """Read the torch.save file in a tar; return the machine that read it, and its tree.

    Raises:
        ReadError: it has none, several, or a DeepSpeed run's, or torch 0.1 wrote it.
    """
    return _read_member(file, *_checkpoint_of(file, members(file)))


def read_ranks(file: File) -> tuple[dict[str, tuple[Machine, Any]], int | None]:
    """Read the weights of each model-parallel rank in a `.nemo`, and the number of ranks in its configuration.

    Returns:
        The machine and the tree by the name of the member; and the number, None if the configuration states none.

    Raises:
        ReadError: one of them cannot be read.
    """
    found = members(file)
    ranks = {name: _read_member(file, name, part) for name, part in _of_ranks(found).items()}
    return ranks, _stated_ranks(found)


def holds_ranks(file: File) -> bool:
    """Whether a tar is a `.nemo` with weights of model-parallel ranks.

    Raises:
        ReadError: the tar is cut or damaged.
    """
    return bool(_of_ranks(members(file)))


def _of_ranks(found: Mapping[str, Window]) -> dict[str, Window]:
    """The weights in folders of ranks; empty if the configuration states a single rank."""
    weights = _weights(found)
    alone = len(weights) == 1 and _stated_ranks(found) == 1
    return {} if alone or not all(RANK.fullmatch(name) for name in weights) else weights


def _stated_ranks(found: Mapping[str, Window]) -> int | None:
    config = found[NEMO_CONFIG]
    sizes = dict(PARALLEL.findall(config.read(0, min(config.size, MAX_CONFIG))))
    return int(sizes[b"tensor"]) * int(sizes.get(b"pipeline", 1)) if b"tensor" in sizes else None


def _weights(found: Mapping[str, Window]) -> dict[str, Window]:
    """The files of weights among the members of a `.nemo`; empty for any other tar."""
    if NEMO_CONFIG not in found:
        return {}
    return {name: found[name] for name in sorted(found) if name.rpartition("/")[2] == NEMO_WEIGHTS}


def _read_member(file: File, name: str, part: Window) -> tuple[Machine, Any]:
    if content_of(head_of(part)) not in ("zip", "legacy"):
        raise ReadError(file.path, f"its member {describe_for_error(name)} is no torch.save file; unpack the tar first")
    return read_archive(part)


def _checkpoint_of(file: File, found: Mapping[str, Window]) -> tuple[str, Window]:
    """The name and the bytes of the torch.save file among the members of a tar."""
    if any(name.startswith(f"{DEEPSPEED}/") for name in found):
        text = "a Composer tar of a DeepSpeed run: unpack the tars of all ranks into one folder and open that"
        raise ReadError(file.path, text)
    if found.keys() >= TORCH_0_1:
        way = "if you trust it, convert it: torch.save(torch.load(OLD, weights_only=False), NEW)"
        raise ReadError(file.path, f"is a tar of torch 0.1, which ckptools does not read; {way}")
    if STATES in found:
        return STATES, found[STATES]
    if _of_ranks(found):
        raise ReadError(
            file.path, "holds the weights of model-parallel ranks, as a .nemo does: call it .nemo to open it"
        )
    for candidates in (_weights(found), found):
        if len(candidates) == 1:
            return next(iter(candidates.items()))
    listed = (
        f" ({', '.join(describe_for_error(name) for name in list(found)[:4])}{' …' if len(found) > 4 else ''})"
        if found
        else ""
    )
    raise ReadError(file.path, f"a tar of {len(found)} files{listed}: unpack it, and open what is inside")
