"""Kills consolidate at each file that gets its name or goes, and says what opens then; run as a script of its own.

    python -m tests.consolidate.killed_between OLD OLD_COUNT NEW NEW_COUNT FOLDER

OLD and NEW are checkpoints of the same names and other values. In FOLDER the output of OLD in files of at most
OLD_COUNT bytes is replaced, with force, by that of NEW in files of at most NEW_COUNT bytes; 0 for one file. Each run is
a fork of this process, which ends itself when the system is about to rename or remove the n-th file.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import ckptools
from ckptools.consolidate.publishing import publish, read_back  # noqa: F401 - imported here, and not in every fork
from ckptools.errors import CkptoolsError


def main(old: Path, old_size: int, new: Path, new_size: int, folder: Path) -> None:
    known = {name: values(ckptools.open(path)) for name, path in (("old", old), ("new", new))}
    states: list[list[str]] = []
    killed = True
    while killed:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write(old, old_size, folder)
        killed = ended_at(len(states) + 1, lambda: write(new, new_size, folder))
        states.append([opened(path, known) for path in (folder, *sorted(folder.iterdir())) if is_model(path)])
    print(json.dumps({"states": states, "left": sorted(p.name for p in folder.iterdir())}))


def write(source: Path, size: int, folder: Path) -> None:
    ckptools.consolidate(source, folder / "m.safetensors", max_shard_size=size or None, force=True)


def ended_at(number: int, work: Callable[[], None]) -> bool:
    """Whether work in a fork was killed at its n-th rename or removal."""
    child = os.fork()
    if not child:
        seen = []

        def count(event: str, arguments: tuple[object, ...]) -> None:
            if event in ("os.rename", "os.remove"):
                seen.append(event)
                if len(seen) == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or not status
    return os.WIFSIGNALED(status)


def is_model(path: Path) -> bool:
    return path.is_dir() or (not path.name.startswith(".") and path.suffix in (".safetensors", ".json"))


def opened(path: Path, known: dict[str, dict[str, bytes]]) -> str:
    """What is taken for whole at a path: `old`, `new`, or a `mix`; or that nothing is."""
    try:
        ck = ckptools.open(path)
    except CkptoolsError:
        return "refused"
    if not ck.whole:
        return "not whole"
    found = values(ck)
    return next((name for name, expected in known.items() if found == expected), "mix")


def values(ck: ckptools.Checkpoint) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in ck.model.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
