"""`ckptools verify`: check that a checkpoint is whole, undamaged and consistent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptools.cli.options import CheckOptions, OpeningOptions, TableOptions
from ckptools.cli.printing import answered_in_json, opened, remark, show, show_answer
from ckptools.cli.progress import Progress
from ckptools.errors import UsageError
from ckptools.option import option
from ckptools.text import plural, printable

if TYPE_CHECKING:
    from ckptools.cli.arguments import CheckpointPaths


def verify(
    paths: CheckpointPaths,
    *,
    checks: CheckOptions,
    to_fetch: bool = option(
        False, "Print only the names of the files to copy again, for rsync --files-from=-; nothing if there are none."
    ),
    form: TableOptions,
    opening: OpeningOptions,
) -> None:
    """Check that a checkpoint is whole, unharmed and coherent.

    Every rank is read. Without options only structure, replicas and counters are read. safetensors have no
    checksums, as the output then says. `ckptools explain CK101` says what a code means, and what to do.

    Exit code: 0 no check failed (warnings may be shown), 1 a check failed, 3 unreadable.
    """
    from ckptools.display.next_command import quoted
    from ckptools.verify.files_to_fetch import folder_of
    from ckptools.verify.record import verification_json
    from ckptools.verify.run import bytes_to_verify
    from ckptools.verify.run import verify as check

    if to_fetch and not form.is_text:
        raise UsageError(None, "--to-fetch prints names alone; the JSON of verify has them under to_fetch")
    with answered_in_json(form.json, "ckptools/verify/1", "ok", paths):
        checkpoint = opened(paths, opening)
    with Progress(bytes_to_verify(checkpoint, checks.deep, checks.values, checks.manifest)) as progress:
        found = check(checkpoint, **vars(checks), jobs=opening.jobs, progress=progress)
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

            following = way_out(checkpoint, opening.arguments, found.problems)
            if following is not None:
                remark(f"\nnext: {following}")
    if not found.ok:
        raise SystemExit(1)
