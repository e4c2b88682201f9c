"""Errors of ckptools that came from another process as text."""

from __future__ import annotations

from ckptools import errors
from ckptools.errors import CkptoolsError


def remade(kind: str, message: str) -> CkptoolsError | None:
    """Make an error of ckptools again that another process raised; None where the name is no such error's."""
    known = getattr(errors, kind, None)
    if not (isinstance(known, type) and issubclass(known, CkptoolsError)):
        return None
    # Some take more than a path and a reason to be made, which the message has in it already.
    error = known.__new__(known, message)
    CkptoolsError.__init__(error, None, message)
    return error
