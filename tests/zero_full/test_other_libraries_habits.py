"""What scripts and tests of other libraries do, and works here too."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import zero_full
from tests.worlds import run_each
from tests.zero_full.runs import Net, config, data
from zero_full.optim.muon import orthogonalized, orthogonalized_by_gram

RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
}
STAGES = (0, 1, 2, 3)


def bare(stage: int, micro_batches: int = 1) -> dict[str, Any]:
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    made = {**config(stage, zero_optimization=zero), "gradient_clipping": 0.0}
    made["gradient_accumulation_steps"] = micro_batches
    return {k: v for k, v in made.items() if k not in ("optimizer", "train_batch_size")}


def plain(rule: str, losses: Callable[[Net, int], Tensor], steps: int) -> tuple[Net, torch.optim.Optimizer]:
    """One process with everybody's data; `losses` is the sum of a step's."""
    model = Net()
    optimizer = RULES[rule](model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        losses(model, step).backward()
        optimizer.step()
    return model, optimizer


def near(got: dict[str, Tensor], model: Net) -> bool:
    return all(torch.allclose(got[name], p, atol=1e-6) for name, p in model.named_parameters())


# A closure ---------------------------------------------------------------------------------------


def with_closure(comm: Any, stage: int) -> bool:
    model, returned = Net(), []
    engine, optimizer, *_ = zero_full.initialize(
        model=model, optimizer=RULES["AdamW"](model.parameters()), config=bare(stage)
    )
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = engine(data(step, 0, comm.rank))
            loss.backward()
            return loss

        with torch.no_grad():
            returned.append(float(optimizer.step(closure)))
    want, _ = plain("AdamW", lambda net, step: sum_of(net, step, comm.world_size, 1), 3)
    got = engine.module_state_dict()
    engine.destroy()
    return near(got, want) and len(set(returned)) == 3 and engine.global_steps == 3


def sum_of(net: Net, step: int, ranks: int, passes: int) -> Tensor:
    losses = [net(data(step, i, rank)) for i, rank in product(range(passes), range(ranks))]
    return torch.stack(losses).sum() / ranks


def test_a_closure_runs_forward_and_backward_once() -> None:
    assert run_each(with_closure, 2, [(stage,) for stage in STAGES]) == [[True, True]] * 4


def lbfgs_outside(comm: Any) -> bool:
    model = Net()
    for stage in (0, 1):
        raw = torch.optim.LBFGS(model.parameters())
        with pytest.raises(TypeError, match=r"LBFGS cannot step here: its step\(\) needs a closure"):
            zero_full.initialize(model=model, optimizer=raw, config=bare(stage))
    engine, *_ = zero_full.initialize(model=model, config=bare(0))
    mine = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        mine.zero_grad()
        loss = engine(data(0, 0, comm.rank))
        engine.backward(loss)
        total: Tensor = loss.detach()
        dist.all_reduce(total)
        return total / comm.world_size

    mine.step(closure)
    want = Net()
    theirs = torch.optim.LBFGS(want.parameters(), lr=0.1, max_iter=3)

    def of_all() -> Tensor:
        theirs.zero_grad()
        loss = sum_of(want, 0, comm.world_size, 1)
        loss.backward()
        return loss

    theirs.step(of_all)
    got = engine.module_state_dict()
    engine.destroy()
    return near(got, want)


def test_lbfgs_steps_outside_of_the_engine() -> None:
    assert run_each(lbfgs_outside, 2, [()]) == [[True, True]]


# Loops that end together -------------------------------------------------------------------------


def uneven(comm: Any, stage: int) -> bool:
    """The first rank has one batch, and the others one more each."""
    model = Net()
    engine, optimizer, *_ = zero_full.initialize(
        model=model, optimizer=RULES["SGD"](model.parameters()), config=bare(stage)
    )
    for joined in (engine, optimizer):
        with pytest.raises(RuntimeError, match=r"torch's Join does not .* zero_full\.synced"):
            Join([joined])
    for batch, counts in zero_full.synced(data(step, 0, comm.rank) for step in range(1 + comm.rank)):
        engine.backward(engine(batch) * counts)
        engine.step()

    def losses(net: Net, step: int) -> Tensor:
        ranks = range(step, comm.world_size)
        return torch.stack([net(data(step, 0, rank)) for rank in ranks]).sum() / comm.world_size

    want, _ = plain("SGD", losses, comm.world_size)
    got, steps = engine.module_state_dict(), engine.global_steps
    engine.destroy()
    return near(got, want) and steps == comm.world_size


def test_ranks_with_different_numbers_of_batches_end_together() -> None:
    assert run_each(uneven, 3, [(stage,) for stage in STAGES]) == [[True] * 3] * 4


# Several backward passes, one reduction ----------------------------------------------------------


def coalesced(comm: Any, stage: int, micro_batches: int) -> bool:
    model = Net()
    engine, *_ = zero_full.initialize(
        model=model, optimizer=RULES["AdamW"](model.parameters()), config=bare(stage, micro_batches)
    )
    for step in range(2):
        for micro in range(micro_batches):
            outside = reduced(engine)
            with engine.coalesce_grad_reduction():
                with pytest.raises(RuntimeError, match="step inside no_sync or coalesce_grad_reduction"):
                    engine.step()
                for part in range(3):
                    engine.backward(engine(data(step, 3 * micro + part, comm.rank)))
                assert reduced(engine) == outside
            assert reduced(engine) > outside or (stage < 2 and micro < micro_batches - 1)
            engine.step()
    want, _ = plain(
        "AdamW", lambda net, step: sum_of(net, step, comm.world_size, 3 * micro_batches) / micro_batches, 2
    )
    got = engine.module_state_dict()
    engine.destroy()
    return near(got, want)


def reduced(engine: Any) -> int:
    """The bytes of gradients that this rank has sent."""
    sent = engine.optimizer.communicators.traffic.sent
    return int(sum(n for kind, n in sent.items() if kind.startswith(("reduce_scatter", "all_reduce"))))


def test_passes_in_a_coalesced_block_are_averaged_together() -> None:
    cases = list(product(STAGES, (1, 2)))
    assert run_each(coalesced, 2, cases) == [[True, True]] * len(cases)


# The optimizer's state in torch's form -----------------------------------------------------------


def consolidated(comm: Any, stage: int, rule: str) -> str:
    """What is wrong with it."""
    model = Net()
    model.layers[2].bias.requires_grad_(False)
    engine, optimizer, *_ = zero_full.initialize(
        model=model, optimizer=RULES[rule](model.parameters()), config=bare(stage)
    )
    for step in range(3):
        engine.backward(engine(data(step, 0, comm.rank)))
        engine.step()
    got = zero_full.consolidated_state_dict(optimizer)
    other = Net()
    other.layers[2].bias.requires_grad_(False)
    base = RULES[rule](other.parameters())
    for step in range(3):
        base.zero_grad()
        sum_of(other, step, comm.world_size, 1).backward()
        base.step()
    want = base.state_dict()
    engine.destroy()
    if got["param_groups"] != want["param_groups"]:
        return f"groups: {got['param_groups']}"
    if got["state"].keys() != want["state"].keys():
        return f"parameters: {[*got['state']]}"
    for number, entries in want["state"].items():
        if entries.keys() != got["state"][number].keys():
            return f"entries of {number}: {[*got['state'][number]]}"
        for key, value in entries.items():
            mine = got["state"][number][key]
            if value is not None and not torch.allclose(mine, value, atol=1e-6):
                return f"{key} of {number}"
    base.load_state_dict(got)
    return ""


def test_the_state_in_torchs_form_is_what_torch_has() -> None:
    cases = list(product(STAGES, RULES))
    assert run_each(consolidated, 3, cases) == [[""] * 3] * len(cases)


def one_bit(comm: Any) -> str:
    rule = {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 1}}
    engine, optimizer, *_ = zero_full.initialize(model=Net(), config=config(0, optimizer=rule))
    for step in range(3):
        engine.backward(engine(data(step, 0, comm.rank)))
        engine.step()
    with pytest.raises(RuntimeError) as caught:
        zero_full.consolidated_state_dict(optimizer)
    engine.destroy()
    return str(caught.value)


def test_a_rule_with_more_than_state_of_elements_has_no_such_form() -> None:
    (told,) = run_each(one_bit, 2, [()])
    assert all(
        "OneBitAdam has state that is not elementwise" in each and "save_checkpoint" in each for each in told
    )


# State that is offloaded ----------------------------------------------------------------------------


def read_while_away(comm: Any, stage: int) -> bool:
    engine, optimizer, *_ = zero_full.initialize(
        model=Net(), config=config(stage, bf16={"enabled": True}, optimizer={"type": "Adam", "params": {}})
    )
    x = data(0, 0, comm.rank).bfloat16()
    engine.backward(engine(x).float())
    engine.step()
    params = [*engine.module.parameters()]

    def read() -> list[Tensor]:
        read = [*zero_full.consolidated_state_dict(optimizer)["state"].values()]
        states = [entry for entries in read for entry in entries.values()]
        masters: Any = [zero_full.safe_get_full_fp32_param(p) for p in params]
        second: Any = [zero_full.safe_get_full_optimizer_state(p, "exp_avg_sq") for p in params]
        return [*states, *masters, *second]

    before = read()
    engine.offload_states()
    memory = [copy.numel() for _, copy in optimizer.offloaded.copies.values()]
    away = read()
    still_away = all(storage.nbytes() == 0 for storage, _ in optimizer.offloaded.copies.values())
    with pytest.raises(RuntimeError, match="states are offloaded"):
        zero_full.safe_set_full_fp32_param(params[0], torch.zeros_like(params[0]))
    used: list[Callable[[], Any]] = [
        partial(engine.module, x),
        params[0].sum,
        zero_full.GatheredParameters(params).__enter__,
        zero_full.GatheredParameters(params, modifier_rank=0).__enter__,
    ]
    for use in used:
        with pytest.raises(RuntimeError, match="states are offloaded"):
            use()
    engine.reload_states()
    back = read()
    engine.offload_states(["optim_states"])
    engine.module(x)
    with zero_full.GatheredParameters(params):
        params[0].sum()
    engine.reload_states()
    engine.backward(engine(x).float())
    engine.step()
    engine.destroy()
    same = all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(before, away, back, strict=True))
    return same and still_away and sum(memory) > 0 and len(before) > 3 * len(params)


def test_state_can_be_read_while_it_is_offloaded_and_parameters_cannot() -> None:
    assert run_each(read_while_away, 2, [(stage,) for stage in STAGES]) == [[True, True]] * 4


# Muon's other order of products, and OnDevice ----------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 64), (32, 200), (200, 32), (1, 40), (3, 5)])
def test_the_products_of_the_short_side_give_the_same_matrix(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    given = (5, (3.4445, -4.7750, 2.0315), 1e-7)
    exact = orthogonalized_in_fp64(matrix, *given)
    offs = [
        float((by(matrix, *given).double() - exact).norm() / exact.norm())
        for by in (orthogonalized, orthogonalized_by_gram)
    ]
    assert max(offs) < 0.03, offs


def orthogonalized_in_fp64(matrix: Tensor, steps: int, coefficients: Any, eps: float) -> Tensor:
    first, third, fifth = coefficients
    x = matrix.double() if matrix.shape[0] <= matrix.shape[1] else matrix.double().T
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = first * x + (third * gram + fifth * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def by_gram(comm: Any, stage: int) -> dict[str, Tensor]:
    params = {"lr": 0.01, "ns_method": "gram"}
    engine, *_ = zero_full.initialize(
        model=Net(), config=config(stage, optimizer={"type": "Muon", "params": params})
    )
    for step in range(3):
        engine.backward(engine(data(step, 0, comm.rank)))
        engine.step()
    whole: dict[str, Tensor] = engine.module_state_dict()
    engine.destroy()
    return whole


def test_muon_by_gram_is_the_same_at_every_stage() -> None:
    first, *others = run_each(by_gram, 2, [(stage,) for stage in STAGES])
    for ranks in others:
        assert all(torch.allclose(ranks[0][name], first[0][name], atol=1e-3) for name in first[0])


def test_on_device_makes_a_model_there() -> None:
    with zero_full.OnDevice(dtype=torch.bfloat16, device="meta"):
        made = Net()
    assert {(p.device.type, p.dtype) for p in made.parameters()} == {("meta", torch.bfloat16)}
    assert torch.get_default_dtype() is torch.float32
    with zero_full.OnDevice(dtype=torch.bfloat16, enabled=False):
        assert next(Net().parameters()).dtype is torch.float32
    with zero_full.OnDevice(dtype=torch.bfloat16, device="cpu"):
        there = nn.Linear(16, 3)
    for stage in STAGES:
        with pytest.raises(ValueError, match=r"weight is on the meta device, .*zero_full\.Init"):
            zero_full.initialize(model=made, config=config(stage))
        engine, *_ = zero_full.initialize(model=there, config=config(stage))
        engine.backward(engine(data(0, 0, 0, torch.bfloat16)).float().square().mean())
        engine.step()
        assert there.weight.dtype is torch.bfloat16 and engine.global_steps == 1
        engine.destroy(gather=True)
