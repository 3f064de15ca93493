"""`engine.weights(...)`: a server has the trained values bit for bit, and gets no more than it needs."""

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL, run_each
from tests.zero_full.generation_runs import (
    Server,
    engine_of,
    reinforce,
    same_bits,
    train_step,
)
from zero_full.errors import DesyncError
from zero_full.kernels.load import compiled_for
from zero_full.plan.memory_tracker import MemoryTracker
from zero_full.shard.group import changed_elements, checksum
from zero_full.shard.group.changed_elements import CHUNK, ChangedElements

STATE_ON_HOST = {"offload_optimizer": {"device": "cpu"}}
MASTERS_16 = {"more": {"bf16_master_weights_and_grads": True}}


# Whole tensors -----------------------------------------------------------------------------------


def whole_tensors(
    comm: Any, stage: int, precision: str, bucket_bytes: int, dtype: torch.dtype | None
) -> None:
    engine = engine_of(stage, precision)
    for step in range(2):
        train_step(engine, step, comm.rank)
    want, weights = engine.module_state_dict(), engine.weights(bucket_bytes, dtype=dtype)
    known = list(zip(weights.names, weights.dtypes, weights.shapes, strict=True))
    kept = list(weights)  # without a copy: a bucket's tensors stay valid
    assert [(name, tensor.dtype, tensor.shape) for name, tensor in kept] == known
    assert {*weights.names} == want.keys() - {"head.weight"}  # tied: once
    exact = {name: zero_full.safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    for name, tensor in kept:
        value = want[name] if dtype in (None, want[name].dtype) else exact.get(name)
        value = want[name] if value is None else value  # frozen
        assert same_bits(tensor, value.to(tensor.dtype)), name
    assert not any(tensor.requires_grad for _, tensor in kept)
    train_step(engine, 2, comm.rank)
    engine.destroy()


def test_every_rank_gets_every_tensor_bit_for_bit() -> None:
    cases = [(0, "bf16", 1, None), (1, "fp32", 2000, torch.bfloat16), (2, "fp16", 10**6, torch.float32)]
    cases += [(3, "bf16", 1500, None), (3, "fp32", 10**6, torch.bfloat16), (3, "bf16", 3000, torch.float32)]
    run_each(whole_tensors, 2, cases)


@pytest.mark.slow
def test_every_rank_gets_every_tensor_bit_for_bit_on_three_ranks() -> None:
    dtypes, sizes = (None, torch.float32, torch.bfloat16), (1, 2000, 10**6)
    cases = [
        (s, p, size, d) for s in range(4) for p in ("fp32", "bf16", "fp16") for size in sizes for d in dtypes
    ]
    run_each(whole_tensors, 3, cases)


class OnTheHost(MemoryTracker):
    """Tracks storages in host memory."""

    def _is_counted(self, tensor: Tensor) -> bool:
        alive = (storage() for storage in self.alive.values())  # collectives return its memory once more
        known = {storage.data_ptr() for storage in alive if storage is not None}
        return tensor.dim() > 0 and tensor.untyped_storage().data_ptr() not in known


class Stairs(nn.Module):
    """Layers of 4 KiB to 12 KiB at bf16, each a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 64 * n) for n in (1, 2, 3, 2, 1, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        return torch.stack([layer(x).float().square().mean() for layer in self.layers]).sum()


# Temporary tensors of a fixed size, which are small beside a real model.
@mock.patch.object(changed_elements, "CHUNK", 512)
@mock.patch.object(checksum, "COLUMNS", 127)
def memory(comm: Any, stage: int, bucket_bytes: int, dtype: torch.dtype | None, delta: bool) -> int:
    """The most bytes that an iteration has taken beside the model, by a caller that keeps nothing."""
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage, **zero},
    }
    engine = zero_full.initialize(model=Stairs(), config=config)[0]
    peaks = list[int]()
    for _ in range(5):
        engine.backward(engine(torch.ones(1, 32, dtype=torch.bfloat16)))
        engine.step()
        weights, tracker = engine.weights(bucket_bytes, delta, dtype), OnTheHost()
        with tracker, tracker.counting("buckets"):
            for item in weights:
                del item
        peaks.append(tracker.peak("buckets"))
    engine.destroy()
    return max(peaks[1:])  # the first delta is of all elements


def test_an_iteration_takes_one_bucket_of_memory() -> None:
    cases = [(3, 30_000, None, False), (3, 13_000, None, False), (3, 13_000, torch.float16, False)]
    cases += [(1, 30_000, torch.float16, False), (1, 30_000, None, False), (2, 26_000, None, True)]
    found = run_each(memory, 2, cases)
    for (stage, bucket_bytes, dtype, _), answers in zip(cases, found, strict=True):
        for most in answers:
            assert most <= bucket_bytes + 9000, (stage, bucket_bytes, most)  # flags, sums and counts
            assert most > 0.4 * bucket_bytes or (stage < 3 and dtype is None)


def wrong_uses(comm: Any) -> None:
    engine = engine_of(3, "bf16")
    for call, text in (
        ({"bucket_bytes": 0}, "bucket_bytes must be"),
        ({"dtype": torch.int8}, "dtype must be a floating-point"),
    ):
        with pytest.raises(ValueError, match=text):
            engine.weights(**call)
    weights = engine.weights(bucket_bytes=100)
    next(weights)
    train_step(engine, 0, comm.rank)
    with pytest.raises(RuntimeError, match="a step or a load while engine"):
        list(weights)
    engine.offload_states()
    with pytest.raises(RuntimeError, match="states are offloaded"):
        list(engine.weights())
    engine.reload_states()
    assert len(list(engine.weights())) == len(engine.module_state_dict()) - 1
    engine.destroy()


def leaves_early(comm: Any) -> str:
    engine = engine_of(3, "bf16")
    try:
        for _ in engine.weights(bucket_bytes=100):
            if comm.rank == 1:
                break
        train_step(engine, 0, comm.rank)
    except Exception as error:
        return str(error)
    return "nothing"


def test_wrong_uses_and_a_rank_that_stops_iterating_are_errors() -> None:
    POOL.run(wrong_uses, 2)
    for text in POOL.run(leaves_early, 2, collective=3):
        assert "rank 0 waits in bucket 2 of engine.weights" in text


# Only what has changed ---------------------------------------------------------------------------


def handed_over(engine: Any, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The module's state dict in this dtype, from the masters where there are some."""
    state = dict(engine.module_state_dict())
    exact = {name: zero_full.safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    for name, value in state.items():
        if dtype is not None and value.is_floating_point():
            trained = exact.get(name) if value.dtype != dtype else None
            state[name] = (value if trained is None else trained).to(dtype)
    return state


def changes(
    comm: Any,
    stage: int,
    precision: str,
    zero: Mapping[str, Any],
    keys: Mapping[str, Any],
    dtype: torch.dtype | None = None,
) -> list[int]:
    """A server that gets deltas while much else happens. Returns the bytes of the updates."""
    engine, server, sizes = engine_of(stage, precision, zero, **keys), Server(), list[int]()
    module, saved = engine.module, None

    def push() -> None:
        server.update(engine.weights(bucket_bytes=3000, delta=True, dtype=dtype))
        sizes.append(server.received)
        assert server.differs_from(handed_over(engine, dtype)) == []

    push()
    for step in range(3):
        train_step(engine, step, comm.rank)
        push()
    train_step(engine, 3, comm.rank)
    train_step(engine, 4, comm.rank)  # two steps add up
    weights = engine.weights(delta=True, dtype=dtype)
    next(weights, None)
    del weights  # what was not iterated to its end is sent again
    push()
    push()
    assert sizes[-1] == 0
    saved = engine.state_dict()
    train_step(engine, 5, comm.rank)
    edited = [module.blocks[1].up.weight, *([module.frozen.weight] if stage == 3 else [])]
    with zero_full.GatheredParameters(edited, modifier_rank=0):
        for param in edited if comm.rank == 0 else ():
            param.data.add_(1)
    if stage < 3:
        module.frozen.weight.data.add_(1)
    push()
    assert {"blocks.1.up.weight", "frozen.weight"}.isdisjoint(server.sparse)
    engine.load_state_dict(saved)
    push()
    module.scale.add_(1)  # a buffer
    train_step(engine, 6, comm.rank)
    push()
    engine.load_module_state_dict({name: value * 2 for name, value in engine.module_state_dict().items()})
    push()
    if stage < 3:
        with torch.no_grad():
            module.blocks[0].down.weight.mul_(2)  # between steps, then a step
        train_step(engine, 7, comm.rank)
        push()
    engine.destroy()
    return sizes


@pytest.mark.rotates
def test_a_server_that_gets_changes_only_has_every_bit() -> None:
    cases: list[Any] = [
        (stage, precision, {}, {}) for stage, precision in ((0, "bf16"), (1, "fp16"), (2, "bf16"))
    ]
    cases += [(3, "bf16", {}, {}), (3, "fp16", {}, {}), (3, "fp32", {}, {}), (1, "bf16", {}, MASTERS_16)]
    cases += [(3, "bf16", STATE_ON_HOST, {"optimizer": {"type": "SGD", "params": {"lr": 1e-4}}})]
    cases += [(1, "fp32", {}, {}, torch.bfloat16), (3, "fp32", {}, {}, torch.bfloat16)]
    cases += [(2, "bf16", {}, {}, torch.float16), (3, "bf16", STATE_ON_HOST, {}, torch.float16)]
    for case, answers in zip(cases, run_each(changes, 2, cases), strict=True):
        sizes = answers[0]
        assert answers[1] == sizes, case
        assert (
            min(sizes[1:4]) > 0
            and max(sizes[1:4])
            < (0.9 if torch.bfloat16 in case or case[1:] == ("bf16", {}, {}) else 1) * sizes[0]
        ), case


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [False, True])
def test_a_server_that_gets_changes_only_has_every_bit_with_every_option(tmp_path: Any, rounds: bool) -> None:
    path = {"device": "nvme", "nvme_path": str(tmp_path)}
    files = {"offload_param": {**path, "max_in_cpu": 0, "buffer_size": 5000}, "offload_optimizer": path}
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 1e-4}}}
    one_bit = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4, "freeze_step": 3}}}
    later = {"offload_optimizer": {"device": "cpu", "delay_update_after": 1}}
    cases: list[Any] = [(s, p, {}, {}) for s in range(4) for p in ("fp32", "bf16", "fp16")]
    cases += [
        (s, "bf16", zero, {}) for s in (1, 2, 3) for zero in (STATE_ON_HOST, {"offload_optimizer": path})
    ]
    cases += [(s, "bf16", {}, keys) for s in (1, 3) for keys in (muon, MASTERS_16)]
    cases += [(0, "bf16", {}, one_bit), (3, "bf16", files, {}), (3, "bf16", later, {})]
    rounded = {"fp32": torch.bfloat16, "bf16": torch.float16, "fp16": torch.bfloat16}
    run_each(changes, 2, [(*case, rounded[case[1]]) for case in cases] if rounds else cases)
    run_each(
        changes, 4, [(3, "bf16", {key: 2}, {}) for key in ("mics_shard_size", "zero_hpz_partition_size")]
    )


def counted(comm: Any, stage: int) -> None:
    """The bytes are those of the changed elements, or of the whole tensor where that is less."""
    engine = engine_of(stage, "bf16")
    before = {name: value.clone() for name, value in ((n, v) for n, _, v in engine.weights(delta=True))}
    train_step(engine, 0, comm.rank)
    after = engine.module_state_dict()
    items = {name: (indices, values) for name, indices, values in engine.weights(delta=True)}
    for name, old in before.items():
        where = (old.view(torch.uint8) if not old.dim() else old).ne(after[name]).view(-1).nonzero().view(-1)
        if not where.numel():
            assert name not in items
            continue
        indices, values = items[name]
        if 6 * where.numel() < old.nbytes:
            assert indices is not None and torch.equal(indices.long(), where)
            assert same_bits(values, after[name].view(-1)[where])
        else:
            assert indices is None and same_bits(values, after[name])
    assert any(indices is not None for indices, _ in items.values())
    engine.destroy()


def test_bytes_are_those_of_the_changed_elements() -> None:
    run_each(counted, 2, [(stage,) for stage in range(4)])


def test_bits_of_changed_elements() -> None:
    numel = CHUNK + 8 * 5
    changes = ChangedElements(numel, torch.bfloat16, torch.device("cpu"))
    old = torch.zeros(numel, dtype=torch.bfloat16)

    def indices(start: int, stop: int) -> list[int]:
        return [index for found in changes.indices(start, stop) for index in found.tolist()]

    assert int(changes.count(0, numel)) == numel  # before the first call
    changes.take(old)
    assert indices(0, numel) == []
    new, places = old.clone(), [0, 7, 8, 13, CHUNK - 1, CHUNK, CHUNK + 9, numel - 1]
    new[places] = torch.tensor([1.0, -0.0, float("nan"), 2, 3, 4, 5, 6], dtype=torch.bfloat16)
    changes.keep(old)
    changes.compare(None, new)
    assert indices(0, numel) == places
    assert indices(8, 16) == [0, 5] and int(changes.count(8, 13)) == 1
    changes.keep(None)
    changes.compare(new, new.clone())  # NaN equals itself
    changes.note_sums(new)
    changes.look(new)
    finite = new.nan_to_num()
    changes.look_for_writes(finite, finite.float())
    assert indices(0, numel) == places and not changes.written
    changes.look(torch.where(new == 5, old, new))  # not as the step has left it
    assert int(changes.count(0, numel)) == numel and changes.written
    changes.take(new)
    changes.look_for_writes(torch.where(finite == 0, old, finite), finite.float())  # 0.0 is not -0.0
    assert int(changes.count(0, numel)) == numel and changes.written
    changes.take(new)
    changes.compare(None, new)  # a step whose old values were not kept
    assert int(changes.count(0, numel)) == numel and not changes.written
    changes.take(new)
    changes.is_marked = True
    changes.bits_of(CHUNK, 9)[:] = 3
    changes.compare(None, new)  # a step that has set the bits itself
    assert indices(0, numel) == [CHUNK, CHUNK + 1, CHUNK + 8, CHUNK + 9]
    changes.take(wide := new.float())
    changes.keep(wide)
    changes.compare(None, torch.where(wide == 3, wide + 1e-4, wide).where(wide != 4, 4.25))  # 3 rounds to 3
    assert indices(0, numel) == [CHUNK]


class Odd(nn.Module):
    """Parameters of odd sizes, all zero."""

    def __init__(self) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.zeros(size) for size in ((1,), (7,), (3, 5), (13,), (11, 11)))
        self.frozen = nn.Parameter(torch.ones(3, 7), requires_grad=False)
        self.register_buffer("scale", torch.ones(5, 3))
        self.register_buffer("count", torch.tensor(1.0))

    def forward(self, signs: Tensor) -> Tensor:
        """A loss whose gradient is positive in each fifth element, else negative."""
        flat = torch.cat([param.view(-1) for param in self.params])
        return (flat.float() * signs.repeat(flat.numel())[: flat.numel()]).sum()


def unusual_values(comm: Any, stage: int) -> None:
    """A server has every bit of zeros with a sign, NaN and inf, and gets nothing for a skipped step."""
    made = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-8, "weight_decay": 0.0}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, server = zero_full.initialize(model=Odd(), config=made)[0], Server()
    signs = torch.tensor([1.0, -1, -1, -1, -1])

    def push() -> int:
        server.update(engine.weights(delta=True))
        assert server.differs_from(engine.module_state_dict()) == []
        return server.received

    def step(factor: float = 1.0) -> None:
        engine.backward(engine(signs * factor))
        engine.step()

    push()
    step()  # masters of 2e-8 and -2e-8: in fp16 0.0 and -0.0
    assert push() == 2 + 6 * 31  # the parameter of one element comes whole
    zeros = torch.cat([value.view(-1) for name, value in server.tensors.items() if "params" in name])
    assert not zeros.any() and int(zeros.signbit().sum()) == 32  # each fifth of 157
    step(float("inf"))
    assert engine.optimizer.overflow and push() == 0
    bad = [engine.module.params[2], engine.module.params[4]]
    with zero_full.GatheredParameters(bad, modifier_rank=0):
        for param in bad if comm.rank == 0 else ():
            param.data.view(-1)[3:6] = torch.tensor([float("nan"), -float("inf"), -0.0])
    push()
    for number in range(3):
        step()
        engine.module.count.add_(1)
        engine.module.scale[number, 2] = -0.0
        assert push() > 0 and {"count", "scale"} <= server.tensors.keys() - server.sparse
    if stage < 3:
        bad[0].data.view(-1)[9] = float("nan")  # then a step, which finds it
        step()
        assert push() > 0 and server.tensors["params.2"].isnan().sum() >= 2
    engine.destroy()


def test_zeros_with_a_sign_nan_and_skipped_steps_with_odd_sizes() -> None:
    run_each(unusual_values, 3, [(1,), (3,)])


def way_of_a_step(comm: Any, precision: str, keys: Mapping[str, Any], marks: bool) -> None:
    engine = engine_of(1, precision, **keys)
    list(engine.weights(delta=True))
    with mock.patch.object(ChangedElements, "_add") as compares:
        train_step(engine, 0, comm.rank)
    assert compares.called != (marks and compiled_for(torch.device("cpu")))
    assert sum(int(found[2].numel()) for found in engine.weights(delta=True)) > 0 or not marks
    engine.destroy()


def test_adam_marks_what_it_changes_and_other_rules_are_compared() -> None:
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 1e-4}}}
    cases: list[Any] = [("bf16", {}, True), ("fp16", {}, True), ("fp32", {}, False)]
    run_each(way_of_a_step, 2, [*cases, ("bf16", sgd, False), ("bf16", MASTERS_16, False)])


def two_receivers(comm: Any) -> None:
    """Receivers that pass the version that they have miss nothing, and two iterators at once are an error."""
    engine, servers, has = engine_of(3, "bf16"), [Server(), Server()], [0, 0]

    def push(number: int) -> int:
        weights = engine.weights(delta=True, since=has[number])
        assert weights.base in (0, has[number])
        servers[number].update(weights)
        has[number] = weights.version
        assert servers[number].differs_from(engine.module_state_dict()) == []
        return servers[number].received

    whole = push(0)
    for step, number in enumerate((0, 0, 1, 1, 0, 1, 0)):
        train_step(engine, step, comm.rank)
        size = push(number)
        assert (size == whole) == (step in (2, 4, 5, 6))  # the other one was served in between
    servers[1].update(engine.weights(delta=True, since=0))  # it has been restarted
    assert servers[1].received == whole
    plain = engine.weights(delta=True)  # without `since` the base tells of the second receiver
    assert plain.base != has[0] and plain.version == plain.base + 1
    train_step(engine, 8, comm.rank)
    one, other = engine.weights(delta=True), engine.weights(delta=True)
    next(one)
    next(other)
    with pytest.raises(RuntimeError, match=r"another iterator .* was begun before this one was at its end"):
        list(one)
    made = engine.weights(delta=True)
    assert len(list(engine.weights(delta=True))) > 1  # both left early: nothing was handed over
    for late in (made, other, plain):
        with pytest.raises(RuntimeError, match=r"another iterator .* (was iterated after|was begun before)"):
            list(late)
    fresh = engine.weights(delta=True)
    engine.weights(delta=True, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="another iterator"):
        list(fresh)
    for call in ({"since": 1}, {"since": -1, "delta": True}):
        with pytest.raises(ValueError, match="must be a version of delta=True"):
            engine.weights(**call)
    engine.destroy()


def ranks_differ(comm: Any) -> None:
    engine = engine_of(1, "bf16")
    weights = engine.weights(delta=True)
    list(weights)
    with pytest.raises(DesyncError, match=f"since version {weights.version}"):
        list(engine.weights(delta=True, since=comm.rank * weights.version))
    engine.destroy()


def version_of_another_run(comm: Any) -> None:
    """A receiver that has the version of another engine gets everything, also if both have counted as far."""
    engines, server = [engine_of(1, "bf16") for _ in range(2)], Server()
    for engine in engines:
        server.update(engine.weights(delta=True))
        train_step(engine, 0, comm.rank)
        weights = engine.weights(delta=True)
        server.update(weights)
    server.update(engines[0].weights(delta=True, since=weights.version))
    assert server.differs_from(engines[0].module_state_dict()) == []
    for engine in engines:
        engine.destroy()


def test_two_receivers_get_everything_or_an_error() -> None:
    POOL.run(two_receivers, 2)
    POOL.run(ranks_differ, 2)
    POOL.run(version_of_another_run, 2)


# What happens while an iterator is read -----------------------------------------------------------


def set_master(engine: Any, param: nn.Parameter, rank: int) -> None:
    zero_full.safe_set_full_fp32_param(param, torch.full(param.shape, 0.5))


def edit(engine: Any, param: nn.Parameter, rank: int) -> None:
    with zero_full.GatheredParameters([param], modifier_rank=0):
        if rank == 0:
            param.data.add_(1)


def add(engine: Any, param: nn.Parameter, rank: int) -> None:
    param.data.add_(1)


def take_step(engine: Any, param: nn.Parameter, rank: int) -> None:
    train_step(engine, 9, rank)


def written_meanwhile(comm: Any, stage: int, dtype: torch.dtype | None, act: Any) -> None:
    """After the last item user code steps or writes, before it asks for another: it comes with the next."""
    engine, server = engine_of(stage, "bf16"), Server()
    server.update(engine.weights(delta=True, dtype=dtype))
    train_step(engine, 0, comm.rank)
    items = engine.weights(delta=True, dtype=dtype)
    trained = {name for name, param in engine.module.named_parameters() if param.requires_grad}
    last = [name for name in items.names if name in trained][-1]

    def read() -> Any:
        for item in items:
            yield item
            if item[0] == last:
                act(engine, engine.module.blocks[0].up.weight, comm.rank)

    server.update(read())
    server.update(engine.weights(delta=True, dtype=dtype))
    assert server.differs_from(handed_over(engine, dtype)) == []
    engine.destroy()


def invalid_meanwhile(comm: Any, stage: int, delta: bool, begun: bool) -> None:
    """Its values are on the host, or gone."""
    engine = engine_of(stage, "bf16")
    for act, text in ((engine.offload_states, "states are offloaded"), (engine.destroy, "after destroy")):
        items = engine.weights(bucket_bytes=100, delta=delta, dtype=torch.float32)
        if begun:
            next(items)
        act()
        with pytest.raises(RuntimeError, match=text):
            list(items)
        engine.reload_states()


def in_inference_mode(comm: Any, stage: int, dtype: torch.dtype | None) -> None:
    """Steps note changes also if the first hand-over was in inference mode."""
    engine, server = engine_of(stage, "fp32"), Server()
    for step in range(3):
        with torch.inference_mode():
            server.update(engine.weights(delta=True, dtype=dtype))
        assert server.differs_from(handed_over(engine, dtype)) == []
        train_step(engine, step, comm.rank)
    engine.destroy()


def test_in_inference_mode() -> None:
    run_each(in_inference_mode, 2, [(s, dtype) for s in (1, 3) for dtype in (None, torch.bfloat16)])


def test_what_is_written_while_an_iterator_is_read_comes_with_the_next_one() -> None:
    acts = (set_master, edit, add, take_step)
    run_each(written_meanwhile, 2, [(1, dtype, act) for dtype in (None, torch.float32) for act in acts])
    run_each(written_meanwhile, 2, [(3, dtype, act) for dtype in (None, torch.float32) for act in acts[:2]])


@pytest.mark.parametrize("world", [1, 2])
def test_an_iterator_over_values_that_are_away_raises(world: int) -> None:
    flags = [(delta, begun) for delta in (False, True) for begun in (False, True)]
    run_each(invalid_meanwhile, world, [(stage, *flag) for stage in (1, 3) for flag in flags])


def asked_again(comm: Any) -> None:
    engine = engine_of(1, "bf16")
    with mock.patch("zero_full.generation.deltas.log") as log:
        for _ in range(2):
            train_step(engine, 0, comm.rank)
            list(engine.weights(delta=True))
        assert not log.warning.called
        list(engine.weights(delta=True))  # as a second receiver would
    assert log.warning.called == (comm.rank == 0)
    engine.destroy()


def test_a_call_without_a_step_in_between_warns() -> None:
    POOL.run(asked_again, 2)


def untouched(comm: Any) -> None:
    """A run that does not ask for changes has none of it."""
    engine = engine_of(3, "bf16")
    list(engine.weights())
    train_step(engine, 0, comm.rank)
    assert all(group.master.changes is None for group in engine.optimizer.trained)
    held = sum(t.nbytes for t in engine.optimizer.holdings()["optimizer"])
    list(engine.weights(delta=True))
    slices = sum(group.layout.shard_numel for group in engine.optimizer.trained)
    assert sum(t.nbytes for t in engine.optimizer.holdings()["optimizer"]) == held + slices // 8
    train_step(engine, 1, comm.rank)
    before = engine.metrics()["held"]["optimizer"]
    for _ in range(2):  # hand-overs that are stopped in the middle, whose changes are the next one's as well
        abandoned = engine.weights(delta=True, bucket_bytes=1)
        next(iter(abandoned))
        assert engine.metrics()["held"]["optimizer"] == before + slices // 8
    del abandoned
    list(engine.weights(delta=True))
    assert engine.metrics()["held"]["optimizer"] == before
    engine.destroy()


def test_changes_cost_one_bit_an_element_of_the_slice_where_they_are_asked_for() -> None:
    """Another one from the start of a hand-over to its end, also if it is abandoned."""
    POOL.run(untouched, 2)


@pytest.mark.rotates
def test_a_server_in_another_process_generates_from_the_trained_weights_for_100_steps() -> None:
    (hashes, _), (others, _), (served, received) = POOL.run(reinforce, 3, 3, 100, collective=60)
    assert hashes == others == served and len({*hashes}) == 10
    assert max(received[2:]) < received[0] / 2
