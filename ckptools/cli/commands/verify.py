"""`ckptools verify`: check that a checkpoint is whole, undamaged and consistent."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ckptools.cli.options import CheckOptions, OpeningOptions, TableOptions
from ckptools.cli.printing import answered_in_json, opened, remark, remark_next, show, show_answer
from ckptools.cli.progress import Progress
from ckptools.errors import UsageError
from ckptools.option import option
from ckptools.text import plural, printable

if TYPE_CHECKING:
    from ckptools.cli.arguments import CheckpointPaths
    from ckptools.model.checkpoint import Checkpoint
    from ckptools.verify.record import Verification


def verify(
    paths: CheckpointPaths,
    *,
    every: bool = option(
        False, "Of the folder of a run, every checkpoint, in order of steps.", flag="--all", common=True
    ),
    checks: CheckOptions,
    to_fetch: bool = option(
        False,
        "Print only the names of the files to copy again, for rsync --files-from=-; nothing if there are none.",
        common=True,
    ),
    form: TableOptions,
    opening: OpeningOptions,
) -> None:
    """Check that a checkpoint is whole, unharmed and coherent.

    Every rank is read. Without options only structure, replicas and counters are read. safetensors have no
    checksums, as the output then says. `ckptools explain CK101` says what a code means, and what to do.

    Exit code: 0 no check failed (warnings may be shown), 1 a check failed, 3 unreadable; with --all the highest.

    Examples:
        ckptools verify PATH
        ckptools verify PATH --deep --values
    """
    from ckptools.display.next_command import quoted
    from ckptools.verify.files_to_fetch import folder_of
    from ckptools.verify.record import summary, verification_json

    if to_fetch and (every or not form.is_text):
        raise UsageError(None, "--to-fetch prints names alone; the JSON of verify has them under to_fetch")
    if every:
        from ckptools.cli.every_checkpoint import OneOfRun, every_checkpoint

        if form.table_format is not None or checks.manifest is not None:
            raise UsageError(None, "--all is about several checkpoints: it takes no --table-format and no --manifest")
        one = OneOfRun(
            "verify",
            "ok",
            partial(_verified, checks=checks, jobs=opening.jobs),
            partial(verification_json, indent=None),
            is_wrong=lambda found: not found.ok,
            with_verdict=lambda found, verdict: replace(found, verdict=verdict),
            below=summary,
        )
        every_checkpoint(paths, opening, form.json, one)
        return
    with answered_in_json(form.json, "ckptools/verify/1", "ok", paths):
        checkpoint = opened(paths, opening)
    found = _verified(checkpoint, checks, opening.jobs)
    if form.json:
        show(verification_json(found))
    elif to_fetch:
        for name in found.to_fetch:
            show(printable(name))
        folder = quoted([str(folder_of(checkpoint))])
        copied = f": append | rsync -a --files-from=- HOST:FOLDER/ {folder}/" if found.to_fetch else ""
        remark(f"{plural(len(found.to_fetch), 'file')} to copy again{copied}")
    else:
        show_answer(form, "verify", found, found.checks)
        if form.is_text and found.verdict.level == "bad":
            from ckptools.doctor.way_out import way_out

            following = way_out(checkpoint, opening.arguments, found.verdict, found.to_fetch, checks.deep)
            if following is not None:
                remark("")
                remark_next(str(following))
    if not found.ok:
        raise SystemExit(1)


def _verified(checkpoint: Checkpoint, checks: CheckOptions, jobs: int | None) -> Verification:
    """Verify a checkpoint, and show progress by the bytes that are read."""
    from ckptools.verify.run import bytes_to_verify
    from ckptools.verify.run import verify as check

    with Progress(bytes_to_verify(checkpoint, checks.deep, checks.values, checks.manifest)) as progress:
        return check(checkpoint, **vars(checks), jobs=jobs, progress=progress)
