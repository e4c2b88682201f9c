"""The hostile corpus: every way to lie, to run something, or to exhaust a reader that we know of, by name.

A case writes its files into a folder of its own and returns the path that a user would name. Groups of cases are made
from one list put into several places, since a reader is as safe as its least looked-at door.
"""

from __future__ import annotations

from tests.hostile.cases import archives, files, headers, metadata, numbers, paths, pickles, words
from tests.hostile.cases.build import Build
from tests.pickles.test_hostile import TRAP

__all__ = ["CASES", "REFUSED", "TRAP"]

SUBJECTS = (pickles, archives, numbers, headers, metadata, paths, files, words)

CASES: dict[str, Build] = {name: build for subject in SUBJECTS for name, build in subject.cases()}

HARMLESS = ("archive: name with a newline", "index: b'{\"weight_map\": {}}'")
"""Odd, and read as it is: a record that no tensor uses is nobody's."""

REFUSED = [
    name
    for name in CASES
    if name.startswith(
        ("tensor: ", "archive: ", "safetensors: ", "dcp: ", "weight_map: ", "DeepSpeed's latest: ", "Megatron's")
    )
    and name not in HARMLESS
]
"""Cases of which no part may be written as if it were whole."""
