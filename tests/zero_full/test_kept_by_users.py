"""What users keep beyond its time: views of gathered parameters, gradients of a step ago, old graphs."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL, run_each
from tests.zero_full.runs import Net, assert_same, config, data
from tests.zero_full.stage3_runs import RELEASED, WIDTH, Tower, one_step, seeded, stage3


def saved_in_a_block(comm: Any) -> tuple[int, int]:
    """Bytes of a state dict that is saved outside of its block, and of plain torch's."""
    engine, *_ = zero_full.initialize(model=seeded(Tower), config=stage3())
    want = engine.module_state_dict()
    with zero_full.GatheredParameters(list(engine.module.parameters())):
        state = engine.module.state_dict()
        array = engine.module.blocks[0].up.weight.detach().numpy()
    one_step(engine, 0, comm.rank)
    assert_same(state, want)
    assert torch.equal(torch.from_numpy(array), want["blocks.0.up.weight"])
    sizes = []
    for each in (state, seeded(Tower).state_dict()):
        file = io.BytesIO()
        torch.save({name: tensor.clone() for name, tensor in each.items()}, file)
        sizes.append(file.tell())
    one_step(engine, 1, comm.rank)
    return sizes[0], sizes[1]


def test_a_state_dict_that_was_made_in_a_block_is_whole_after_it() -> None:
    for ours, plain in POOL.run(saved_in_a_block, 2):
        assert ours == plain


class Clamps(Tower):
    """Writes to a weight in its forward, as WGAN's critics do."""

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        with torch.no_grad():
            self.blocks[2].up.weight.clamp_(-0.1, 0.1)  # type: ignore[union-attr, operator]
        return super().forward(x)


class ClampsInside(nn.Linear):
    """The same in the module itself."""

    def forward(self, x: Tensor) -> Tensor:
        """Its output."""
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def writes_that_would_be_lost(comm: Any) -> list[str]:
    said = []

    def tell(act: Any) -> None:
        try:
            act()
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error))

    engine, *_ = zero_full.initialize(model=seeded(Clamps), config=stage3())
    tell(lambda: engine(data(0, 0, comm.rank)))
    engine.destroy()
    inside = nn.Sequential(ClampsInside(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    engine, *_ = zero_full.initialize(model=inside, config=stage3())
    tell(lambda: engine(data(0, 0, comm.rank)))
    engine.destroy()

    tower = seeded(Tower)
    engine, *_ = zero_full.initialize(model=tower, config=stage3())

    def beside() -> None:
        up = tower.blocks[1].up  # type: ignore[union-attr]
        with zero_full.GatheredParameters([up.weight], modifier_rank=0), torch.no_grad():
            up.weight.mul_(0.5)
            up.bias.mul_(0.5)

    tell(beside)
    one_step(engine, 0, comm.rank)
    return said


def test_writes_that_a_release_would_lose_are_errors_with_the_name() -> None:
    for in_the_model, in_the_module, beside in POOL.run(writes_that_would_be_lost, 2):
        assert in_the_model.startswith("blocks.2.up.weight is sharded")
        assert in_the_module.startswith("0.weight was written while it was gathered")
        assert beside.startswith("blocks.1.up.bias was written while it was gathered")


def stashed(comm: Any, stage: int) -> str:
    """Puts the gradients of a step ago back."""
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(stage))
    engine(data(0, 0, comm.rank)).backward()
    kept = [p.grad for p in engine.module.parameters()]
    optimizer.zero_grad()
    engine(data(1, 0, comm.rank)).backward()
    for param, gradient in zip(engine.module.parameters(), kept, strict=True):
        param.grad = gradient
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("stage", [0, 2])
def test_a_gradient_that_was_kept_does_not_pass_for_the_new_one(stage: int) -> None:
    assert all("has no values" in said for said in POOL.run(stashed, 2, stage))


def converted(comm: Any, stage: int) -> None:
    """Converts gradients between two micro-batches, which would add to them."""
    engine, *_ = zero_full.initialize(
        model=Net(), config=config(stage, gradient_accumulation_steps=2, zero_optimization={"stage": stage})
    )
    engine.backward(engine(data(0, 0, comm.rank)))
    engine.step()
    for param in engine.module.parameters():
        assert param.grad is not None
        param.grad = param.grad.float()
    with pytest.raises(RuntimeError, match=r"layers\.\d\.\w+\.grad has no values"):
        engine.backward(engine(data(0, 1, comm.rank)))


def test_a_gradient_without_values_that_was_converted_is_an_error_with_its_name() -> None:
    run_each(converted, 2, [(1,), (3,)])


def old_graph(comm: Any, stage: int) -> str:
    zero = RELEASED if stage == 3 else {}
    engine, optimizer, _, _ = zero_full.initialize(
        model=seeded(Tower), config=config(stage, zero_optimization=zero)
    )
    old = engine(data(0, 0, comm.rank))
    engine(data(1, 0, comm.rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    try:
        old.backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_graph_from_before_a_step_does_not_run_backward_with_new_values(stage: int) -> None:
    assert all("modified by an inplace operation" in said for said in POOL.run(old_graph, 2, stage))


# What differs between ranks in the middle of a run -----------------------------------------------


def noise(engine: zero_full.Engine, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for param in engine.module.parameters():
            param.add_(torch.randn(param.shape, generator=generator))


def other_memory(engine: zero_full.Engine, rank: int) -> None:
    for param in engine.module.parameters():
        param.data = param.data + rank


def load(engine: zero_full.Engine, rank: int) -> None:
    engine.load_module_state_dict({k: v + rank for k, v in engine.module_state_dict().items()})


def tensor_lr(engine: zero_full.Engine, rank: int) -> None:
    engine.optimizer.param_groups[0]["lr"] = torch.tensor(0.01 * (1 + rank))


def maximize(engine: zero_full.Engine, rank: int) -> None:
    engine.optimizer.param_groups[0]["maximize"] = rank == 1


def steps_alone(engine: zero_full.Engine, rank: int) -> None:
    if rank == 1:
        engine.optimizer.step()


def freeze(engine: zero_full.Engine, rank: int) -> None:
    engine.module.layers[2].weight.requires_grad_(rank == 1)


DIFFERENT = {
    "noise of its own": (noise, "layers.0.weight.* differ between ranks"),
    "p.data = x": (other_memory, "layers.0.weight.* differ between ranks"),
    "load_module_state_dict": (load, "layers.0.weight.* differ between ranks|other values of layers.0.bias"),
    "lr as a tensor": (tensor_lr, r"lr of group 0: 0\.0099.* \(rank 0\), 0\.0199.* \(rank 1\)"),
    "maximize": (maximize, r"maximize of group 0: False \(rank 0\), True \(rank 1\)"),
    "frozen": (freeze, r"frozen parameters: layers.2.weight \(rank 0\), nothing \(rank 1\)"),
    "a step alone": (
        steps_alone,
        r"a backward pass before the step: True \(rank 0\), False \(rank 1\)",
    ),
}


def different(comm: Any, name: str, stage: int) -> str:
    zero = RELEASED if stage == 3 else {}
    engine, *_ = zero_full.initialize(model=Net(), config=config(stage, zero_optimization=zero))
    try:
        DIFFERENT[name][0](engine, comm.rank)
        engine.backward(engine(data(0, 0, comm.rank)))
        engine.step()
    except (zero_full.DisagreementError, zero_full.DesyncError) as error:
        return str(error)
    return "nothing"


AT_STAGE_3 = ("load_module_state_dict", "frozen")


@pytest.mark.parametrize(
    ("name", "stage"),
    [*((name, stage) for name in DIFFERENT for stage in (0, 2)), *((name, 3) for name in AT_STAGE_3)],
)
def test_ranks_that_do_different_things_hear_of_it_at_the_step(name: str, stage: int) -> None:
    first, second = POOL.run(different, 2, name, stage)
    assert first == second
    with pytest.raises(AssertionError, match=DIFFERENT[name][1]):
        raise AssertionError(first)


class Skips(Tower):
    """Leaves out a block of its own choice."""

    skipped = -1

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for number, block in enumerate(self.blocks):
            x = x if number == self.skipped else block(x)
        return x.square().mean()


def skips(comm: Any, shared_memory: bool) -> str:
    model: Any = seeded(Skips)
    engine, *_ = zero_full.initialize(model=model, config=stage3() | {"shared_memory": shared_memory})
    model.skipped = 1 + comm.rank
    try:
        engine.backward(engine(data(0, 0, comm.rank)))
        engine.step()
    except (zero_full.DisagreementError, zero_full.DesyncError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("shared_memory", "text"), [(True, "all_gather of parameters blocks.1"), (False, "order of gathers")]
)
def test_ranks_that_run_different_modules_at_stage_3_hear_of_it(shared_memory: bool, text: str) -> None:
    assert all(text in said for said in POOL.run(skips, 2, shared_memory))


def goes_on(comm: Any) -> tuple[bool, int]:
    """A step in which ranks have run different modules, and one in which they have not."""
    model: Any = seeded(Skips)
    keys = stage3() | {"shared_memory": False}
    engine, *_ = zero_full.initialize(model=model, config=keys)
    raised = False
    for model.skipped in (1 + comm.rank, -1):
        engine.backward(engine(data(0, 0, comm.rank)))
        try:
            engine.step()
        except zero_full.DisagreementError:
            raised = True
            engine.zero_grad()
    return raised, engine.global_steps


def test_ranks_that_have_run_different_modules_can_go_on() -> None:
    assert POOL.run(goes_on, 2) == [(True, 1)] * 2


def hooked(comm: Any, stage: int) -> list[bool]:
    """Whether a hook of the user's has seen a gradient, in the first two passes; on the last parameter."""
    engine, *_ = zero_full.initialize(model=Net(), config=config(stage))
    seen: list[bool] = []
    last = engine.module.layers[4].bias
    last.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    for step in range(2):
        engine.module(data(step, 0, comm.rank)).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_hook_that_comes_after_initialize_sees_the_gradient_from_the_first_pass_on(stage: int) -> None:
    assert POOL.run(hooked, 2, stage) == [[True, True]] * 2
