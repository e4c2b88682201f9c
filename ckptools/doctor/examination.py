"""Ask the questions of `doctor`: is it whole, the newest whole one, loadable, in step, and do its facts agree?

This module combines the results of `verify`, `ls` and `match`, and checks nothing by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptools.display.next_command import command_arguments, instead_of_writing, next_command, quoted
from ckptools.doctor.answers import (
    LOADS,
    NEWEST,
    WHOLE,
    Diagnosis,
    Finding,
    facts_finding,
    in_step_finding,
    values_finding,
    whole_finding,
)
from ckptools.errors import CkptoolsError, ReadError, SeveralError
from ckptools.files.opening import check_path, content_of, head_at, location, path_of, real_path, what_is
from ckptools.formats.open import open_checkpoint
from ckptools.formats.rank_search.rank_names import parse
from ckptools.ls.folder_around import folder_around, of_run
from ckptools.ls.one_of_run import check_step, paths_of_step
from ckptools.ls.record import RunFolder
from ckptools.ls.rows import UNORDERED, checkpoints_in, is_wrong, step_or_name
from ckptools.match.run import match
from ckptools.model.checkpoint import Checkpoint
from ckptools.model.records import Rows
from ckptools.model.verdict import Verdict
from ckptools.option import spelled
from ckptools.tensor_io.fetch_ahead import Progress, begin_stage
from ckptools.text import few, plural, size
from ckptools.verify.record import Verification
from ckptools.verify.run import bytes_to_verify, verify

MOST = 3
"""At most this many names in an answer, and commands proposed."""


def examined(
    path: str | Path | Sequence[str | Path],
    to: Any = None,
    on_found: Callable[[Path], None] | None = None,
    deep: bool = False,
    progress: Progress | None = None,
    step: int | None = None,
    **how: Any,
) -> Diagnosis:
    """Answer the questions about a checkpoint, a run folder or an unreadable file; this is `ckptools.doctor`."""
    started = time.perf_counter()
    if not isinstance(path, Iterable):
        check_path(path)
    paths = [path] if isinstance(path, (str, Path)) else list(path)
    if step is not None:
        paths = list(paths_of_step(paths, step, on_found, **how))
    made = _Examination([location(one) for one in paths], to, how, on_found, deep, progress, step)
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
    """One run of `doctor`: the opened checkpoint, and the commands to propose, the most useful first."""

    paths: list[Path]
    to: Any
    how: Mapping[str, Any]
    on_found: Callable[[Path], None] | None
    deep: bool
    progress: Progress | None
    step: int | None
    commands: list[str] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    error: CkptoolsError | None = None
    run: RunFolder | None = None
    not_searched: str = ""
    verdict: Verdict | None = None

    @property
    def path(self) -> Path:
        """The path to examine; the first if several files are given."""
        return self.paths[0]

    def findings(self) -> Iterator[Finding]:
        """Answer every question in order."""
        self._open()
        self.run = self._run_folder()
        self._open_by_another_rank()
        if self.checkpoint is None:
            yield from self._of_unreadable()
            return
        jobs = self.how.get("jobs")
        if self.deep:
            begin_stage(self.progress, "checking values", bytes_to_verify(self.checkpoint, deep=True, values=True))
        verified = verify(self.checkpoint, deep=self.deep, values=self.deep, jobs=jobs, progress=self.progress)
        self.verdict = verified.verdict
        whole = self._newest_save_first(whole_finding(verified, self.checkpoint))
        newest, facts = self._newest(bool(whole.ok)), facts_finding(self.checkpoint, verified)
        loads = self._loads(self.checkpoint)
        self._propose(whole, verified)
        values = [values_finding(verified)] if self.deep else []
        yield from (whole, *values, newest, facts, loads, in_step_finding(verified))

    def _open(self) -> None:
        """Open the given path; in a run folder, open the newest whole checkpoint."""
        what: Any = self.paths if len(self.paths) > 1 else self.path
        try:
            self.checkpoint = open_checkpoint(what, all_ranks=True, **self.how)
            if self.step is not None:
                check_step(self.checkpoint, self.step)
        except SeveralError:
            self._open_newest()
        except CkptoolsError as error:
            if not (isinstance(error, ReadError) and self.path.exists()):
                raise
            self.error = error
            if self.path.is_dir():  # its tracker file may name a wrong checkpoint
                with suppress(CkptoolsError):
                    self._open_newest()

    def _open_newest(self) -> None:
        self.run = checkpoints_in(self.path, on_found=self.on_found, **of_run(self.how))
        chosen = self.run.newest_whole or next((row.path for row in self.run.rows if row.format), None)
        if chosen is not None:
            self.checkpoint = open_checkpoint(chosen, all_ranks=True, **self.how)

    def _open_by_another_rank(self) -> None:
        """If the given rank file is damaged, open its checkpoint by the file of another rank."""
        name = parse(self.path)
        if self.checkpoint is not None or self.run is None or name is None:
            return
        for row in self.run.rows:
            other = parse(path_of(row.path))
            beside = real_path(path_of(row.path).parent) == real_path(self.path.parent)
            if row.format and beside and other is not None and other.group == name.group:
                self.checkpoint = open_checkpoint(row.path, all_ranks=True, **of_run(self.how))

    def _run_folder(self) -> RunFolder | None:
        """Find all checkpoints of the run; None if no run folder is found."""
        if self.run is not None:
            return self.run
        folder, levels = folder_around(self.path)
        try:
            how = of_run(self.how)
            others = [value for name, value in self.how.items() if name not in how]
            known = None if any(others) else self.checkpoint
            found = checkpoints_in(folder, on_found=self.on_found, known=known, levels=levels, **how)
            if not levels and any(e.is_dir() and not e.name.startswith(".") for e in folder.iterdir()):
                self.not_searched = ", whose subfolders were not searched"
            return found
        except (CkptoolsError, OSError):
            return None

    @property
    def _is_run(self) -> bool:
        """Whether the user gave a run folder, and not one checkpoint in it."""
        run = self.run
        return (
            run is not None
            and run.checkpoints > 1
            and len(self.paths) == 1
            and run.path.absolute() == self.path.absolute()
        )

    def _newest_save_first(self, opened: Finding) -> Finding:
        """Answer "whole?" for a run: about its newest save if that is broken, else about the opened checkpoint."""
        rows = self.run.rows if self.run is not None and self._is_run else ()
        if not rows or not is_wrong(rows[0]) or (rows[0].format and self._is_mine(path_of(rows[0].path))):
            return opened
        save, newest = rows[0], self.run.newest if self.run is not None else None
        fate = save.verdict if save.format else save.why
        whole = "none" if newest is None else newest.name if newest.step == save.step else step_or_name(newest)
        answer = f"{step_or_name(save)}: {fate}; newest whole: {whole}"
        evidence = [save.why, *save.notes] if save.format else [*save.notes]
        return Finding(WHOLE, False, answer, "; ".join([save.path, *evidence, f"opened instead: {opened.evidence}"]))

    def _newest(self, whole: bool) -> Finding:
        if self.run is None or self.checkpoint is None:
            return Finding(NEWEST, None, "not judged", "no other checkpoint was looked for")
        looked = self._looked(self.run)
        trackers = [f"{tracker.name}: {tracker.problem}" for tracker in self.run.trackers if tracker.problem]
        newest = self.run.newest
        if newest is None:
            free = " and free of errors" if any(row.whole and row.why for row in self.run.rows) else ""
            return Finding(NEWEST, False, "none", f"{looked}: none is whole{free}")
        mine = self._is_mine(path_of(newest.path))
        rows, others = list(self.run.rows), self.run.wrong_not_older
        before = {row.name for row in rows[: rows.index(newest)]}
        older = [row for row in rows if is_wrong(row) and row.name not in others and self._is_run]
        newer = [row for row in rows if row.name in others and row.name in before]
        unsure = [name for name in others if name not in before]
        by_age: dict[str, Sequence[str]] = {
            "NOT WHOLE and newer": [row.name for row in newer if row.whole is False],
            "with errors and newer": [row.name for row in newer if row.whole is not False],
            "wrong, and nothing says whether newer": unsure,
            "wrong and older": [row.name for row in older],
            "left over from a write, or still being written": [row.name for row in self.run.left_over],
        }
        found = [f"{words}: {few(names, MOST)}" for words, names in by_age.items() if names]
        found += [looked if self.run.ordered_by == "nothing" else f"{looked}, by {self.run.ordered_by}"]
        astray = bool(others) or any(tracker.severity == "error" for tracker in self.run.trackers)
        wrong = astray or (self._is_run and not self.run.ok)
        order = [note for note in self.run.notes if self.run.ordered_by == "nothing" and note.startswith(UNORDERED)]
        evidence = "; ".join([*found, *trackers, *order])
        if mine and self.deep and self.verdict is not None and self.verdict.whole is False:
            if self.run.checkpoints == 1:
                return Finding(NEWEST, False, "none", f"{looked}: none is whole")
            text = f"{step_or_name(newest)} is not whole, and the bytes of others were not compared"
            return Finding(NEWEST, False, "not known", f"{text}; {evidence}")
        if mine:
            answer = f"this one, {step_or_name(newest)}" if whole else step_or_name(newest)
            if order and not wrong:
                return Finding(NEWEST, None, f"not known; {newest.name} is whole", evidence, doubtful=True)
            return Finding(NEWEST, not wrong, answer, evidence)
        self.commands.append(f"ckptools inspect {quoted([newest.path])}")
        ok = False if wrong or not whole else None
        return Finding(NEWEST, ok, f"{step_or_name(newest)}: {newest.path}", evidence)

    def _looked(self, run: RunFolder) -> str:
        """Say where other checkpoints were looked for, and how many there are."""
        return f"{plural(run.checkpoints, 'checkpoint')} in {run.path}{self.not_searched}"

    def _is_mine(self, path: Path) -> bool:
        """Whether the checkpoint at a path is the opened one, or shares files with it."""
        assert self.checkpoint is not None
        if path.absolute() == self.checkpoint.path.absolute():
            return True
        other = open_checkpoint(path, **of_run(self.how))
        return not _real_files(self.checkpoint).isdisjoint(_real_files(other))

    def _loads(self, checkpoint: Checkpoint) -> Finding:
        if self.to is None:
            way = f"{spelled('to')} MODEL compares names and shapes with those of a model"
            return Finding(LOADS, None, "not judged", f"not asked; {way}")
        try:
            found = match(checkpoint, self.to)
        except CkptoolsError as error:
            return Finding(LOADS, False, "not known", str(error))
        facts = [f"{found.same} of {plural(found.model_names, 'name')} of {found.to} are here with their shape"]
        facts += [found.chosen] if found.chosen else []
        facts += [found.while_loading] if found.while_loading else []
        facts += [f"{found.apart}: from_pretrained alone converts them"] if found.apart else []
        facts += [f"not compared: {one}" for one in found.not_compared] + [row.detail for row in found.resume]
        evidence = "; ".join(facts)
        if found.resumes:
            return Finding(LOADS, True, "yes", evidence)
        self.commands.append(f"ckptools match {command_arguments(checkpoint)} --to {quoted([str(self.to)])}")
        renamed = f"; after a rename {found.renamed} more" if found.renamed else ""
        return Finding(LOADS, False, "no", evidence + renamed)

    def _propose(self, whole: Finding, verified: Verification) -> None:
        assert self.checkpoint is not None
        named = command_arguments(self.checkpoint)
        if not named:
            return
        if self.run is not None and self.run.checkpoints > 1:
            deeper = " --deep" if self.deep and verified.verdict.whole is False else ""
            self.commands.append(f"ckptools ls {quoted([str(self.run.path)])}{deeper}")
        newest = self.run.newest_whole if self.run is not None else None
        deep = " --deep" if self.deep else ""
        to_fetch = [f"ckptools verify {named}{deep} --to-fetch"] if verified.to_fetch else []
        if verified.verdict.whole is False and newest is not None and not self._is_mine(path_of(newest)):
            self.commands[:0] = [f"ckptools consolidate {quoted([newest])} -o OUT.safetensors", *to_fetch]
        elif to_fetch:
            self.commands[:0] = to_fetch
        elif not verified.ok:
            self.commands.insert(0, f"ckptools verify {named}{' --deep --values' if self.deep else ''}")
        elif not self.deep:
            self.commands.insert(0, f"ckptools verify {named} --deep --values")
        following = next_command(self.checkpoint)
        if following is not None and following.name == "consolidate":
            self.commands.append(instead_of_writing(named, f"{following.line} --dry-run", verified.problems))

    def _of_unreadable(self) -> Iterator[Finding]:
        """Answer the questions about a path that cannot be opened, and propose where to go on."""
        why = self.error.reason if self.error is not None else "no checkpoint in it can be opened"
        about = self.error.path if self.error is not None and self.error.path is not None else self.path
        yield Finding(WHOLE, False, "cannot be opened", f"{about}: {why}")
        yield Finding("what is it?", None, *_what_is(about if about.exists() else self.path))
        newest = self.run and self.run.newest_whole
        if self.run is not None:
            self.commands.append(f"ckptools ls {quoted([str(self.run.path)])}")
            yield Finding(NEWEST, bool(newest), newest or "none", self._looked(self.run))
        if newest:
            self.commands.insert(0, f"ckptools inspect {quoted([newest])}")


def _what_is(path: Path) -> tuple[str, str]:
    """Describe a file by its first bytes and its size, or a folder."""
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
