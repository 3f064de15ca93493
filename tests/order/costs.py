"""What a step costs a device: the operations that it starts, and the bytes that these read and write."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zero_full
from tests.order.device import DEVICE
from tests.order.echo import on_an_accelerator
from tests.order.trace import MAKES, WITHOUT_ACCESS, Recorder
from tests.zero_full.runs import config
from zero_full.comm.fake_ranks import FakeGroup
from zero_full.comm.topology import Topology

WIDTH, DEPTH, STEPS = 128, 4, 3
OVERWRITES = ("copy_", "zero_", "fill_")


class Costs(TorchDispatchMode):
    """Counts operations that read or write values, and bytes by name. Views cost nothing.

    An argument that is changed in place counts twice, and once if it is overwritten. What torch declares as
    changed counts as changed: of a fused Adam, gradients too, which it would unscale.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.nbytes = Counter[str](), Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if func in WITHOUT_ACCESS or func in MAKES:
            return results
        name, nbytes, acts, known = func.overloadpacket.__name__, 0, False, set[int]()
        for tensor, writes in _given(func, args, kwargs or {}):
            known.add(tensor.untyped_storage()._cdata)
            nbytes += tensor.nbytes * (1 + (writes and name not in OVERWRITES))
            acts |= writes
        for tensor in _tensors(results):
            if tensor.untyped_storage()._cdata not in known:
                nbytes, acts = nbytes + tensor.nbytes, True
        if acts:
            self.operations[name] += 1
            self.nbytes[name] += nbytes
        return results


def _given(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """Every tensor that an operation is given, and whether it is written."""
    declared = func._schema.arguments
    by_name = {argument.name: argument for argument in declared}
    named = [*zip(declared, args, strict=False), *((by_name[key], value) for key, value in kwargs.items())]
    for argument, value in named:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        yield from ((tensor, writes) for tensor in _tensors(value))


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _tensors(each)


def cost_of_a_step(stage: int, keys: Mapping[str, Any]) -> tuple[int, int]:
    """Operations of a third step on one of two ranks, and bytes for each element that this rank owns."""
    recorder = Recorder()
    with on_an_accelerator(recorder):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
        for param in model.parameters():
            recorder.put_on_device(param)
        zero = {"reduce_bucket_size": 10**9, "stage3_param_persistence_threshold": 0}
        engine, optimizer, _, _ = zero_full.initialize(
            model=model,
            config=config(stage, **{**keys, "zero_optimization": zero}),
            topology=Topology(data=FakeGroup(range(2), 0)),
            dist_init_required=False,
        )
        dtype = optimizer.sharded.flats[0].dtype
        for _ in range(STEPS):
            x = torch.full((2, WIDTH), 0.1, dtype=dtype, device=DEVICE)
            engine.backward(engine(x).float().square().mean())
            with Costs() as costs:
                optimizer.step()
            optimizer.zero_grad()
        owned = sum(group.layout.shard_numel for group in optimizer.trained)
    return costs.operations.total(), round(costs.nbytes.total() / owned)
