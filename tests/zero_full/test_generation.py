"""`engine.generation()`: gathered once, the plain model's tokens, and training goes on as without it."""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import zero_full
from tests.worlds import POOL, run_each
from tests.zero_full.generation_runs import PROMPT, Language, engine_of, same_bits, tokens, train_step
from tests.zero_full.runs import config
from tests.zero_full.stage3_runs import RELEASED
from zero_full.generation import budget, generating
from zero_full.offload.limits import Limit
from zero_full.plan import plan

STEPS = 2
OFFLOADED = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
ON_DISK = {"offload_param": {"device": "nvme", "nvme_path": "PATH", "max_in_cpu": 0, "buffer_count": 8}}
CASES = [(stage, precision) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16", "fp16")]
QUICK = [(0, "bf16"), (1, "fp32"), (2, "fp16"), (3, "fp32"), (3, "fp16")]
PROMPTS = tokens(9, 9, PROMPT)


def zero_of(name: str, path: str) -> dict[str, Any]:
    """The keys of a kind of offload."""
    if name == "disk":
        return {"offload_param": {**ON_DISK["offload_param"], "nvme_path": path, "buffer_size": 10_000}}
    return OFFLOADED if name == "host" else {}


def generate(engine: Any, rank: int) -> None:
    """In all ways, on each rank a different number of times."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in engine.module.modules()]
    engine.module.blocks[1].eval()  # modes come back as they were
    want = _in_plain_torch(engine)
    with engine.generation() as model:
        assert model is engine.module and not torch.is_grad_enabled()
        assert not any(m.training for m in model.modules())
        for _ in range(1 + 2 * rank):
            assert torch.equal(model.generate(PROMPTS), want)
        with engine.generation() as again, engine.generation(memory=0):
            assert torch.equal(again.generate(PROMPTS, cached=False), want)
        assert torch.equal(engine(PROMPTS), model(PROMPTS))  # a forward without autograd
        with torch.enable_grad(), pytest.raises(RuntimeError, match=r"training inside engine\.generation"):
            engine(PROMPTS)
    assert torch.is_grad_enabled() and engine.module.training and not engine.module.blocks[1].training
    engine.module.blocks[1].train()
    for memory in (0, 5000):
        with engine.generation(memory=memory) as model:
            assert torch.equal(model.generate(PROMPTS), want)
    assert hooks == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in engine.module.modules()]


def _in_plain_torch(engine: Any) -> torch.Tensor:
    plain = Language().to(engine.module.embedding.weight.dtype).eval()
    plain.load_state_dict(engine.module_state_dict())
    return plain.generate(PROMPTS)


def trained(rank: int, case: Sequence[Any], generates: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and masters of a run, whose dropout draws from torch's generator."""
    stage, precision, zero = case
    torch.manual_seed(rank)
    engine, losses = engine_of(stage, precision, zero, gradient_accumulation_steps=2), []
    torch.manual_seed(rank)
    for step in range(STEPS):
        losses.append(train_step(engine, step, rank))
        if generates and step == 0:
            with torch.random.fork_rng():
                generate(engine, rank)
    state = engine.optimizer.state_dict()["tensors"]
    found = {key: chunk.clone() for key, chunk in _tensors(state)} | engine.module_state_dict()
    engine.destroy()
    return losses, found


def _tensors(state: Any) -> Any:
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            yield key, value
        elif isinstance(value, dict):
            yield from ((f"{key}/{inner}", each) for inner, each in _tensors(value))


def without_and_with(comm: Any, stage: int, precision: str, offload: str, path: str) -> None:
    case = stage, precision, zero_of(offload, path)
    (losses, state), (same_losses, same_state) = (trained(comm.rank, case, each) for each in (False, True))
    assert losses == same_losses and state.keys() == same_state.keys()
    assert [key for key in state if not same_bits(state[key], same_state[key])] == []


def test_training_after_generation_is_training_without_it_bit_for_bit(tmp_path: Any) -> None:
    cases = [(stage, precision, "", "") for stage, precision in QUICK]
    run_each(without_and_with, 2, [*cases, (3, "bf16", "host", ""), (3, "bf16", "disk", str(tmp_path))])


@pytest.mark.slow
def test_training_after_generation_is_training_without_it_on_three_ranks(tmp_path: Any) -> None:
    cases = [(*case, offload, str(tmp_path)) for case in CASES for offload in ("", "host", "disk")]
    run_each(without_and_with, 3, [case for case in cases if not case[2] or case[0] == 3])


def functions_entered(call: Callable[[], Any]) -> list[str]:
    """The functions of zero_full that a call enters, but for the guard that raises for a training forward."""
    entered, package = list[str](), str(Path(zero_full.__file__).parent)
    guard = {generating.NoTraining.before_forward.__code__, generating.NoTraining.check.__code__}

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package) and frame.f_code not in guard:
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


def chosen(comm: Any, shared: bool) -> list[Any]:
    """How many units each size of the free memory keeps; and functions entered by a call of `generate`."""
    engine = engine_of(3, "bf16")
    units = [group.parameters for group in engine.optimizer.sharded.groups]
    whole, found = sum(unit.full.nbytes for unit in units), list[Any]()
    planned = config(3, zero_optimization=RELEASED, bf16={"enabled": True})
    assert plan(Language(), planned, 2).whole == whole
    for free in (2**40, 4 * whole, whole, 4 * whole // 3, 0):
        mine = free + comm.rank * 2**20  # the least counts
        limit = Limit("test", "one" if shared else f"rank {comm.rank}", mine, "")
        reported = mock.patch.object(budget, "memory_limits", lambda host, limit=limit: [limit])
        with reported, engine.generation() as model:
            model.generate(PROMPTS)
            kept = sum(unit.full.nbytes for unit in units if unit.users)
            calls = functions_entered(lambda: model.generate(PROMPTS))
            with engine.generation() as again:  # what is gathered already needs no memory
                again.generate(PROMPTS)
        found.append((kept / whole, len(calls)))
    engine.destroy()
    return found


def test_memory_that_nobody_names_is_chosen_alike_and_whole_parameters_cost_no_function_per_token() -> None:
    for shared in (False, True):
        first, second = POOL.run(chosen, 2, shared)
        assert [kept for kept, _ in first] == [kept for kept, _ in second]
        kept, calls = zip(*first, strict=True)
        assert kept[0] == kept[1] == 1 and calls[0] == calls[1] == 0
        assert 0 < kept[2] < 1 and calls[2] > 0
        assert (kept[3] == 1) == (not shared) and kept[4] == 0 and calls[4] > 0


def of_two_engines(comm: Any) -> list[tuple[int, int, int]]:
    """Free bytes at the beginning, and the bytes that each of two nested engines keeps gathered."""
    engines = [engine_of(3, "bf16") for _ in range(2)]
    units = [[group.parameters for group in engine.optimizer.sharded.groups] for engine in engines]

    def kept(number: int) -> int:
        return sum(unit.full.nbytes for unit in units[number] if unit.users)

    whole, found = sum(unit.full.nbytes for unit in units[0]), []
    for total in (whole // 2, whole, 2 * whole, 8 * whole):

        def limits(host: str, total: int = total) -> list[Limit]:
            return [Limit("test", f"rank {comm.rank}", total - kept(0) - kept(1), "")]

        reported = mock.patch.object(budget, "memory_limits", limits)
        with reported, engines[0].generation() as first, engines[1].generation() as second:
            assert torch.equal(first.generate(PROMPTS), second.generate(PROMPTS))
            found.append((total, kept(0), kept(1)))
    for engine in engines:
        engine.destroy()
    return found


def test_two_engines_that_generate_at_once_keep_no_more_than_is_free() -> None:
    for found in POOL.run(of_two_engines, 2):
        for total, first, second in found:
            assert first + second <= total
        total, first, second = found[-1]
        assert first == second == total // 8  # both models are whole
        assert found[1][1] > found[1][2]  # the second one has what the first one has left


def test_free_memory_of_a_device_has_what_the_allocator_has_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"get_memory_info": (1000, 2000), "memory_reserved": 700, "memory_allocated": 500}
    for name, value in numbers.items():
        monkeypatch.setattr(torch.accelerator, name, lambda device, value=value: value)
    device = torch.device("cuda", 1)
    assert [free for _, free in budget._free(device)] == [1200]

    def refuses(device: Any) -> Any:
        raise RuntimeError("this device has no such numbers")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", refuses)
    assert list(budget._free(device)) == []


def entered_at_stage_2(comm: Any) -> list[str]:
    engine = engine_of(2, "bf16")
    with engine.generation() as model:
        model.generate(PROMPTS)  # the first forward of an engine looks for DistributedDataParallel
        calls = functions_entered(lambda: model.generate(PROMPTS))
    engine.destroy()
    return calls


def test_generation_without_gathers_enters_no_function_either() -> None:
    assert POOL.run(entered_at_stage_2, 2) == [[], []]


def wrong_uses(comm: Any) -> None:
    engine = engine_of(3, "bf16", gradient_accumulation_steps=2)
    for _ in range(2):  # an error leaves the engine as it was
        engine.backward(engine(PROMPTS).float().square().mean())
        engine.step()
        with pytest.raises(RuntimeError, match="in the middle of a step"), engine.generation():
            pass
        engine.backward(engine(PROMPTS).float().square().mean())
        with pytest.raises(RuntimeError, match="in the middle of a step"), engine.generation():
            pass
        engine.step()
    with pytest.raises(RuntimeError, match="memory must be a number of bytes"), engine.generation(memory=-1):
        pass
    with pytest.raises(RuntimeError, match="Leave out memory"), engine.generation(0, merge_adapters=True):
        pass
    with pytest.raises(ZeroDivisionError), engine.generation():
        raise ZeroDivisionError
    written = pytest.raises(RuntimeError, match=r"weight.* was written while it was gathered")
    with written, engine.generation() as model:
        model.blocks[0].up.weight.mul_(2)
    engine.offload_states()
    with pytest.raises(RuntimeError, match="states are offloaded"), engine.generation():
        pass
    engine.reload_states()
    with engine.generation() as model:
        model.generate(PROMPTS)
    train_step(engine, 0, comm.rank)
    engine.destroy()


def test_what_cannot_be_done_is_one_error_on_every_rank_and_training_goes_on() -> None:
    POOL.run(wrong_uses, 2)


def different(comm: Any, how: str) -> str:
    """What a rank hears."""
    engine = engine_of(1 if "middle" in how else 3, "fp32")
    try:
        if how == "one raises within":
            with engine.generation() as model:
                model.generate(PROMPTS)
                if comm.rank == 1:
                    raise ZeroDivisionError("mine")
        elif how == "one does not enter":
            if comm.rank == 0:
                with engine.generation():
                    pass
            train_step(engine, 0, comm.rank)
        elif how == "one is in the middle of a step":
            if comm.rank == 1:
                with engine.no_sync():
                    engine.backward(engine(PROMPTS).square().mean())
            with engine.generation():
                pass
        elif how == "different memory":
            with engine.generation(memory=100 * comm.rank):
                pass
        elif how == "one has no memory":
            broken = mock.patch.object(generating, "_allocate_one", side_effect=MemoryError("of this rank"))
            with broken if comm.rank == 1 else nullcontext(), engine.generation():
                pass
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def errors(how: str) -> list[str]:
    """What each rank hears."""
    return POOL.run(different, 2, how, collective=3)


def test_a_rank_that_does_something_else_ends_all_ranks_with_the_reason() -> None:
    first, second = errors("one raises within")
    assert (
        first.startswith("DesyncError") and "leaving engine.generation() by ZeroDivisionError: mine" in first
    )
    assert second == "ZeroDivisionError: mine"
    first, second = errors("one does not enter")
    assert "rank 0 waits in engine.generation" in first and "rank 0 waits in engine.generation" in second
    first, second = errors("one is in the middle of a step")
    assert first.startswith("DesyncError") and "in the middle of a step" in first
    assert second.startswith("RuntimeError") and "in the middle of a step" in second
    for text in errors("different memory"):
        assert "rank 0: engine.generation(memory=0" in text and "rank 1: engine.generation(memory=100" in text
    for text in errors("one has no memory"):
        assert "(of this rank)" in text and "Pass memory=BYTES" in text
