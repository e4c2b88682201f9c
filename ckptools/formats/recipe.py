"""Folders whose parts other formats read, side by side in one tree: the recipe of such a format, and its reader.

A recipe is data: how a folder is detected, its parts, the key of each in the tree, the severity if one is missing, and
the source of the world size. `Recipe.read` follows it. Steps that a recipe cannot express are functions: each part
names the function that reads it. Formats whose parts depend on the files in the folder add theirs one by one.

Problems of parts are found here, once for all of these formats: a part is missing, unreadable or a link out of the
folder, or ranks have no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError, UnsafePathError
from ckptools.files.opening import reading
from ckptools.formats.dcp.files import METADATA, lacks_metadata, looks_like_dcp
from ckptools.formats.dcp.folder import PLANNED, Folder, Writers, read_folder, world_size_of
from ckptools.formats.options import Options
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, Fault, file_now
from ckptools.formats.shared.companions import Companion, CompanionFiles, unlike_states
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.facts import Fact, ModuleOrder, RankFile
from ckptools.model.problems import Code, Problem, Severity
from ckptools.model.tree import leaf_at
from ckptools.rules.files import missing
from ckptools.text import few
from ckptools.training_state.optimizers import AS_SAVED
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

RANK = "{rank}"
MAX_RANKS = 1 << 16


# -- recipes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A part of a checkpoint: a file, a folder, or the files of all ranks.

    Attributes:
        at: paths below the folder, the first existing one of which is read; `{rank}` in one stands for each rank.
        key: its key in the tree; "" to add its own top-level keys.
        read: adds the content at a path under a key; a method of `PartsBuilder`, or a function of the format.
        missing: the severity of its absence; None if it may be absent.
        why: follows "no folder NAME" and "no file NAME" in messages.
        needed: whether the checkpoint is unreadable without this part; if not, a fault of it is a problem.
    """

    at: tuple[str, ...]
    key: str
    read: Callable[[PartsBuilder, Path, str], None]
    missing: Severity | None = None
    why: str = ""
    needed: bool = False


@dataclass(frozen=True)
class Recipe:
    """A format whose checkpoints are folders of parts; see `Format` for the names in capitals.

    Attributes:
        signs: groups of files; a folder is of this format if it has a file of each group.
        parts: in the order of the tree.
        saved_as: for people; `{parts.writer}` is the writer of its DCP folders.
        world_size: counts the ranks from the finished tree; without a value, the writers of the DCP folders decide.
        confirmed: examines a folder that has the signs, if names alone are ambiguous.
    """

    NAME: str
    READS: str
    KNOWN_BY: str
    signs: tuple[tuple[str, ...], ...]
    parts: tuple[Part, ...]
    saved_as: str
    world_size: Callable[[PartsBuilder], Fact] = lambda parts: Fact(None)
    confirmed: Callable[[Path], bool] = lambda path: True
    TRIED: tuple[str, ...] = ()
    BY_HAND: tuple[str, ...] = ()
    JOINS: tuple[str, ...] = ("model", "optimizer", "rest")

    def detect(self, path: Path) -> bool:
        """Whether a folder has the format's signs."""
        signs = path.is_dir() and all(any((path / name).is_file() for name in group) for group in self.signs)
        return signs and self.confirmed(path)

    def read(self, path: Path, options: Options) -> Checkpoint:
        """Open a folder.

        Raises:
            ReadError: a part that is needed cannot be read, or no part can.
            UnsafePathError: a part is a link out of the folder.
        """
        parts = PartsBuilder(self.NAME, path, options)
        for part in self.parts:
            parts.add(part)
        parts.check_tree()
        world = self.world_size(parts)
        for part in self.parts:
            if RANK in part.at[0]:
                parts.miss_ranks(part, world.value or 1 + max(parts.writers.ranks, default=0))
        return parts.checkpoint(self.saved_as.format(parts=parts), world)


def stated(*path: str) -> Callable[[PartsBuilder], Fact]:
    """Make a `Recipe.world_size` that reads the number at a key path of the tree."""

    def world_size(parts: PartsBuilder) -> Fact:
        number = leaf_at(parts.tree, path)
        return Fact(number, (".".join(path),)) if type(number) is int and number > 0 else Fact(None)

    return world_size


def flattened_optimizer(flat: Mapping[str, Any], param_groups: Any) -> dict[str, Any]:
    """The state of an optimizer whose moments are called `state/0/exp_avg`, or with dots; other keys stay beside it."""
    rest, state = dict(flat), dict[int, dict[str, Any]]()
    for slot in filter(None, [re.fullmatch(r"state[/.](\d{1,9})[/.](.+)", str(name)) for name in flat]):
        state.setdefault(int(slot[1]), {})[slot[2]] = rest.pop(slot[0])
    return {**rest, "state": dict(sorted(state.items())), "param_groups": param_groups}


def is_dcp(folder: Path) -> bool:
    """Whether a folder has the metadata of a finished DCP."""
    return folder.is_dir() and (folder / METADATA).is_file()


def ranks_at(path: Path) -> dict[int, Path]:
    """The files of a path with `{rank}` in its name, by rank."""
    head, tail = map(re.escape, path.name.split(RANK))
    with reading(path.parent):
        entries = sorted(path.parent.iterdir())
    return {int(m[1]): p for p in entries if (m := re.fullmatch(rf"{head}(\d{{1,7}}){tail}", p.name))}


# -- parts with usual names: does the content of each fit its name, and are they of one step? --------------------------


MODEL, OPTIMIZERS, SCHEDULERS = "model", ("optim", "optimizer"), ("scheduler", "lr_scheduler")
RNG, UNCOUNTED = "rng", ("rng", "dataloader")
"""Parts whose counters count an epoch or belong to a rank, and are not the training step."""

KINDS = {MODEL: "model", **dict.fromkeys(OPTIMIZERS, "optimizer"), **dict.fromkeys(SCHEDULERS, "scheduler")}
"""The kind of section that the name of a part implies."""


def contradictions(tree: Mapping[str, Any], here: set[str]) -> Iterator[Problem]:
    """Find parts that do not fit together, or whose content is not of the kind that their names imply."""
    stated = {}
    for key in (key for key in tree if key not in UNCOUNTED):
        sections = tuple(s for s in find_sections({key: tree[key]}) if s.kind == "other")
        step = find_step(Path("-"), sections)
        if step.value is not None:
            stated[f"{step.sources[0]} {step.value}"] = step.value
    if len(set(stated.values())) > 1:
        text = f"parts state different steps: {', '.join(stated)}; they may be of different saves"
        yield Problem(Code.MIXED_SAVES, text, severity="warning")
    for key, kind in KINDS.items():
        if key in tree and kind not in {s.kind for s in find_sections({key: tree[key]})}:
            text = f"holds nothing that is known to be {'an' if kind == 'optimizer' else 'a'} {kind}"
            yield Problem(Code.NAME_CONTRADICTS, text, None, key)
    if not here.isdisjoint(SCHEDULERS) and here.isdisjoint(OPTIMIZERS):
        yield missing("optimizer, whose learning rates the scheduler here sets", kind="", severity="warning")


# -- the builder -------------------------------------------------------------------------------------------------------


class PartsBuilder:
    """Collects the parts of one checkpoint, each read by its own format, and builds the `Checkpoint`.

    Attributes:
        tree: every part by its key.
        writers: ranks that wrote a DCP file.
        writer: writer of the DCP folders.
        nbytes: bytes that the files should have.
        order: whether the model's names are in the order of the module.
        world: the largest world size that a part states.
        forms: how parts that are checkpoints of their own were saved, by key.
        builder: the other findings of all parts.
    """

    def __init__(self, format: str, path: Path, options: Options) -> None:
        self.path, self.options = path, options
        self.tree: dict[str, Any] = {}
        self.writers = Writers()
        self.writer, self.nbytes = "", 0
        self.order: ModuleOrder = AS_SAVED
        self.world = Fact(None)
        self.forms: dict[str, str] = {}
        self.builder = CheckpointBuilder(format, path)
        self.files, self.problems = self.builder.files, self.builder.problems

    @property
    def form(self) -> str:
        """How the model was saved, if it is a DCP folder or one file."""
        return f"DCP folders, {self.writer}" if self.writer else "the model whole"

    def check_link(self, path: Path) -> None:
        """Refuse a part that is a link out of the checkpoint, or lies behind one.

        Raises:
            UnsafePathError: it is refused, and links are not to be followed.
        """
        for below in self._way(path):
            self.options.check_link(below, self.path)

    def check_tree(self) -> None:
        """Refuse a checkpoint without any part.

        Raises:
            ReadError: no part could be read.
        """
        if not self.tree:
            wrong = [p for p in self.problems if p.severity == "error"] or self.problems
            raise ReadError(self.path, f"no part of it can be read: {few([p.message for p in wrong])}")

    def add(self, part: Part) -> None:
        """Add a part, or the problem that it is missing or cannot be read.

        Raises:
            ReadError: it cannot be read, and is needed.
            UnsafePathError: it is a link out of the checkpoint.
        """
        name, paths = part.key or part.at[0], [self.path / at for at in part.at]
        path = next((p for p in paths if (p.parent if RANK in p.name else p).exists()), None)
        if path is None:
            if part.missing is not None:
                absent = next(below for below in self._way(paths[0]) if not below.exists())
                at, kind = self.name_in(absent), "file" if absent.suffix else "folder"
                self.problems.append(missing(at, None, name, kind=kind, more=part.why, severity=part.missing))
            return
        self.check_link(path.parent if RANK in path.name else path)
        try:
            part.read(self, path, part.key)
        except UnsafePathError:
            raise
        except ReadError as error:
            if part.needed:
                raise
            inside = error.path is not None and self.path in error.path.parents
            where = error.path if inside and error.path is not None else path
            fault, colon = Fault.of(error, where), ":" if where.is_dir() else ""
            problem = fault.problem(f"{self.name_in(where)}{colon}", None, name)
            self.problems.append(replace(problem, files=(self.name_in(where),)))
            if path.is_file():
                self.files.append(file_now(path, None, name, fault.status))

    def _way(self, path: Path) -> list[Path]:
        """The folders between the checkpoint's and a path, and the path itself."""
        return [below for below in (*reversed(path.parents), path) if self.path in below.parents]

    def name_in(self, path: Path) -> str:
        """The path below the checkpoint's, with `/`."""
        return "/".join(path.parts[len(self.path.parts) :])

    def add_file(self, path: Path, key: str) -> None:
        """Add what a torch.save, pickle, JSON or YAML file holds as `tree[key]`, or a problem if it is unreadable."""
        content = self.read_file(path, key)
        if self.files[-1].status == "read":
            self.tree[key] = content

    def read_file(self, path: Path, key: str) -> Any:
        """Read and list a torch.save, pickle, JSON or YAML file of a part; None, and a problem, if it cannot be read.

        Raises:
            UnsafePathError: it is a link out of the checkpoint.
        """
        if not path.exists():
            self.miss_files(key, path, (None,))
            return None
        self.check_link(path)
        found = CompanionFiles(self.path)
        content = found.read(Companion(path, key, None), self.options, self.name_in(path))
        self.add_companions(found)
        if found.files[-1].status != "read":  # its proper size is unknown
            self.nbytes -= found.files[-1].nbytes
        return content

    def add_dcp(self, path: Path, key: str, top: str = "") -> None:
        """Add a DCP folder as `tree[key]`, or its top-level parts without a key; a problem if it has no metadata.

        A file in its place holds the whole part. If `top` is the only top-level key, it is not repeated below `key`.

        Raises:
            ReadError: it cannot be read.
        """
        if path.is_file():
            self.add_file(path, key)
            return
        if not is_dcp(path):
            self.problems.append(lacks_metadata(path, key or path.name))
            return
        found = read_folder(path, self.options)
        self.files += (f._replace(part="/".join(filter(None, (path.name, f.part)))) for f in found.files)
        self.builder.add_read(found.files_read, found.bytes_read, found.names)
        self.writers |= found.writers
        self.writer = self.writer or found.writer
        self.nbytes += found.bytes_expected
        self._add_tree(found, key, top, path.name)
        if "model" in (key, *found.tree):
            self.order = PLANNED

    def add_weights(self, path: Path, key: str) -> None:
        """Add a model in Hugging Face's form, in a DCP folder, or in a single file of safetensors.

        Raises:
            ReadError: there is none, or it cannot be read.
        """
        from ckptools.formats import hugging_face

        if path.is_dir() and looks_like_dcp(path):
            self.add_dcp(path, key, key)
            return
        if path.is_dir() and not hugging_face.detect(path):
            raise ReadError(path, "holds no weights", "absent")
        alone = path.is_file()
        made = hugging_face.read(path, replace(self.options, only_this_file=alone))
        self.add_checkpoint(made, key, "" if alone else key)

    def add_ranks(self, path: Path, key: str) -> None:
        """Add the files of all ranks as `rank_files` merges them.

        Raises:
            ReadError: the first one cannot be read.
        """
        from ckptools.formats import rank_files

        if found := ranks_at(path):
            self.add_checkpoint(rank_files.read(found[min(found)], self.options), key)

    def add_checkpoint(self, other: Checkpoint, key: str, top: str = "", name: str = "") -> None:
        """Add a checkpoint that was opened on its own as `tree[key]`; `top` as for `add_dcp`.

        `name` is put before the messages of its problems, which do not name the folder.
        """
        self._add_tree(other, key, top, name)
        self.files += (f._replace(part=key) for f in other.files)
        self.writers |= Writers(tuple(range(other.world_size.value or 0)))
        self.nbytes += other.bytes_expected or 0
        self.builder.add_read(other.cost.files, other.cost.nbytes, other.names)
        self.count(other.world_size)
        self.forms[key] = other.saved_as
        if key == "model":
            self.order = other.module_order

    def count(self, world: Fact) -> None:
        """Keep the largest world size that a part states."""
        most, here = self.world.value or 0, world.value or 0
        if here > most or (here == most and self.world.at_least):
            self.world = world

    def _add_tree(self, found: Folder | Checkpoint, key: str, top: str, name: str) -> None:
        """Add a tree below its key, and its problems and differences, with their key paths extended by it."""
        dropped = bool(top) and isinstance(found.tree, dict) and set(found.tree) <= {top}
        if key:
            self.tree[key] = found.tree.get(top, {}) if dropped else found.tree
        else:
            self.tree |= found.tree
        for problem in found.problems:
            tensor = problem.tensor
            if key and tensor is not None:
                tensor = f"{key}.{tensor.removeprefix(f'{top}.') if dropped else tensor}"
            text = f"{name}: {problem.message}" if name else problem.message
            files = tuple(f"{name}/{file}" for file in problem.files) if name else problem.files
            self.problems.append(replace(problem, message=text, tensor=tensor, files=files))
        above, cut = (key,) if key else (), 1 if dropped else 0
        self.builder.differing += ((*above, *path[cut:]) for path in found.differing)
        self.builder.per_rank |= {(*above, *path[cut:]): values for path, values in found.per_rank.items()}
        self.builder.unequal |= {(*above, *path[cut:]): values for path, values in found.unequal.items()}

    def add_parts(self, other: PartsBuilder) -> None:
        """Add parts behind the present ones."""
        self.tree |= other.tree
        self.files += other.files
        self.writers |= other.writers
        self.writer = self.writer or other.writer
        self.nbytes += other.nbytes
        self.builder.add(other.builder)

    def add_companions(self, found: CompanionFiles) -> None:
        """Add companion files, without replacing parts."""
        both = [key for key in found.tree if key in self.tree]
        self.tree |= {key: value for key, value in found.tree.items() if key not in both}
        self.problems += [*found.problems, *found.swapped()]
        self.problems += (
            Problem(Code.METADATA_CONTRADICTS, f"{key} is here twice; the DCP folder is read", severity="warning")
            for key in both
        )
        self.files += found.files
        self.nbytes += sum(f.nbytes for f in found.files)
        self.builder.add_read(sum(f.status == "read" for f in found.files), found.bytes_read, found.names)

    def add_states(self, path: Path, key: str) -> None:
        """Add the files of all ranks as `tree[key]`, by rank; a file that cannot be read becomes a problem."""
        self.add_states_of(key, {("", rank): file for rank, file in ranks_at(path).items()})

    def add_states_of(self, key: str, files: Mapping[tuple[str, int], Path]) -> None:
        """Add files by the kind of rank, such as `dp`, and its number, as `add_states` does.

        The tree has numbers alone if there is one kind.

        Raises:
            UnsafePathError: a file is a link out of the checkpoint.
        """
        found, states = CompanionFiles(self.path), dict[int | str, Any]()
        alone = len({kind for kind, _ in files}) == 1
        self.options.read_ahead([files[one] for one in sorted(files)])
        for (kind, rank), path in sorted(files.items()):
            self.check_link(path)
            state = found.read(Companion(path, key, rank), self.options)
            if found.files[-1].status == "read":
                states[rank if alone else f"{kind}_{rank}"] = state
        found.tree = {key: states} if states else {}
        self.add_companions(found)
        self.problems += unlike_states(key, states)

    def miss_ranks(self, part: Part, world: int) -> None:
        """Note the ranks without a file of a part; if no rank has one, note the missing part once."""
        path = self.path / part.at[0]
        if path.parent.is_dir():
            here = ranks_at(path)
            alone = None if here else part.missing
            absent = set(range(1 if alone else min(world, MAX_RANKS))) - set(here)
            self.miss_files(part.key, path, sorted(absent), alone or "error", part.why)

    def miss_files(
        self, key: str, template: Path, ranks: Iterable[int | None], severity: Severity = "error", why: str = ""
    ) -> None:
        """Note ranks without a file at a path with `{rank}` in its name; None stands for a file of no rank."""
        known = {file.path for file in self.files}
        for rank in ranks:
            path = template.with_name(template.name.replace(RANK, str(rank)))
            if path not in known:
                self.files.append(RankFile(path, rank, key, "missing", 0, None))
            name = f"{path.parent.name}/{path.name}"
            self.problems.append(missing(name, rank, key, more=why, severity=severity))

    def checkpoint(
        self,
        saved_as: str,
        world_size: Fact,
        steps: Iterable[str] | None = None,
        named: Path | None = None,
    ) -> Checkpoint:
        """Build the checkpoint from the parts.

        Args:
            saved_as: for people.
            world_size: as the parts state it; without a value, the DCP files decide.
            steps: keys of the tree that may count steps; None for all.
            named: the path whose names may state the step; by default its own.
        """
        if world_size.value is None:
            world_size = world_size_of(self.writers, self.tree)
        counting = (s for s in find_sections(self.tree) if steps is None or (s.path and s.path[0] in steps))
        return self.builder.checkpoint(
            name=self.path.absolute().name,
            saved_as=saved_as,
            tree=self.tree,
            world_size=world_size,
            step=find_step(named or self.path, tuple(counting)),
            module_order=self.order,
            text_keys=True,
            bytes_expected=self.nbytes,
            all_ranks=self.options.all_ranks,
        )
