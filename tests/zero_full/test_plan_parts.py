"""What stands in for what a plan has not: the model's shadow, groups without ranks, late jobs, a watch."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zero_full.planned import BF16, Odd
from tests.zero_full.runs import config
from zero_full.comm.communicator import Communicator
from zero_full.comm.fake_ranks import FakeGroup
from zero_full.comm.lane import LazyLane, lane_for
from zero_full.comm.topology import Topology, ranks_of
from zero_full.comm.traffic import Traffic
from zero_full.plan import human, plan, plan_stages, side_by_side
from zero_full.plan.memory_tracker import MemoryTracker
from zero_full.plan.meta_model import begin_pass, meta_copy_of

META = torch.device("meta")


class Many(nn.Module):
    """Everything a model may do with its parameters."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(size))
        self.own.allreduce = False  # type: ignore[attr-defined]
        self.embedding = nn.Embedding(5, size)
        self.layers = nn.ModuleList([nn.Linear(size, size, bias=False)] * 2)
        self.listed = nn.ParameterList([torch.zeros(2), torch.zeros(3)])
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(size, 2, bias=False))
        self.head = nn.Linear(size, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(size, size).requires_grad_(False)
        self.register_buffer("steps", torch.zeros(7, dtype=torch.int64))
        self.register_parameter("nothing", None)
        self.lambda_that_no_copy_can_have = lambda: self

    def forward(self, x: Tensor) -> Tensor:
        """Never called here."""
        raise AssertionError


def refused(*given: Any) -> None:
    raise AssertionError("a hook of the user's was called")


def test_a_shadow_is_the_model_without_values_and_hooks() -> None:
    model = Many(4)
    model.layers[0].register_forward_hook(refused)
    model.own.register_hook(refused)
    shadow = meta_copy_of(model)
    assert [type(module) for module in shadow.modules()] == [type(module) for module in model.modules()]
    for mine, yours in (
        (shadow.named_parameters(remove_duplicate=False), model.named_parameters(remove_duplicate=False)),
        (shadow.named_buffers(), model.named_buffers()),
    ):
        described = [[(n, t.shape, t.dtype, t.requires_grad) for n, t in named] for named in (mine, yours)]
        assert described[0] == described[1]
    assert all(t.is_meta for t in (*shadow.parameters(), *shadow.buffers()))
    assert shadow.get_parameter("own").allreduce is False  # type: ignore[attr-defined]
    assert model.forward.__func__ is Many.forward and not any(p.is_meta for p in model.parameters())  # type: ignore[attr-defined]


def test_a_pretended_pass_brings_every_gradient_the_last_parameters_first() -> None:
    shadow, arrived = meta_copy_of(Many(4)), []
    trained = {name: p for name, p in shadow.named_parameters() if p.requires_grad}
    for name, param in trained.items():
        param.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    for _ in range(2):
        begin_pass(shadow)
        nn.Module.__call__(shadow, torch.zeros((), device=META)).backward()
        assert arrived == list(trained)[::-1]  # a tied one and a shared module's come once
        assert all(p.grad is not None and p.grad.shape == p.shape for p in trained.values())
        arrived.clear()


def test_models_that_no_copy_can_be_made_of_are_planned() -> None:
    model = Many(4)
    keys = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    assert plan(model, keys, 2, expert_parallel=2).parameters > 0


def test_a_pretended_group_counts_what_it_does_not_send() -> None:
    traffic, group = Traffic(), FakeGroup(range(8, 16), global_rank=11)
    by = Communicator(group, META, traffic)
    assert (by.rank, by.size, by.ranks) == (3, 8, list(range(8, 16)))
    whole = torch.empty(80, device=META)
    by.reduce_scatter(whole, by.slice_of(whole), 1, "a")
    by.all_gather(whole, "b")
    by.all_reduce(whole, 1, "c")
    by.all_to_all(whole, torch.empty_like(whole), "d")
    by.broadcast(whole, "e")
    assert dict(traffic.sent) == {
        "reduce_scatter": 280,
        "all_gather": 280,
        "all_reduce": 560,
        "all_to_all": 280,
    }
    assert by.sum_numbers(torch.tensor([1.0, 2.0]), "f").tolist() == [8.0, 16.0]
    assert by.gather_objects("me", "g") == ["me"] * 8
    inner, outer = Topology(data=group).sub_groups(2, "zero_hpz_partition_size")
    assert ranks_of(inner) == [10, 11] and ranks_of(outer) == [9, 11, 13, 15]


def test_late_jobs_are_done_in_order_when_somebody_waits() -> None:
    lane, done = lane_for(META, overlap=True), []
    assert isinstance(lane, LazyLane)
    first, second, third = (lane.submit(lambda n=n: done.append(n), [], [lane.producer()]) for n in range(3))
    assert done == []
    second.wait()
    assert done == [0, 1]
    first.wait()
    third.wait()
    assert done == [0, 1, 2]
    with torch.enable_grad():
        lane.submit(lambda: done.append(torch.is_grad_enabled()), [], []).wait()
    assert done[-1] is False


def test_a_watch_knows_the_most_at_a_time_of_what_does_not_stay() -> None:
    watch, kept = MemoryTracker(), []
    with watch:
        torch.empty(1000, device=META)  # for nothing that counts
        with watch.counting("a"):
            kept.append(torch.empty(10, device=META))
            passing = torch.empty(20, device=META)
            with watch.counting("b"):
                other = torch.empty(5, device=META, dtype=torch.int8)
            view = passing[:3].view(-1).add_(1)  # no memory of its own
            del passing, view
            passing = torch.empty(15, device=META)
            torch.empty((), device=META)
        del passing, other
    assert watch.peak("a") == 80 and watch.peak("b") == 5 and watch.peak("c") == 0
    whole = torch.empty(100, device=META)
    whole.untyped_storage().resize_(0)
    watch.begin([whole])
    with watch, watch.counting("gathered"):
        whole.untyped_storage().resize_(400)
        copy = whole.copy_(torch.empty(100, device=META)).clone()
        whole.untyped_storage().resize_(0)
        del copy
        assert watch.peak("gathered") == 800 and watch.peak("a") == 0


def test_who_asks_a_watch_for_a_value_is_told_one() -> None:
    number = torch.zeros(3, device=META).sum()
    with MemoryTracker():
        assert number.item() == 1 and float(number) == 1.0 and bool(number > 5)
    with pytest.raises(RuntimeError, match="meta"):
        number.item()


# What waits elsewhere ----------------------------------------------------------------------------


def test_what_waits_on_the_disk_is_told_apart_from_memory() -> None:
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": "nowhere"}}
    given = config(1, zero_optimization=zero, **BF16)
    plans = plan_stages(Odd(), given, 2)
    assert [each.disk > 0 for each in plans] == [False, True, True, True]
    each, on_cpu = plans[1], plan(Odd(), given, 2, device="cpu")
    assert each.disk == on_cpu.disk and each.read == each.written == 0, "all of it stays in memory"
    assert on_cpu.host == each.disk
    beside = plan(Odd(), config(1, **BF16), 2)
    assert each.host == on_cpu.host + beside.master * 3 // 2, "gradients and copies of parameters, too"
    assert beside.master + beside.moments <= each.disk < beside.master + beside.moments + 3 * 4096
    table = each.table()
    assert f"offloaded to disk{human(each.disk):>26}{each.disk:>24,}" in table
    assert "written to the disk in a step" in table and "written to" not in beside.table()
    assert all(f"offloaded to {place}" in side_by_side(plans) for place in ("disk", "host"))
    assert json.loads(each.as_json())["written"] == each.written
