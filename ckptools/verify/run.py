"""Verification: every check on one checkpoint, in a fixed order."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ckptools.errors import CkptoolsError, DamagedError, NotWholeError, ReadError, UsageError
from ckptools.files.location import location
from ckptools.files.opening import OpenFiles
from ckptools.formats.open import with_all_ranks
from ckptools.formats.shared.checkpoint_builder import KINDS
from ckptools.keys.entries import EVERYTHING
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.cover import cover_problem
from ckptools.model.problems import Code, Problem
from ckptools.model.records import Rows
from ckptools.model.tree import fqn_of, tensors_in
from ckptools.pickles.foreign_names import foreign_classes, foreign_problems, suspicious_names
from ckptools.tensor_io import replicas
from ckptools.tensor_io.checksums import Record, Stored, without_records
from ckptools.tensor_io.copied_partitions import copies_without_checksums
from ckptools.tensor_io.equal_copies import equal_copies
from ckptools.tensor_io.fetch_ahead import copies_of, in_ranks
from ckptools.tensor_io.threads import Progress, no_progress, thread_count
from ckptools.text import plural
from ckptools.training_state.judgement import verdict_of
from ckptools.training_state.modules import module_problems
from ckptools.verify import found_files, stored_bytes, training_checks
from ckptools.verify.record import Check, Verification, judged, not_judged, without


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
    """Check whether a checkpoint is whole, undamaged and consistent, as `ckptools.verify` does; all ranks are read.

    Unreadable parts are problems too. Codes to ignore are single, or several separated by commas.

    Raises:
        ReadError: the checkpoint cannot be opened, or the manifest cannot be read.
        UsageError: a code does not exist.
    """
    started = time.perf_counter()
    codes = _codes(ignore)
    ck = with_all_ranks(checkpoint)
    with OpenFiles() as files:
        reading = _ByteChecks(files, thread_count(jobs), progress or no_progress)
        checks = [*_each(STRUCTURE, ck), *reading.bytes_of(ck, deep, values), reading.copies(ck)]
        checks += [reading.stated(ck, deep)] if ck.stated_digests else []
        checks += [reading.manifest(ck, location(manifest))] if manifest is not None else []
        checks += [*_each(STATE, ck), _pickles(ck)]
        checks += _others(ck, checks)
    kept = Rows(without(check, codes) for check in checks)
    ignored = sum(len(check.problems) for check in checks) - sum(len(check.problems) for check in kept)
    opened = ck.cost.seconds if ck is checkpoint else 0.0
    found = [p for check in checks for p in check.problems if p.kind not in ELSEWHERE]
    found += [p for p in ck.problems if p.kind in ELSEWHERE]
    sums = next(check for check in checks if check.name == CHECKSUMS)
    verdict = verdict_of(ck, found, "bytes" if 0 < sums.looked_at == sums.of else None)
    return Verification(ck.path, kept, verdict, ignored, reading.nbytes, opened + time.perf_counter() - started)


def _codes(ignore: Iterable[str]) -> set[str]:
    codes = [code.strip().upper() for listed in ignore for code in listed.split(",") if code.strip()]
    known = [kind.code for kind in Code]
    for code in codes:
        if code not in known:
            raise UsageError(None, f"--ignore {code}: there is no such code; they are {', '.join(known)}")
    return set(codes)


RANKS_AGREE = "ranks agree on layout"
"""The check of the world size, shapes and dtypes that ranks state."""

STRUCTURE = {
    "files": found_files.presence,
    "one save": found_files.one_save,
    "layout": found_files.exactly_covered,
    RANKS_AGREE: found_files.ranks_agree,
}
"""Checks of files and layout, by the name of their row."""

STATE = {
    "optimizer covers params": training_checks.state_covers_parameters,
    "step counters": training_checks.step_counters,
    "lr: scheduler = groups": training_checks.learning_rates,
    "rng": training_checks.distinct_states,
}
"""Checks of training state other than the model, by the name of their row."""


def _each(checks: Mapping[str, Callable[[Checkpoint], Check]], ck: Checkpoint) -> Iterator[Check]:
    """Run some checks; a file that cannot be read becomes a problem of the check."""
    for name, check in checks.items():
        try:
            yield check(ck)
        except (ReadError, NotWholeError) as error:
            yield judged(name, [unreadable(error)], "a file could not be read", looked_at=0, of=len(ck.files))


def _listed(problems: Iterator[Problem], fqn: str | None = None) -> list[Problem]:
    """List problems that a check finds; or that a file cannot be read, if it cannot."""
    try:
        return list(problems)
    except (ReadError, NotWholeError) as error:
        return [unreadable(error, None, fqn)]


def unreadable(error: CkptoolsError, rank: int | None = None, fqn: str | None = None) -> Problem:
    """The problem of a file, or a part of one, that could not be read."""
    if isinstance(error, NotWholeError):
        kind = Code.TENSOR_GAP
    elif isinstance(error, DamagedError):
        kind = Code.BAD_CHECKSUM
    else:
        kind = KINDS[error.kind] if isinstance(error, ReadError) else Code.FILE_CUT
    return Problem(kind, str(error), rank, fqn)


ELSEWHERE = (Code.TENSOR_GAP, Code.TENSOR_OVERLAP, Code.TENSOR_NOT_JOINED)
"""Problems of tensors found while opening, which the check of the layout repeats for each."""


def _others(ck: Checkpoint, checks: Sequence[Check]) -> list[Check]:
    """Problems found while opening that no check has reported."""
    known = {problem for check in checks for problem in check.problems}
    reported = {p.tensor for p in known if p.kind is Code.COPIES_DIFFER}
    left = [p for p in ck.problems if p not in known and p.kind not in ELSEWHERE and p.severity != "note"]
    left = [p for p in left if p.kind is not Code.COPIES_DIFFER or p.tensor not in reported]
    return [judged("anything else", left, "", looked_at=len(left), of=len(left))] if left else []


def _pickles(ck: Checkpoint) -> Check:
    """The check of names in the pickles, none of which was run."""
    foreign = foreign_classes(ck.tree)
    named = foreign_problems(foreign, suspicious_names(ck.names, foreign))
    problems = [*named, *module_problems(ck.tree)]
    names = len(ck.names)
    detail = f"{plural(names, 'name')}; nothing was run" if names else "no pickle names a class or function"
    return judged("names in pickles", problems, detail, looked_at=names, of=names)


CHECKSUMS = "checksums (CRC-32)"
"""The check of the checksums that the container states."""

IN_RANGE = "values in range"
"""The check of each tensor's values, which are finite and may be odd all the same."""

IN_LINE = "values in line"
"""The check of tensors beside the same tensor of other layers."""

BESIDE_OTHERS = ("out of line", "copy")
"""What stands out only beside other layers."""


STATED = "stated digests (sha256)"
"""The check of whole files, where the checkpoint lists their digests."""


class _ByteChecks:
    """The checks that read bytes, in threads; `damaged` are records that do not match their stated checksum."""

    def __init__(self, files: OpenFiles, jobs: int, progress: Progress) -> None:
        self.files, self.jobs, self.progress = files, jobs, progress
        self.nbytes = 0
        self.damaged: set[Record] = set()

    def bytes_of(self, ck: Checkpoint, deep: bool, values: bool) -> list[Check]:
        """Check checksums and finite values in one pass over the storages."""
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
        unread = found_files.damaged_archives(ck, self.files) if deep else []
        lost = stored_bytes.not_here(ck) if deep or values else 0
        codes = {fqn_of(path) for path, t in tensors_in(ck.tree) if t.are_codes}
        checks = [_checksums(found, findings, deep, unread, lost), _finite(found, findings, values, lost, codes)]
        return [*checks, *self.odd_values(ck, values)]

    def odd_values(self, ck: Checkpoint, values: bool) -> list[Check]:
        """Look for what stands out of the model's values, other than what is not finite."""
        why = ""
        if not values:
            why = "not asked for; --values looks for zeros, denormals and values that are far from others"
        elif any(p.kind is Code.NEVER_WRITTEN and p.severity == "error" for p in ck.problems):
            why = "values were never written to the disk, and read as zeros"
        if why:
            return [not_judged(name, why) for name in (IN_RANGE, IN_LINE)]
        from ckptools.stats.figures import statistics
        from ckptools.stats.reading import parts_of

        found = statistics(ck.path, parts_of(ck, EVERYTHING), False, self.jobs)
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
        with suppress(ReadError):  # other checks report it
            problems += copies_without_checksums(
                ((fqn_of(path), tensor) for path, tensor in tensors_in(ck.tree)), self.files
            )

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
        """Compare files with the digests that the checkpoint itself states."""
        if not deep:
            return not_judged(STATED, "not asked for; --deep reads every byte")

        def compare(path: Path) -> list[Problem]:
            self.progress(0, path.name)
            return _listed(found_files.of_stated(path, ck.stated_digests[path]))

        found = in_ranks(compare, list(ck.stated_digests), self.jobs, lambda path: 0)
        detail = f"{plural(len(ck.stated_digests), 'file')} as stated beside them"
        total = len(found)
        return judged(STATED, [p for problems in found for p in problems], detail, looked_at=total, of=total)

    def manifest(self, ck: Checkpoint, path: Path) -> Check:
        """Compare digests of tensors and files with those of a manifest."""
        listed, listed_files = found_files.read_manifest(path)
        tensors = dict(found_files.whole_tensors(ck))

        def nbytes(name: str) -> int:
            return tensors[name].nbytes if name in tensors else 0

        def tensor(name: str) -> list[Problem]:
            self.progress(nbytes(name), name)
            return _listed(found_files.of_tensor(name, listed[name], tensors.get(name), self.files), name)

        def file(name: str) -> list[Problem]:
            return _listed(found_files.of_file(path, name, listed_files[name]))

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
    """The check of checksums; `lost` is how many pieces of tensors are in no file here."""
    name, records = CHECKSUMS, [f.record for f in found if f.record.nbytes]
    if not deep:
        return not_judged(name, "not asked for; --deep reads every byte")
    carrying, of = sum(record.crc != 0 for record in records), len(records) + lost
    problems = [*more, *(p for f in findings for p in f.checksum)]
    if not carrying:
        rest = "no checksum in this format" if records else "no tensor has bytes here" if found else "no tensors"
    else:
        without_one = len(records) - carrying
        why = [f"{without_one} {_have(without_one)} no checksum"] if without_one else []
        rest = ", ".join([*why, *_lost(lost)])
    return judged(name, problems, f"{plural(carrying, 'record')} right", looked_at=carrying, of=of, rest=rest)


def _have(count: int) -> str:
    return "has" if count == 1 else "have"


def _lost(pieces: int) -> list[str]:
    return [f"{pieces} {'is' if pieces == 1 else 'are'} in no file here"] if pieces else []


def _finite(
    found: Sequence[Stored], findings: Sequence[stored_bytes.Findings], values: bool, lost: int, codes: Container[str]
) -> Check:
    """The check for NaN and infinities; `lost` is how many pieces of tensors are in no file here.

    `codes` has the names of tensors with codes: finite codes do not show that the weights are.
    """
    name, filled = "finite values", [f for f in found if f.record.nbytes]
    if not values:
        return not_judged(name, "not asked for; --values looks for NaN and infinities")
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
