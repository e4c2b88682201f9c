"""The files of a DeepSpeed checkpoint: their names, their content once read, their ranks, and files beside them.

`<folder>/latest` names a tag, and `<folder>/<tag>/` contains the files; `latest_universal` does so for a universal
checkpoint. Names, where D is the rank in the ZeRO group and M the model-parallel rank:

* `mp_rank_MM_model_states.pt`; ZeRO-3 `zero_pp_rank_D_mp_rank_MM_model_states.pt`
* `[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt`, formerly also `fp16_`
* `layer_LL[-model_TT]-model_states.pt` of a pipeline
* `layer_L_expert_E_mp_rank_MM_model_states.pt`, `expp_rank_E_mp_rank_MM_optim_states.pt` of experts

The model-parallel rank counts tensor-parallel ranks within pipeline stages, and global ranks count tensor-parallel
ranks first, then those of the ZeRO group, then stages. Source: deepspeed/runtime/engine.py (`_get_ckpt_name`,
`_get_rank_zero_ckpt_name`, `_get_expert_ckpt_name`), runtime/pipe/module.py (`ckpt_layer_path`) of 0.6 to 0.19,
runtime/pipe/topology.py (`PipelineParallelGrid`, `PipeModelDataParallelTopology`), checkpoint/reshape_meg_2d.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError, UnsafePathError
from ckptools.files.opening import is_plain_name, reading
from ckptools.formats.deepspeed.zero_stages import MAX_WORLD, ModelStates, OptimStates
from ckptools.formats.options import Options
from ckptools.formats.rank_search import rank_checks
from ckptools.formats.shared.checkpoint_builder import SavedFiles
from ckptools.formats.shared.companions import CompanionFiles, companions_in, path_that_states_a_step, read_companions
from ckptools.formats.shared.several_checkpoints import ASTRAY, several, text_of
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import Fact, ModuleOrder, RankFile
from ckptools.model.problems import Code, Problem, worst_first
from ckptools.model.records import Rows
from ckptools.model.tree import describe_for_error
from ckptools.rules.files import FileClaims, beyond
from ckptools.text import few
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

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
        dp: rank in the ZeRO group; None if one file serves all ranks of the group.
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
        """`(mp, dp)`, with 0 for a rank that the name lacks."""
        return self.mp or 0, self.dp or 0


def parse(path: Path) -> StateName | None:
    """Parse the name of a state file; None for a name that DeepSpeed does not give."""
    for part, pattern in PATTERNS.items():
        found = pattern.fullmatch(path.name)
        if found:
            words = {key: word for key, word in found.groupdict().items() if word is not None}
            axes, numbers = words.pop("axes", ""), {key: int(word) for key, word in words.items()}
            return StateName(path, part, numbers.pop("mp", None), axes=axes, **numbers)
    return None


def names_in(folder: Path, options: Options) -> list[StateName]:
    """The files of a tag folder, in the order of their numbers.

    Raises:
        UnsafePathError: one of them is a link out of the folder.
    """
    with reading(folder):
        found = [name for name in map(parse, folder.iterdir()) if name is not None]
    for name in found:
        options.check_link(name.path, folder)
    return sorted(found, key=lambda n: (n.part, *n.place, n.layer or 0, n.expert or 0, n.path.name))


def is_tag_folder(folder: Path) -> bool:
    """Whether a folder itself has files of DeepSpeed; False if it cannot be listed."""
    with suppress(OSError):
        return folder.is_dir() and any(parse(p) is not None for p in folder.iterdir())
    return False


def is_deepspeed(path: Path) -> bool:
    """Whether a path leads to a DeepSpeed checkpoint, by names and the content of `latest`."""
    if not path.is_dir():
        return parse(path) is not None or _is_slot_file(path)
    if is_tag_folder(path) or tags_in(path):
        return True
    pointer = _pointer(path)
    return pointer is not None and ((path / "zero_to_fp32.py").exists() or "global_step" in text_of(pointer))


def _is_slot_file(path: Path) -> bool:
    """Whether a file is a slot of a parameter in a universal checkpoint: `<tag>/zero/<name>/fp32.pt`."""
    zero = path.parent.parent
    return path.suffix == ".pt" and path.is_file() and zero.name == "zero" and is_tag_folder(zero.parent)


def _pointer(folder: Path) -> Path | None:
    return next((folder / name for name in POINTERS if (folder / name).is_file()), None)


def tags_in(folder: Path) -> list[Path]:
    """The tag folders in a folder."""
    return sorted((p for p in folder.iterdir() if p.is_dir() and is_tag_folder(p)), key=lambda p: p.name)


def find_tag(path: Path, options: Options) -> Path:
    """Find the tag folder of a path: itself, the folder of a file, or the one that `latest` names.

    Raises:
        ReadError: `latest` names a missing tag.
        UnsafePathError: it names something other than a folder beside it.
        UsageError: there are several tags and no `latest`.
    """
    if not path.is_dir():
        return path.parent if parse(path) else path.parent.parent.parent
    if is_tag_folder(path):
        return path
    pointer = _pointer(path)
    if pointer is not None:
        options.check_link(pointer, pointer.parent)
        tag = text_of(pointer)
        if not is_plain_name(tag):
            text = f"names the tag {describe_for_error(tag)}, which is not the plain name of a folder beside it"
            raise UnsafePathError(pointer, text)
        folder = pointer.parent / tag
        options.check_link(folder, pointer.parent)
        if not is_tag_folder(folder):
            here = few([tag.name for tag in tags_in(pointer.parent)]) or "no other checkpoint"
            what = (
                f"which {'holds no DeepSpeed files' if folder.is_dir() else 'is not there'} ({ASTRAY}); here are {here}"
            )
            raise ReadError(pointer, f"names the tag {describe_for_error(tag)}, {what}: name the one you mean")
        return folder
    tags = tags_in(path)
    if len(tags) > 1:
        raise several(path, tags, " and no file latest")
    return tags[0]


# -- the content of files that were read -------------------------------------------------------------------------------

GROUPED = ModuleOrder(False, "DeepSpeed lists parameters by group, which round robin may have reordered")
"""Its files list the content of the flat groups (`param_shapes`), so no order is needed."""


class Files(SavedFiles):
    """The files of a tag folder; an error in `must`, the file that the caller named, is raised."""

    def __init__(self, folder: Path, names: list[StateName], options: Options, must: Path) -> None:
        super().__init__(options.read_file)
        self.folder, self.names, self.options, self.must = folder, names, options, must

    def read_all(self, names: Iterable[StateName]) -> None:
        """Read files, and collect the faults of those that cannot be read.

        Raises:
            ReadError: the file that the caller named cannot be read.
        """
        for name in names:
            self.read(name.path, must=name.path == self.must)

    def read_one_of_each(self, part: str) -> None:
        """Read the first readable file of each model-parallel rank; the others of its ZeRO group are similar."""
        read: set[int | None] = set()
        for name in self.of(part):
            if name.mp not in read:
                self.read_all([name])
                read |= {name.mp} if name.path in self.saved else set()

    def of(self, part: str) -> list[StateName]:
        """The files of one part."""
        return [n for n in self.names if n.part == part]

    def tree(self, name: StateName) -> dict[Any, Any] | None:
        """The dict in a file; None if it was not read.

        Raises:
            ReadError: it is not a dict.
        """
        if name.path not in self.saved:
            return None
        tree = self.saved[name.path].tree
        if not isinstance(tree, dict):
            raise ReadError(name.path, f"holds a {type(tree).__name__}, expected the dict that DeepSpeed saves")
        return tree

    def models(self) -> dict[Place, ModelStates]:
        """The model states that were read, by `(mp, dp)`.

        Raises:
            ReadError: one is an optimizer states file.
        """
        trees = ((n, self.tree(n)) for n in self.of("model"))
        read = [ModelStates(n.path, *n.place, tree) for n, tree in trees if tree is not None]
        for model in read:
            if "module" not in model.tree and "optimizer_state_dict" in model.tree:
                raise ReadError(model.path, "holds optimizer states and no model; an optimizer's file under this name")
        return {(m.mp, m.dp): m for m in reversed(read)}

    def optims(self) -> dict[Place, OptimStates]:
        """The optimizer states that were read, by `(mp, dp)`.

        Raises:
            ReadError: one is not an optimizer states file.
        """
        found = {}
        for name in reversed(self.of("optim")):
            tree = self.tree(name)
            state = tree.get("optimizer_state_dict") if tree is not None else None
            if tree is not None and not isinstance(state, dict):
                raise ReadError(name.path, "has no optimizer_state_dict; not written by ZeRO, or damaged")
            if isinstance(state, dict):
                found[name.place] = OptimStates(name.path, state)
        return dict(sorted(found.items()))

    def status(self, path: Path, rank: int | None, part: str) -> RankFile:
        """The status of a present file; the end of an unread file is checked."""
        return self.listed(path, rank, part, len(self.names))


@dataclass(frozen=True)
class RankLayout:
    """The arrangement of ranks: data-parallel, tensor-parallel, pipeline stages.

    Attributes:
        dp: ranks in a data-parallel group.
        mps: model-parallel ranks: pipeline stages times tensor-parallel ranks.
        tp: ranks over which each weight is cut, not counting ZeRO's partitions.
    """

    dp: int
    mps: int
    tp: int

    @property
    def world(self) -> int:
        """The world size."""
        return self.dp * self.mps

    def of(self, where: Sequence[int]) -> int:
        """The global rank of a place that begins with a model-parallel rank and a data-parallel rank."""
        mp, dp = where[:2]
        stage, slice_ = divmod(mp, self.tp)
        return (stage * self.dp + dp) * self.tp + slice_


def model_parallel(files: Files, models: Mapping[Place, ModelStates]) -> tuple[int, int]:
    """`(mps, tp)`, the model-parallel and tensor-parallel sizes: as the files state, or by the number of files."""
    found = [n.mp for n in (*files.of("model"), *files.of("optim")) if n.mp is not None]
    stated = [model.number("mp_world_size") or 1 for model in models.values()]
    mps = min(max([*found, *(n - 1 for n in stated)]) + 1, MAX_WORLD)
    base = models[min(models)]
    dims = base.tree.get("checkpoint_parallel_dimensions")
    degree = dims.get("tp_degree") if isinstance(dims, dict) else None
    layers = files.of("layer")
    if layers or base.module is None:
        degree = max(len({n.axes for n in layers}), degree if type(degree) is int else 1)
    elif type(degree) is not int:
        # Without a pipeline, several model-parallel ranks must be tensor-parallel.
        degree = mps
    return mps, max(1, min(degree, MAX_WORLD))


def list_files(
    files: Files, ranks: RankLayout, worlds: Mapping[int, int], sharded: bool, zero: str | None
) -> Iterator[RankFile]:
    """List every file, found or missing.

    `worlds` has the number of ranks over which each model-parallel rank's parameters are cut; if they are `sharded`
    (ZeRO-3), every rank has its own model states. `zero` is the prefix of optimizer states, None without ZeRO.
    """
    for name in files.names:
        if name.part in ("model", "optim"):
            yield files.status(name.path, ranks.of(name.place), name.part)
        else:
            yield files.status(name.path, None, name.path.name.partition("-model_st")[0])
    here = {(name.part, *name.place) for name in files.names}
    for mp, world in worlds.items():
        for dp in range(min(world, MAX_WORLD)):
            own = f"zero_pp_rank_{dp}_mp_rank_{mp:02d}"
            expected = {"optim": f"{zero}{own}_optim_states.pt"} if zero is not None else {}
            if sharded or dp == 0:
                expected = {"model": f"{own if sharded else f'mp_rank_{mp:02d}'}_model_states.pt", **expected}
            for part, missing in expected.items():
                if (part, mp, dp) not in here:
                    yield RankFile(files.folder / missing, ranks.of((mp, dp)), part, "missing", 0, None)


def leftover_files(files: Files, ranks: RankLayout, worlds: Mapping[int, int], base: ModelStates) -> Iterator[Problem]:
    """Find files of ranks beyond those of the save, left over from another save.

    The parameters are cut over `worlds`. Without a pipeline, `base` states the number of model-parallel ranks.
    """
    stated = base.number("mp_world_size") if base.module is not None else None
    names = (*files.of("model"), *files.of("optim"))
    rows = [FileClaims(n.path, ranks.of(n.place), {"model-parallel rank": n.place[0]}) for n in names]
    yield from beyond(rows, {"model-parallel rank": stated} if stated else {}, " (mp_world_size)")
    for name in files.of("optim"):
        mp, dp = name.place
        if dp < ranks.dp:
            row = FileClaims(name.path, ranks.of(name.place), {"rank of a group": dp})
            yield from beyond([row], {"rank of a group": worlds.get(mp, 0)})


def expected_bytes(files: Iterable[RankFile]) -> int:
    """Total size of all files, assuming that missing and cut ones are as large as the others of their part."""
    by_part: dict[str, list[RankFile]] = {}
    for file in files:
        by_part.setdefault(file.part, []).append(file)
    return sum(rank_checks.expected_bytes(of_part) or 0 for of_part in by_part.values())


# -- state that transformers' Trainer and Accelerate write beside a tag folder: scheduler, RNG of every rank, counters
#     checkpoint-500/global_step500/      the Trainer: `latest`, scheduler.pt, rng_state_{R}.pth, trainer_state.json, …
#     OUT/pytorch_model/                  Accelerate: `latest`, scheduler.bin, random_states_{R}.pkl, …


def with_state_beside(made: Checkpoint, path: Path, tag: Path, options: Options) -> Checkpoint:
    """Add the companions in `path`, the folder around the tag folder, to the checkpoint.

    Beside several tag folders they are not read: no file states to which of the tags they belong.

    Raises:
        UnsafePathError: one of them is a link out of the folder.
    """
    if not path.is_dir() or path == tag or not companions_in(path):
        return made
    tags = tags_in(path)
    if len(tags) > 1:
        names = tuple(companion.path.name for companion in companions_in(path))
        text = (
            f"also here, and not read: {few(names)}; nothing says to which of {few([t.name for t in tags])} they belong"
        )
        return replace(made, problems=worst_first([*made.problems, Problem(Code.NOT_READ, text, files=names)]))
    found = read_companions(path, options, made.world_size.value or 0)
    own = made.tree if isinstance(made.tree, Mapping) else {}
    both = found.tree.keys() & own.keys()
    tree = {**own, **{key: value for key, value in found.tree.items() if key not in both}}
    problems = [*made.problems, *found.problems, *found.swapped()]
    problems += (
        Problem(Code.METADATA_CONTRADICTS, f"{key} is here twice; the tag folder is read", severity="warning")
        for key in sorted(both)
    )
    problems += [*_of_too_many(made, found), *_of_another_step(made, found)]
    nbytes = None if made.bytes_expected is None else made.bytes_expected + sum(f.nbytes for f in found.files)
    read = sum(file.status == "read" for file in found.files)
    cost = made.cost._replace(files=made.cost.files + read, nbytes=made.cost.nbytes + found.bytes_read)
    return replace(
        made,
        tree=tree,
        files=Rows((*made.files, *found.files)),
        problems=worst_first(problems),
        names=tuple(dict.fromkeys([*made.names, *found.names])),
        world_size=made.world_size._replace(sources=(*made.world_size.sources, *found.world_size.sources)),
        step=_step(made.step, found, tag),
        bytes_expected=nbytes,
        cost=cost,
    )


def _of_too_many(made: Checkpoint, found: CompanionFiles) -> Iterator[Problem]:
    """Find random states of ranks that the tag folder does not have, left over from another save."""
    world = made.world_size.exact
    if isinstance(world, int):
        rows = (FileClaims(f.path, f.rank, {"rank": f.rank}, tensor=f.part) for f in found.files if f.rank is not None)
        yield from beyond(rows, {"rank": world}, f" in {made.name}", "warning")


def _of_another_step(made: Checkpoint, found: CompanionFiles) -> Iterator[Problem]:
    """Find a contradiction between the Trainer's counter and DeepSpeed's."""
    counters = found.tree.get("trainer_state")
    stated = counters.get("global_step") if isinstance(counters, Mapping) else None
    if type(stated) is int and made.step.value not in (None, stated):
        text = f"trainer_state.json is of step {stated}, and {made.name} of step {made.step.value}"
        yield Problem(Code.STEPS_DISAGREE, text, None, "trainer_state")


def _step(own: Fact, found: CompanionFiles, tag: Path) -> Fact:
    """The step of the tag folder, and the files beside it that confirm it; Accelerate's scheduler counts processes."""
    counting = ("other",) if found.from_accelerate else ("other", "scheduler")
    beside = find_step(path_of_step(tag), tuple(s for s in find_sections(found.tree) if s.kind in counting))
    if own.value is None:
        return beside
    confirmed = (s for s in beside.sources if beside.value == own.value and s not in own.sources)
    return own._replace(sources=(*own.sources, *confirmed))


def path_of_step(tag: Path) -> Path:
    """The tag folder as a path whose names may state the step; Accelerate numbers saves, not steps."""
    return tag if path_that_states_a_step(tag.parent) == tag.parent else Path("-") / tag.name
