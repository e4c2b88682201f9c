"""`torch.multiprocessing.spawn`: one Python process starts the ranks as its children, without an agent.

The way of many tutorials. The children get by hand what the elastic launcher would set for them; nobody starts them
again when one dies.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptools.training import worker
from ckptools.training.launchers.failures import failure_reason
from ckptools.training.launchers.job import Job
from ckptools.training.options import Created

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def launch(job: Job) -> Created:
    """Start the ranks of this node, wait for them and take the answer of the first.

    Raises:
        CkptoolsError: a rank failed; it is the error that says why.
        KeyboardInterrupt: Ctrl-C; every rank has been ended.
    """
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

    with tempfile.TemporaryDirectory(prefix="ckptools-") as scratch:
        answer = Path(scratch, "answer.json")
        arguments = worker.arguments(job.options, job.partial, answer, job.verbose)
        variables = [_variables(job, local_rank, scratch) for local_rank in range(job.node.nproc)]
        ranks = spawn(_be_a_rank, (variables, arguments), nprocs=job.node.nproc, join=False)
        try:
            while not ranks.join():
                pass
        except (ProcessExitedException, ProcessRaisedException):
            raise failure_reason(job.options.out, _failures(ranks.processes, variables)) from None
        finally:
            _end(ranks.processes)
        return worker.from_json(answer.read_text(), job.options.out)


def _variables(job: Job, local_rank: int, scratch: str) -> dict[str, str]:
    """Make the environment of one rank; the names are those that the elastic launcher sets."""
    node = job.node
    first = sum(job.counts[: node.node_rank])
    return {
        "RANK": str(first + local_rank),
        "WORLD_SIZE": str(sum(job.counts)),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(node.nproc),
        "GROUP_RANK": str(node.node_rank),
        "MASTER_ADDR": node.address,
        "MASTER_PORT": str(node.port),
        # The store where the nodes met stays open for the ranks: nobody else can take its port in between.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(Path(scratch, f"error{local_rank}.json")),
    }


def _be_a_rank(local_rank: int, variables: list[dict[str, str]], arguments: list[str]) -> None:
    os.environ.update(variables[local_rank])
    # Not sys.exit: a gloo group that is torn down waits for its threads, and they may wait for the interpreter.
    os._exit(worker.main(arguments))


def _failures(processes: list[Any], variables: list[dict[str, str]]) -> dict[int, ProcessFailure]:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    return {
        int(own["RANK"]): ProcessFailure(
            int(own["LOCAL_RANK"]), process.pid, process.exitcode, own["TORCHELASTIC_ERROR_FILE"]
        )
        for process, own in zip(processes, variables, strict=True)
        if process.exitcode
    }


def _end(processes: list[Any]) -> None:
    """End what still runs; a rank has nothing to clean up."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
