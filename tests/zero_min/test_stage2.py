"""What only stage 2 does: gradients leave in the middle of backward, bucket by bucket."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from zero_min import Stage1, Stage2, run_world
from zero_min.comm import Comm
from zero_min.stage1 import FlatGroup
from zero_min.stage2 import make_buckets


def chain(depth: int = 5, width: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))


def whole_gradients(comm: Comm, stage_class: type, bucket_size: int) -> tuple[list[int], int]:
    """How many whole gradients exist each time backward reaches the input of a layer, and afterwards."""
    model = chain()
    options = {"bucket_size": bucket_size} if stage_class is Stage2 else {}
    stage = stage_class(model, comm, **options)
    seen: list[int] = []
    params = list(model.parameters())

    def look(_: Tensor) -> None:
        seen.append(sum(p.grad is not None for p in params))

    x = torch.ones(2, 8, requires_grad=True)
    for layer in model:
        x.register_hook(look)
        x = layer(x)
    stage.backward(x.sum())
    return seen, sum(p.grad is not None for p in params)


def test_gradients_are_gone_before_backward_ends() -> None:
    kept = run_world(whole_gradients, 2, Stage1, 0)[0]
    one_layer_a_bucket = run_world(whole_gradients, 2, Stage2, 64)[0]
    two_layers_a_bucket = run_world(whole_gradients, 2, Stage2, 128)[0]
    assert max(kept[0]) >= 4 and kept[1] == 5  # stage 1 piles them up
    assert max(one_layer_a_bucket[0]) <= 1 and one_layer_a_bucket[1] == 0
    assert max(two_layers_a_bucket[0]) <= 2 and two_layers_a_bucket[1] == 0


@pytest.mark.parametrize(("bucket_size", "buckets"), [(1, 5), (64, 5), (128, 3), (10_000, 1)])
def test_every_bucket_is_one_collective(bucket_size: int, buckets: int) -> None:
    def body(comm: Comm) -> int:
        model = chain()
        stage = Stage2(model, comm, bucket_size=bucket_size)
        comm.ledger.clear_traffic()
        stage.backward(model(torch.ones(1, 8)).sum())
        return [event.what for event in comm.ledger.events].count("reduce_scatter")

    assert run_world(body, 2) == [buckets] * 2


@given(st.lists(st.integers(0, 30), min_size=1, max_size=10), st.integers(1, 40))
def test_buckets_hold_every_parameter_once_in_order(sizes: list[int], bucket_size: int) -> None:
    params = [nn.Parameter(torch.zeros(n)) for n in sizes]

    def body(comm: Comm) -> None:
        flat = FlatGroup(params, comm, lambda own: own)
        buckets = make_buckets([flat], params[::-1], bucket_size)
        assert [w.param for bucket in buckets for w in bucket.windows] == params[::-1]
        for bucket in buckets:
            total = sum(w.param.numel() for w in bucket.windows)
            largest = max(w.param.numel() for w in bucket.windows)
            assert total <= max(bucket_size, largest)  # only a tensor larger than a bucket may exceed it

    run_world(body, 1)


def test_a_bucket_waits_its_turn_so_that_all_ranks_reduce_the_same_one() -> None:
    """The last layer is not used, so its bucket, the first, leaves only when backward is over."""

    def body(comm: Comm) -> list[str]:
        model = chain()
        stage = Stage2(model, comm, bucket_size=64)
        comm.ledger.clear_traffic()
        loss = model[:-1](torch.ones(1, 8)).sum()
        loss.backward()
        comm.ledger.note("backward is over")
        stage.step()
        return [event.what for event in comm.ledger.events][:2]

    assert run_world(body, 2) == [["backward is over", "reduce_scatter"]] * 2
