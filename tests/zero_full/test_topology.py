"""Groups as arguments: sub-groups, meshes, replicated sharding (HSDP, MiCS), and every error message."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zero_full
from tests.worlds import POOL, RankError
from tests.zero_full.runs import Net, Outcome, assert_close, config, data, reference, run, train
from zero_full import Topology
from zero_full.comm.topology import ROLES, marked_as_expert, marked_as_split

WHOLE_BUCKET = {"reduce_bucket_size": 10_000}  # Net in one bucket
NUMEL = sum(p.numel() for p in Net().parameters())
PADDED = 480  # 3+5, 39+1, 13+3, 169+7, 13+3 and 208 elements, in two halves, each a multiple of 8 x 2


# Sub-groups --------------------------------------------------------------------------------------


def other_start() -> Net:
    """Other values than the first rank's, which should win."""
    model = Net()
    for p in model.parameters():
        p.data.add_(1)
    return model


def in_pairs(comm: Any, config: Mapping[str, Any]) -> Outcome:
    """Ranks 0 and 1 train together, and ranks 2 and 3."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = other_start if comm.rank % 2 else Net
    return train(comm, config, model=model, process_group=pairs[comm.rank // 2])


def alone_on_the_data_of(ranks: Sequence[int], steps: int = 4) -> dict[str, Tensor]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in ranks:
            (model(data(step, 0, rank)) / len(ranks)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_pairs_of_processes_train_two_models(stage: int, overlap: bool) -> None:
    keys = config(stage, zero_optimization={"overlap_comm": overlap})
    outcomes = POOL.run(in_pairs, 4, keys)
    for rank, outcome in enumerate(outcomes):
        assert_close(outcome.parameters, alone_on_the_data_of([0, 1] if rank < 2 else [2, 3]))
    assert_close(outcomes[0].parameters, reference(2))


def outside(comm: Any) -> None:
    zero_full.initialize(model=Net(), config=config(1), process_group=dist.new_group([0]))


def test_a_rank_that_is_not_in_its_group_is_told_so() -> None:
    with pytest.raises(RankError, match="ValueError: rank 1 is not in the `data` group that it was given"):
        POOL.run(outside, 2)


# Meshes ------------------------------------------------------------------------------------------


def on_a_mesh(comm: Any, shape: tuple[int, ...], names: tuple[str, ...] | None, keys: Any) -> Outcome:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return train(comm, keys, mesh=mesh)


@pytest.mark.parametrize("names", [None, ("dp",), ("shard",)])
def test_a_mesh_of_one_dimension_is_the_world(names: tuple[str, ...] | None) -> None:
    for outcome in POOL.run(on_a_mesh, 3, (3,), names, config(2)):
        assert_close(outcome.parameters, reference(3))


@pytest.mark.parametrize("stage", [1, 2])
def test_a_mesh_of_replicate_and_shard_is_replicated_sharding(stage: int) -> None:
    keys = config(stage, zero_optimization=WHOLE_BUCKET, gradient_accumulation_steps=2)
    outcomes = POOL.run(on_a_mesh, 4, (2, 2), ("replicate", "shard"), keys)
    for outcome in outcomes:
        assert_close(outcome.parameters, reference(4, micro_batches=2))
        assert outcome.traffic["all_gather"] == 4 * PADDED // 2 * 4  # four steps, half of it, 4 bytes each


# MiCS --------------------------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2])
def test_mics_equals_plain_adam_and_full_sharding_at_any_size(stage: int, size: int) -> None:
    accumulate = {"gradient_accumulation_steps": 2}
    mics = run(4, config(stage, zero_optimization={"mics_shard_size": size}, **accumulate))
    full = run(4, config(stage, **accumulate))
    for outcome in mics:
        assert_close(outcome.parameters, reference(4, micro_batches=2))
        assert_close(outcome.parameters, full[0].parameters, tolerance=1e-6)


@pytest.mark.parametrize("stage", [1, 2])
def test_mics_sends_in_the_group_at_each_reduction_and_across_groups_once_a_step(stage: int) -> None:
    keys = {"zero_optimization": {"mics_shard_size": 2, **WHOLE_BUCKET}, "gradient_accumulation_steps": 2}
    half, reductions = PADDED // 2 * 4, {1: 1, 2: 2}[stage]  # bytes; stage 2 reduces every micro-batch
    want = {"reduce_scatter": reductions * half, "all_reduce": 2 * half // 2, "all_gather": half}
    for outcome in run(4, config(stage, **keys), steps=3):
        assert outcome.traffic == {kind: 3 * sent for kind, sent in want.items()}


def what_is_held(comm: Any, size: int) -> int:
    """Elements of optimizer state on this rank."""
    zero = {"mics_shard_size": size, **WHOLE_BUCKET} if size else WHOLE_BUCKET
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(1, zero_optimization=zero))
    engine.backward(engine(data(0, 0, comm.rank)))
    engine.step()
    held = sum(tensor.numel() for tensor in optimizer.holdings()["optimizer"])
    engine.destroy()
    return held


def test_mics_holds_the_state_once_in_every_group_of_its_size() -> None:
    full, mics = POOL.run(what_is_held, 4, 0), POOL.run(what_is_held, 4, 2)
    assert sum(full) == 2 * NUMEL  # Adam has two moments
    assert mics[0] + mics[1] == mics[2] + mics[3] == 2 * NUMEL
    assert mics == [mics[0], mics[1]] * 2
    assert max(full) < min(mics)


def across_bits(comm: Any) -> dict[str, Tensor]:
    return train(comm, config(2, zero_optimization={"mics_shard_size": 2}, gradient_clipping=0.1)).parameters


def averaged_during_backward(comm: Any, stage: int) -> list[tuple[int, bool]]:
    """Of each average with the copies in a step of two passes: in which pass, and whether that still ran."""
    zero = {"mics_shard_size": 2, "stage3_param_persistence_threshold": 0, "overlap_comm": False}
    keys = config(stage, zero_optimization=zero, gradient_accumulation_steps=2)
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=keys)
    replicas, found = optimizer.communicators.dense.replica_comm, list[tuple[int, bool]]()
    all_reduce = replicas.all_reduce

    def note(*given: Any) -> None:
        found.append((micro, torch._C._current_graph_task_id() >= 0))
        all_reduce(*given)

    object.__setattr__(replicas, "all_reduce", note)
    for micro in range(2):
        engine.backward(engine(data(0, micro, comm.rank)))
        engine.step()
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_copies_are_averaged_beside_the_last_backward_pass_of_a_step(stage: int) -> None:
    for found in POOL.run(averaged_during_backward, 4, stage):
        assert len(found) > 2 and set(found[:-1]) == {(1, True)}


def steps_on_written_gradients(comm: Any, zero: dict[str, Any]) -> dict[str, Tensor]:
    """No backward pass comes before the step: gradients are written by hand."""
    engine, optimizer, _, _ = zero_full.initialize(model=Net(), config=config(2, zero_optimization=zero))
    engine.allreduce_gradients()  # there are none
    for param in engine.module.parameters():
        param.grad = torch.full_like(param, 0.1)
    optimizer.step()
    found = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return found


def test_copies_have_nothing_to_average_before_there_are_gradients() -> None:
    (want, *_) = POOL.run(steps_on_written_gradients, 4, {})
    for got in POOL.run(steps_on_written_gradients, 4, {"mics_shard_size": 2}):
        assert_close(got, want)


def test_all_replicas_have_the_same_bits() -> None:
    first, *others = POOL.run(across_bits, 4)
    for other in others:
        assert all(torch.equal(other[name], tensor) for name, tensor in first.items())


# Errors ------------------------------------------------------------------------------------------


@dataclass
class Mesh:
    """What `from_mesh` looks at."""

    mesh_dim_names: tuple[str, ...] | None
    ndim: int = 0
    groups: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ndim = self.ndim or len(self.mesh_dim_names or ())

    def get_group(self, name: str | None = None) -> Any:
        return f"group of {name}"


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (("data",), {"data": "data"}),
        (("fsdp",), {"data": "fsdp"}),
        (("dp", "tp"), {"data": "dp", "tensor": "tp"}),
        (("pp", "data", "model"), {"pipe": "pp", "data": "data", "tensor": "model"}),
        (("dp_replicate", "dp_shard"), {"replicate": "dp_replicate", "shard": "dp_shard"}),
        (("replicate", "shard", "tensor"), {"replicate": "replicate", "shard": "shard", "tensor": "tensor"}),
    ],
)
def test_mesh_names_become_roles(names: tuple[str, ...], groups: dict[str, str]) -> None:
    made = Topology.from_mesh(Mesh(names))  # type: ignore[arg-type]
    found = {role: getattr(made, role) for role in ROLES if getattr(made, role) is not None}
    assert found == {role: f"group of {name}" for role, name in groups.items()}


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (Mesh(("context",)), r"mesh dimension 'context' is unknown or repeated; known: data, dp, "),
        (Mesh(("data", "dp")), r"mesh dimension 'dp' is unknown or repeated"),
        (Mesh(None, ndim=2), r"a mesh of 2 dimensions needs mesh_dim_names, e.g. data, dp"),
        (Mesh(("replicate",)), r"'replicate' dimension also needs a 'shard' dimension"),
        (Mesh(("tp",)), r"a `tensor` group also needs a `data` group.*dimension 'data'"),
        (Mesh(("pp",)), r"a `pipe` group also needs a `data` group.*dimension 'data'"),
    ],
    ids=["unknown", "twice", "no names", "replicate alone", "tensor alone", "pipe alone"],
)
def test_a_mesh_that_says_too_little_or_too_much_is_refused(mesh: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology.from_mesh(mesh)


GROUP: Any = object()


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"shard": GROUP}, "needs both `shard` and `replicate` groups, or neither"),
        ({"replicate": GROUP}, "needs both `shard` and `replicate` groups, or neither"),
        ({"expert": GROUP}, "needs both `expert` and `expert_data` groups, or neither"),
        ({"expert_data": GROUP}, "needs both `expert` and `expert_data` groups, or neither"),
        (
            dict.fromkeys(["shard", "replicate", "expert", "expert_data"], GROUP),
            "experts and replicated sharding together are not supported",
        ),
        ({"tensor": GROUP}, "a `tensor` group also needs a `data` group"),
        ({"pipe": GROUP}, "a `pipe` group also needs a `data` group"),
    ],
    ids=lambda value: " and ".join(value) if isinstance(value, dict) else "",
)
def test_half_a_topology_is_refused(groups: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(**groups)


@pytest.mark.parametrize("role", ["shard", "expert"])
def test_mics_needs_a_topology_without_groups_of_its_own(role: str) -> None:
    groups = {"shard": ["shard", "replicate"], "expert": ["expert", "expert_data"]}[role]
    topology = Topology(**dict.fromkeys(groups, GROUP))
    with pytest.raises(ValueError, match="mics_shard_size needs a topology without `shard` and `expert`"):
        topology.with_sub_groups(2)


def refused_by_initialize(comm: Any, stage: int, zero: dict[str, Any], names: tuple[str, ...] | None) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names) if names else None
    keys = config(stage, zero_optimization=zero)
    with pytest.raises(ValueError) as caught:
        zero_full.initialize(model=Net(), config=keys, mesh=mesh)
    comm.barrier()  # nobody leaves while others still connect the mesh
    return str(caught.value)


@pytest.mark.parametrize(
    ("stage", "zero", "names", "message"),
    [
        (
            1,
            {"mics_shard_size": 3},
            None,
            "the configuration cannot be used:\n  zero_optimization.mics_shard",
        ),
        (0, {}, ("replicate", "shard"), "stage 0 shards nothing"),
        (1, {"mics_shard_size": 2}, ("replicate", "shard"), "mics_shard_size needs a topology without"),
    ],
)
def test_every_rank_refuses_a_topology_that_cannot_be(
    stage: int, zero: dict[str, Any], names: tuple[str, ...] | None, message: str
) -> None:
    for answer in POOL.run(refused_by_initialize, 4, stage, zero, names):
        assert answer.startswith(message)


def thirds(comm: Any) -> None:
    Topology().with_sub_groups(3)


def test_shard_groups_that_do_not_divide_the_data_group_are_refused() -> None:
    with pytest.raises(RankError, match="mics_shard_size 3 does not divide the data-parallel world 4"):
        POOL.run(thirds, 4)


class Views(nn.Module):
    """Two parameters in one piece of memory, the second from `start` on."""

    def __init__(self, start: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        memory = torch.ones(8, dtype=dtype)
        self.first, self.second = nn.Parameter(memory[:4]), nn.Parameter(memory[start : start + 4])

    def forward(self, x: Tensor) -> Tensor:
        return ((self.first + self.second) * x[:, :4]).abs().mean()


@pytest.mark.parametrize("start", [0, 3])
def test_two_parameters_in_the_same_memory_are_refused_with_the_remedy(start: int) -> None:
    wanted = (
        r"(first and second|second and first) share memory .* assign the same nn\.Parameter to both modules"
    )
    with pytest.raises(ValueError, match=wanted):
        zero_full.initialize(model=Views(start), config=config(1))


def test_neighbours_in_one_piece_of_memory_are_not_in_the_same() -> None:
    engine, _, _, _ = zero_full.initialize(model=Views(4), config=config(1))
    engine.backward(engine(data(0, 0, 0)))
    engine.step()
    assert engine.was_step_applied() and not bool((engine.module.second == 1).any())


def test_parameters_that_are_not_floating_point_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"first is torch.complex64"):
        zero_full.initialize(model=Views(4, torch.complex64), config=config(1))


def test_an_expert_without_expert_groups_is_refused_by_name() -> None:
    model = Net()
    model.layers[0].weight.allreduce = False  # DeepSpeed's mark
    with pytest.raises(ValueError, match=r"layers.0.weight is marked as an expert, but .*topology=Topology"):
        zero_full.initialize(model=model, config=config(1))


@pytest.mark.parametrize(
    ("mark", "value", "predicate"),
    [
        ("allreduce", False, marked_as_expert),
        ("model_parallel", True, marked_as_split),
        ("tensor_model_parallel", True, marked_as_split),
    ],
)
def test_deepspeeds_and_megatrons_marks_are_understood(
    mark: str, value: bool, predicate: Callable[[str, nn.Parameter], bool]
) -> None:
    plain, marked, other = (nn.Parameter(torch.ones(1)) for _ in range(3))
    setattr(marked, mark, value)
    setattr(other, mark, not value)
    assert [predicate("p", p) for p in (plain, marked, other)] == [False, True, False]
