"""Figures of every format's tensors are those of their known full values, sharded or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ckptools
from ckptools.model.tensor import Tensor
from tests.truth import FIXTURES, WHOLE, load_truth

COMPOSER = FIXTURES / "composer-0.13.5-torch1.13.1-sharded-w4"
HSDP = FIXTURES / "torch2.0.1-fsdp1-hsdp2x2-st-w4"


def numbers(dtype: str, data: bytes) -> np.ndarray:
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).double().numpy()


@pytest.mark.slow
@pytest.mark.parametrize("known", WHOLE, ids=lambda known: f"{known.name}/{known.path}")
def test_figures_are_those_of_the_known_values(known):
    truth, compared = load_truth(known.name), 0
    for row in known.open(all_ranks=True).stats().rows:
        dtype, data, shape = truth.get(f"model/{row.name.removeprefix(known.prefix)}", ("", b"", ()))
        if dtype != row.dtype or shape != row.shape or f"model/{row.name}" in known.absent:
            continue
        values, compared = numbers(dtype, data), compared + 1
        assert (row.problem, row.elements, row.numel) == ("", values.size, values.size), row
        assert (row.min, row.max, row.zeros) == (values.min(), values.max(), (values == 0).sum()), row
        assert row.mean == pytest.approx(values.mean(), rel=1e-9, abs=1e-12), row
        assert row.std == pytest.approx(values.std(), rel=1e-9, abs=1e-12), row
        assert row.l2 == pytest.approx(np.sqrt((values**2).sum()), rel=1e-12), row
    assert compared > 2


def test_a_replica_is_read_once_and_each_rank_has_a_row_of_its_own():
    with ckptools.open(HSDP, all_ranks=True) as ck:
        whole, ranks = ck.stats(), ck.stats(per_rank=True)
        tensors = {row.name: row for row in whole.rows}
        assert whole.bytes_read == sum(t.nbytes for t in ck.model.values() if isinstance(t, Tensor))
        assert ranks.bytes_read > 1.9 * whole.bytes_read and ranks.l2 is None
        for row in ranks.rows:
            local = ck.model[row.name].load(rank=row.rank)
            assert (row.elements, row.numel, row.shape) == (local.numel(), local.numel(), tensors[row.name].shape)
            if local.numel():
                assert row.max == local.max().item() <= tensors[row.name].max


def test_a_lazy_tensor_takes_its_figures_from_the_ranks_that_it_needs(large_world):
    with ckptools.open(COMPOSER / "ep0-ba5-rank0.pt") as ck:
        name, tensor = next((n, t) for n, t in ck.model.items() if len(t.shape) == 2)
        found, part, loaded = tensor.stats(), tensor.stats(rank=1), tensor.load()
        assert (found.elements, found.max) == (loaded.numel(), loaded.max().item())
        assert (part.elements, part.max) == (tensor.load(rank=1).numel(), tensor.load(rank=1).max().item())
        assert part.rank == 1 and found.name.endswith(name)
        assert ck.stats(filter=name).rows[0].rms == found.rms
        rms, most = f"{found.rms:.4g}", f"{found.max:.4g}"
        assert repr(found).startswith(f"Stats(rms={rms}, l2=") and f"max={most}, zeros=0, nonfinite=0)" in repr(found)


def test_a_tied_tensor_is_read_and_summed_once(tmp_path):
    w = torch.ones(100)
    torch.save({"model": {"a": w, "b": w, "c": torch.zeros(4), "n": torch.tensor([1000])}}, tmp_path / "m.pt")
    found = ckptools.open(tmp_path / "m.pt").stats()
    assert (len(found.rows), found.bytes_read, found.l2, found.elements) == (4, 400 + 16 + 8, 10.0, 205)
