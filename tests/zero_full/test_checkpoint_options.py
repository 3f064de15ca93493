"""What `save_checkpoint` and `load_checkpoint` are asked for, with the engine and without it."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import zero_full
from tests.worlds import POOL
from tests.zero_full.checkpoint_runs import Layout, Rich, batch, differences, engine_of, everything, go
from tests.zero_full.runs import said_by
from zero_full.assemble import shard
from zero_full.checkpoint import disk, open_checkpoint
from zero_full.comm.topology import Topology
from zero_full.settings import Settings

ALONE = Layout(1, 1)


def trained(folder: Path, layout: Layout = ALONE, rank: int = 0, **options: Any) -> zero_full.Engine:
    """An engine after two steps, saved."""
    engine = engine_of(layout)
    go(engine, rank, range(2))
    assert engine.save_checkpoint(folder, **options)
    return engine


def values(engine: zero_full.Engine) -> dict[str, torch.Tensor]:
    return engine.module_state_dict()


def test_return_values_and_names_are_deepspeeds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = trained(tmp_path, client_state={"epoch": 3})
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert engine.load_checkpoint(tmp_path) == (str(tmp_path / "global_step2"), {"epoch": 3})
    assert engine.load_checkpoint(str(tmp_path), tag="global_step2")[1] == {"epoch": 3}
    assert engine.load_checkpoint(tmp_path / "global_step2")[1] == {"epoch": 3}
    engine.save_checkpoint(tmp_path, tag="other", save_latest=False)
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert engine.load_checkpoint(tmp_path / "nowhere") == (None, None)
    assert "nowhere has no checkpoint" in caplog.text
    (tmp_path / "latest").unlink()
    with pytest.raises(zero_full.CheckpointError, match=r"\(global_step2, other\), but no file `latest`"):
        engine.load_checkpoint(tmp_path)
    assert engine.load_checkpoint(tmp_path, tag="other")[0] == str(tmp_path / "other")
    with pytest.raises(
        zero_full.CheckpointError, match=r"has no checkpoint step5. Complete ones: global_step2"
    ):
        engine.load_checkpoint(tmp_path, tag="step5")


NO_STATE = "options", "exp_avg", "schedule"


def test_parts_of_a_checkpoint_can_be_left_alone(tmp_path: Path) -> None:
    saved = everything(trained(tmp_path))
    for options, keeps in (
        ({"load_module_only": True}, (*NO_STATE, "counters")),
        ({"load_optimizer_states": False, "load_lr_scheduler_states": False}, NO_STATE),
        ({"load_lr_scheduler_states": False}, ("schedule",)),
    ):
        engine = engine_of(ALONE)
        before = everything(engine)
        engine.load_checkpoint(tmp_path, **options)
        after = everything(engine)
        for key, value in after.items():
            kept = any(key.startswith(start) for start in keeps)
            want = before.get(key) if kept else saved[key]
            assert not differences({key: value}, {key: want}), (options, key)


class Smaller(Rich):
    """Without a layer, and with another one."""

    def __init__(self) -> None:
        super().__init__()
        del self.frozen
        self.new = nn.Linear(2, 2)


def test_strict_or_not(tmp_path: Path) -> None:
    saved = values(trained(tmp_path))
    engine = engine_of(ALONE, Smaller)
    new = engine.module.new.weight.detach().clone()
    lacks = (
        r"lacks new.bias, new.weight; .*global_step2 has frozen.bias, frozen.weight, which the model lacks"
    )
    with pytest.raises(zero_full.CheckpointError, match=lacks + ". Nothing was loaded"):
        engine.load_checkpoint(tmp_path)
    assert not torch.equal(values(engine)["first.weight"], saved["first.weight"])
    engine.load_checkpoint(tmp_path, load_module_strict=False)
    assert torch.equal(values(engine)["first.weight"], saved["first.weight"])
    assert torch.equal(engine.module.new.weight, new)


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_can_be_left_out(stage: int, tmp_path: Path) -> None:
    POOL.run(leaves_out_frozen, 2, stage, tmp_path)


def leaves_out_frozen(comm: Any, stage: int, folder: Path) -> None:
    engine = trained(folder, Layout(2, stage), comm.rank, exclude_frozen_parameters=True)
    assert not [key for key in open_checkpoint(folder).tensors if "frozen" in key]
    held = everything(engine)
    engine.destroy()
    other = engine_of(Layout(2, stage))
    with zero_full.GatheredParameters([other.module.frozen.weight], modifier_rank=0), torch.no_grad():
        other.module.frozen.weight.fill_(0.5)
    other.load_checkpoint(folder)
    found = everything(other)
    assert bool((found.pop("frozen.weight") == 0.5).all()) and held.pop("frozen.weight") is not None
    assert not differences(held, found)
    other.destroy()


class Untied(Rich):
    """The same with two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(7, 12, bias=False)


def test_a_tied_weight_is_stored_once_and_fills_both_of_a_model_that_is_not_tied(tmp_path: Path) -> None:
    saved = everything(trained(tmp_path))
    assert open_checkpoint(tmp_path).aliases == {"tied.weight": "last.weight"}
    engine = engine_of(ALONE, Untied)
    engine.load_checkpoint(tmp_path)
    found = everything(engine)
    for key in ("", "exp_avg of ", "exp_avg_sq of "):
        assert torch.equal(found[f"{key}tied.weight"], saved[f"{key}last.weight"])
    engine.save_checkpoint(tmp_path, tag="untied")
    with pytest.raises(zero_full.CheckpointError, match=r"has tied.weight.*, which the model lacks"):
        engine_of(ALONE).load_checkpoint(tmp_path, tag="untied")


def test_a_compiled_model_and_a_plain_one_have_the_same_names(tmp_path: Path) -> None:
    saved = everything(trained(tmp_path))
    compiled = torch.compile(Rich(), backend="eager")
    engine = zero_full.initialize(model=compiled, config=ALONE.keys())[0]
    engine.load_checkpoint(tmp_path)
    state = {name.replace("_orig_mod.", ""): value for name, value in values(engine).items()}
    assert torch.equal(state["first.weight"], saved["first.weight"])


def buffers_of_each_rank(comm: Any, folder: Path) -> list[Any]:
    engine = trained(folder, Layout(2, 2), comm.rank)
    before = engine.module.seen.running_mean.clone()
    go(engine, comm.rank, range(2, 3))
    engine.load_checkpoint(folder)
    assert torch.equal(engine.module.seen.running_mean, before)
    return [before, open_checkpoint(folder).read("buffers/seen.running_mean", 0, 7)]


def test_every_rank_has_its_own_buffers_again_and_the_first_ones_are_everybodys(tmp_path: Path) -> None:
    (first, stored), (second, _) = POOL.run(buffers_of_each_rank, 2, tmp_path)
    assert torch.equal(first, stored) and not torch.equal(first, second)


def accumulates(comm: Any, folder: Path) -> list[str]:
    engine = engine_of(Layout(2, 1, more={"gradient_accumulation_steps": 2}))
    engine.backward(engine(batch(0, comm.rank, torch.float32)))
    before = said_by(lambda: engine.save_checkpoint(folder))
    engine.step()
    after = said_by(lambda: engine.save_checkpoint(folder))
    engine.backward(engine(batch(0, comm.rank, torch.float32)))
    engine.step()
    assert engine.save_checkpoint(folder)
    return [before, after]


def test_between_micro_batches_nothing_is_saved(tmp_path: Path) -> None:
    for before, after in POOL.run(accumulates, 2, tmp_path):
        assert "save_checkpoint between the backward passes of a step" in before, before
        assert "save_checkpoint after 1 of a step's 2 micro-batches" in after, after


class Place:
    """Somebody's data loader."""

    def __init__(self, place: int) -> None:
        self.place = place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def keeps(comm: Any, folder: Path, places: list[int] | None) -> Any:
    engine = engine_of(Layout(comm.world_size, 1))
    mine = Place(-1 if places is None else places[comm.rank])
    engine.keep_in_checkpoint(data=mine)
    if places is not None:
        return engine.save_checkpoint(folder)
    said = said_by(lambda: engine.load_checkpoint(folder))
    return mine.place, said


def test_objects_of_the_loop_are_kept_for_each_rank(tmp_path: Path) -> None:
    POOL.run(keeps, 2, tmp_path / "own", [5, 6])
    POOL.run(keeps, 2, tmp_path / "same", [7, 7])
    assert [place for place, _ in POOL.run(keeps, 2, tmp_path / "own", None)] == [5, 6]
    assert [place for place, _ in POOL.run(keeps, 3, tmp_path / "same", None)] == [7, 7, 7]
    for place, said in POOL.run(keeps, 3, tmp_path / "own", None):
        assert place == -1 and "data was saved with a different state on each of 2 ranks" in said, said
    with pytest.raises(TypeError, match="data needs state_dict"):
        engine_of(ALONE).keep_in_checkpoint(data=3)


def without_engine(comm: Any, folder: Path) -> None:
    def make() -> tuple[nn.Module, Any, Any]:
        model = Rich()
        base = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = shard(model, base, Settings(stage=2))
        return model, optimizer, LambdaLR(base, lambda step: 1 / (1 + step))

    def step(model: nn.Module, optimizer: Any, schedule: Any, number: int) -> float:
        loss = model(batch(number, comm.rank, torch.float32))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return float(loss)

    one, other = make(), make()
    step(*one, 0)
    extras = zero_full.Extras(lr_scheduler=one[2], counters={"global_steps": 1})
    path = zero_full.save_checkpoint(one[0], one[1], folder, "first", {"at": 1}, extras)
    found = zero_full.load_checkpoint(
        other[0], other[1], folder, extras=zero_full.Extras(lr_scheduler=other[2])
    )
    assert found is not None and (found.path, found.client_state) == (path, {"at": 1})
    assert found.counters == {"global_steps": 1}
    state = torch.get_rng_state()
    expected = step(*one, 1)
    torch.set_rng_state(state)
    assert step(*other, 1) == expected and one[2].get_last_lr() == other[2].get_last_lr()
    for _, optimizer, _ in (one, other):
        optimizer.close(gather=False)


def test_a_loop_without_engine_saves_and_loads(tmp_path: Path) -> None:
    POOL.run(without_engine, 2, tmp_path)


def in_groups(comm: Any, folder: Path, how: str) -> list[str]:
    """Saved where state is cut inside groups and repeated, loaded where all ranks share it; and back."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    topologies = {"groups": Topology.from_mesh(mesh), "all": Topology()}
    first, second = how.split(" to ")
    engines = []
    for name in (first, second):
        model = Rich()
        keys = Layout(4, 3).keys()
        engines.append(zero_full.initialize(model=model, config=keys, topology=topologies[name])[0])
    go(engines[0], comm.rank, range(2))
    engines[0].save_checkpoint(folder)
    held = everything(engines[0])
    engines[1].load_checkpoint(folder)
    wrong = differences(held, everything(engines[1]))
    for engine in engines:
        engine.destroy()
    return wrong


@pytest.mark.rotates
@pytest.mark.parametrize("how", ["groups to all", "all to groups", "groups to groups"])
def test_repeated_slices_are_saved_once_and_found_again(how: str, tmp_path: Path) -> None:
    assert POOL.run(in_groups, 4, tmp_path, how) == [[]] * 4
    total = sum(path.stat().st_size for path in (tmp_path / "global_step2").glob("*.safetensors"))
    tensors = open_checkpoint(tmp_path).tensors
    assert sum(tensor.nbytes for tensor in tensors.values()) < total < 2 * total


def test_a_layer_that_was_thawed_goes_on(tmp_path: Path) -> None:
    def thaws(frozen: bool) -> zero_full.Engine:
        model = Rich()
        model.last.weight.requires_grad_(not frozen)
        base = torch.optim.AdamW(model.parameters(), lr=0.01)
        return zero_full.initialize(model=model, optimizer=base, config={**BARE, "bf16": {"enabled": True}})[
            0
        ]

    BARE = {"train_micro_batch_size_per_gpu": 6, "zero_optimization": {"stage": 1}}
    engine = thaws(frozen=True)
    go_on(engine, 0)
    engine.module.last.weight.requires_grad_(True)
    go_on(engine, 1)
    engine.save_checkpoint(tmp_path)
    state = torch.get_rng_state()
    losses = go_on(engine, 2), go_on(engine, 3)
    for frozen in (True, False):
        other = thaws(frozen)
        other.load_checkpoint(tmp_path)
        other.module.last.weight.requires_grad_(True)
        torch.set_rng_state(state)
        assert (go_on(other, 2), go_on(other, 3)) == losses


def go_on(engine: zero_full.Engine, step: int) -> float:
    return go(engine, 0, range(step, step + 1))[0]


def bytes_read(comm: Any, layout: Layout, folder: Path) -> tuple[int, int]:
    """How many bytes of numbers a load reads, and how many this rank gets."""
    read = [0]

    def counting(file: disk.FileReader, buffer: memoryview, at: int) -> None:
        read[0] += len(buffer) * file.path.name.endswith(".safetensors")
        plainly(file, buffer, at)

    plainly = disk.FileReader.read_into
    engine = zero_full.initialize(model=nn.Linear(1000, 1000), config=layout.keys())[0]
    with mock.patch.object(disk.FileReader, "read_into", counting):
        engine.load_checkpoint(folder)
    mine = sum(each.numel() * each.itemsize for each in engine.optimizer.holdings()["optimizer"])
    mine += sum(
        group.master.values.nbytes for group in engine.optimizer.trained if not group.master.is_separate
    )
    engine.destroy()
    return read[0], mine


def saves_a_large_layer(comm: Any, folder: Path) -> None:
    keys = Layout(comm.world_size, 1).keys()
    engine = zero_full.initialize(model=nn.Linear(1000, 1000), config=keys)[0]
    engine.backward(engine(torch.ones(1, 1000)).square().mean())
    engine.step()
    engine.save_checkpoint(folder)
    engine.destroy()


def test_a_rank_reads_what_it_owns_once_to_verify_it_and_once_to_take_it(tmp_path: Path) -> None:
    POOL.run(saves_a_large_layer, 2, tmp_path)
    for layout in (Layout(4, 3), Layout(3, 1)):
        for read, mine in POOL.run(bytes_read, layout.world, layout, tmp_path):
            assert 2 * mine <= read <= 2 * mine + 8 * disk.BLOCK, (read, mine)


def test_an_engine_that_only_runs_forward_takes_the_weights(tmp_path: Path) -> None:
    saved = values(trained(tmp_path))
    keys = {key: each for key, each in ALONE.keys().items() if key not in ("optimizer", "scheduler")}
    engine = zero_full.initialize(model=Rich(), config=keys)[0]
    assert engine.load_checkpoint(tmp_path)[0] is not None
    assert all(torch.equal(value, saved[name]) for name, value in values(engine).items())
