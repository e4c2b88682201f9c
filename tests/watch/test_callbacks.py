"""Callbacks of real trainers: what they save is verified in another process, and a problem is a warning."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptools
from ckptools.api.watching import CheckpointWarning, RunWatch
from ckptools.errors import UsageError
from tests.watch.runs import flip, save


def proven(watch: RunWatch) -> list[int | None]:
    return sorted(event["step"] for event in watch.events if event["event"] == "proven")


def watch_of(tmp_path: Path, trainer: Any = None, **more: Any) -> Any:
    return ckptools.watch(tmp_path / "run", trainer, settle=0.5, state=tmp_path / "state.json", **more)


@pytest.mark.slow
def test_a_check_returns_at_once_and_a_second_follows_the_first(tmp_path):
    save(tmp_path / "run", 2)
    watch = watch_of(tmp_path)
    started = time.monotonic()
    watch.check()
    watch.check()
    assert time.monotonic() - started < 5
    save(tmp_path / "run", 4)
    assert {event["step"] for event in watch.wait()} == {2, 4} and proven(watch) == [2, 4]


@pytest.mark.slow
def test_a_problem_is_a_warning_or_what_the_user_wants(tmp_path):
    flip(save(tmp_path / "run", 2))
    watch = watch_of(tmp_path)
    watch.check()
    with pytest.warns(CheckpointWarning, match=r"step-2.pt: .*CK004"):
        watch.wait()
    found: list[Any] = []
    again = watch_of(tmp_path, on_problem=found.append, values=False)
    (tmp_path / "state.json").unlink()
    again.check()
    again.wait()
    assert [one["event"] for one in found] == ["problem"]


def test_a_folder_that_never_comes_is_a_warning(tmp_path):
    watch = watch_of(tmp_path)
    watch.check()
    with pytest.warns(CheckpointWarning, match="not verified: .*no such file"):
        watch.wait()


def test_a_trainer_that_is_not_known_is_refused(tmp_path):
    with pytest.raises(UsageError, match="lightning or transformers"):
        watch_of(tmp_path, "keras")


@pytest.mark.slow
def test_transformers_trainer_has_each_save_verified(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=31
    )
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8
    watch = watch_of(tmp_path, "transformers")
    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=4, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        Trainer(LlamaForCausalLM(config), arguments, train_dataset=data, callbacks=[watch]).train()
    assert proven(watch.run_watch) == [2, 4]


@pytest.mark.slow
def test_lightnings_trainer_has_each_save_verified(tmp_path):
    lightning = pytest.importorskip("pytorch_lightning")
    from pytorch_lightning.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    watch = watch_of(tmp_path, "lightning")
    saving = ModelCheckpoint(tmp_path / "run", every_n_train_steps=2, save_top_k=-1)
    trainer = lightning.Trainer(
        max_steps=4, logger=False, accelerator="cpu", enable_progress_bar=False, callbacks=[watch, saving],
        default_root_dir=tmp_path,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(8, 4)))
    assert proven(watch.run_watch) == [2, 4]
