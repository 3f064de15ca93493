"""Stage 3: models that are compiled, frozen in part, used in part."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.conformance.expected import padded
from tests.worlds import POOL, run_each
from tests.zero_full.runs import assert_same, config, data
from tests.zero_full.stage3_runs import (
    RELEASED,
    WIDTH,
    Block,
    Tower,
    assert_stage_3_is_stage_2,
    one_step,
    seeded,
    stage3,
)


def engine_of(make: Callable[[], nn.Module] = Tower, **zero: Any) -> zero_full.Engine:
    return zero_full.initialize(model=seeded(make), config=stage3(**zero))[0]


# torch.compile -----------------------------------------------------------------------------------


def compiled(
    comm: Any, stage: int, before: bool, in_place: bool, backend: str
) -> tuple[list[float], dict[str, Tensor]]:
    """Every block by itself. (losses, parameters)."""
    torch._dynamo.reset()
    model, keys = seeded(Tower), config(stage, zero_optimization=RELEASED if stage == 3 else {})
    engine = None if before else zero_full.initialize(model=model, config=keys)[0]
    for number, block in enumerate(model.blocks):
        if in_place:
            block.compile(backend=backend)
        else:
            model.blocks[number] = torch.compile(block, backend=backend)
    engine = engine or zero_full.initialize(model=model, config=keys)[0]
    assert stage == 2 or sum(values.released_at_rest for values in engine.optimizer.sharded.flats) == 8
    losses = [one_step(engine, step, comm.rank) for step in range(3)]
    parameters = {k.replace("_orig_mod.", ""): v for k, v in engine.module_state_dict().items()}
    engine.destroy()
    torch._dynamo.reset()
    return losses, parameters


@pytest.mark.rotates
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_blocks_that_are_compiled_before_or_after_initialize(before: bool, in_place: bool) -> None:
    want = POOL.run(compiled, 2, 2, before, in_place, "aot_eager")
    for (losses, parameters), stage_2 in zip(
        POOL.run(compiled, 2, 3, before, in_place, "aot_eager"), want, strict=True
    ):
        assert losses == stage_2[0]
        assert_same(parameters, stage_2[1])


@pytest.mark.slow
def test_blocks_that_inductor_compiles() -> None:
    want = POOL.run(compiled, 2, 2, True, False, "inductor", limit=240)
    for (losses, _), stage_2 in zip(
        POOL.run(compiled, 2, 3, True, False, "inductor", limit=240), want, strict=True
    ):
        assert losses == pytest.approx(stage_2[0], rel=1e-6)


def graphs_of(comm: Any, stage: int | None, how: str) -> list[int]:
    """Sizes of the graphs that are made of a model with more blocks than torch would compile one by one."""
    torch._dynamo.reset()
    sizes = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        sizes.append(sum(node.op == "call_function" for node in module.graph.nodes))
        return module

    called: Any = seeded(partial(Tower, depth=12))
    engine = None
    if stage is not None:
        keys = config(stage, zero_optimization=RELEASED if stage == 3 else {})
        engine = zero_full.initialize(model=called, config=keys)[0]
    if how == "whole":
        called = torch.compile(called, backend=backend, fullgraph=stage != 3)
    for block in called.blocks if how == "blocks" else ():
        block.compile(backend=backend, fullgraph=stage != 3)
    for step in range(2):
        loss = called(data(step, 0, comm.rank))
        loss.backward() if engine is None else engine.backward(loss)
        if engine is not None:
            engine.step()
    if engine is not None:
        engine.destroy()
    torch._dynamo.reset()
    return sizes


@pytest.mark.rotates
def test_hooks_break_no_graph_and_make_no_more_of_them() -> None:
    cases = [(stage, how) for how in ("blocks", "whole") for stage in (None, 0, 1, 2, 3)]
    found = dict(zip(cases, (by_rank[0] for by_rank in run_each(graphs_of, 2, cases)), strict=True))
    blocks, whole = found[None, "blocks"], found[None, "whole"]
    assert len(blocks) == 2 and len(whole) == 1  # the first block's input needs no gradient
    for stage in (0, 1, 2):
        assert (found[stage, "blocks"], found[stage, "whole"]) == (blocks, whole)
    # A whole model is cut where units are gathered: into its blocks, of which each is one graph.
    assert found[3, "blocks"] == found[3, "whole"] == blocks


# Frozen and unused -------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer, int8 weights beside it, and a small adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.coarse = nn.Parameter(
            torch.randint(-99, 99, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False
        )
        self.mask = nn.Parameter(torch.rand(WIDTH) < 0.5, requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        coarse = x @ (self.coarse.to(x.dtype) / 500)
        return torch.tanh(self.base(x) + coarse * self.mask) + self.up(self.down(x))


class LoRA(Tower):
    """The embedding is frozen, too, and the first layers have no adapters that are trained."""

    def __init__(self) -> None:
        super().__init__(8, Adapted)
        self.embed = nn.Embedding(32, WIDTH)
        self.embed.requires_grad_(False)
        self.blocks[:2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return super().forward(x + self.embed((x[:, 0].abs() * 10).long() % 32))


@pytest.mark.parametrize("keys", [{}, {"bf16": {"enabled": True}}], ids=str)
def test_a_frozen_base_with_adapters(keys: dict[str, Any]) -> None:
    assert_stage_3_is_stage_2(LoRA, units=16, **keys)


def held_of_frozen(comm: Any) -> tuple[int, int, int]:
    """(bytes of parameters that this rank keeps, the same by formula, of whole parameters)."""
    engine = engine_of(LoRA)
    one_step(engine, 0, comm.rank)
    kept = sum(t.untyped_storage().nbytes() for t in engine.optimizer.holdings()["parameters"])
    by_formula = sum(v.full.untyped_storage().nbytes() for v in engine.optimizer.sharded.flats)
    units = [engine.module.embed, *engine.module.blocks]
    formula = 0
    for unit in units:
        kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
        for p in unit.parameters():
            kinds.setdefault((p.dtype, p.requires_grad), []).append(p.numel())
        formula += sum(
            padded(numels, comm.world_size) * dtype.itemsize for (dtype, _), numels in kinds.items()
        )
    return kept, formula // comm.world_size, by_formula


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_keeps_its_slices_of_what_is_frozen_and_no_more(world_size: int) -> None:
    for kept, formula, whole in POOL.run(held_of_frozen, world_size):
        assert kept == formula and whole == 0


class Partly(Block):
    """Uses only some of its parameters: `spare` never, `down` not on the second rank."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor, whole: bool = True) -> Tensor:
        """The same shape."""
        return super().forward(x) if whole else x + self.up(x)[:, :WIDTH]


class PartlyUsed(Tower):
    """`whole`: whether all blocks use all; `skipped`: blocks that are not called."""

    def __init__(self) -> None:
        super().__init__(8, Partly)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, whole: bool = True, skipped: tuple[int, ...] = ()) -> Tensor:
        """The loss."""
        for number, block in enumerate(self.blocks):
            x = x if number in skipped else block(x, whole)
        return x.square().mean()


def unlike_others(engine: zero_full.Engine, step: int, rank: int) -> float:
    """One rank uses less than the others, inside of units that all use."""
    loss = engine(data(step, 0, rank), whole=rank == 0)
    engine.backward(loss)
    engine.step()
    return float(loss)


def skips_alike(engine: zero_full.Engine, step: int, rank: int) -> float:
    """All ranks skip the same units, other ones in every step."""
    loss = engine(data(step, 0, rank), skipped=(step, 3, 7 - step)[: step + 1])
    engine.backward(loss)
    engine.step()
    return float(loss)


@pytest.mark.parametrize("play", [unlike_others, skips_alike], ids=lambda play: play.__name__)
def test_parts_and_whole_units_that_are_not_used(play: Any) -> None:
    assert_stage_3_is_stage_2(PartlyUsed, play, steps=4)


def parts_ways(comm: Any, overlap: bool, only: str) -> tuple[str, float]:
    """One rank skips a unit. (what it raises, after how many seconds)."""
    keys = config(
        3,
        zero_optimization={**RELEASED, "overlap_comm": overlap},
        debug={"check_collectives": True, "timeout_s": 2},
    )
    engine, _, _, _ = zero_full.initialize(model=seeded(PartlyUsed), config=keys)
    if only == "skips":
        one_step(engine, 0, comm.rank)
    start = time.monotonic()
    try:
        if only == "skips":
            engine.backward(engine(data(1, 0, comm.rank), skipped=(3,) if comm.rank else ()))
        for step in range(4):
            one_step(engine, step, comm.rank)
    except zero_full.DesyncError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


def test_a_unit_that_one_rank_skips_is_named_on_all_ranks() -> None:
    for said, seconds in POOL.run(parts_ways, 2, False, "skips"):
        assert "all_gather of parameters blocks.3" in said and "all_gather of parameters blocks.4" in said
        assert seconds < 5


def test_the_check_of_calls_raises_no_false_alarm_beside_overlap() -> None:
    assert POOL.run(parts_ways, 2, True, "nothing") == [("", 0.0)] * 2
