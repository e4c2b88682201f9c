"""`verify`: run every check on one checkpoint, in a fixed order."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ckptools.errors import CkptoolsError, DamagedError, NotWholeError, ReadError, UsageError
from ckptools.files.opening import OpenFiles, location
from ckptools.formats.open import with_all_ranks
from ckptools.formats.shared.checkpoint_builder import KINDS
from ckptools.keys.random_states import ByRank, Owner, random_states
from ckptools.keys.value_digests import NUMBERS
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import cover_problem
from ckptools.model.problems import Code, Problem
from ckptools.model.records import Rows, grouped
from ckptools.model.tensor import Tensor
from ckptools.model.tree import tensors_in
from ckptools.option import spelled
from ckptools.pickles.foreign_names import foreign_classes, foreign_problems, suspicious_names
from ckptools.rules.optimizers import is_lbfgs, optimizer_problems
from ckptools.rules.verdict import verdict_of
from ckptools.tensor_io import replicas
from ckptools.tensor_io.checksums import Record, Stored, without_records
from ckptools.tensor_io.copies import copies_without_checksums, equal_copies
from ckptools.tensor_io.fetch_ahead import Progress, begin_stage, copies_of, in_ranks, no_progress, thread_count
from ckptools.tensor_io.stream import shard_bytes
from ckptools.text import few, first_few, fqn_of, plural
from ckptools.training_state.models import with_every_model
from ckptools.training_state.modules import module_problems
from ckptools.training_state.optimizers import nested, optimizers_of
from ckptools.training_state.sections import sections_of_kind
from ckptools.training_state.steps import WHY_OUT_OF_STEP, SchedulerCount, scheduler_counts
from ckptools.training_state.steps import learning_rates as compared_rates
from ckptools.verify import stored_bytes
from ckptools.verify.files_to_fetch import files_to_fetch
from ckptools.verify.record import Check, Verification, judged, not_judged, without
from ckptools.verify.stored_bytes import (
    damaged_archives,
    exactly_covered,
    of_file,
    of_stated,
    of_tensor,
    one_save,
    presence,
    ranks_agree,
    read_manifest,
    whole_tensors,
)

# -- checks of the training state: optimizer states, steps, learning rates, and states of random generators


LOST_STATE = "the state of the others may be in files that are not here, or damaged"
"""Why some parameters were not compared with their optimizer state."""

OTHER_RATES = "the others list no rates, or others than there are param groups"
"""Why the learning rates of some schedulers were not compared with the param groups."""

LOST = "the steps that the optimizer counts are in files that are not here, or damaged"
"""Why steps were not compared although the optimizer counts them."""

MAX_RATES = 4
"""At most this many learning rates are listed in one line."""

MAY = "; only ranks that share one copy of the model should"
"""Files may not show which ranks share a copy: DCP stores tensor-parallel and FSDP-sharded matrices alike."""


def state_covers_parameters(ck: Checkpoint) -> Check:
    """Check that every parameter has optimizer state of its shape, and is in exactly one param group."""
    name = "optimizer covers params"
    problems = list(optimizer_problems(ck))
    optimizers = [o for o in optimizers_of(ck).values() if o.state]
    if not optimizers and not problems:
        return not_judged(name, "no optimizer state")
    with_state = sum(len(o.state) for o in optimizers)
    in_groups = sum(len({n for group in o.param_groups for n in group.names}) for o in optimizers)
    assumed = sum(len(o.naming.assumed) for o in optimizers)
    more = f"; {assumed} names are assumed by order" if assumed else ""
    known = max(in_groups, with_state)
    # A parameter without state is a problem, unless its state may be in a missing file.
    looked_at = known if any(p.kind is Code.NO_OPTIMIZER_STATE for p in problems) else with_state
    lone = [o for o in optimizers if is_lbfgs(o.state)]
    detail = f"{with_state} of {plural(known, 'parameter')} have optimizer state{more}"
    if lone:
        detail, looked_at = f"{detail}; LBFGS keeps all of it under its first parameter", known
    return judged(name, problems, detail, looked_at=looked_at, of=known, rest=LOST_STATE)


def step_counters(ck: Checkpoint) -> Check:
    """Check that trainer, optimizers and schedulers count the same number of steps."""
    name = "step counters"
    slots = _step_slots(ck)
    found = {key: step for key, slot in slots.items() if (step := counted_steps(slot)) is not None}
    counted = {key: int(step) for key, step in found.items() if math.isfinite(step)}
    trained = [source for source in ck.step.sources if ".last_epoch" not in source]
    steps = {*counted.values(), *([ck.step.value] if trained else [])}
    schedulers = scheduler_counts(ck, steps)
    problems = [*_unlike_steps(ck, found, counted, trained), *_out_of_step(ck, schedulers, counted, trained)]
    problems += [p for p in ck.problems if p.kind is Code.STEPS_DISAGREE]
    in_step = [one for one in schedulers if one.in_step is not None]
    where = [*trained, *([f"{plural(len(counted), 'optimizer step')}"] if counted else [])]
    where += [one.name if one.value in steps else one.words for one in in_step]
    unsure = [f"{one.words}: {WHY_OUT_OF_STEP}" for one in schedulers if one.in_step is None]
    counter = ck.step.value if trained else min(counted.values(), default=None)
    detail = f"{counter} in {', '.join(where)}" if where else ""
    if not problems and (bool(trained) + bool(counted) + bool(in_step) < 2):
        why = LOST if slots and not counted else "no optimizer counts steps" if not counted else ""
        alone = "" if len(where) != 1 else "nothing else counts them"
        return not_judged(name, "; ".join(filter(None, [why, detail, alone, *unsure])), len(slots) + len(schedulers))
    looked_at, of = len(counted) + len(in_step), len(slots) + len(schedulers)
    rest = [LOST] if len(counted) < len(slots) else []
    return judged(name, problems, detail, looked_at=looked_at, of=of, rest="; ".join([*rest, *unsure]))


Steps = Mapping[tuple[str, Any], float]
"""Steps that an optimizer counts, by optimizer name and fqn of the parameter."""


def _out_of_step(
    ck: Checkpoint, schedulers: Iterable[SchedulerCount], counted: Mapping[tuple[str, Any], int], trained: Sequence[str]
) -> Iterator[Problem]:
    """Yield a problem for each scheduler that counts other steps than trainer and optimizers."""
    others = [f"{trained[-1]} {ck.step.value}"] if trained else []
    others += [f"the optimizer's steps {first_few(sorted(set(counted.values())))}"] if counted else []
    for one in schedulers:
        if one.in_step is False:
            text = f"{one.words} beside {', '.join(others)}: {WHY_OUT_OF_STEP}"
            yield Problem(Code.STEPS_DISAGREE, text)


def _unlike_steps(
    ck: Checkpoint, found: Steps, counted: Mapping[tuple[str, Any], int], trained: Sequence[str]
) -> Iterator[Problem]:
    """Yield problems of step counters that are not finite, or that differ between parameters or from the trainer's."""
    not_numbers = [(fqn, step) for (name, fqn), step in found.items() if (name, fqn) not in counted]
    for fqn, step in not_numbers[:1]:
        text = f"the optimizer counts {step} steps (of {len(found)} parameters {len(not_numbers)} have no number)"
        yield Problem(Code.STEPS_DISAGREE, text, None, str(fqn))
    values = set[int]()
    for name in dict.fromkeys(name for name, _ in counted):
        own = {fqn: step for (optimizer, fqn), step in counted.items() if optimizer == name}
        different = sorted(set(own.values()))
        values |= set(different)
        if len(different) > 1:
            few = min(different, key=list(own.values()).count)
            who = next(str(fqn) for fqn, step in own.items() if step == few)
            text = f"the optimizer counts {len(different)} different steps, from {different[0]} to {different[-1]}"
            yield Problem(Code.STEPS_DISAGREE, f"{text}; here {few}", None, who)
    several = len({name for name, _ in counted}) > 1
    # Optimizers may take turns, each counting its own steps, while the trainer counts the steps of all.
    known = {*values, sum(values)} if several else values
    if trained and values and ck.step.value not in known and (several or len(values) == 1):
        who = "optimizers count" if several else "optimizer counts"
        text = f"the {who} {first_few(sorted(values))} steps, {trained[0]} says {ck.step.value}"
        yield Problem(Code.STEPS_DISAGREE, text)


def _step_slots(ck: Checkpoint) -> dict[tuple[str, Any], Any]:
    """Find the step counter of each parameter: an int, or a tensor with one element."""
    states = [(name, fqn, slots) for name, o in optimizers_of(ck).items() for fqn, slots in o.state.items()]
    found = {(name, fqn): slots.get("step") for name, fqn, slots in states if isinstance(slots, Mapping)}
    one = {key: step for key, step in found.items() if isinstance(step, Tensor) and step.numel == 1}
    return one | {key: step for key, step in found.items() if type(step) is int}


def step_counter(ck: Checkpoint) -> Any:
    """Return the step counter of the first parameter that has one, an int or a one-element tensor; else None."""
    for section in sections_of_kind(ck, "optimizer"):
        state = nested(section.value).get("state")
        for slots in state.values() if isinstance(state, Mapping) else ():
            step = slots.get("step") if isinstance(slots, Mapping) else None
            if type(step) is int or (isinstance(step, Tensor) and step.numel == 1):
                return step
    return None


def counted_steps(slot: Any) -> float | None:
    """Read the number in a step counter, as int if it is finite; None if its file is missing or damaged."""
    if not isinstance(slot, Tensor):
        return int(slot)
    if cover_problem(slot, "") is not None:
        return None
    code = NUMBERS.get(slot.dtype)
    if code is not None:
        last = next(shard for shard in reversed(slot.shards) if shard.was_read and shard.box.numel)
        with OpenFiles() as files:
            number = struct.unpack(code, shard_bytes(last, files))[0]
    else:
        from ckptools.tensor_io import read

        number = read.to_numpy(slot).reshape(-1)[0]
    return int(number) if math.isfinite(number) else float(number)


def learning_rates(ck: Checkpoint) -> Check:
    """Check that the last learning rates of each scheduler are the rates in the param groups."""
    name, rates, problems = "lr: scheduler = groups", set[float](), []
    schedulers, compared = sections_of_kind(ck, "scheduler"), 0
    for section, pair in zip(schedulers, compared_rates(ck), strict=True):
        compared += pair is not None
        rates.update(pair.scheduler if pair else ())
        if pair and not pair.agree:
            theirs = _rates(pair.groups)
            text = f"its last learning rates are {_rates(pair.scheduler)}, those of the param groups {theirs}"
            problems.append(Problem(Code.LEARNING_RATES_DISAGREE, text, None, section.name))
    if not rates:
        return not_judged(name, "no scheduler states rates that can be compared")
    detail = f"{_rates(rates)} in scheduler and param groups"
    return judged(name, problems, detail, looked_at=compared, of=len(schedulers), rest=OTHER_RATES)


def _rates(rates: Iterable[float]) -> str:
    distinct = sorted(set(rates))
    return ", ".join(f"{rate:.4g}" for rate in distinct[:MAX_RATES]) + (", ..." if len(distinct) > MAX_RATES else "")


Prints = Mapping[Owner, str]
"""Fingerprint of a random generator's state, by rank."""


def distinct_states(ck: Checkpoint) -> Check:
    """Check that no two ranks have the same random generator states."""
    with OpenFiles() as files:
        states = random_states(ck, files)
    shared = {stream: by_rank for stream, by_rank in states.items() if len(by_rank) > 1}
    unread = list(_unreadable(states))
    if not shared and not unread:
        return not_judged("rng", "no random state" if not states else "random state of one rank alone", len(states))
    prints = {s: {rank: c.fingerprint for rank, c in by_rank.items() if not c.problem} for s, by_rank in shared.items()}
    counts = ", ".join(f"{stream} {len(set(p.values()))} distinct of {len(p)}" for stream, p in prints.items())
    # Megatron keys states by (pipeline, tensor) position. All positions share one model copy, and may draw alike.
    ranked = {s: by_rank for s, by_rank in prints.items() if not any(isinstance(owner, str) for owner in by_rank)}
    problems = [*_equal_for_all(ranked), *_equal_for_some(ranked)]
    if problems and _share_a_model(ck):
        problems, counts = [], f"{counts}; ranks that share one copy of the model may draw alike"
    lost = len({f.rank for f in ck.files if not f.is_here and f.rank is not None}) * len(ranked)
    of, looked_at = sum(map(len, states.values())) + lost, sum(map(len, prints.values()))
    rest = "the others are in files that are not here, or damaged" if lost else "the others are of one rank"
    return judged("rng", [*unread, *problems], counts, looked_at=looked_at, of=of, rest=rest)


def _unreadable(states: Mapping[str, ByRank]) -> Iterator[Problem]:
    for stream, by_rank in states.items():
        for owner, content in by_rank.items():
            rank = owner if isinstance(owner, int) else None
            if content.problem:
                yield Problem(Code.VALUE_LOST, f"its {stream} state cannot be read: {content.problem}", rank)


def _equal_for_all(states: Mapping[str, Prints]) -> Iterator[Problem]:
    """Report random states that all ranks share, as one problem: one copied file or one seed explains all of them."""
    streams: dict[int, dict[str, str]] = {}
    for stream, prints in states.items():
        if len(prints) > 1 and len(set(prints.values())) == 1:
            streams.setdefault(len(prints), {})[stream] = next(iter(prints.values()))
    for ranks, same in streams.items():
        s = "s" if len(same) > 1 else ""
        which = f"{', '.join(same)} state{s}, fingerprint{s} {', '.join(same.values())}"
        yield Problem(Code.RNG_STATES_EQUAL, f"all {ranks} ranks have the same {which}{MAY}")


def _share_a_model(ck: Checkpoint) -> bool:
    """Return True if all ranks train one copy of the model, and so may draw the same random numbers.

    Stages of a pipeline do, and so do ranks of a one-dimensional mesh with a replicated parameter: FSDP shards every
    parameter, while tensor parallelism replicates biases.
    """
    model = (t for s in sections_of_kind(ck, "model") for _, t in tensors_in(s.value))
    return ck.in_parts or any(t.placements == ("Replicate()",) and t.mesh == (ck.world_size.value,) for t in model)


def _equal_for_some(states: Mapping[str, Prints]) -> Iterator[Problem]:
    """Report ranks that share a random state while others have their own.

    Groups of equal size, such as the data-parallel copies of each tensor-parallel rank, may share one.
    """
    streams: dict[tuple[Any, ...], list[str]] = {}
    for stream, prints in states.items():
        groups = grouped(prints, prints.__getitem__)
        if len({len(ranks) for ranks in groups.values()}) > 1:
            for fingerprint, members in groups.items():
                if len(members) > 1:
                    streams.setdefault(tuple(members), []).append(f"{stream} state ({fingerprint})")
    for ranks, same in streams.items():
        text = f"ranks {first_few(ranks)} have the same {', '.join(same)}, other ranks have their own"
        why = f"{text}; a file may have been copied, or restored on the wrong rank"
        yield Problem(Code.RNG_STATES_EQUAL, why, ranks=ranks)


# -- every check -------------------------------------------------------------------------------------------------------


def verify(
    checkpoint: Checkpoint | str | Path,
    *,
    deep: bool = False,
    values: bool = False,
    manifest: str | Path | None = None,
    ignore: Iterable[str] = (),
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Check whether a checkpoint is whole, undamaged and consistent, reading the files of all ranks.

    This is `ckptools.verify`. An unreadable file becomes a problem. An item of `ignore` is a code, or several separated
    by commas.

    Raises:
        ReadError: the checkpoint cannot be opened, or the manifest cannot be read.
        UsageError: a code does not exist.
    """
    started = time.perf_counter()
    codes = _codes(ignore)
    whole = with_all_ranks(checkpoint)
    ck = with_every_model(whole)
    with OpenFiles() as files:
        reading = _ByteChecks(files, thread_count(jobs), progress or no_progress)
        checks = [*_each(STRUCTURE, ck), *reading.bytes_of(ck, deep, values), reading.copies(ck)]
        checks += [reading.stated(ck, deep)] if ck.stated_digests else []
        checks += [reading.manifest(ck, location(manifest))] if manifest is not None else []
        checks += [*_each(STATE, ck), _pickles(ck)]
        checks += _others(ck, checks)
    kept = Rows(without(check, codes) for check in checks)
    ignored = sum(len(check.problems) for check in checks) - sum(len(check.problems) for check in kept)
    opened = ck.cost.seconds if whole is checkpoint else 0.0
    found = [p for check in checks for p in check.problems if p.kind not in ELSEWHERE]
    found += [p for p in ck.problems if p.kind in ELSEWHERE]
    sums = next(check for check in checks if check.name == CHECKSUMS)
    verdict = verdict_of(ck, found, "bytes" if 0 < sums.looked_at == sums.of else None)
    return Verification(
        path=ck.path,
        checks=kept,
        verdict=verdict,
        ignored=ignored,
        to_fetch=files_to_fetch(ck, found),
        bytes_read=reading.nbytes,
        seconds=opened + time.perf_counter() - started,
    )


def bytes_to_verify(
    ck: Checkpoint, deep: bool = False, values: bool = False, manifest: str | Path | None = None
) -> int:
    """Count the bytes that `verify` reports to `progress` with these arguments."""
    total = stored_bytes.bytes_to_read(ck, deep, values)
    if values:
        from ckptools.stats.passes import parts_of_models

        models = sections_of_kind(with_every_model(ck), "model")
        total += sum(part.nbytes for part in parts_of_models(ck, models))
    return total + (sum(tensor.nbytes for _, tensor in whole_tensors(ck)) if manifest is not None else 0)


MOST_NEAR = 30
"""Most codes that a message about an unknown code names."""


def _codes(ignore: Iterable[str]) -> set[str]:
    codes = [code.strip().upper() for listed in ignore for code in listed.split(",") if code.strip()]
    known = [kind.code for kind in Code]
    for code in codes:
        if code not in known:
            near = few([other for other in known if other[:3] == code[:3]], MOST_NEAR)
            others = f"near it are {near}; " if near else ""
            lists = f"{others}`ckptools explain` lists all"
            raise UsageError(None, f"{spelled('ignore')} {code[:40]}: there is no such code; {lists}")
    return set(codes)


RANKS_AGREE = "ranks agree on layout"
"""Name of the check that compares the world size, shapes and dtypes that ranks state."""

STRUCTURE = {
    "files": presence,
    "one save": one_save,
    "layout": exactly_covered,
    RANKS_AGREE: ranks_agree,
}
"""Checks of files and layout, by the name of their row."""

STATE = {
    "optimizer covers params": state_covers_parameters,
    "step counters": step_counters,
    "lr: scheduler = groups": learning_rates,
    "rng": distinct_states,
}
"""Checks of optimizer, scheduler and random states, by the name of their row."""


def _each(checks: Mapping[str, Callable[[Checkpoint], Check]], ck: Checkpoint) -> Iterator[Check]:
    """Run some checks; turn a file that cannot be read into a problem of the check."""
    for name, check in checks.items():
        try:
            yield check(ck)
        except (ReadError, NotWholeError) as error:
            yield judged(name, [unreadable(error)], "a file could not be read", looked_at=0, of=len(ck.files))


def _listed(problems: Iterator[Problem], fqn: str | None = None) -> list[Problem]:
    """List the problems of one check; if a file cannot be read, return that as the only problem."""
    try:
        return list(problems)
    except (ReadError, NotWholeError) as error:
        return [unreadable(error, None, fqn)]


def unreadable(error: CkptoolsError, rank: int | None = None, fqn: str | None = None) -> Problem:
    """Turn the error of a file that could not be read into a problem."""
    if isinstance(error, NotWholeError):
        kind = Code.TENSOR_GAP
    elif isinstance(error, DamagedError):
        kind = Code.BAD_CHECKSUM
    else:
        kind = KINDS[error.kind] if isinstance(error, ReadError) else Code.FILE_CUT
    return Problem(kind, str(error), rank, fqn)


ELSEWHERE = (Code.TENSOR_GAP, Code.TENSOR_OVERLAP, Code.TENSOR_NOT_JOINED)
"""Codes found when the checkpoint is opened and reported again, for each tensor, by the layout check."""


def _others(ck: Checkpoint, checks: Sequence[Check]) -> list[Check]:
    """Collect problems found when the checkpoint was opened that no check has reported."""
    known = {problem for check in checks for problem in check.problems}
    reported = {p.tensor for p in known if p.kind is Code.COPIES_DIFFER}
    left = [p for p in ck.problems if p not in known and p.kind not in ELSEWHERE and p.severity != "note"]
    left = [p for p in left if p.kind is not Code.COPIES_DIFFER or p.tensor not in reported]
    return [judged("anything else", left, "", looked_at=len(left), of=len(left))] if left else []


def _pickles(ck: Checkpoint) -> Check:
    """Check the class and function names in the pickles for foreign and suspicious ones; nothing is run."""
    foreign = foreign_classes(ck.tree)
    named = foreign_problems(foreign, suspicious_names(ck.names, foreign))
    problems = [*named, *module_problems(ck.tree)]
    names = len(ck.names)
    detail = f"{plural(names, 'class or function', 'classes and functions')}; nothing was run"
    detail = detail if names else "no pickle names a class or function"
    return judged("names in pickles", problems, detail, looked_at=names, of=names)


CHECKSUMS = "checksums (CRC-32)"
"""Name of the check of the CRC-32 checksums that zip archives state."""

IN_RANGE = "values in range"
"""Name of the check for odd but finite values in each tensor."""

IN_LINE = "values in line"
"""Name of the check that compares each tensor with the same tensor of other layers."""

BESIDE_OTHERS = ("out of line", "copy")
"""Findings of the statistics that come from a comparison with other layers."""


STATED = "stated digests (sha256)"
"""Name of the check of whole files against the SHA-256 digests that the checkpoint lists."""


class _ByteChecks:
    """Checks that read tensor bytes, in threads; `damaged` are zip entries with a wrong checksum."""

    def __init__(self, files: OpenFiles, jobs: int, progress: Progress) -> None:
        self.files, self.jobs, self.progress = files, jobs, progress
        self.nbytes = 0
        self.damaged: set[Record] = set()

    def bytes_of(self, ck: Checkpoint, deep: bool, values: bool) -> list[Check]:
        """Check checksums, and look for NaN and infinities, in one pass over the storages."""
        found = stored_bytes.records_of(ck) if deep or values else []

        def read(found: Stored) -> stored_bytes.Findings:
            try:
                findings = stored_bytes.read_record(found, self.files, deep, values)
            except ReadError as error:
                fqn, shard = found.owners[0]
                problem = unreadable(error, shard.rank, fqn)
                return stored_bytes.Findings((problem,), (), 0) if deep else stored_bytes.Findings((), (problem,), 0)
            self.progress(findings.nbytes, found.record.path.name)
            return findings

        parts = partial(stored_bytes.parts_of, deep=deep, values=values)
        findings = in_ranks(read, found, self.jobs, lambda one: one.record.nbytes, reads=parts)
        self.nbytes += sum(f.nbytes for f in findings)
        self.damaged = {one.record for one, finding in zip(found, findings, strict=True) if finding.checksum}
        findings = stored_bytes.with_replicas(ck, found, stored_bytes.with_padding(ck, findings), self.damaged)
        unread = damaged_archives(ck, self.files) if deep else []
        lost = stored_bytes.not_here(ck) if deep or values else 0
        codes = {fqn_of(path) for path, t in tensors_in(ck.tree) if t.are_codes}
        checks = [_checksums(found, findings, deep, unread, lost), _finite(found, findings, values, lost, codes)]
        return [*checks, *self.odd_values(ck, values)]

    def odd_values(self, ck: Checkpoint, values: bool) -> list[Check]:
        """Find zeros, denormals and outliers in the model's values; `bytes_of` finds NaN and infinities."""
        if not values:
            asked = f"not asked for; {spelled('values', True)}"
            alone = f"{asked} looks for zeros, denormals and values that are far from others"
            return [not_judged(IN_RANGE, alone), not_judged(IN_LINE, f"{asked} compares tensors with other layers'")]
        if any(p.kind is Code.NEVER_WRITTEN and p.severity == "error" for p in ck.problems):
            why = "values were never written to the disk, and read as zeros"
            return [not_judged(name, why) for name in (IN_RANGE, IN_LINE)]
        from ckptools.stats.figures import statistics
        from ckptools.stats.passes import parts_of_models

        begin_stage(self.progress, IN_RANGE)
        parts = parts_of_models(ck, sections_of_kind(ck, "model"))
        found = statistics(ck.path, parts, False, self.jobs, self.progress)
        odd = [one for one in found.suspects if one.what != "not finite"]
        kinds = {"all zero": Code.ZEROS, "zeros": Code.ZEROS}
        problems: dict[bool, list[Problem]] = {True: [], False: []}
        for one in odd:
            kind = kinds.get(one.what, Code.VALUES_ODD)
            problems[one.what in BESIDE_OTHERS].append(Problem(kind, one.words, one.rank, one.name, one.severity))
        return [
            judged(name, problems[name is IN_LINE], f"{plural(at, noun)} of the model", looked_at=at, of=of, rest=rest)
            for name, noun, (at, of, rest) in (
                (IN_RANGE, "weight", found.in_range),
                (IN_LINE, "tensor", found.in_line),
            )
        ]

    def copies(self, ck: Checkpoint) -> Check:
        """Compare replicas byte for byte, and plain values that should be equal."""
        pairs = [(fqn, without_records(tensor, self.damaged)) for fqn, tensor in stored_bytes.replicated(ck)]
        beside = {fqn for fqn, _ in pairs}
        problems = [p for p in ck.problems if p.kind is Code.COPIES_DIFFER and p.tensor not in beside]
        contradicted, rounded = replicas.compare_rounded(ck.rounded)
        problems += contradicted
        with suppress(ReadError):  # other checks report unreadable files
            problems += copies_without_checksums(
                ((fqn_of(path), tensor) for path, tensor in tensors_in(ck.tree)), self.files
            )

        if pairs:
            begin_stage(self.progress, "comparing copies")

        def compare(pair: tuple[str, Any]) -> list[Problem]:
            self.progress(0, pair[0])
            return _listed(stored_bytes.unequal(*pair, self.files), pair[0])

        stored_bytes.fetch_copies(ck)
        equal = equal_copies(pairs, self.files)
        others = [pair for pair in pairs if pair[0] not in equal]
        compared = in_ranks(compare, others, self.jobs, lambda p: p[1].nbytes, reads=lambda p: copies_of(p[1]))
        problems += [p for found in compared for p in found]
        try:
            own = stored_bytes.own(ck, self.files)
        except ReadError as error:
            problems, own = [*problems, unreadable(error)], ""
        if not pairs and not problems and not ck.rounded:
            return not_judged("copies equal", "; ".join(["nothing is stored twice", *([own] if own else [])]))
        parts = [f"{plural(len(pairs), 'tensor')} stored more than once"] if pairs or not ck.rounded else []
        right = rounded - len(contradicted)
        parts += [f"{plural(right, 'weight')} beside fp32 copies that round to them"] if ck.rounded else []
        looked_at, of = len(pairs) + rounded, len(pairs) + len(ck.rounded)
        detail = "; ".join([*parts, *([own] if own else [])])
        rest = "the others are not whole, or cannot be read"
        return judged("copies equal", problems, detail, looked_at=looked_at, of=of, rest=rest)

    def stated(self, ck: Checkpoint, deep: bool) -> Check:
        """Compare files with the SHA-256 digests that the checkpoint itself lists."""
        if not deep:
            return not_judged(STATED, f"not asked for; {spelled('deep', True)} reads every byte")

        begin_stage(self.progress, STATED)

        def compare(path: Path) -> list[Problem]:
            self.progress(0, path.name)
            return _listed(of_stated(path, ck.stated_digests[path]))

        found = in_ranks(compare, list(ck.stated_digests), self.jobs, lambda path: 0)
        detail = f"{plural(len(ck.stated_digests), 'file')} as stated beside them"
        total = len(found)
        return judged(STATED, [p for problems in found for p in problems], detail, looked_at=total, of=total)

    def manifest(self, ck: Checkpoint, path: Path) -> Check:
        """Compare the SHA-256 of tensors and files with a manifest that `consolidate` wrote."""
        listed, listed_files = read_manifest(path)
        tensors = dict(whole_tensors(ck))

        def nbytes(name: str) -> int:
            return tensors[name].nbytes if name in tensors else 0

        def tensor(name: str) -> list[Problem]:
            self.progress(nbytes(name), name)
            return _listed(of_tensor(name, listed[name], tensors.get(name), self.files), name)

        def file(name: str) -> list[Problem]:
            return _listed(of_file(path, name, listed_files[name]))

        begin_stage(self.progress, "manifest")
        found = in_ranks(tensor, listed, self.jobs, nbytes)
        found += in_ranks(file, listed_files, self.jobs, lambda name: listed_files[name][0])
        detail = f"{plural(len(listed), 'tensor')} and {plural(len(listed_files), 'file')} as {path.name} says"
        unjoined = sum(name in tensors and cover_problem(tensors[name], name) is not None for name in listed)
        absent = sum(not (path.parent / name).is_file() for name in listed_files)
        total, rest = len(listed) + len(listed_files), [f"{plural(unjoined, 'tensor')} cannot be joined"]
        rest = [*(rest if unjoined else []), *([f"{plural(absent, 'file')} not beside the manifest"] if absent else [])]
        return judged(
            "manifest (sha256)",
            [p for problems in found for p in problems],
            detail,
            looked_at=total - unjoined - absent,
            of=total,
            rest=", ".join(rest) or "the manifest lists nothing",
        )


def _checksums(
    found: Sequence[Stored],
    findings: Sequence[stored_bytes.Findings],
    deep: bool,
    more: Sequence[Problem],
    lost: int,
) -> Check:
    """Make the check of checksums; `lost` counts shards in missing or damaged files."""
    name, records = CHECKSUMS, [f.record for f in found if f.record.nbytes]
    if not deep:
        return not_judged(name, f"not asked for; {spelled('deep', True)} reads every byte")
    carrying, of = sum(record.crc != 0 for record in records), len(records) + lost
    problems = [*more, *(p for f in findings for p in f.checksum)]
    if not carrying:
        rest = "no checksum in this format" if records else "no tensor has bytes here" if found else "no tensors"
    else:
        without_one = len(records) - carrying
        why = [f"{without_one} {'has' if without_one == 1 else 'have'} no checksum"] if without_one else []
        rest = ", ".join([*why, *_lost(lost)])
    return judged(name, problems, f"{plural(carrying, 'checksum')} right", looked_at=carrying, of=of, rest=rest)


def _lost(pieces: int) -> list[str]:
    return [f"{pieces} {'is' if pieces == 1 else 'are'} in no file here"] if pieces else []


def _finite(
    found: Sequence[Stored], findings: Sequence[stored_bytes.Findings], values: bool, lost: int, codes: Container[str]
) -> Check:
    """Make the check for NaN and infinities; `lost` counts shards in missing or damaged files.

    `codes` names the tensors of quantization codes: finite codes do not show that the weights are finite.
    """
    name, filled = "finite values", [f for f in found if f.record.nbytes]
    if not values:
        return not_judged(name, f"not asked for; {spelled('values', True)} looks for NaN and infinities")
    encoded = sum(map(stored_bytes.is_encoded, filled))
    coded = [f for f in filled if all(fqn in codes for fqn, _ in f.owners)]
    scanned = sum(map(stored_bytes.is_scanned, filled)) - sum(map(stored_bytes.is_scanned, coded))
    integers = len(filled) - scanned - encoded - len(coded)
    detail = f"{plural(scanned, 'record')} read" + (f"; {integers} of integers need none" if integers else "")
    nothing = "integers are always finite" if integers else "no tensor has bytes here" if found else "no tensors"
    why = [f"{encoded} {'is' if encoded == 1 else 'are'} encoded"] if encoded else []
    why += [f"{len(coded)} {'holds' if len(coded) == 1 else 'hold'} codes of quantized weights"] if coded else []
    rest = ", ".join([*why, *_lost(lost)]) or nothing
    problems = [p for f in findings for p in f.values]
    return judged(name, problems, detail, looked_at=scanned, of=scanned + encoded + len(coded) + lost, rest=rest)
