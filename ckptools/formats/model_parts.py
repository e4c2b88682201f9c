"""Parts of one model that are not joined here: each rank's file of another framework, told by their names.

vLLM's and SGLang's `model-rank-0-part-0.safetensors`, DeepSeek's `model0-mp4.safetensors`, TensorRT-LLM's
`rank0.safetensors`, fairseq's `checkpoint_5-shard0.pt`, NeMo's `mp_rank_00/model_weights.ckpt`. Slices look like whole
tensors, so what the files hold stands side by side, each under its file's name, and is never called whole.
"""

from __future__ import annotations

from pathlib import Path

from ckptools.errors import ReadError
from ckptools.formats.hugging_face.tensors import WeightFile, read_weights
from ckptools.formats.options import Options
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder
from ckptools.formats.shared.file_status import Fault, file_now
from ckptools.formats.shared.part_names import Parts, not_joined, parts_in
from ckptools.formats.shared.sibling_search import are_of_one
from ckptools.model.checkpoint import Checkpoint, Fact, RankFile
from ckptools.model.problems import Code, Problem
from ckptools.training_state.module_order import AS_SAVED
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

NAME = "model_parts"
READS = "files of other frameworks that are parts of one model (vLLM, TensorRT-LLM, fairseq, NeMo): shown, not joined"
KNOWN_BY = (
    "a folder whose files are called model-rank-0-part-0, model0-mp4, rank0.safetensors, x-shard0, tp_00, mp_rank_00/"
)

MAX_READ = 64
"""Files whose structure is read."""


def detect(path: Path) -> bool:
    """A folder whose files of weights are all parts by their names, and do not tell themselves how they join."""
    found = parts_in(path) if path.is_dir() else None
    return found is not None and not (found.files[0].suffix != ".safetensors" and are_of_one(found.files))


def read(path: Path, options: Options) -> Checkpoint:
    """Open the parts in a folder, side by side.

    Raises:
        ReadError: none of them can be read.
    """
    builder, parts = CheckpointBuilder(NAME, path), parts_in(path)
    if parts is None:
        raise ReadError(path, "holds no parts of a model by their names")
    files, held = _read(builder, parts, options)
    builder.add_read(len(held), sum(h.bytes_read for h in held.values()), [n for h in held.values() for n in h.names])
    builder.problems.insert(0, Problem(Code.ONE_OF_SEVERAL, not_joined(parts)))
    tree = {name: one.tree for name, one in held.items()}
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


def _read(builder: CheckpointBuilder, parts: Parts, options: Options) -> tuple[list[RankFile], dict[str, WeightFile]]:
    """The files, and what those hold that could be read, by a short name of each."""
    files, held = [], dict[str, WeightFile]()
    error: ReadError | None = None
    for path in parts.files[:MAX_READ]:
        try:
            one = held[_short(path, parts)] = read_weights(path, options)
            files.append(RankFile(path, None, "", "read", one.nbytes, one.modified))
        except ReadError as failed:
            error, fault = failed, Fault.of(failed, path)
            builder.problems.append(fault.problem(path.name))
            files.append(file_now(path, None, "", fault.status))
    if not held:
        raise error or ReadError(builder.path, "holds nothing that can be read")
    return files, held


def _short(path: Path, parts: Parts) -> str:
    """What a file is called in the tree: its folder where all files have one name."""
    return path.parent.name if "/" in parts.pattern else path.stem
