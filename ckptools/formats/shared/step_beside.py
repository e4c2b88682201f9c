"""The step of a file from a small JSON beside it that has the same number in its name: `meta_000010.json`.

nanochat saves `model_000010.pt`, `meta_000010.json` and `optim_000010_rank0.pt` of each rank; only the JSON states
`step`. The number in the name is the step where both are the same.
Source: nanochat/checkpoint_manager.py (`save_checkpoint`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ckptools.errors import CkptoolsError
from ckptools.files.json_file import read_json
from ckptools.files.location import check_stays_inside
from ckptools.model.checkpoint import Fact
from ckptools.training_state.sections import Section
from ckptools.training_state.steps import find_step

NUMBERED = re.compile(r"[A-Za-z]+_(\d{6,12})(?:_rank\d+)?\.pt")


def find_step_with_beside(path: Path, sections: tuple[Section, ...]) -> Fact:
    """The step of the checkpoint at a path, as `find_step` has it, else that of the JSON beside it."""
    step = find_step(path, sections)
    found = NUMBERED.fullmatch(path.name) if step.value is None else None
    return step if found is None else _stated(path.with_name(f"meta_{found[1]}.json"), int(found[1])) or step


def _stated(path: Path, number: int) -> Fact | None:
    with suppress(CkptoolsError):
        if path.is_file():
            check_stays_inside(path, path.parent)
            content = read_json(path)
            stated = content.get("step") if isinstance(content, Mapping) else None
            if type(stated) is int and stated == number:
                return Fact(number, ("file name", path.name))
    return None
