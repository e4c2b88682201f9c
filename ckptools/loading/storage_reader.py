"""`StorageReader`: a checkpoint of any format as a storage from which `torch.distributed.checkpoint.load` loads.

`dcp.load` asks for the box of each tensor that a rank's state dict holds. So each rank reads only what it keeps, and
this code does not need to know how this run or the saved run is spread over ranks. Rank 0 opens the checkpoint and
tells the others where every value lies.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
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

from ckptools.cluster.rank_0 import made_by_rank_0, told_by
from ckptools.errors import CkptoolsError, DamagedError, ReadError, RefusedError
from ckptools.files.opening import File, OpenFiles
from ckptools.loading.keys import GROUPS, Answer, Asked, Keys, problem_with
from ckptools.loading.options import LoadOptions, choices_in, opened
from ckptools.loading.record_checks import Compared, RecordChecks, compared
from ckptools.loading.saved_state import MODEL, OPTIMIZER, SavedState, Value, saved_state, stamp_of
from ckptools.loading.values import read_into
from ckptools.model.regions import Box
from ckptools.model.tensor import Tensor as SavedTensor
from ckptools.option import in_python, spelled
from ckptools.tensor_io.checksums import Record
from ckptools.tensor_io.fetch_ahead import in_threads, thread_count
from ckptools.text import plural

if TYPE_CHECKING:
    from typing_extensions import Unpack


class StorageReader(TorchStorageReader):
    """A checkpoint of any format and world size, for `dcp.load(state_dict, storage_reader=...)`.

    Making one is a collective: every rank makes it. Rank 0 opens the checkpoint, judges it, and tells the others where
    the values lie; each rank then reads only the bytes that it keeps. Keys are those of the saved tree, or of torch's
    state_dict API: `model.<fqn>`, `optimizer.state.<fqn>.exp_avg`. Names of wrappers do not matter.

    What is read is compared with the checksums that the files state, where all ranks together read a record.

    Attributes:
        path: the checkpoint.
        step: its training step; None if unknown.
        counters: plain numbers beside model and optimizer, such as an epoch, by key.
        notes: what was done or assumed.
        bytes_read: bytes that this rank has read for the last `dcp.load`.
        bytes_kept: bytes of the tensors that it has filled, and `tensors` their number.
        checksums: how many records were compared with their checksums, on rank 0; None before `dcp.load`.
        kept: keys whose values stayed as they were.
        state: what the checkpoint holds, by key.
        rank: the rank that reads, in its process group.
        param_groups: the running param groups, with fqns as `params`, if they are to be compared with the saved ones.

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
        self._group, self._alone = process_group, alone
        self.rank, self._world_size = (
            (0, 1) if alone else (dist.get_rank(process_group), dist.get_world_size(process_group))
        )
        self._threads = thread_count(options.get("jobs"), most=4)
        self._open(path)

    @in_python
    def _open(self, path: str | Path | Sequence[str | Path]) -> None:
        choices = choices_in(self._options)

        def make() -> SavedState:
            return saved_state(opened(path, self._options), choices)

        try:
            self.state = make() if self._alone else made_by_rank_0(make, self._group)
        except CkptoolsError as error:
            raise error if self.rank == 0 else told_by(0, error, path) from None
        self.path, self.step = self.state.path, self.state.step
        self.counters, self.notes = self.state.counters, self.state.notes
        self._described = _Described(self.state, Keys(self.state, self.rank, self._world_size, self._strict))
        self.bytes_read = self.bytes_kept = self.tensors = 0
        self.checksums: Compared | None = None
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
            if number not in taken and not entry.flat.startswith(f"{OPTIMIZER}.{GROUPS}")
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
        return Metadata(self._described, {entry.saved: entry.path for entry in self.state.entries}, storage_data={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **_more: Any) -> None:
        """Do nothing: the checkpoint is open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave out what is not read on this rank, and tell rank 0 what was asked for."""
        answers = self._described.asked
        self.kept = tuple(key for key, answer in answers.items() if _value(answer) is None)
        asked = Asked(
            {key: (a.section, a.entry, a.head) for key, a in answers.items() if a is not None},
            tuple(key for key, answer in answers.items() if answer is None),
            self._described.keys_of.mixed(self.param_groups),
        )
        items = [item for item in plan.items if _value(answers[item.dest_index.fqn]) is not None]
        return replace(plan, items=items, storage_data=asked)

    @in_python
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Compare the keys of all ranks with those of the checkpoint.

        Raises:
            RefusedError: some are only on one side, two mean one value, or a running param group is of several saved.
        """
        asked = [plan.storage_data for plan in plans]
        problem = problem_with(asked, self.state) if self._strict else ""
        problem = problem or next((one.mixed for one in asked if one.mixed), "")
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
        checks = RecordChecks()
        failure: Exception | None = None
        try:
            self._fill(plan, planner, checks)
        except Exception as error:  # the other ranks wait for this one's checksums
            failure = error
        mine = (0, {}) if failure else (checks.right, checks.pieces())
        of_ranks: list[Any] = [mine]
        if not self._alone and self.state.states_checksums:
            of_ranks = [None] * self._world_size
            dist.all_gather_object(of_ranks, mine, self._group)
        if failure:
            raise failure
        if self.rank == 0:
            self.checksums = compared(sum(right for right, _ in of_ranks), [pieces for _, pieces in of_ranks])
            for record, crc in self.checksums.damaged.items():
                raise DamagedError(record.path, self._in_record(record), record.damage(crc))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _fill(self, plan: LoadPlan, planner: LoadPlanner, checks: RecordChecks) -> None:
        tensors: list[tuple[ReadItem, SavedTensor, Tensor]] = []
        for item in plan.items:
            answer = self._described.asked[item.dest_index.fqn]
            value = _value(answer)
            if answer is not None and answer.group is not None:
                names = io.BytesIO()
                torch.save(self._described.keys_of.listed(answer.group, self._described.asked), names)
                planner.load_bytes(item, io.BytesIO(names.getvalue()))
            elif item.type == LoadItemType.BYTE_IO:
                assert isinstance(value, bytes)
                planner.load_bytes(item, io.BytesIO(value))
            else:
                assert isinstance(value, SavedTensor)
                tensors.append((item, value, planner.resolve_tensor(item).detach()))
        self._check_dtypes(tensors)
        before = File.total_read

        def read(one: tuple[ReadItem, SavedTensor, Tensor]) -> None:
            item, saved, target = one
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            read_into(target, saved, box, files, None if self._options.get("unchecked") else checks.seen)
            planner.commit_tensor(item, target)

        with OpenFiles() as files:
            in_threads(read, tensors, self._threads)
        self._check_unchanged()
        self.bytes_read = File.total_read - before
        self.tensors = len({item.dest_index.fqn for item, _, _ in tensors})
        self.bytes_kept = sum(target.numel() * target.element_size() for _, _, target in tensors)

    def _in_record(self, record: Record) -> str:
        """The key of a tensor that lies in a record."""
        values = ((entry.flat, entry.value) for entry in self.state.entries if isinstance(entry.value, SavedTensor))
        inside = (key for key, value in values for shard in value.found if record in map(Record.of, shard.sources))
        return next(inside, "a tensor")

    def _check_dtypes(self, tensors: Sequence[tuple[ReadItem, SavedTensor, Tensor]]) -> None:
        other = {
            item.dest_index.fqn: f"{saved.dtype} there and {str(target.dtype).removeprefix('torch.')} here"
            for item, saved, target in tensors
            if target.dtype is not getattr(torch, saved.dtype) and saved.shape
        }
        if other and not self._cast:
            key, dtypes = next(iter(other.items()))
            many = f"{plural(len(other), 'tensor')} of another dtype: {key} is {dtypes}"
            raise RefusedError(self.path, f"{many}; {spelled('cast', True)} converts while loading")

    def _check_unchanged(self) -> None:
        for path, stamp in self.state.stamps.items():
            if stamp_of(path) != stamp:
                raise ReadError(path, "changed since it was opened: is a run still writing it?", "contradicts")


def _value(answer: Answer | None) -> Value | None:
    return None if answer is None else answer.value


class _Described(dict[str, Any]):
    """The descriptions of a checkpoint's values for DCP's planner, which looks up every key of a state dict.

    It lists the keys of the saved tree, and also has those that mean the same values. It seems to have every key, so
    that the planner goes on: then all missing keys are told at once, or their values are kept.
    """

    def __init__(self, state: SavedState, keys: Keys) -> None:
        super().__init__({entry.saved: _description(entry.value) for entry in state.entries})
        self.keys_of = keys
        self.asked: dict[str, Answer | None] = {}

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: str) -> Any:
        if key not in self.asked:
            self.asked[key] = self.keys_of.find(key)
        return _description(_value(self.asked[key]))


def _description(value: Value | None) -> Any:
    if not isinstance(value, SavedTensor):
        return BytesStorageMetadata()
    size = torch.Size(value.shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(getattr(torch, value.dtype)), size, [whole])
