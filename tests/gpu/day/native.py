"""The collectives of the `Native` transport over a group of size one: what NCCL takes, without a second card.

A group of one rank computes nothing: every collective leaves or copies what is there. But NCCL checks types,
addresses and streams as for many ranks, and queues its kernels.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.day.place import Place
from tests.gpu.day.rows import STAND_IN, finish
from tests.worlds import free_port
from zero_full.comm.transport import Native, Splits

NUMEL = 1_000_003
SUMMED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOVED = (*SUMMED, torch.uint8, torch.int64)
STREAMS = 3
SLEEP = 20_000_000  # cycles of the device: about 10 ms


def check(place: Place) -> None:
    """Every collective in every type, on three streams at once, and without elements."""
    backend = "nccl" if place.device.type == "cuda" else "gloo"
    address = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group(backend, init_method=address, rank=0, world_size=1)
    stand_in = {} if backend == "nccl" else {STAND_IN: "gloo"}
    numel = 1003 if place.tiny else NUMEL
    wrong = list[str]()

    def say(name: str, dtype: torch.dtype, fine: bool) -> None:
        named = str(dtype).removeprefix("torch.")
        place.say(collective=name, type=named, numel=numel, fine=fine, **stand_in)
        wrong.extend([] if fine else [f"{name} of {named}"])

    group = dist.group.WORLD
    assert group is not None
    transport = Native(group)
    for dtype in MOVED:
        for name, (collective, factor) in collectives(transport, dtype).items():
            want = numbers(numel, dtype, place.device)
            got = collective(want.clone())
            say(name, dtype, torch.equal(got, want if factor == 1 else want * factor))
    for name, fine in without_elements(transport, place.device).items():
        say(name, torch.float32, fine)
    say(f"on {STREAMS} streams at once", torch.float32, on_streams(place, numel))
    if wrong:
        raise ArithmeticError(f"another result than its input: {', '.join(wrong)}")


def numbers(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Small whole numbers, which every type has."""
    return (torch.arange(numel, device=device) % 100).to(dtype)


Collective = Callable[[Tensor], Tensor]


def collectives(transport: Native, dtype: torch.dtype) -> dict[str, tuple[Collective, float]]:
    """By name: a collective of a flat tensor that returns its result, and its factor. Sums need floats."""

    def in_place(whole: Tensor) -> Tensor:
        transport.reduce_scatter(whole, whole, 1)
        return whole

    def into_another(whole: Tensor) -> Tensor:
        out = torch.full_like(whole, 77)
        transport.reduce_scatter(whole, out, 2)
        return out

    def into_fp32(whole: Tensor) -> Tensor:
        out = torch.full_like(whole, 77, dtype=torch.float32)
        transport.reduce_scatter(whole, out, 1)
        return out.to(dtype)

    def all_gather(whole: Tensor) -> Tensor:
        transport.all_gather(whole)
        return whole

    def all_reduce(whole: Tensor) -> Tensor:
        transport.all_reduce(whole, 2)
        return whole

    def sum_numbers(whole: Tensor) -> Tensor:
        transport.sum_numbers(whole)
        return whole

    def broadcast(whole: Tensor) -> Tensor:
        transport.broadcast(whole)
        return whole

    def all_to_all(whole: Tensor) -> Tensor:
        received = torch.full_like(whole, 77)
        transport.all_to_all(whole, received, Splits.even(whole.numel(), 1))
        return received

    sums: dict[str, tuple[Collective, float]] = {
        "reduce-scatter in place": (in_place, 1),
        "reduce-scatter, divided by 2": (into_another, 0.5),
        "reduce-scatter into fp32": (into_fp32, 1),
        "all-reduce, divided by 2": (all_reduce, 0.5),
        "sum of a few numbers": (sum_numbers, 1),
    }
    moves: dict[str, tuple[Collective, float]] = {
        "all-gather in place": (all_gather, 1),
        "broadcast": (broadcast, 1),
        "all-to-all": (all_to_all, 1),
    }
    return {**(sums if dtype in SUMMED else {}), **moves}


def without_elements(transport: Native, device: torch.device) -> dict[str, bool]:
    """Collectives of empty tensors, as a rank has them that owns or sends nothing. True: they return."""
    empty = torch.empty(0, device=device)
    transport.all_to_all(empty, empty.clone(), Splits([0], [0], 0))
    transport.all_gather(empty)
    transport.reduce_scatter(empty, empty.clone(), 1)
    finish(device)
    return {"all-to-all with splits of 0": True, "all-gather and reduce-scatter of 0": True}


def on_streams(place: Place, numel: int) -> bool:
    """Queue collectives of three groups on a stream each, behind work of that stream that takes its time."""
    on_gpu = place.device.type == "cuda"
    transports = [Native(dist.new_group([0])) for _ in range(STREAMS)]
    streams: list[Any] = [torch.cuda.Stream(place.device) if on_gpu else None for _ in range(STREAMS)]
    tensors = [torch.zeros(numel, device=place.device) for _ in range(STREAMS)]
    results = [torch.zeros(numel, device=place.device) for _ in range(STREAMS)]
    finish(place.device)
    for number, (transport, stream) in enumerate(zip(transports, streams, strict=True)):
        with torch.cuda.stream(stream) if on_gpu else contextlib.nullcontext():
            if on_gpu:
                torch.cuda._sleep((STREAMS - number) * SLEEP)  # the first one is the last to end
            tensors[number].fill_(number + 1)
            transport.all_reduce(tensors[number], 1)
            transport.reduce_scatter(tensors[number], results[number], 1)
            transport.all_gather(results[number])
    finish(place.device)
    return all(bool((result == number + 1).all()) for number, result in enumerate(results))
