"""`StorageReader`: a checkpoint of any format as a storage from which `torch.distributed.checkpoint.load` loads.

`dcp.load` asks for the box of each tensor that a rank's state dict holds. So each rank reads only what it keeps, and
this code does not need to know how this run or the saved run is spread over ranks. Rank 0 opens the checkpoint and
sends the others the place of every value.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from ckptools.cluster.lost_rank import lost_ranks_told
from ckptools.cluster.rank_0 import made_by_rank_0, told_by
from ckptools.consolidate.selection import DOUBT
from ckptools.errors import CkptoolsError, DamagedError, ReadError, RefusedError
from ckptools.files.opening import File, OpenFiles, reading
from ckptools.loading.boxes import read_into
from ckptools.loading.fit import AskedKeys, Found, Unfit, other_dtype, problem_with, unfit, unfit_words
from ckptools.loading.keys import GROUPS, Answer, SavedKeys
from ckptools.loading.load_options import LoadOptions, choices_in, opened
from ckptools.loading.record_checks import Checksums, RecordChecks, RecordPart, compared
from ckptools.loading.saved_state import MODEL, OPTIMIZER, SavedState, Value, saved_state, stamp_of
from ckptools.model.regions import Box
from ckptools.model.tensor import Tensor as SavedTensor
from ckptools.option import in_python, spelled
from ckptools.tensor_io.checksums import Record
from ckptools.tensor_io.fetch_ahead import in_threads, thread_count
from ckptools.text import plural

if TYPE_CHECKING:
    from typing_extensions import Unpack


IN_PART = "the tensors here may be filled in part"


class StorageReader(TorchStorageReader):
    """A checkpoint of any format and world size, for `dcp.load(state_dict, storage_reader=...)`.

    Making one is a collective: every rank makes it. Rank 0 opens the checkpoint, judges it, and sends the others the
    place of every value; each rank then reads only the bytes that it keeps. Keys are those of the saved tree, or of
    torch's state_dict API: `model.<fqn>`, `optimizer.state.<fqn>.exp_avg`. Names of wrappers do not matter.

    What is read is compared with the checksums that the files state, where all ranks together read a record.

    `dcp.load` puts an error of one rank into a CheckpointException, which it raises on every rank. Names and shapes are
    compared before anything is written into the state dict; if files turn out to be damaged or to have changed, it may
    hold some of the new values.

    Attributes:
        path: the checkpoint.
        step: its training step; None if unknown.
        counters: plain numbers beside model and optimizer, such as an epoch, by key.
        notes: what was done or assumed. A note that casts doubt on the values is a Python warning too, on rank 0.
        bytes_read: bytes that this rank has read for the last `dcp.load`.
        bytes_kept: bytes of the tensors that it has filled, and `tensors` their number.
        checksums: how many records were compared with their checksums, on rank 0; None before `dcp.load`.
        kept: keys whose values stayed as they were.
        state: what the checkpoint holds, by key.
        rank: the rank that reads, in its process group.
        param_groups: the running param groups, with fqns as `params`, if they are to be compared with the saved ones.
        group: the ranks that load; None for all.
        alone: whether this process loads without others.

    Raises:
        NotWholeError: the checkpoint is not whole, and `allow_missing` is not given; on every rank.
        ReadError: it cannot be read.
        UsageError: options contradict each other.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        *,
        strict: bool = True,
        cast: bool = False,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        **options: Unpack[LoadOptions],
    ) -> None:
        """Open a checkpoint.

        Args:
            path: as for `ckptools.open`.
            strict: refuse names of a model or an optimizer that only one side has; otherwise the values of keys that
                the checkpoint lacks stay as they are.
            cast: convert values to the dtypes of the running tensors; otherwise other dtypes are refused.
            process_group: the ranks that load, as for `dcp.load`.
            no_dist: this process loads alone, as for `dcp.load`.
            options: see `LoadOptions`.
        """
        self._strict, self._cast, self._options = strict, cast, options
        alone = no_dist or not (dist.is_available() and dist.is_initialized())
        self.group, self.alone = process_group, alone
        self.rank, self._world_size = (
            (0, 1) if alone else (dist.get_rank(process_group), dist.get_world_size(process_group))
        )
        # The ranks of a machine share its cores.
        beside = 1 if self.alone else int(os.environ.get("LOCAL_WORLD_SIZE", self._world_size))
        self._threads = options.get("jobs") or max(1, thread_count(None, most=4 * beside) // beside)
        self._open(path)

    @in_python
    def _open(self, path: str | Path | Sequence[str | Path]) -> None:
        choices = choices_in(self._options)

        def make() -> SavedState:
            return saved_state(opened(path, self._options), choices)

        with lost_ranks_told(None, self.group):
            try:
                self.state = make() if self.alone else made_by_rank_0(make, self.group)
            except CkptoolsError as error:
                raise error if self.rank == 0 else told_by(0, error, path) from None
        for note in self.state.notes if self.rank == 0 else ():
            if note.startswith(DOUBT):
                warnings.warn(f"{self.state.path}: {note}", stacklevel=4)
        self.path, self.step = self.state.path, self.state.step
        self.counters, self.notes = self.state.counters, self.state.notes
        self._described = _Described(self.state, SavedKeys(self.state, self.rank, self._world_size, self._strict))
        self.bytes_read = self.bytes_kept = self.tensors = 0
        self.checksums: Checksums | None = None
        self.kept: tuple[str, ...] = ()
        self.param_groups: Sequence[Mapping[str, Any]] = ()

    def has(self, key: str) -> bool:
        """Whether the checkpoint has a value for a key of a state dict."""
        return self._described.keys_of.find(key) is not None

    def saved_name(self, fqn: str) -> str:
        """The name that a tensor of the model has in the checkpoint; the given one if the checkpoint lacks it."""
        answer = self._described.keys_of.find(f"{MODEL}.{fqn}")
        if answer is None or answer.entry is None:
            return fqn
        return self.state.entries[answer.entry].flat.removeprefix(f"{MODEL}.")

    @property
    def not_asked(self) -> tuple[str, ...]:
        """The keys of the saved tree that the last `dcp.load` did not ask for, on this rank."""
        taken = {answer.entry for answer in self._described.asked.values() if answer is not None}
        return tuple(
            entry.saved
            for number, entry in enumerate(self.state.entries)
            if number not in taken and entry.value is not None and not entry.flat.startswith(f"{OPTIMIZER}.{GROUPS}")
        )

    # -- the calls of `dcp.load`, in its order

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this reader takes a checkpoint by this name: any path or URL."""
        return isinstance(checkpoint_id, (str, os.PathLike))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin to load anew; a collective if `checkpoint_id` is another checkpoint than before."""
        if checkpoint_id is not None and os.fspath(checkpoint_id) != str(self.path):
            self._open(os.fspath(checkpoint_id))

    def read_metadata(self, *_: Any, **_more: Any) -> Metadata:
        """Describe every tensor as one chunk, because ckptools itself finds its bytes in the files."""
        self._described.asked.clear()
        self._described.keys_of.begin()
        paths = {entry.saved: entry.path for entry in self.state.entries if entry.value is not None}
        return Metadata(self._described, paths, storage_data={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **_more: Any) -> None:
        """Do nothing: the checkpoint is open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave out what is not read on this rank, and tell rank 0 what was asked for."""
        answers = self._described.asked
        known = {key: answer for key, answer in answers.items() if answer is not None}
        self.kept = tuple(key for key, answer in answers.items() if _value(answer) is None)
        asked = AskedKeys(
            {key: Found(one.section, one.entry, one.head, one.with_around) for key, one in known.items()},
            tuple(key for key, answer in answers.items() if answer is None) if self._strict else (),
            plan.planner_data or {},
            self._described.keys_of.mixed(self.param_groups),
        )
        items = [item for item in plan.items if _value(known.get(item.dest_index.fqn)) is not None]
        return replace(plan, items=items, storage_data=asked, planner_data=None)

    @in_python
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Compare what all ranks ask for with what the checkpoint has, on rank 0.

        Raises:
            RefusedError: keys are only on one side, two mean one value, shapes or dtypes differ, or a running param
                group has parameters of several saved ones that differ.
        """
        problem = problem_with([plan.storage_data for plan in plans], self.state, self._strict)
        if problem:
            raise RefusedError(self.path, problem)
        return [replace(plan, storage_data=None) for plan in plans]

    @in_python
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what this rank asks for; a collective.

        Raises:
            RefusedError: a dtype differs, and `cast` is not given.
            ReadError: a file cannot be read, or has changed since it was opened.
            DamagedError: a record does not match its checksum; the tensors may hold what was read of it.
        """
        mine: tuple[int, dict[Record, list[RecordPart]]] | None = None
        failure: BaseException | None = None
        try:
            checks = RecordChecks()
            self._fill(plan, planner, checks)
            mine = checks.right, checks.pieces()
        except BaseException as error:  # whatever it is, the other ranks wait for this one's checksums
            failure = error
        of_ranks: list[tuple[int, dict[Record, list[RecordPart]]] | None] = [mine]
        if not self.alone:
            of_ranks = [None] * self._world_size
            dist.all_gather_object(of_ranks, mine, self.group)
        # One rank raises: torch hands its error to all, and ranks that share a file have all met the same one.
        if failure and of_ranks.index(None) == self.rank:
            raise _filled_in_part(failure)
        done_by = [one for one in of_ranks if one is not None]
        if self.rank == 0 and len(done_by) == len(of_ranks):
            with OpenFiles() as files:
                right = sum(right for right, _ in done_by)
                self.checksums = compared(right, [pieces for _, pieces in done_by], files)
            if self.checksums.damaged:
                raise _filled_in_part(self._damage(self.checksums.damaged))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _fill(self, plan: LoadPlan, planner: LoadPlanner, checks: RecordChecks) -> None:
        tensors: list[tuple[ReadItem, SavedTensor, Tensor]] = []
        for item in plan.items:
            answer = self._described.asked[item.dest_index.fqn]
            assert answer is not None
            value = answer.value
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._described.keys_of.bytes_of(answer)))
            else:
                assert isinstance(value, SavedTensor)
                tensors.append((item, value, planner.resolve_tensor(item).detach()))
        self._check_dtypes(tensors)
        before = File.total_read

        def read(one: tuple[ReadItem, SavedTensor, Tensor]) -> None:
            item, saved, target = one
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            read_into(target, saved, box, files, None if self._options.get("unchecked") else checks.seen)
            if not (saved.shape or self._cast) and target.dtype is not getattr(torch, saved.dtype):
                self._check_exact(item.dest_index.fqn, saved, target, files)
            planner.commit_tensor(item, target)

        try:
            with OpenFiles() as files:
                in_threads(read, tensors, self._threads)
        except ReadError:
            self._check_unchanged()  # which explains an end that comes too early
            raise
        self._check_unchanged()
        self.bytes_read = File.total_read - before
        self.tensors = len({item.dest_index.fqn for item, _, _ in tensors})
        self.bytes_kept = sum(target.numel() * target.element_size() for _, _, target in tensors)

    def _in_record(self, record: Record) -> str:
        """The key of a tensor that lies in a record."""
        values = ((entry.flat, entry.value) for entry in self.state.entries if isinstance(entry.value, SavedTensor))
        inside = (key for key, value in values for shard in value.found if record in map(Record.of, shard.sources))
        return next(inside, "a tensor")

    def _damage(self, damaged: Mapping[Record, int]) -> DamagedError:
        record, crc = next(iter(damaged.items()))
        others = f" ({plural(len(damaged) - 1, 'more record')} too)" if len(damaged) > 1 else ""
        way = f"load it as it is with {spelled('unchecked', True)}"
        return DamagedError(record.path, self._in_record(record), f"{record.damage(crc)}{others}", way)

    def _check_dtypes(self, tensors: Sequence[tuple[ReadItem, SavedTensor, Tensor]]) -> None:
        other = {item.dest_index.fqn: other_dtype(saved, target, self._cast) for item, saved, target in tensors}
        if words := unfit_words({key: problem for key, problem in other.items() if problem is not None}):
            raise RefusedError(self.path, "; ".join(words))

    def _check_exact(self, key: str, saved: SavedTensor, target: Tensor, files: OpenFiles) -> None:
        """Refuse a number that its new dtype does not hold exactly; a count of steps may have any dtype."""
        number = torch.empty((), dtype=getattr(torch, saved.dtype))
        read_into(number, saved, Box((), ()), files, None)
        back = target.cpu().to(number.dtype)
        if not torch.equal(back, number) and not (back.isnan() and number.isnan()):
            text = f"{key} is {number.item()}, which {str(target.dtype).removeprefix('torch.')} does not hold exactly"
            raise RefusedError(self.path, f"{text}; {spelled('cast', True)} rounds it")

    def _check_unchanged(self) -> None:
        for path, stamp in self.state.stamps.items():
            try:
                with reading(path):
                    now = stamp_of(path)
            except ReadError as error:
                if error.kind != "absent":
                    raise
                text = "is not here, though rank 0 has opened it: was it deleted, or is it on another machine?"
                raise ReadError(path, text, "absent") from error
            if now != stamp:
                raise ReadError(path, "changed since it was opened: is a run still writing it?", "contradicts")


def _filled_in_part(error: BaseException) -> BaseException:
    """An error while reading, which says that some values may have been replaced by then."""
    if isinstance(error, CkptoolsError):
        error.reason, message = f"{error.reason}; {IN_PART}", f"{error}; {IN_PART}"
        error.args = (message,)
    return error


def _value(answer: Answer | None) -> Value | None:
    return None if answer is None else answer.value


class Planner(DefaultLoadPlanner):
    """Plans as torch does by default, but finds every tensor of another shape or dtype, where torch stops at the first.

    Args:
        cast: whether values are converted to the running dtype.
    """

    def __init__(self, cast: bool) -> None:
        super().__init__()
        self._cast = cast

    def create_local_plan(self) -> LoadPlan:
        """Plan this rank's reads; if a value does not fit, plan none, and leave it to rank 0 to tell."""
        described = cast("Metadata", self.metadata).state_dict_metadata
        assert isinstance(described, _Described)
        problems = {key: described.unfit(key, value, self._cast) for key, value in self.state_dict.items()}
        if any(problems.values()):
            return LoadPlan([], planner_data={key: one for key, one in problems.items() if one is not None})
        described.asked.clear()  # torch may ask for other keys: those that torch 2.3 would have made
        return super().create_local_plan()


class _Described(dict[str, Any]):
    """The descriptions of a checkpoint's values for DCP's planner, which looks up every key of a state dict.

    It lists the keys of the saved tree, and seems to have every other key too, so that the planner goes on: whether a
    missing key is refused is decided when all are known.
    """

    def __init__(self, state: SavedState, keys: SavedKeys) -> None:
        there = (entry for entry in state.entries if entry.value is not None)
        super().__init__({entry.saved: _description(entry.value) for entry in there})
        self.keys_of = keys
        self.asked: dict[str, Answer | None] = {}

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: str) -> Any:
        answer = self._answer(key)
        return _description(None if answer is None else answer.value)

    def unfit(self, key: str, running: Any, cast: bool) -> Unfit | None:
        """Why a running value cannot become the one that its key means."""
        saved = _value(self._answer(key))
        return None if saved is None else unfit(saved, running, cast)

    def _answer(self, key: str) -> Answer | None:
        if key not in self.asked:
            self.asked[key] = self.keys_of.find(key)
        return self.asked[key]


def _description(value: Value | None) -> Any:
    if not isinstance(value, SavedTensor):
        return BytesStorageMetadata()
    size = torch.Size(value.shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    # An older torch may not have the dtype: a value of it is refused when it is asked for, and not before.
    return TensorStorageMetadata(TensorProperties(getattr(torch, value.dtype, torch.uint8)), size, [whole])
