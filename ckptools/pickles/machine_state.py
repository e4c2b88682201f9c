"""What opcodes, rebuilders and the readers of runs see of the pickle machine that calls them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ckptools.model.values import Global
from ckptools.pickles.repeated_records import RepeatedRecords


class MachineState(Protocol):
    """A machine while it interprets a pickle; `ckptools.pickles.machine.Machine` says what each attribute is."""

    data: bytes
    locate: Callable[[Any], tuple[Path, int, str, int]] | None
    stack: list[Any]
    marks: list[list[Any]]
    memo: dict[int, Any]
    next_number: int
    claims: set[tuple[int | None, int]]
    modules: bool
    meshes: set[Any]
    repeated: RepeatedRecords

    runs: Any

    def check_sizes(self) -> None:
        """Hold the sizes of stack and memo against their limits."""

    def pop(self) -> Any:
        """Take the value on top of the stack."""

    def pop_mark(self) -> list[Any]:
        """Take everything above the last mark."""

    def take(self, at: int, length: int) -> bytes:
        """The bytes of an argument."""

    def check(self, at: int, length: int) -> None:
        """Refuse an argument that ends behind the pickle."""

    def spend(self, elements: int) -> None:
        """Count elements that a call goes through against what the pickle can have spelled out."""

    def line(self, at: int) -> tuple[str, int]:
        """A text argument that a newline ends, and where it ends."""

    def newline(self, at: int) -> int:
        """Where the next newline is."""

    def put(self, index: int) -> None:
        """Keep the value on top of the stack in the memo."""

    def get(self, index: int) -> Any:
        """A value of the memo."""

    def key(self, key: Any) -> Any:
        """A value that may be a key of a dict."""

    def name(self, module: str, name: str) -> Global:
        """A global that the pickle mentions."""

    def rebuild(self, function: Global, args: tuple[Any, ...]) -> Any:
        """What a call of a global stands for."""

    def persistent(self, pid: Any) -> Any:
        """What a persistent id names."""
