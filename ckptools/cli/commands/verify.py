"""`ckptools verify`: check that a checkpoint is whole, undamaged and consistent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptools.cli.options import CheckOptions, OpeningOptions, TableOptions
from ckptools.cli.printing import ProgressLine, answered_in_json, opened, show, show_answer

if TYPE_CHECKING:
    from ckptools.cli.arguments import CheckpointPaths


def verify(
    paths: CheckpointPaths,
    *,
    checks: CheckOptions,
    form: TableOptions,
    opening: OpeningOptions,
) -> None:
    """Check that a checkpoint is whole, unharmed and coherent.

    Every rank is read. Without options only structure, replicas and counters are read. safetensors have no
    checksums, as the output then says. `ckptools explain CK101` says what a code means, and what to do.

    Exit code: 0 no check failed (warnings may be shown), 1 a check failed, 3 unreadable.
    """
    from ckptools.model.tree import tensors_in
    from ckptools.verify.record import verification_json
    from ckptools.verify.run import verify as check
    from ckptools.verify.stored_bytes import bytes_to_read

    with answered_in_json(form.json, "ckptools/verify/1", "ok", paths):
        checkpoint = opened(paths, opening)
    total = bytes_to_read(checkpoint, checks.deep, checks.values)
    total += sum(tensor.nbytes for _, tensor in tensors_in(checkpoint.tree)) if checks.manifest else 0
    with ProgressLine(total) as line:
        found = check(checkpoint, **vars(checks), jobs=opening.jobs, progress=line)
    if form.json:
        show(verification_json(found))
    else:
        show_answer(form, "verify", found, found.checks)
    if not found.ok:
        raise SystemExit(1)
