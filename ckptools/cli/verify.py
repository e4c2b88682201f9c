"""`ckptools verify`: is this checkpoint whole, unharmed and coherent?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ckptools.cli.choices import Weights
from ckptools.cli.printing import show
from ckptools.cli.terminal import screen

if TYPE_CHECKING:
    from ckptools.cli.arguments import (
        AsJson,
        CheckpointPaths,
        Deep,
        FollowSymlinks,
        Ignored,
        Jobs,
        ManifestFile,
        NamesFrom,
        OnlyThisFile,
        RanksPattern,
        RulesFile,
        ShapesFrom,
        Values,
        WhichWeights,
    )


def verify(
    paths: CheckpointPaths,
    deep: Deep = False,
    values: Values = False,
    manifest: ManifestFile = None,
    ignore: Ignored = None,
    json: AsJson = False,
    jobs: Jobs = None,
    ranks: RanksPattern = None,
    only_this_file: OnlyThisFile = False,
    follow_symlinks: FollowSymlinks = False,
    weights: WhichWeights = Weights.fp32,
    rules: RulesFile = None,
    shapes: ShapesFrom = None,
    names: NamesFrom = None,
) -> None:
    """Check that a checkpoint is whole, unharmed and coherent.

    Every rank is read. Without options only structure, replicas and counters are read. safetensors carry no
    checksums, and that is said.

    Exit code: 0 no check failed (warnings may be shown), 1 a check failed, 3 unreadable.
    """
    from ckptools.checks.verify import verify as check
    from ckptools.cli.opening import answered_in_json, opened
    from ckptools.cli.progress import ProgressLine
    from ckptools.text import encodable
    from ckptools.views.verification import verification_json, verification_text

    with answered_in_json(json, "ckptools/verify/1", "ok", paths):
        checkpoint = opened(paths, ranks, only_this_file, follow_symlinks, weights, rules, shapes, names, jobs=jobs)
    with ProgressLine(sum(f.nbytes for f in checkpoint.files)) as line:
        found = check(
            checkpoint, deep=deep, values=values, manifest=manifest, ignore=ignore or (), jobs=jobs, progress=line
        )
    shown = verification_json(found) if json else verification_text(found, screen())
    show(encodable(shown, sys.stdout.encoding))
    if not found.ok:
        raise SystemExit(1)
