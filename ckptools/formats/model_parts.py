"""Parts of one model that are not joined here: each rank's file of another framework, by names or contents.

vLLM's and SGLang's `model-rank-0-part-0.safetensors`, DeepSeek's `model0-mp4.safetensors`, TensorRT-LLM's
`rank0.safetensors`, fairseq's `checkpoint_5-shard0.pt`, NeMo's `mp_rank_00/model_weights.ckpt`. Slices look like whole
tensors, so the contents are shown side by side, each under its file's name, and the model is never called whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ckptools.errors import ReadError
from ckptools.formats.options import Options
from ckptools.formats.rank_search.parts import PartFiles, not_joined, parts_by_content, parts_in
from ckptools.formats.rank_search.sibling_search import are_of_one
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, Fault, file_now
from ckptools.model.checkpoint import Checkpoint, Fact, RankFile
from ckptools.model.problems import Code, Problem
from ckptools.training_state.parameter_names import AS_SAVED
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

if TYPE_CHECKING:
    from ckptools.formats.hugging_face.model import WeightFile

NAME = "model_parts"
READS = "files of other frameworks that are parts of one model (vLLM, TensorRT-LLM, fairseq, NeMo): shown, not joined"
KNOWN_BY = (
    "a folder whose files are called model-rank-0-part-0, model0-mp4, rank0.safetensors, x-shard0, tp_00, mp_rank_00/"
)
TRIED = ()
BY_HAND = ("vLLM, SGLang, TensorRT-LLM, DeepSeek, NeMo",)
JOINS = ()

MAX_READ = 64
"""Most files whose structure is read."""


def detect(path: Path) -> bool:
    """A folder whose files of weights are all parts, by names or contents, without a statement of how they join."""
    found = _parts(path) if path.is_dir() else None
    return found is not None and not (found.files[0].suffix != ".safetensors" and are_of_one(found.files))


def read(path: Path, options: Options) -> Checkpoint:
    """Open the parts in a folder, side by side.

    Raises:
        ReadError: none of them can be read.
    """
    builder, parts = CheckpointBuilder(NAME, path), _parts(path)
    if parts is None:
        raise ReadError(path, "holds no parts of a model")
    files, found = _read(builder, parts, options)
    for one in found.values():
        builder.add_read(1, one.bytes_read, one.names)
    builder.problems.insert(0, Problem(Code.ONE_OF_SEVERAL, not_joined(parts)))
    tree = {name: one.tree for name, one in found.items()}
    return builder.checkpoint(
        name=path.absolute().name,
        saved_as=f"{len(files)} files, each a part of the model",
        tree=tree,
        files=files,
        world_size=Fact(len(parts.files), ("files found",)),
        step=find_step(path, find_sections(next(iter(tree.values())))),
        module_order=AS_SAVED,
        bytes_expected=None,
    )


def _parts(folder: Path) -> PartFiles | None:
    return parts_in(folder) or parts_by_content(folder)


def _read(
    builder: CheckpointBuilder, parts: PartFiles, options: Options
) -> tuple[list[RankFile], dict[str, WeightFile]]:
    """The list of files, and the contents of the readable ones, by name, or by folder where all have one name."""
    from ckptools.formats.hugging_face.model import read_weights

    files: list[RankFile] = []
    found: dict[str, WeightFile] = {}
    error: ReadError | None = None
    for path in parts.files[:MAX_READ]:
        try:
            one = found[path.parent.name if "/" in parts.pattern else path.stem] = read_weights(path, options)
            files.append(RankFile(path, None, "", "read", one.nbytes, one.modified))
        except ReadError as failed:
            error, fault = failed, Fault.of(failed, path)
            builder.problems.append(fault.problem(path.name))
            files.append(file_now(path, None, "", fault.status))
    if not found:
        raise error or ReadError(builder.path, "holds nothing that can be read")
    return files, found
