"""What a checkpoint that was harmed on purpose says of itself, short enough for a row of a table."""

from __future__ import annotations

import ckptools


def said(ck: ckptools.Checkpoint, *severities: str) -> list[str]:
    """Code, rank and tensor of each problem, those that it has; errors and warnings if no severity is named."""
    wanted = severities or ("error", "warning")
    found = [(p.code, p.rank, p.tensor) for p in ck.problems if p.severity in wanted]
    return [" ".join(str(word) for word in words if word is not None) for words in found]
