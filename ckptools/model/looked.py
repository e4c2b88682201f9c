"""How much of a checkpoint a rule or a check looked at: all of it, a part, or nothing."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple


class Looked(NamedTuple):
    """How many of some files, tensors, records or counters were looked at.

    Attributes:
        looked_at: how many were looked at.
        of: how many there are.
        rest: why not the rest.
    """

    looked_at: int
    of: int
    rest: str = ""

    @property
    def result(self) -> Literal["ok", "partly", "not judged"]:
        """What nothing found amounts to: `ok` only if everything was looked at."""
        if not self.looked_at:
            return "not judged"
        return "ok" if self.looked_at == self.of else "partly"

    @property
    def words(self) -> str:
        """Why not everything was looked at; empty if it was."""
        if self.result == "ok":
            return ""
        return self.rest if not self.looked_at else f"{self.looked_at} of {self.of} looked at: {self.rest}"

    def _record(self) -> dict[str, Any]:
        return {"result": self.result, **self._asdict()}
