"""Problems of the files of a Megatron checkpoint, and notes for its user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptools.formats.megatron.folders import Coordinates, Grid, RankFolder, arguments, setting
from ckptools.formats.megatron.layers import QKV
from ckptools.formats.megatron.model import HEADS, INPUT
from ckptools.formats.options import Options
from ckptools.formats.shared.checkpoint_builder import Fault
from ckptools.model.checkpoint import RankFile
from ckptools.model.problems import Code, Problem
from ckptools.model.tensor import Tensor


def check_files(
    files: Sequence[RankFile],
    faults: Mapping[Path, Fault],
    grid: Grid,
    places: Mapping[Coordinates, RankFolder],
    options: Options,
) -> Iterator[Problem]:
    """Files that are missing, cut or stray, and pipeline stages without any file."""
    for file in files:
        name = f"{file.path.parent.name}/{file.path.name}"
        if file.status == "missing":
            yield Problem(Code.FILE_MISSING, f"no file {name}", file.rank)
        elif file.status in ("cut", "bad"):
            yield faults[file.path].problem(name, file.rank)
    for at, member in places.items():
        if at.tp >= grid.tp or at.pp >= grid.pp or at.ep >= grid.ep:
            text = f"{member.name} is outside of the grid of {_sizes(grid)} that args state"
            yield Problem(Code.STRAY_FILE, text, grid.rank(at))
    yield from _check_stages(files, grid, options)


def _check_stages(files: Sequence[RankFile], grid: Grid, options: Options) -> Iterator[Problem]:
    """A stage without a readable file leaves no gap in any tensor: whole layers are absent."""
    here = {file.rank for file in files if file.is_here and not file.part}
    alone = " with --only-this-file" if options.only_this_file else ""
    for stage in range(min(grid.pp, 1 << 16)):
        ranks = {grid.rank(Coordinates(stage, e, t)) for e in range(grid.ep) for t in range(grid.tp)}
        if not ranks & here:
            text = f"pipeline stage {stage} of {grid.pp}: none of its files is read{alone}, so its layers are missing"
            yield Problem(Code.MODEL_PART_MISSING, text, min(ranks))


def _sizes(grid: Grid) -> str:
    return f"tensor parallel {grid.tp} x pipeline {grid.pp}" + (f" x expert {grid.ep}" if grid.ep > 1 else "")


SAME = (
    "tensor_model_parallel_size", "model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "num_layers", "hidden_size", "padded_vocab_size",
)  # fmt: skip


def check_arguments(grid: Grid, trees: Mapping[Coordinates, Any]) -> Iterator[Problem]:
    """Files whose arguments are from another run, or from another rank than their folder's."""
    args = {at: arguments(tree) for at, tree in trees.items()}
    first = next(iter(args.values()), {})
    for at, own in args.items():
        odd = next((name for name in SAME if setting(own, name) != setting(first, name)), None)
        if odd is not None:
            text = f"{grid.folder(at)}: args.{odd} is {setting(own, odd)}, the first file's is {setting(first, odd)}"
            yield Problem(Code.WORLD_SIZES_DISAGREE, f"{text}; the files are not of one run", grid.rank(at))
    yield from _check_ranks(grid, {at: own.get("rank") for at, own in args.items()})


def _check_ranks(grid: Grid, stated: Mapping[Coordinates, Any]) -> Iterator[Problem]:
    """Folders that were written by other tensor-parallel ranks than their names say."""
    ranks = {at: rank for at, rank in stated.items() if type(rank) is int}
    # A converter writes every file from one process, so equal ranks prove nothing.
    if len(set(ranks.values())) < len(stated) or len(ranks) < 2:
        return
    for at, rank in ranks.items():
        if rank % grid.tp != at.tp:
            text = f"{grid.folder(at)} was written by rank {rank} (args.rank), another tensor-parallel rank"
            yield Problem(Code.STRAY_FILE, f"{text} than its name says", grid.rank(at))


def check_values(args: Mapping[str, Any], tree: Mapping[Any, Any], grid: Grid) -> Iterator[Problem]:
    """Notes on what Megatron saves in its own way, and problems where values contradict the saved arguments."""
    model = tree.get("model")
    model = model if isinstance(model, dict) else {}
    rows = next((model[n].shape[0] for n in INPUT if isinstance(model.get(n), Tensor) and not model[n].note), None)
    padded = setting(args, "padded_vocab_size")
    if rows is not None and padded is not None:
        if rows != padded:
            text = f"{rows} rows, args.padded_vocab_size is {padded}"
            yield Problem(Code.LAYOUT_DISAGREES, text, None, f"model.{next(n for n in INPUT if n in model)}")
        text = f"embedding and output layer keep the padded vocabulary of {rows} rows (args.padded_vocab_size)"
        yield Problem(Code.KEPT_AS_SAVED, text)
    yield from notes_on_tied(args, model)
    if any(isinstance(name, str) and QKV.fullmatch(name) for name in model):
        yield Problem(Code.KEPT_AS_SAVED, _order(tree.get("checkpoint_version", 0)))
    if grid.ep > 1:
        text = f"expert parallel {grid.ep}: the experts' weights are shown and not joined, everything else is"
        yield Problem(Code.KEPT_AS_SAVED, text)


def notes_on_tied(args: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[Problem]:
    """A note on a tied output layer that has no name of its own."""
    embedding = next((name for name in INPUT if name in model), None)
    stored = any(name.endswith("output_layer.weight") or name in HEADS for name in model)
    if args.get("untie_embeddings_and_output_weights") is False and embedding is not None and not stored:
        text = f"the output layer is tied to {embedding} and stored under that name only"
        yield Problem(Code.KEPT_AS_SAVED, text)


def _order(version: Any) -> str:
    if isinstance(version, (int, float)) and version >= 2:
        return "fused QKV weights keep Megatron's row order: for each query group its queries, key and value"
    how = "all queries, all keys, all values of each rank" if not version else "per head, with q, k and v interleaved"
    return f"checkpoint_version {version}: fused QKV weights keep that version's row order ({how})"
