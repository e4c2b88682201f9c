"""`python -m ckptools.training.worker OPTIONS PARTIAL ANSWER LOUD`: the process that the launcher starts per rank.

OPTIONS is JSON, PARTIAL the folder for unfinished files, ANSWER the file into which the first rank of the node writes
the result, LOUD is `loud` or `quiet`. A failure goes to torchelastic's error file, from which the launcher makes one
line.
"""

from __future__ import annotations

import atexit
import dataclasses
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from ckptools.cluster.environment import calm_torch, use_loopback
from ckptools.training import options as choices
from ckptools.training.options import CreateOptions
from ckptools.training.output import Created

# Seconds between two checks that the launcher is alive.
_LOOK = 1.0

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def main(words: list[str]) -> int:
    """Run one rank; returns the exit code of the process."""
    prepare_process()
    threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
    text, partial, answer, loud = words
    try:
        from ckptools.training.rank import in_group, say, say_nothing, train_and_save

        options = choices.from_json(text)
        with in_group(options):
            created = train_and_save(options, Path(partial), say if loud == "loud" else say_nothing)
        if os.environ["LOCAL_RANK"] == "0":
            Path(answer).write_text(to_json(created))
    except Exception as error:
        if os.environ.get("CKPTOOLS_DEBUG"):
            traceback.print_exc()
        record_failure(error)
        return 1
    return 0


def be_spawned(*words: str) -> None:
    """Run one rank in a process that `torch.multiprocessing` has started."""
    if code := main(list(words)):
        os._exit(code)
    # Exit at once, after the launcher has read that this function returned; the last lines of this file say why.
    atexit.register(os._exit, 0)


def record_failure(error: Exception) -> None:
    """Write torchelastic's error file, whole or not at all.

    A gloo thread can abort a rank while it writes, and torchelastic raises an error if the error file is cut.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    path = os.environ[_ERROR_FILE]
    os.environ[_ERROR_FILE] = partial = f"{path}.partial"
    get_error_handler().record_exception(error)
    Path(partial).replace(path)


def _end_after(launcher: int) -> None:
    """End this rank when its launcher has died: no other process would end it or waits for its result."""
    while os.getppid() == launcher:
        time.sleep(_LOOK)
    os._exit(1)


def prepare_process() -> None:
    """Prepare the process before torch is imported: threads, network, signals, C++ warnings, garbage collection."""
    calm_torch()
    # Imports make some 300,000 objects that stay; by default a quarter of the time is spent searching them for garbage.
    gc.set_threshold(200_000)
    use_loopback()
    # The launcher cleans up, and a rank that Ctrl-C stops prints nothing.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def arguments(options: CreateOptions, partial: Path, answer: Path, verbose: bool) -> list[str]:
    """The command-line arguments of `main`."""
    return [choices.to_json(options), str(partial), str(answer), "loud" if verbose else "quiet"]


def to_json(created: Created) -> str:
    """Encode the result for the launcher."""
    return json.dumps(dataclasses.asdict(created), default=str)


def from_json(text: str, out: Path) -> Created:
    """Read what `to_json` wrote."""
    answer = json.loads(text)
    files, losses = tuple(map(Path, answer["files"])), tuple(answer["losses"])
    return Created(out, files, losses, answer["world_size"], answer["nbytes"], answer["rank"])


if __name__ == "__main__":
    # Not sys.exit: a gloo group that is torn down waits for its threads, and they may wait for the interpreter.
    os._exit(main(sys.argv[1:]))
