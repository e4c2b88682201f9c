"""The first questions in one go: whole? newest whole? do the facts agree? does it load? are its counters in step?

Nothing is found out here: each answer is that of another call, `verify`, `checkpoints_in` or `match`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptools.api.checkpoint import Checkpoint
from ckptools.api.opening import checkpoints_in, open
from ckptools.checks.optimizers import LOST
from ckptools.errors import CkptoolsError, ReadError, SeveralError
from ckptools.files.location import check_path, location, path_of, real_path
from ckptools.formats.shared.rank_names import parse
from ckptools.model.diagnosis import Diagnosis, Finding
from ckptools.model.problems import Code, Problem
from ckptools.model.rows import Rows
from ckptools.model.run_folder import RunFolder
from ckptools.model.verdict import Verdict
from ckptools.model.verification import Check, Verification
from ckptools.text import and_others, few, plural, size
from ckptools.training_state.steps import contradiction, step_in
from ckptools.views.next_command import command_arguments, next_command, quoted

WHOLE, NEWEST, FACTS, LOADS, IN_STEP = (
    "whole?",
    "newest whole here?",
    "do step, name and world size agree?",
    "does it load?",
    "optimizer and scheduler in step?",
)
MOST = 3
"""Problems that an answer names, and commands that are proposed."""

COMPARING = ("step counters", "lr: scheduler = groups")
IN_STEP_CHECKS = ("optimizer covers params", *COMPARING)
CONTRADICTIONS = (Code.NAME_CONTRADICTS, Code.MIXED_SAVES, Code.METADATA_CONTRADICTS, Code.WORLD_SIZES_DISAGREE)


def doctor(
    path: str | Path | Sequence[str | Path], to: Any = None, on_found: Callable[[Path], None] | None = None, **how: Any
) -> Diagnosis:
    """Answer the first questions about a checkpoint, a run or a file that cannot be opened; see `ckptools.doctor`."""
    started = time.perf_counter()
    if not isinstance(path, Iterable):
        check_path(path)
    paths = [path] if isinstance(path, (str, Path)) else list(path)
    made = _Examination([location(one) for one in paths], to, how, on_found)
    findings = list(made.findings())
    return Diagnosis(
        path=made.path,
        ok=all(finding.ok is not False for finding in findings),
        readable=made.checkpoint is not None,
        verdict=made.verdict,
        rows=Rows(findings),
        next=tuple(dict.fromkeys(made.commands))[:MOST],
        seconds=time.perf_counter() - started,
    )


@dataclass
class _Examination:
    """One visit: what was opened, and which commands are worth typing next.

    Attributes:
        paths: what was named.
        to: what it should load into; None where nobody asked.
        how: how it is opened.
        on_found: called with each checkpoint of the run that was looked into.
        commands: what to type next, the most useful first.
        checkpoint: it, with every rank read; None where it cannot be opened.
        verdict: what was found of it.
    """

    paths: list[Path]
    to: Any
    how: Mapping[str, Any]
    on_found: Callable[[Path], None] | None
    commands: list[str] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    error: CkptoolsError | None = None
    run: RunFolder | None = None
    verdict: Verdict | None = None

    @property
    def path(self) -> Path:
        """What is being looked at; of several files the first."""
        return self.paths[0]

    def findings(self) -> Iterator[Finding]:
        """Answer every question in order."""
        self._open()
        self.run = self._run_folder()
        self._open_by_another_rank()
        if self.checkpoint is None:
            yield from self._of_unreadable()
            return
        verified = self.checkpoint.verify(jobs=self.how.get("jobs"))
        self.verdict = verified.verdict
        whole = _whole(verified, self.checkpoint)
        newest, facts, in_step = self._newest(bool(whole.ok)), _facts(self.checkpoint, verified), _in_step(verified)
        loads = self._loads(self.checkpoint)
        self._propose(whole, verified)
        yield from (whole, newest, facts, loads, in_step)

    def _open(self) -> None:
        """Open it; of a folder of several the newest whole one."""
        what: Any = self.paths if len(self.paths) > 1 else self.path
        try:
            self.checkpoint = open(what, all_ranks=True, **self.how)
        except SeveralError:
            self.run = checkpoints_in(self.path, on_found=self.on_found, **_of_run(self.how))
            chosen = self.run.newest_whole or next((row.path for row in self.run.rows if row.format), None)
            if chosen is not None:
                self.checkpoint = open(chosen, all_ranks=True, **self.how)
        except CkptoolsError as error:
            if not (isinstance(error, ReadError) and self.path.exists()):
                raise
            self.error = error

    def _open_by_another_rank(self) -> None:
        """Open the checkpoint of a rank file that is damaged itself by a file of another rank."""
        name = parse(self.path)
        if self.checkpoint is not None or self.run is None or name is None:
            return
        for row in self.run.rows:
            other = parse(path_of(row.path))
            beside = real_path(path_of(row.path).parent) == real_path(self.path.parent)
            if row.format and beside and other is not None and other.group == name.group:
                self.checkpoint = open(row.path, all_ranks=True, **_of_run(self.how))

    # -- the run around it ---------------------------------------------------------------------------------------

    def _run_folder(self) -> RunFolder | None:
        """The other checkpoints of its run; None where there are none."""
        folder = None if self.run is not None else self._folder_around()
        if folder is None:
            return self.run
        try:
            return checkpoints_in(folder, on_found=self.on_found, **_of_run(self.how))
        except CkptoolsError:
            return None

    def _folder_around(self) -> Path | None:
        """The folder of the run: above the folder that a step has named, else the one that its file is in."""
        start = self.path if self.path.is_dir() else self.path.absolute().parent
        for folder in (start.absolute(), start.absolute().parent):
            if step_in(folder.name) is not None:
                return _as_given(folder.parent)
        return _as_given(start)

    def _newest(self, whole: bool) -> Finding:
        if self.run is None or self.checkpoint is None:
            return Finding(NEWEST, None, "not known", "no other checkpoint was looked for")
        looked = f"{plural(self.run.checkpoints, 'checkpoint')} in {self.run.path}"
        trackers = [f"{tracker.name}: {tracker.problem}" for tracker in self.run.trackers if tracker.problem]
        newest = next((row for row in self.run.rows if row.newest_whole), None)
        if newest is None:
            return Finding(NEWEST, False, "none", f"{looked}: none is whole")
        mine = _real_files(self.checkpoint) & _real_files(open(newest.path, **_of_run(self.how)))
        step = newest.name if newest.step is None else f"step {newest.step}"
        newer = [row for row in self.run.rows[: list(self.run.rows).index(newest)] if row.whole is False]
        if newer:
            looked = f"NOT WHOLE and newer: {few([row.name for row in newer], MOST)}; {looked}"
        astray = bool(newer) or any(tracker.severity == "error" for tracker in self.run.trackers)
        evidence = "; ".join([f"{looked}, by {self.run.ordered_by}", *trackers])
        if mine:
            return Finding(NEWEST, not astray, f"this one, {step}" if whole else step, evidence)
        self.commands.append(f"ckptools inspect {quoted([newest.path])}")
        return Finding(NEWEST, False if astray or not whole else None, f"{step}: {newest.path}", evidence)

    # -- what loads ----------------------------------------------------------------------------------------------

    def _loads(self, checkpoint: Checkpoint) -> Finding:
        if self.to is None:
            return Finding(LOADS, None, "not asked", "--to MODEL compares names and shapes with those of a model")
        try:
            found = checkpoint.match(self.to)
        except CkptoolsError as error:
            return Finding(LOADS, False, "not known", str(error))
        held = f"{found.same} of {plural(found.model_names, 'name')} of {found.to} are here with their shape"
        if found.loads:
            return Finding(LOADS, True, "yes", held)
        self.commands.append(f"ckptools match {command_arguments(checkpoint)} --to {quoted([str(self.to)])}")
        renamed = f"; after a rename {found.renamed} more" if found.renamed else ""
        return Finding(LOADS, False, "no", held + renamed)

    # -- what to type next ---------------------------------------------------------------------------------------

    def _propose(self, whole: Finding, verified: Verification) -> None:
        """Commands for a checkpoint that was opened."""
        assert self.checkpoint is not None
        named = command_arguments(self.checkpoint)
        if not named:
            return
        if self.run is not None and self.run.checkpoints > 1:
            self.commands.append(f"ckptools ls {quoted([str(self.run.path)])}")
        if not verified.ok:
            self.commands.insert(0, f"ckptools verify {named}")
        else:
            self.commands.insert(0, f"ckptools verify {named} --deep --values")
        consolidation = next_command(self.checkpoint).split("     ")[0]
        if consolidation.startswith("ckptools consolidate"):
            self.commands.append(f"{consolidation} --dry-run")

    def _of_unreadable(self) -> Iterator[Finding]:
        """What can be said of what cannot be opened, and where to go on."""
        why = self.error.reason if self.error is not None else "no checkpoint in it can be opened"
        about = self.error.path if self.error is not None and self.error.path is not None else self.path
        yield Finding(WHOLE, False, "cannot be opened", f"{about}: {why}")
        yield Finding("what is it?", None, *_what_is(about if about.exists() else self.path))
        newest = self.run and self.run.newest_whole
        if self.run is not None:
            self.commands.append(f"ckptools ls {quoted([str(self.run.path)])}")
            found = f"{plural(self.run.checkpoints, 'checkpoint')} in {self.run.path}"
            yield Finding(NEWEST, bool(newest), newest or "none", found)
        if newest:
            self.commands.insert(0, f"ckptools inspect {quoted([newest])}")


def _whole(verified: Verification, checkpoint: Checkpoint) -> Finding:
    errors = [problem for problem in verified.problems if problem.severity == "error"]
    if errors or not verified.verdict.whole or not verified.verdict.joinable:
        whole = None if verified.verdict.whole is None and not errors else False
        unjoined = [p for p in verified.problems if p.kind is Code.TENSOR_NOT_JOINED]
        return Finding(WHOLE, whole, verified.verdict.headline, _named(errors or unjoined))
    files = next(check.detail for check in verified.checks if check.name == "files")
    evidence = f"{checkpoint.path}: {files}; every rank read, no checksums (--deep)"
    return Finding(WHOLE, True, verified.verdict.headline, evidence)


def _named(problems: Sequence[Problem]) -> str:
    """The first problems in full; several of one kind are one."""
    first: dict[Code, list[Problem]] = {}
    for problem in problems:
        first.setdefault(problem.kind, []).append(problem)
    told = [f"{same[0]}{and_others(len(same) - 1)}" for same in first.values()]
    return "; ".join(told[:MOST]) + and_others(len(told) - MOST)


def _facts(checkpoint: Checkpoint, verified: Verification) -> Finding:
    step, world = checkpoint.step, checkpoint.world_size
    found = [problem for problem in verified.problems if problem.kind in CONTRADICTIONS]
    told = [f"step {step.value}: {', '.join(step.sources)}"] if step.value is not None else ["no file tells a step"]
    told += [f"world size {world.words}: {', '.join(world.sources)}"] if world.value is not None else []
    if found or not step.agree or not world.agree:
        wrong = [] if step.agree else [contradiction(step)]
        return Finding(FACTS, False, "no", "; ".join([*wrong, *([_named(found)] if found else [])]) or "; ".join(told))
    return Finding(FACTS, True if step.value is not None else None, "yes", "; ".join(told))


def _in_step(verified: Verification) -> Finding:
    checks = [check for check in verified.checks if check.name in IN_STEP_CHECKS]
    wrong = [problem for check in checks if check.result in ("FAIL", "warn") for problem in check.problems]
    if wrong:
        return Finding(IN_STEP, False, "no", _named(wrong))
    done: list[Check] = [check for check in checks if check.result == "ok" and check.name in COMPARING]
    if not done or any(check.detail.startswith(LOST) for check in checks):
        return Finding(IN_STEP, None, "not known", "; ".join(f"{check.name}: {check.detail}" for check in checks))
    return Finding(IN_STEP, True, "yes", "; ".join(f"{check.name}: {check.detail}" for check in done))


def _what_is(path: Path) -> tuple[str, str]:
    """What something is by its first bytes, and its size."""
    from ckptools.files.file_type import content_of, head_at, what_is

    if path.is_symlink():
        return "a link", "not followed"
    if path.is_dir():
        return "a folder", f"of {plural(sum(1 for _ in path.iterdir()), 'entry', 'entries')}"
    if not path.is_file():
        return "no regular file", "not opened"
    try:
        head = head_at(path)
    except ReadError as error:
        return "a file that may not be read", error.reason
    nbytes = size(path.stat().st_size)
    kinds = {"zip": "a zip archive, as torch.save writes", "legacy": "a torch.save file of before torch 1.6"}
    content = content_of(head)
    what = kinds.get(content, content) or what_is(head) or "nothing that ckptools knows"
    return what, f"by its first bytes; {nbytes}"


def _real_files(checkpoint: Checkpoint) -> set[Path]:
    return {real_path(file.path) for file in checkpoint.files if file.status != "missing"}


def _as_given(folder: Path) -> Path:
    """A folder as a user would type it: below the current one without what is above that."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


OF_A_RUN = ("follow_symlinks", "jobs", "weights", "rules", "shapes", "names")
"""How every checkpoint of a run is opened; what else there is goes with one alone."""


def _of_run(how: Mapping[str, Any]) -> dict[str, Any]:
    return {name: how[name] for name in OF_A_RUN if name in how}
