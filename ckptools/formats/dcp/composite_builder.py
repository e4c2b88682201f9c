"""Composite checkpoints: several DCP folders and files, put together into one tree.

Each part is read by its own format, and its problems name the part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptools.errors import ReadError, UnsafePathError
from ckptools.files.file_type import content_of, head_of
from ckptools.files.json_file import read_json
from ckptools.files.location import check_stays_inside
from ckptools.files.opening import File, reading
from ckptools.files.zip_archive import MAX_PICKLE
from ckptools.formats.dcp.files import METADATA, lacks_metadata
from ckptools.formats.dcp.folder import Folder, Writers, read_folder
from ckptools.formats.dcp.folder import world_size as world_size_of
from ckptools.formats.options import Options
from ckptools.formats.shared.checkpoint_builder import CheckpointBuilder, Fault
from ckptools.formats.shared.companions import Companion, CompanionFiles, unlike_states
from ckptools.model.checkpoint import Checkpoint, Fact, ModuleOrder, RankFile
from ckptools.model.problems import Code, Problem, Severity
from ckptools.pickles.machine import Machine, load_checked
from ckptools.training_state.sections import find_sections
from ckptools.training_state.steps import find_step

PROTO = b"\x80"
"""First byte of a pickle of protocol 2 or later."""


def _is_plain_pickle(path: Path) -> bool:
    """Whether a file is a pickle that torch.save did not write."""
    with File(path) as file:
        return path.suffix == ".pkl" and file.size > 0 and file.read(0, 1) == PROTO and not content_of(head_of(file))


def is_dcp(folder: Path) -> bool:
    """Whether a folder has the metadata of a finished DCP."""
    return folder.is_dir() and (folder / METADATA).is_file()


class CompositeBuilder:
    """Collects the parts of one checkpoint, and builds the `Checkpoint`.

    Attributes:
        options: how it is opened.
        tree: every part by its key.
        files: of all parts.
        writers: who wrote a DCP file.
        writer: what wrote the DCP folders.
        nbytes: bytes that the files should have.
        builder: what else was found of all parts.
        problems: those of the builder.
    """

    def __init__(self, format: str, path: Path, options: Options) -> None:
        self.path, self.options = path, options
        self.tree: dict[str, Any] = {}
        self.files: list[RankFile] = []
        self.writers = Writers()
        self.writer, self.nbytes = "", 0
        self.builder = CheckpointBuilder(format, path)
        self.problems = self.builder.problems

    def check_link(self, path: Path) -> None:
        """Refuse a part that is a link out of the checkpoint.

        Raises:
            UnsafePathError: it is one, and links were not allowed.
        """
        if not self.options.follow_symlinks:
            check_stays_inside(path, self.path)

    def add_dcp(self, folder: Path, key: str, top: str | None = None) -> None:
        """Add a DCP folder as `tree[key]`.

        Args:
            folder: where it is.
            key: its key in this checkpoint.
            top: the folder's only top-level key, which is dropped; None to keep the tree as it is.

        Raises:
            ReadError: it cannot be read.
        """
        found = self.read_dcp(folder)
        inner = found.tree.get(top) if top is not None and set(found.tree) <= {top} else found.tree
        self.tree[key] = {} if inner is None else inner
        prefix = f"{top}." if top is not None and inner is not found.tree else ""
        for problem in found.problems:
            tensor = None if problem.tensor is None else f"{key}.{problem.tensor.removeprefix(prefix)}"
            self.problems.append(replace(problem, tensor=tensor, message=f"{folder.name}: {problem.message}"))
        cut = 1 if prefix else 0
        self.builder.differing += ((key, *path[cut:]) for path in found.differing)
        self.builder.per_rank |= {(key, *path[cut:]): values for path, values in found.per_rank.items()}
        self.builder.unequal |= {(key, *path[cut:]): values for path, values in found.unequal.items()}

    def add_dcp_at_top(self, folder: Path) -> None:
        """Add the top-level parts of a DCP folder.

        Raises:
            ReadError: it cannot be read.
        """
        found = self.read_dcp(folder)
        self.tree |= found.tree
        self.problems += (replace(p, message=f"{folder.name}: {p.message}") for p in found.problems)
        self.builder.differing += found.differing
        self.builder.per_rank |= found.per_rank
        self.builder.unequal |= found.unequal

    def add_dcp_part(self, folder: Path, key: str | None, absent: str, needed: bool = True) -> None:
        """Add a DCP folder as `tree[key]`, or at the top without a key; a problem where it cannot be read.

        Args:
            folder: where it is.
            key: its key in this checkpoint; None for its own top-level parts.
            absent: what to say where there is no such folder.
            needed: whether that is an error; else a warning.

        Raises:
            UnsafePathError: it is a link out of the checkpoint.
        """
        if not is_dcp(folder):
            here = folder.is_dir()
            text = lacks_metadata(folder)
            severity: Severity = "error" if here or needed else "warning"
            self.problems.append(Problem(Code.FILE_MISSING, text if here else absent, None, folder.name, severity))
            return
        try:
            self.add_dcp(folder, key) if key is not None else self.add_dcp_at_top(folder)
        except UnsafePathError:
            raise
        except ReadError as error:
            fault = Fault.of(error, folder / METADATA)
            self.problems.append(fault.problem(f"{folder.name}/{METADATA}", None, folder.name))

    def read_dcp(self, folder: Path) -> Folder:
        """Read a DCP folder and note its files and cost.

        Raises:
            ReadError: it cannot be read.
        """
        self.check_link(folder)
        found = read_folder(folder, self.options)
        self.files += (f._replace(part="/".join(filter(None, (folder.name, f.part)))) for f in found.files)
        self.builder.add_read(found.files_read, found.bytes_read, found.names)
        self.writers |= found.writers
        self.writer = self.writer or found.writer
        self.nbytes += found.bytes_expected
        return found

    def add_file(self, path: Path, key: str) -> None:
        """Add the content of a torch.save, pickle or JSON file as `tree[key]`, or a problem where it cannot be read.

        Raises:
            UnsafePathError: it is a link out of the checkpoint.
        """
        self.check_link(path)
        with reading(path):
            status = path.stat()
        try:
            found = self._read(path)
        except ReadError as error:
            self.problems.append(Fault.of(error, path).problem(path.name, None, key))
            self.files.append(RankFile(path, None, key, "bad", status.st_size, status.st_mtime))
            return
        self.tree[key] = found
        self.files.append(RankFile(path, None, key, "read", status.st_size, status.st_mtime))
        self.nbytes += status.st_size
        self.builder.add_read(1, 0)

    def _read(self, path: Path) -> Any:
        if path.suffix == ".json":
            self.builder.add_read(0, path.stat().st_size)
            return read_json(path)
        if _is_plain_pickle(path):
            return self._plain_pickle(path)
        saved = self.options.read_file(path)
        self.builder.add_read(0, saved.bytes_read, saved.names)
        return saved.tree

    def _plain_pickle(self, path: Path) -> Any:
        """Return what `pickle.dump` wrote; tensors in it are foreign objects."""
        with File(path) as file:
            if file.size > MAX_PICKLE:
                raise ReadError(path, f"has {file.size} bytes; at most {MAX_PICKLE} are read")
            machine = Machine(file.read(0, file.size))
        tree = load_checked(machine, path, "pickle")
        self.builder.add_read(0, len(machine.data), (g.dotted for g in machine.globals.values()))
        return tree

    def add_parts(self, other: CompositeBuilder) -> None:
        """Add other parts behind these."""
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

    def add_checkpoint(self, other: Checkpoint, key: str, top: str | None = None) -> None:
        """Add a checkpoint that was opened on its own as `tree[key]`; `top` is its only top-level key, or as above."""
        dropped = top is not None and isinstance(other.tree, dict) and set(other.tree) == {top}
        self.tree[key] = other.tree[top] if dropped else other.tree
        cut, prefix = (1, f"{top}.") if dropped else (0, "")
        for problem in other.problems:
            tensor = None if problem.tensor is None else f"{key}.{problem.tensor.removeprefix(prefix)}"
            self.problems.append(replace(problem, tensor=tensor))
        self.files += (f._replace(part=key) for f in other.files)
        self.builder.differing += ((key, *path[cut:]) for path in other.differing)
        self.builder.per_rank |= {(key, *path[cut:]): values for path, values in other.per_rank.items()}
        self.builder.unequal |= {(key, *path[cut:]): values for path, values in other.unequal.items()}
        self.writers |= Writers(tuple(range(other.world_size.value or 0)))
        self.nbytes += other.bytes_expected or 0
        self.builder.add_read(other.cost.files, other.cost.nbytes, other.names)

    def add_states(self, key: str, files: Mapping[tuple[str, int], Path]) -> None:
        """Add what each rank has for itself as `tree[key]`; problems where a file cannot be read.

        Files are by the kind of rank, such as `dp`, and its number. The tree has numbers alone where there is one kind.

        Raises:
            UnsafePathError: a file is a link out of the checkpoint.
        """
        found, states = CompanionFiles(), dict[int | str, Any]()
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

    def miss_state(self, path: Path, key: str, rank: int, severity: Severity = "error") -> None:
        """Note that a rank's file is missing."""
        self.files.append(RankFile(path, rank, key, "missing", 0, None))
        text = f"no file {path.parent.name}/{path.name}"
        self.problems.append(Problem(Code.FILE_MISSING, text, rank, key, severity))

    def checkpoint(
        self,
        saved_as: str,
        world_size: Fact,
        order: ModuleOrder,
        steps: Iterable[str] | None = None,
        named: Path | None = None,
    ) -> Checkpoint:
        """Build the checkpoint from the parts.

        Args:
            saved_as: for people.
            world_size: as the parts state it; without a value, the DCP files decide.
            order: whether the model's names come in the order of the module, and why.
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
            files=self.files,
            world_size=world_size,
            step=find_step(named or self.path, tuple(counting)),
            module_order=order,
            text_keys=True,
            bytes_expected=self.nbytes,
            all_ranks=self.options.all_ranks,
        )
