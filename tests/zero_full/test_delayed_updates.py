"""Delayed updates: bit for bit the rule that the guide tells, beside the next passes, and nothing lost."""

import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import zero_full
from tests.slow_copies import slow_copies
from tests.worlds import POOL, run_each
from tests.zero_full.runs import Net, config, data
from zero_full.config import ConfigError, resolve
from zero_full.offload import BlockTier, HostTier
from zero_full.optim.fused_adam import FusedAdam
from zero_full.optim.step import Peers, Piece
from zero_full.precision.dtypes import Dtypes

STEPS, AFTER, LR, CLIP = 9, 3, 0.01, 0.05
SKIPPED = (2, 5, 6)  # steps whose gradients overflow, where anybody looks
KEYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "clipped": {"gradient_clipping": CLIP},
    "accumulated": {"gradient_accumulation_steps": 2, "gradient_clipping": CLIP},
    "bf16": {"bf16": {"enabled": True}, "gradient_clipping": CLIP},
}


def waiting(stage: int, after: int | None = AFTER, **keys: Any) -> dict[str, Any]:
    """A config; every parameter is cut at stage 3."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 150, "sub_group_size": 60}
    zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 100} if stage == 3 else {}
    zero["offload_optimizer"] = {"device": "cpu", "delay_update_after": after}
    return config(stage, zero_optimization=zero, **keys)


def engine_of(stage: int, after: int | None = AFTER, **keys: Any) -> Any:
    torch.manual_seed(0)
    return zero_full.initialize(model=Net(), config=waiting(stage, after, **keys))[0]


def one_step(engine: Any, step: int, rank: int, skips: bool = False) -> None:
    """Of training, at a learning rate of its own."""
    for group in engine.optimizer.param_groups:
        group["lr"] = LR * 0.9**step
    dtype, micros = next(engine.parameters()).dtype, engine.gradient_accumulation_steps()
    for micro in range(micros):
        inf = float("inf") if skips and step in SKIPPED and micro == 0 and rank == 0 else 1.0
        engine.backward(engine(data(step, micro, rank, dtype)) * inf)
        engine.step()
    for group in engine.optimizer.param_groups:
        group["lr"] = 100.0  # that is nobody's


def of_engine(engine: Any) -> list[Tensor]:
    """Parameters, masters and state, whole."""
    params = list(engine.parameters())
    masters = [zero_full.safe_get_full_fp32_param(p) for p in params]
    moments = [zero_full.safe_get_full_optimizer_state(p, "exp_avg_sq") for p in params]
    found = [*engine.module_state_dict().values(), *masters, *moments]
    return [tensor for tensor in found if tensor is not None]


def _sum(lists: list[list[Tensor]]) -> list[Tensor]:
    """Tensor by tensor, in this order."""
    total = [tensor.clone() for tensor in lists[0]]
    for more in lists[1:]:
        total = [a + b for a, b in zip(total, more, strict=True)]
    return total


# The rule ----------------------------------------------------------------------------------------


@dataclass
class Referee:
    """The rule in plain PyTorch, in one process, with everybody's data."""

    stage: int
    ranks: int
    micros: int
    clip: float
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.model = Net()
        self.masters = [p.detach().clone() for p in self.model.parameters()]
        self.params = list(self.model.to(self.dtype).parameters())
        self.base = torch.optim.AdamW(self.masters, lr=LR, weight_decay=0.1)
        self.stepper = FusedAdam(self.base, self.base.step, Dtypes())
        self.states: list[dict[str, Any]] = [{} for _ in self.params]
        self.is_behind, self.taken = False, 0

    def gradients(self, step: int, skips: bool) -> list[Tensor]:
        """The average of everybody's, in fp32; added up as it is at this stage."""
        pairs = [(micro, rank) for micro in range(self.micros) for rank in range(self.ranks)]
        found = {(micro, rank): self._gradients(step, micro, rank, skips) for micro, rank in pairs}
        micros, ranks = range(self.micros), range(self.ranks)
        if self.stage == 1:
            own = [_sum([found[micro, rank] for micro in micros]) for rank in ranks]
            return [total / self.ranks for total in _sum(own)]
        averages = [
            [t / self.ranks for t in _sum([found[micro, rank] for rank in ranks])] for micro in micros
        ]
        return _sum(averages)

    def _gradients(self, step: int, micro: int, rank: int, skips: bool) -> list[Tensor]:
        inf = float("inf") if skips and step in SKIPPED and micro == 0 and rank == 0 else 1.0
        loss = self.model(data(step, micro, rank, self.dtype)) * inf / self.micros
        return [gradient.float() for gradient in torch.autograd.grad(loss, self.params)]

    def step(self, step: int, after: int, skips: bool) -> None:
        """Gradients of the parameters as they are; then the last update counts; then the next is made."""
        gradients = self.gradients(step, skips)
        if self.is_behind:
            self.publish()
        norm = float(torch.cat([g.reshape(-1) for g in gradients]).double().norm())
        if norm != norm or norm == float("inf"):
            return
        factor = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
        self.base.param_groups[0]["lr"] = LR * 0.9**step
        pieces = [
            Piece("", m.shape, (0, m.numel()), 0, m, g, state=state)
            for m, g, state in zip(self.masters, gradients, self.states, strict=True)
        ]
        self.stepper.step(pieces, factor, Peers())
        self.taken += 1
        self.is_behind = self.taken > after
        if not self.is_behind:
            self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Parameters follow their masters."""
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)
        self.is_behind = False


def run(
    comm: Any, stage: int, name: str, after: int, copies: bool
) -> tuple[list[Tensor], list[Tensor], bool]:
    """Whole parameters, masters and state at the end; parameters before they were asked for."""
    keys, skips = KEYS[name], name != "fp32"
    with slow_copies(1e7) if copies else nullcontext():
        engine = engine_of(stage, after, **keys)
        for step in range(STEPS):
            one_step(engine, step, comm.rank, skips)
            engine.optimizer.zero_grad(set_to_none=bool(step % 2))  # what the update needs it has
        with zero_full.GatheredParameters(list(engine.parameters())):
            behind = [p.detach().float().clone() for p in engine.parameters()]
        was_behind = engine.optimizer.delayed.current is not None
        found = of_engine(engine)
        engine.destroy()
    return found, behind, was_behind


def refereed(world: int, stage: int, name: str, after: int) -> tuple[list[Tensor], list[Tensor]]:
    """The same by the referee."""
    keys, skips = KEYS[name], name != "fp32"
    micros, clip = keys.get("gradient_accumulation_steps", 1), keys.get("gradient_clipping", 0.0)
    referee = Referee(stage, world, micros, clip, torch.bfloat16 if "bf16" in keys else torch.float32)
    for step in range(STEPS):
        referee.step(step, after, skips)
    behind = [p.detach().float().clone() for p in referee.params]
    referee.publish()
    moments = [state["exp_avg_sq"] for state in referee.states]
    return [*(p.detach() for p in referee.params), *referee.masters, *moments], behind


@pytest.mark.parametrize(("world", "stage"), [(1, 1), (1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2), (3, 3)])
def test_the_rule(world: int, stage: int) -> None:
    cases = [
        (stage, name, after, copies) for name in KEYS for after in (0, AFTER) for copies in (False, True)
    ]
    for (_, name, after, copies), by_rank in zip(cases, run_each(run, world, cases), strict=True):
        expected, expected_behind = refereed(world, stage, name, after)
        assert any(not torch.equal(a, b.float()) for a, b in zip(expected_behind, expected, strict=False))
        for found, behind, was_behind in by_rank:
            assert was_behind
            for ours, theirs in zip([*behind, *found], [*expected_behind, *expected], strict=True):
                assert torch.equal(ours, theirs), (name, after, copies)


def test_without_a_number_of_updates_every_step_is_ordinary() -> None:
    plain, delayed = POOL.run(compared, 1, None)[0], POOL.run(compared, 1, STEPS)[0]
    assert all(map(torch.equal, plain, delayed)), "none of so many updates is late"
    late = POOL.run(compared, 1, STEPS - 1)[0]
    assert all(map(torch.equal, plain, late)), "only the last one is, and nothing was computed with that"
    later = POOL.run(compared, 1, STEPS - 2)[0]
    assert not all(map(torch.equal, plain, later))


def compared(comm: Any, after: int | None) -> list[Tensor]:
    engine = engine_of(2, after)
    for step in range(STEPS):
        one_step(engine, step, comm.rank)
    found = of_engine(engine)
    engine.destroy()
    return found


# Beside ------------------------------------------------------------------------------------------


def times(comm: Any, stage: int, copies: bool) -> list[str]:
    """What happened, in order, with steps and passes that take their time."""
    told: list[str] = []
    plain = FusedAdam.step

    def slow(stepper: FusedAdam, *args: Any) -> None:
        told.append("step")
        time.sleep(0.15)
        plain(stepper, *args)
        told.append("stepped")

    with mock.patch.object(FusedAdam, "step", slow), slow_copies(1e9) if copies else nullcontext():
        engine = engine_of(stage, 1)
        for step in range(3):
            loss = engine(data(step, 0, comm.rank))
            told.append("forward")
            engine.backward(loss)
            told.append("backward")
            engine.step()
            told.append("returned")
        engine.optimizer.finish_update()
        engine.destroy()
    return told


@pytest.mark.parametrize(("world", "stage", "copies"), [(1, 2, False), (2, 3, False), (2, 2, True)])
def test_the_host_steps_beside_the_next_passes(world: int, stage: int, copies: bool) -> None:
    for told in POOL.run(times, world, stage, copies):
        first = told.index("returned")
        assert "step" in told[:first] and told[first - 1] == "stepped"
        assert [what for what in told[first:] if what in ("forward", "backward", "stepped")] == [
            *("forward", "backward", "forward", "backward", "stepped", "stepped")
        ]


def grown(comm: Any) -> list[tuple[Any, ...]]:
    """Memory and threads after few and after many steps."""
    told = []
    with slow_copies():
        engine = engine_of(2, 2)
        for step in range(200):
            one_step(engine, step % 5, comm.rank)
            if step in (4, 199):
                held = engine.optimizer.holdings()
                aside = [tensor.data_ptr() for tensor in engine.optimizer.delayed.aside.values()]
                sizes = {kind: sum(t.nbytes for t in tensors) for kind, tensors in held.items()}
                told.append((sizes, aside, threading.active_count()))
        engine.destroy()
    return [*told, (threading.active_count(),)]


def test_nothing_grows() -> None:
    few, many, _ = POOL.run(grown, 1)[0]
    assert few == many and few[1]


# Who looks in between ----------------------------------------------------------------------------


def resumed(
    comm: Any, stage: int, folder: str, copies: bool, by_hand: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """The run that has saved in the middle, and one that goes on from there."""

    def go_on(engine: Any) -> list[Tensor]:
        for step in range(6, 9):
            one_step(engine, step, comm.rank)
        found = of_engine(engine)
        engine.destroy()
        return found

    with slow_copies(1e7) if copies else nullcontext():
        first = engine_of(stage, 5, **KEYS["bf16"])
        for step in range(6):
            one_step(first, step, comm.rank)
        assert first.optimizer.delayed.current is not None
        state = first.state_dict() if by_hand else None
        if state is None:
            first.save_checkpoint(folder)
        assert first.optimizer.delayed.current is None
        saved = go_on(first)
        second = engine_of(stage, 5, **KEYS["bf16"])
        one_step(second, 0, comm.rank)
        if state is None:
            second.load_checkpoint(folder)
        else:
            second.load_state_dict(state)
        return saved, go_on(second)


@pytest.mark.parametrize(
    ("stage", "copies", "by_hand"), [(1, False, False), (3, False, True), (3, True, False)]
)
def test_who_saves_and_who_goes_on_from_there_are_the_same(
    stage: int, copies: bool, by_hand: bool, tmp_path: Path
) -> None:
    for saved, loaded in POOL.run(resumed, 2, stage, str(tmp_path), copies, by_hand):
        assert all(map(torch.equal, saved, loaded))


def ended(comm: Any, stage: int) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters after destroy, and after an update that was finished by hand."""
    found = []
    for by_hand in (True, False):
        engine = engine_of(stage, 1)
        for step in range(4):
            one_step(engine, step, comm.rank)
        if by_hand:
            engine.optimizer.finish_update()
            engine.optimizer.finish_update()  # there is none any more
        model = engine.module
        engine.destroy(gather=stage == 3)
        found.append([p.detach().clone() for p in model.parameters()])
    return found[0], found[1]


@pytest.mark.parametrize("stage", [1, 3])
def test_the_last_update_counts(stage: int) -> None:
    for by_hand, at_the_end in POOL.run(ended, 2, stage):
        assert all(map(torch.equal, by_hand, at_the_end))


def alone(comm: Any) -> list[str]:
    """What one rank is told that asks for what is being written; then what it may ask for."""
    engine = engine_of(2, 0)
    weight = engine.module.layers[0].weight
    one_step(engine, 0, comm.rank)
    calls = [
        lambda: zero_full.safe_get_local_fp32_param(weight),
        lambda: zero_full.safe_get_local_optimizer_state(weight, "exp_avg"),
        lambda: zero_full.safe_set_local_fp32_param(weight, torch.zeros(1)),
        lambda: zero_full.safe_set_local_optimizer_state(weight, torch.zeros(1), "exp_avg"),
        engine.offload_states,
        engine.module.state_dict,
    ]
    told = []
    for call in calls if comm.rank == 0 else ():
        with pytest.raises(RuntimeError) as caught:
            call()
        told.append(str(caught.value))
    engine.backward(engine(data(1, 0, comm.rank)))
    assert zero_full.safe_get_local_grad(weight) is not None
    assert zero_full.safe_get_full_grad(weight) is not None
    assert engine.optimizer.delayed.current is not None, "for gradients nobody waits"
    engine.step()
    assert engine.optimizer.state[weight]["step"] == 2, "who reads state waits"
    engine.optimizer.finish_update()
    assert zero_full.safe_get_local_fp32_param(weight) is not None
    assert engine.module.state_dict()
    engine.destroy()
    return told


def test_what_one_rank_asks_for_alone_is_refused() -> None:
    told, others = POOL.run(alone, 2)
    assert len(told) == 6 and not others
    assert all("call finish_update() of the engine's optimizer on every rank first" in each for each in told)


def written(comm: Any, stage: int, copies: bool, how: str) -> tuple[str, Tensor]:
    """What a rank hears when parameters are written while an update is under way; and what they are."""
    with slow_copies() if copies else nullcontext():
        engine = engine_of(stage, 0)
        for step in range(2):
            one_step(engine, step, comm.rank)
        weight, said = engine.module.layers[0].weight, ""
        if how == "gathered":
            with zero_full.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
                weight.fill_(0.25)
        elif how == "counted":
            with torch.no_grad():
                weight.fill_(0.25)
        else:
            weight.data.fill_(0.25)
        try:
            one_step(engine, 2, comm.rank)
            engine.optimizer.finish_update()
        except RuntimeError as error:
            said = str(error)
            with pytest.raises(RuntimeError, match="This run cannot go on"):
                engine.module_state_dict()
        with zero_full.GatheredParameters([weight]):
            found = weight.detach().clone()
        engine.destroy()
        return said, found


@pytest.mark.parametrize("copies", [False, True])
def test_a_parameter_that_is_written_meanwhile_is_an_error_and_inside_the_context_it_counts(
    copies: bool,
) -> None:
    cases = [(stage, copies, how) for stage in (1, 2) for how in ("counted", "not counted")]
    for by_rank in run_each(written, 2, cases):
        for said, _ in by_rank:
            assert "parameters were written while an update of them was under way" in said
    for by_rank in run_each(written, 2, [(stage, copies, "gathered") for stage in (1, 2, 3)]):
        for said, weight in by_rank:
            assert not said and not torch.equal(weight, torch.full_like(weight, 0.25))
            assert (weight - 0.25).abs().max() < 0.02, "what was written has moved by a step or two"


def failing(comm: Any) -> list[str]:
    """What a rank hears of a step that has failed on the last one."""
    engine, told = engine_of(2, 0), []
    one_step(engine, 0, comm.rank)
    with mock.patch.object(FusedAdam, "step", side_effect=OSError("no such luck")):
        engine.backward(engine(data(1, 0, comm.rank)))
        if comm.rank == comm.world_size - 1:
            engine.step()
            engine.optimizer.delayed.wait()
    if comm.rank < comm.world_size - 1:
        engine.step()
    for call in (lambda: one_step(engine, 2, comm.rank), engine.state_dict, engine.optimizer.finish_update):
        with pytest.raises(RuntimeError) as caught:
            call()
        told.append(str(caught.value))
    engine.destroy()
    return told


def test_a_failure_is_told_to_all_ranks() -> None:
    for told in POOL.run(failing, 2):
        assert all("failed on rank 1: OSError('no such luck')" in each for each in told)


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"device": "none"}, "nothing to delay"),
        ({"device": "nvme", "nvme_path": "/x"}, "in memory for a step only"),
        ({"device": "cpu", "super_offload": True}, "leave one of them out"),
        ({"device": "cpu", "ratio": 0.5}, "use ratio 1"),
        ({"device": "cpu", "delay_update_after": -1}, "expected a whole number of at least 0"),
    ],
    ids=str,
)
def test_what_a_config_is_told(section: dict[str, Any], message: str) -> None:
    section = {"delay_update_after": 3, **section}
    with pytest.raises(ConfigError, match=f"delay_update_after: .*{message}"):
        resolve(config(2, zero_optimization={"stage": 2, "offload_optimizer": section}), 1)
    with pytest.raises(ConfigError, match="stage 0 keeps the optimizer's state"):
        resolve(
            config(
                0,
                zero_optimization={
                    "stage": 0,
                    "offload_optimizer": {"device": "cpu", "delay_update_after": 3},
                },
            ),
            1,
        )


def test_what_a_tier_is_told() -> None:
    for more, message in [
        ({"step_early": True}, "step_early"),
        ({"ratio": 0.5}, "ratio"),
        ({"delay_after": -1}, "a number of updates"),
    ]:
        with pytest.raises(ValueError, match=message):
            HostTier(**{"delay_after": 1, **more})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot delay updates"):
        BlockTier(path="/x", delay_after=1)


def other_optimizer(comm: Any, section: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match="delay_update_after") as caught:
        zero_full.initialize(model=Net(), config=waiting(2, 3, optimizer=section))
    return str(caught.value)


@pytest.mark.parametrize("kind", ["SGD", "Lamb", "Lion"])
def test_only_adam_is_stepped_so(kind: str) -> None:
    assert f"not this {kind}" in POOL.run(other_optimizer, 1, {"type": kind, "params": {"lr": 0.1}})[0]
