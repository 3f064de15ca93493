"""Reads and writes of state that does not fit in memory: their order, and results in any order of calls."""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL
from tests.zero_full.runs import config
from zero_full.offload.block_memory import BlockMemory, FileBlock, Read, Step, Write, bytes_moved, memory_for
from zero_full.offload.nvme_state import OpenNvmeTier

PAGE = 4096


def swept(memory: BlockMemory[FileBlock], parts: Sequence[Sequence[FileBlock]]) -> tuple[int, int]:
    """Bytes read and written in a step, whose events are checked."""
    inside, read, written = dict(memory.begins), 0, 0
    for event in memory.sweep(parts):
        if isinstance(event, Write):
            del inside[event.block]
            written += event.block.padded_size
        elif isinstance(event, Read):
            for block in event.blocks:
                assert block not in inside and block.is_in_file
                inside[block] = memory.begins[block]
                read += block.padded_size
        else:
            assert isinstance(event, Step)
            assert all(block in inside for block in parts[event.number] if block.is_in_file)
        ends = [(begin, begin + size) for block, begin in inside.items() if (size := block.padded_size)]
        assert all(stop <= memory.size for _, stop in ends)
        for (_, stop), (begin, _) in pairwise(sorted(ends)):
            assert stop <= begin, "two blocks in one place"
    assert inside == memory.begins
    return read, written


def test_a_step_moves_what_does_not_fit_and_begins_with_what_the_last_one_left() -> None:
    parts = [[FileBlock(PAGE)] for _ in range(12)]
    memory = BlockMemory[FileBlock](8 * PAGE)
    assert swept(memory, parts) == (12 * PAGE, 4 * PAGE)
    for _ in range(3):
        parts.reverse()
        assert swept(memory, parts) == (4 * PAGE, 4 * PAGE)
    assert bytes_moved([[PAGE]] * 12, 8 * PAGE) == 4 * PAGE
    assert swept(memory, parts) == (12 * PAGE, 12 * PAGE), "in the same order once more"
    assert bytes_moved([[PAGE]] * 8, 8 * PAGE) == 0


@pytest.mark.parametrize(
    ("sizes", "room", "more"), [([9, 7, 8] * 5, 60, 15), ([4, 5, 3] * 9 + [4, 2], 57, 0)]
)
def test_parts_of_different_sizes_leave_few_gaps(sizes: list[int], room: int, more: int) -> None:
    """What two steps read beyond what does not fit: 24 and 12 pages if each takes the first free range."""
    parts, memory = [[FileBlock(size * PAGE)] for size in sizes], BlockMemory[FileBlock](room * PAGE)
    swept(memory, parts)
    for _ in range(6):
        read = 0
        for _ in range(2):
            parts.reverse()
            read += swept(memory, parts)[0]
        assert read == (2 * (sum(sizes) - room) + more) * PAGE


@pytest.mark.parametrize("seed", range(20))
def test_every_part_is_there_for_its_step_in_any_order_and_of_any_size(seed: int) -> None:
    chance = random.Random(seed)
    parts = [
        [FileBlock(PAGE * chance.randrange(9), chance.random() < 0.9) for _ in range(chance.randrange(1, 4))]
        for _ in range(chance.randrange(1, 12))
    ]
    largest = max(sum(block.padded_size for block in part) for part in parts)
    memory = BlockMemory[FileBlock](chance.choice([largest, 2 * largest, 5 * largest]))
    for _ in range(6):
        swept(memory, chance.sample(parts, chance.randrange(1, len(parts) + 1)))


def test_memory_has_room_for_two_parts_and_never_for_more_than_there_is() -> None:
    assert memory_for(100 * PAGE, 1000, 5 * PAGE, 200) == 20 * PAGE
    assert memory_for(100 * PAGE, 1000, 15 * PAGE, 200) == 30 * PAGE
    assert memory_for(100 * PAGE, 1000, 60 * PAGE, 0) == memory_for(100 * PAGE, 50, 1, 51) == 100 * PAGE
    assert memory_for(0, 0, 0, 10) == 0


# Any order of calls ----------------------------------------------------------------------------------

WIDTHS = (7, 30, 11, 40, 3, 25, 16, 5)


class Tower(nn.Module):
    """Layers of different sizes, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        pairs = pairwise(WIDTHS)
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairs)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean() + self.empty.sum()


def engine_of(stage: int, place: dict[str, Any]) -> Any:
    """Two parameter groups, clipping, and buckets of single parameters."""
    model = Tower()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.02, "weight_decay": 0.0},
    ]
    zero = {"stage": stage, "reduce_bucket_size": 60, "sub_group_size": 60, "offload_optimizer": place}
    zero |= {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    keys = config(stage, zero_optimization=zero, gradient_clipping=0.05)
    keys.pop("optimizer")
    base = torch.optim.AdamW(groups, lr=0.01)
    return zero_full.initialize(model=model, optimizer=base, config=keys)[0]


class InterruptedStepError(Exception):
    """A step that ends in the middle."""


class Player:
    """An engine that is told what to do."""

    def __init__(self, stage: int, place: dict[str, Any], folder: Path, rank: int) -> None:
        self.engine, self.folder, self.rank = engine_of(stage, place), folder, rank
        self.made = 0
        self.saved: Any = self.engine.state_dict()
        self.save()

    def backward(self, bad: bool = False) -> None:
        self.made += 1
        generator = torch.Generator().manual_seed(100 * self.made + self.rank)
        x = torch.randn(4, WIDTHS[0], generator=generator)
        self.engine.backward(self.engine(x * (float("inf") if bad and self.rank == 0 else 1)))

    def step(self) -> None:
        self.backward()
        self.engine.step()

    def skip(self) -> None:
        self.backward(bad=True)
        self.engine.step()
        assert self.engine.optimizer.overflow

    def zero_grad(self) -> None:
        self.backward()
        self.engine.optimizer.zero_grad()

    def save(self) -> None:
        self.engine.save_checkpoint(self.folder, "x")

    def save_beside(self) -> None:
        self.engine.save_checkpoint(self.folder, "x", asynchronous=True)
        self.step()
        self.engine.wait_for_checkpoint()

    def load(self) -> None:
        self.engine.load_checkpoint(self.folder, "x")

    def remember(self) -> None:
        self.saved = self.engine.state_dict()

    def recall(self) -> None:
        self.engine.load_state_dict(self.saved)

    def rate(self) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] *= 0.7

    def write(self) -> None:
        weight = self.engine.module.layers[self.made % 7].weight
        value = zero_full.safe_get_full_optimizer_state(weight, "exp_avg")
        if value is not None:
            zero_full.safe_set_full_optimizer_state(weight, value * 0.5, "exp_avg")

    def swap(self) -> None:
        """Give the two moments of every piece each other's tensors, and back in the next call."""
        for state in self.engine.optimizer.state.values():
            if "exp_avg" in state:
                state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"].abs(), state["exp_avg"].abs()

    def interrupt(self) -> None:
        """End a step after some parts, and load."""
        steppers, parts = self.engine.optimizer.steppers, 0
        step_part = steppers._step_part

        def failing(*given: Any) -> None:
            nonlocal parts
            parts += 1
            if parts == 3:
                raise InterruptedStepError
            step_part(*given)

        steppers._step_part = failing
        try:
            self.step()
        except InterruptedStepError:
            self.engine.optimizer.zero_grad()
        finally:
            del steppers._step_part
        self.load()

    def move(self) -> None:
        self.engine.offload_states()
        self.engine.reload_states()


ACTS = ["step", "step", "step", "skip", "zero_grad", "save", "save_beside", "load"]
ACTS += ["remember", "recall", "rate", "write", "swap", "move"]


def played(comm: Any, world: int, stage: int, seed: int, folder: str) -> list[str]:
    """The ways of keeping state that differ from keeping it on the device."""
    chance = random.Random(seed)
    acts = chance.choices([*ACTS, *(["interrupt"] if world == 1 else [])], k=25)
    nvme = {"device": "nvme", "nvme_path": folder, "pin_memory": False}
    places = {"device": {"device": "none"}, **{n: {**nvme, "max_in_cpu": n} for n in (0, 300, 600, 2**25)}}
    found: dict[Any, list[Tensor]] = {}
    for name, place in places.items():
        player = Player(stage, place, Path(folder) / str(name), comm.rank)
        for act in acts:
            getattr(player, act)()
        state = player.engine.optimizer.state_dict()["tensors"]
        values = [*player.engine.module_state_dict().values(), *(state[k]["values"] for k in sorted(state))]
        found[name] = [value.clone() for value in values]
        if isinstance(tier := player.engine.optimizer.settings.tier, OpenNvmeTier) and name != 2**25:
            assert len(tier.blocks) > len(tier.places.begins)
        player.engine.destroy()
    want = found.pop("device")
    return [
        f"{name}: {acts}"
        for name, got in found.items()
        if len(got) != len(want) or not all(map(torch.equal, got, want))
    ]


@pytest.mark.rotates
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
@pytest.mark.parametrize(("world", "stage"), [(1, 2), (2, 1), (2, 2), (2, 3)])
def test_the_place_of_the_state_changes_no_bit_in_any_order_of_calls(
    world: int, stage: int, seed: int, tmp_path: Path
) -> None:
    assert not any(POOL.run(played, world, world, stage, seed, str(tmp_path), limit=100))


def test_an_engine_ends_in_the_middle_of_a_step_and_without_destroy(tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0}
    player = Player(2, nvme, tmp_path / "saved", 0)
    player.step()
    player.step()
    player.backward()
    player.engine.destroy()
    dropped = Player(2, nvme, tmp_path / "saved", 0)
    dropped.step()
    del dropped
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
