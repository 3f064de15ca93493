"""Writes `deepspeed_compressed.safetensors` with the compressed optimizers of the real DeepSpeed 0.19.6.

Run by hand, never by a test; 0.19.7 and later do not have them any more:

    python -m venv build/deepspeed && . build/deepspeed/bin/activate
    pip install torch==2.13.0 numpy safetensors setuptools wheel packaging psutil ninja
    DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed==0.19.6
    DS_ACCELERATOR=cpu python -m tests.zero_full.deepspeed_compressed

What runs is DeepSpeed's own `step` and its own `CompressedBackend.compressed_allreduce`, over gloo, on two
ranks. Four things are not its own:

* packing bits. DeepSpeed has that for CUDA (by cupy) and for Intel's GPUs, not for a CPU; numpy packs here.
* gathering scales. DeepSpeed gathers numbers without dimensions into tensors of one element: NCCL takes that,
  and gloo does not, so `Gathering` gives them their dimension.
* the engine. It would average gradients of the whole model over the ranks in each step in which
  `enable_backward_allreduce` is set, and not in the others: `Engine` and `train` do that with one tensor.
* `initialize` is set before the first step. DeepSpeed's first step of an optimizer trains nothing: it only
  makes room, counts itself, and so makes every later number of a step larger by one.

A case is one parameter for the Adams (they compress each tensor by itself, so one tensor is one buffer), and
two for LAMB, whose momenta are compressed as one. All gradients and results are in the file.
"""

import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import save_file
from torch import Tensor

FILE = Path(__file__).with_suffix(".safetensors")
WORLD, NUMEL = 2, 32  # a multiple of 8 bits and the ranks, so that DeepSpeed pads nothing
LR = 0.02


@dataclass(frozen=True)
class Case:
    """One run of one optimizer."""

    type: str  # DeepSpeed's name of it in a JSON file
    steps: int
    params: dict[str, Any] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = ((NUMEL,),)
    masked: bool = False  # every third element has no gradient, and a mask says so


ZERO_ONE = {"var_freeze_step": 14, "var_update_scaler": 2, "local_step_scaler": 5, "local_step_clipper": 4}
ONE_BIT = {"freeze_step": 6}
LAMB = {**ONE_BIT, "coeff_beta": 0.0}  # the last coefficient instead of a mean that begins at zero
CASES = {
    "zero_one": Case("ZeroOneAdam", 36, ZERO_ONE),
    "zero_one_masked": Case("ZeroOneAdam", 36, ZERO_ONE, masked=True),
    "zero_one_decay": Case("ZeroOneAdam", 36, {**ZERO_ONE, "weight_decay": 0.1}),
    "one_bit": Case("OneBitAdam", 20, ONE_BIT),
    "one_bit_masked": Case("OneBitAdam", 20, ONE_BIT, masked=True),
    "one_bit_decay": Case("OneBitAdam", 20, {**ONE_BIT, "weight_decay": 0.1}),
    "lamb": Case("OneBitLamb", 20, LAMB, ((4, 4), (16,))),
    "lamb_decay": Case("OneBitLamb", 20, {**LAMB, "weight_decay": 0.1}, ((4, 4), (16,))),
    "lamb_mean": Case("OneBitLamb", 20, ONE_BIT, ((4, 4), (16,))),
}


def learning_rate(step: int) -> float:
    """Of the step with this number, from 1 on: it changes, so that who uses the wrong one is seen.

    Not while 0/1 Adam's ranks walk alone: DeepSpeed adds errors of one rate to walks at another.
    """
    return LR * min(1.0, step / 5) / (1 + 0.02 * min(step, 14))


def inputs() -> dict[str, Tensor]:
    """The first parameters, and every rank's gradient at every step: a drift, and noise of its own."""
    generator = torch.Generator().manual_seed(18)
    sizes = 10 ** torch.linspace(-2, 0, NUMEL)[torch.randperm(NUMEL, generator=generator)]
    first, drift = (torch.randn(NUMEL, generator=generator) for _ in range(2))
    noise = torch.randn(WORLD, max(case.steps for case in CASES.values()), NUMEL, generator=generator)
    return {"first": first, "gradients": sizes * (drift + noise), "mask": torch.arange(NUMEL) % 3 != 0}


class Packer:
    """What DeepSpeed's `PackbitsBuilder` would have built: a bit is 1 where a number is not negative."""

    def packbits(self, numbers: Tensor, numel: int, rank: int) -> Tensor:
        """Eight to a byte, the first in its highest bit."""
        return torch.from_numpy(np.packbits(numbers.numpy().reshape(-1) >= 0))

    def unpackbits(self, packed: Tensor, numel: int, rank: int) -> Tensor:
        """1 and -1."""
        return torch.from_numpy(np.unpackbits(packed.numpy())).float().mul_(2).sub_(1)


class Gathering:
    """DeepSpeed's `comm`, whose `all_gather` does not mind a missing dimension."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def all_gather(self, tensors: list[Tensor], tensor: Tensor, group: Any) -> None:
        """Everyone's, by rank."""
        self.comm.all_gather(tensors, tensor.view(tensors[0].shape), group=group)


class Engine:
    """What the optimizers ask of DeepSpeed's engine."""

    local_rank, mpu, enable_backward_allreduce = 0, None, True


def optimizer_of(case: Case, params: list[Tensor]) -> Any:
    """DeepSpeed's, with a packer that runs here, and without the step that trains nothing."""
    from deepspeed.runtime.comm import compressed
    from deepspeed.runtime.fp16.onebit.adam import OnebitAdam
    from deepspeed.runtime.fp16.onebit.lamb import OnebitLamb
    from deepspeed.runtime.fp16.onebit.zoadam import ZeroOneAdam

    class Builder:
        def load(self) -> Packer:
            return Packer()

    compressed.PackbitsBuilder = Builder
    if not isinstance(compressed.dist, Gathering):
        compressed.dist = Gathering(compressed.dist)
    kind = {"ZeroOneAdam": ZeroOneAdam, "OneBitAdam": OnebitAdam, "OneBitLamb": OnebitLamb}[case.type]
    made = kind(params, deepspeed=Engine(), comm_backend_name="compressed", **case.params)
    made.initialize = True
    return made


def train(case: Case) -> dict[str, Tensor]:
    """This rank's parameters after every step, and its averages at the end."""
    given, rank = inputs(), dist.get_rank()
    mask = given["mask"].float() if case.masked else torch.ones(NUMEL)
    sizes = [torch.Size(shape).numel() for shape in case.shapes]
    pieces = zip(given["first"].split(sizes), case.shapes, strict=True)
    params = [piece.view(shape).clone().requires_grad_() for piece, shape in pieces]
    optimizer = optimizer_of(case, params)
    if case.masked:
        optimizer.param_groups[0]["exp_avg_mask"] = mask
    seen, exact = [], []
    for number in range(case.steps):
        gradient = given["gradients"][rank, number] * mask
        exact.append(optimizer.deepspeed.enable_backward_allreduce)
        if exact[-1]:
            dist.all_reduce(gradient)
            gradient /= WORLD
        for p, piece in zip(params, gradient.split(sizes), strict=True):
            p.grad = piece.view_as(p)
        optimizer.param_groups[0]["lr"] = learning_rate(number + 1)
        optimizer.step()
        seen.append(_flat(params))
    state = [optimizer.state[p] for p in params]
    averages = {name: _flat([of[name] for of in state]) for name in ("exp_avg", "exp_avg_sq")}
    return {"params": torch.stack(seen), "exact": torch.tensor(exact), **averages}


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).clone()


def rank_main(rank: int, folder: str) -> None:
    """The life of a rank."""
    import deepspeed

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch, about the ways in which DeepSpeed calls it
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    deepspeed.init_distributed("gloo", verbose=False)
    results = {name: train(case) for name, case in CASES.items()}
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Write the file."""
    import deepspeed

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (folder,), WORLD)
        ranks = [torch.load(f"{folder}/{rank}.pt") for rank in range(WORLD)]
    written = inputs()
    for name in CASES:
        for key in ranks[0][name]:
            written[f"{name}/{key}"] = torch.stack([rank[name][key] for rank in ranks])
    save_file(written, FILE, {"deepspeed": deepspeed.__version__.strip(), "torch": torch.__version__})
    return 0


if __name__ == "__main__":
    sys.exit(main())
