"""The note on an out-of-memory error: what is held beside the plan, and which settings to change."""

import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import run_each
from tests.zero_full.pipeline_runs import Block, Case, batch
from tests.zero_full.runs import Net, config, data
from zero_full.engine import out_of_memory
from zero_full.engine.out_of_memory import BEGIN, MemoryNote, MemoryNotes, add_note


class Greedy(Net):
    """A model that runs out of memory in the call that is named."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise torch.OutOfMemoryError("out of memory")
        if self.where == "the CPU's":
            torch.empty(2**60)
        loss = super().forward(x)
        if self.where == "backward":
            loss.register_hook(fail)
        return loss


def fail(*given: Any) -> None:
    raise torch.OutOfMemoryError("out of memory")


def note_of(error: BaseException) -> list[str]:
    """The lines of the note. Python 3.10 has it in the message."""
    lines = "\n".join([str(error), *getattr(error, "__notes__", ())]).splitlines()
    return lines[next((place for place, line in enumerate(lines) if line.startswith(BEGIN)), len(lines)) :]


def table_in(note: list[str]) -> dict[str, list[str]]:
    """The bytes held and planned, as they are written, by kind."""
    rows = [re.fullmatch(r"  (\w+) +([\d.]+ \w+) +([\d.]+ \w+)", line) for line in note]
    return {row[1]: [row[2], row[3]] for row in rows if row}


def steps_that_fail(comm: Any, stage: int) -> list[list[str]]:
    """The notes of a rank's errors, one in each call."""
    model = Greedy()
    zero = {"stage3_param_persistence_threshold": 0}
    engine = zero_full.initialize(model=model, config=config(stage, zero_optimization=zero))[0]
    notes = []
    for where in ("", "forward", "backward", "the CPU's", "step"):
        model.where = where
        hook = engine.optimizer.register_step_pre_hook(fail) if where == "step" else None
        try:
            engine.backward(engine(data(0, 0, comm.rank)))
            engine.step()
        except RuntimeError as error:
            notes.append(note_of(error))
            engine.optimizer.zero_grad()
        if hook is not None:
            hook.remove()
    model.where = ""
    engine.backward(engine(data(0, 0, comm.rank)))  # a smaller batch goes on
    engine.step()
    engine.destroy()
    return notes


@pytest.mark.parametrize("stage", [1, 3])
def test_every_call_has_a_note_with_the_ledger_and_the_plan(stage: int) -> None:
    states = []
    for rank, notes in enumerate(run_each(steps_that_fail, 2, [(stage,)])[0]):
        calls = ("forward", "backward", "forward", "step")
        for note, call in zip(notes, calls, strict=True):
            assert note[0].startswith(f"{BEGIN} {call} on rank {rank} (cpu)"), note
            table = table_in(note)
            assert table.keys() == {"parameters", "gradients", "optimizer"}, note
            states.append(table["optimizer"])
            remedies = note[note.index("What to change first:") + 1 :]
            assert [line[:5] for line in remedies] == ["  1. ", "  2. ", "  3. "], note
            assert ("zero_optimization.stage 3, not 1" in "".join(remedies)) is (stage == 1)
        assert "train_micro_batch_size_per_gpu 2" in "".join(notes[0])
        assert "train_micro_batch_size_per_gpu" not in "".join(notes[3])  # no activations in a step
    assert any(held == planned for held, planned in states)  # a plan is of the rank that holds most


def test_a_note_of_a_device_names_what_else_it_holds() -> None:
    engine = zero_full.initialize(model=Net(), config=config(1, bf16={"enabled": True}))[0]
    device, allocated = torch.device("cuda", 0), 10**9
    with (
        mock.patch.object(torch.accelerator, "memory_allocated", lambda device: allocated),
        mock.patch.object(torch.accelerator, "get_memory_info", lambda device: (10**6, 2 * 10**9)),
    ):
        notes = MemoryNotes(engine.optimizer, engine.config, device, dict)
        note = MemoryNote(notes, "step").text().splitlines()
    *_, rest, _, _, first, second, third = note
    assert rest.startswith("  torch has allocated 1.00 GB more: ")
    assert rest.endswith(" The device has 2.00 GB, of which 1.00 MB are free.")
    assert first.startswith("  1. train_micro_batch_size_per_gpu 2 ") and first.endswith(", of 1.00 GB")
    assert second.startswith("  2. torch.utils.checkpoint")
    assert third.startswith('  3. zero_optimization.offload_optimizer {"device": "cpu"}: ')
    engine.destroy()


def test_the_plan_is_computed_once_for_an_engine() -> None:
    calls = list[int]()

    def computed() -> dict[str, int]:
        calls.append(1)
        return {"parameters": 7}

    engine = zero_full.initialize(model=nn.Linear(4, 4), config=config(1))[0]
    notes = MemoryNotes(engine.optimizer, engine.config, engine.device, computed)
    assert calls == [] and notes.plan == notes.plan == ({"parameters": 7}, "") and calls == [1]
    engine.destroy()


def test_an_error_of_another_kind_stays_as_it_is_and_no_note_comes_twice() -> None:
    engine = zero_full.initialize(model=nn.Linear(4, 4), config=config(1))[0]
    with pytest.raises(RuntimeError) as caught:
        engine(torch.ones(3, 5))
    assert not note_of(caught.value)
    error = RuntimeError("all_gather failed")
    error.__cause__ = torch.OutOfMemoryError("out of memory")
    notes = MemoryNotes(engine.optimizer, engine.config, engine.device, fail)
    for _ in range(2):
        notes.explain(error, "step")
    note = note_of(error)
    assert "\n".join(note).count(BEGIN) == 1 and "  No plan: out of memory." in note
    with mock.patch.object(out_of_memory, "MemoryNote", fail):
        notes.explain(other := MemoryError(), "step")
    assert "could not be described" in note_of(other)[0]
    engine.destroy()


def test_python_3_10_has_the_note_in_the_message() -> None:
    error: Any = SimpleNamespace(args=("out of memory", 1))
    add_note(error, "a note")
    assert error.args[0].endswith("\na note") and error.args[1] == 1


# A pipeline -----------------------------------------------------------------------------------------


def batches_that_fail(comm: Any, schedule: str) -> list[list[str]]:
    """The notes of a rank's errors, in a batch and in a step."""
    case, notes = Case(3, schedule, precision="bf16"), []
    engine = case.start()
    engine.train_batch(iter(batch(0, 0)))
    block = next(module for module in engine.module.modules() if isinstance(module, Block))
    places: tuple[Any, ...] = (block.register_forward_hook, engine.optimizer.register_step_pre_hook)
    for register in places:
        hook = register(fail)
        try:
            engine.train_batch(iter(batch(1, 0)))
        except RuntimeError as error:
            notes.append(note_of(error))
            engine.optimizer.zero_grad()
        hook.remove()
    engine.train_batch(iter(batch(1, 0)))
    engine.destroy()
    return notes


def test_a_batch_of_a_pipeline_has_a_note_with_the_plan_of_this_rank() -> None:
    answers = run_each(batches_that_fail, 3, [("1f1b",), ("gpipe",)])
    for schedule, ranks in zip(("1f1b", "gpipe"), answers, strict=True):
        tables = []
        for rank, (in_batch, in_step) in enumerate(ranks):
            assert in_batch[0].startswith(f"{BEGIN} train_batch on rank {rank} (cpu)"), in_batch
            assert in_step[0].startswith(f"{BEGIN} step on rank {rank} (cpu)"), in_step
            tables.append(table_in(in_step))
            assert tables[-1].keys() == {"parameters", "gradients", "optimizer"}, in_step
            assert all(tables[-1][kind][0] == tables[-1][kind][1] for kind in ("parameters", "optimizer"))
            remedies = "".join(in_batch[in_batch.index("What to change first:") + 1 :])
            assert "pipeline.activation_checkpoint_interval 1" in remedies
            assert ('pipeline.schedule "1f1b", not "gpipe"' in remedies) is (schedule == "gpipe")
            assert ("train_micro_batch_size_per_gpu 1" in remedies) is (schedule == "1f1b")
            assert "zero_optimization.stage" not in "".join(in_step)  # a pipeline has no stages 2 and 3
        assert tables[0] != tables[1]  # each place has other layers
