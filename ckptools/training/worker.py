"""`python -m ckptools.training.worker OPTIONS PARTIAL ANSWER LOUD`: the process that the launcher starts per rank.

OPTIONS is JSON, PARTIAL the folder for files in the making, ANSWER a file in which rank 0 writes what came
out, LOUD is `loud` or `quiet`. A failure goes to torchelastic's error file, from which the launcher makes one
line.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

from ckptools.training import options as choices
from ckptools.training.options import Created


def main(arguments: list[str]) -> int:
    """Run one rank; returns the exit code of the process."""
    prepare_process()
    text, partial, answer, loud = arguments
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        from ckptools.training.backends import chosen_here
        from ckptools.training.rank import say_nothing, train_and_save

        options = choices.from_json(text)
        dist.init_process_group(chosen_here(options.hardware).group)
        created = train_and_save(options, Path(partial), say if loud == "loud" else say_nothing)
        if created.rank == 0:
            Path(answer).write_text(to_json(created))
    except Exception as error:
        if os.environ.get("CKPTOOLS_DEBUG"):
            traceback.print_exc()
        get_error_handler().record_exception(error)
        return 1
    return 0


def prepare_process() -> None:
    """Prepare the process before torch is imported: threads, network, signals, C++ warnings."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # The ranks share a machine: its own name may resolve to nothing, or to a network behind a firewall.
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    # The launcher cleans up; a rank that is told to stop has nothing to say.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def say(line: str) -> None:
    """Write a line to stdout at once, also into a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def to_json(created: Created) -> str:
    """Write the answer down for the launcher."""
    return json.dumps(
        {
            "files": [str(path) for path in created.files],
            "losses": created.losses,
            "world_size": created.world_size,
            "nbytes": created.nbytes,
        }
    )


def from_json(text: str, out: Path) -> Created:
    """Read what `to_json` wrote."""
    answer = json.loads(text)
    files = tuple(Path(name) for name in answer["files"])
    return Created(out, files, tuple(answer["losses"]), answer["world_size"], answer["nbytes"], rank=0)


if __name__ == "__main__":
    # Not sys.exit: a gloo group that is torn down waits for its threads, and they may wait for the interpreter.
    os._exit(main(sys.argv[1:]))
