"""Tasks that srun starts on several nodes: they meet by its variables alone, and answer as one process does."""

from __future__ import annotations

import pytest

import ckptools
from tests.cluster.launched import ended, srun
from tests.truth import FIXTURES

SOURCE = FIXTURES / "torch2.13.0-fsdp1-sharded-w4"
NODES = "127.0.0.[1-2,7]"
"""Names of this machine."""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_tasks_on_several_nodes_write_what_one_process_does(tmp_path):
    alone, together = tmp_path / "alone.safetensors", tmp_path / "together.safetensors"
    tasks = ended(srun("consolidate", SOURCE, "-o", together, hosts=NODES, tasks=(2, 1, 1), cyclic=True))
    ckptools.consolidate(SOURCE, alone)
    assert [code for code, _, _ in tasks] == [0] * 4, tasks
    assert [bool(printed) for _, printed, _ in tasks] == [True, False, False, False]
    assert together.read_bytes() == alone.read_bytes()


def test_a_task_alone_has_nobody_to_meet(tmp_path):
    [(code, printed, said)] = ended(srun("verify", SOURCE, tasks=(1,), hosts="no-such-host"))
    assert (code, said) == (0, "") and "4 of 4 here and complete" in printed
