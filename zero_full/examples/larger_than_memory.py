"""Train a model that is larger than the memory of each of its processes.

    torchrun --nproc-per-node 4 -m zero_full.examples.larger_than_memory

Every process limits its memory to less than the model's size in fp32. So plain construction fails with an
out-of-memory error (`--plain` shows that). `zero_full.Init` allocates nothing, and after `initialize` every
process keeps only its shards: parameters, gradients and SGD's momentum, 3/4 of the model's bytes at 4
processes. This example needs Linux for memory limits and /proc.
"""

import argparse
import ctypes
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_full

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}},
    "gradient_clipping": 0.0,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": False,
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": 0,
    },
}


class Tower(nn.Module):
    """Model of equal linear layers in sequence."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean square of the output."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def in_use() -> int:
    """Return the bytes of data that this process has reserved, as counted for the limit."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData")) * 1024


def give_memory_back() -> None:
    """Make the C library return every large freed block to the system.

    By default it keeps blocks of up to 32 MiB, which is faster. But glibc before 2.38 cannot reuse a hole for
    an aligned block of the same size. So gathering one unit after the other would leave a hole for each.
    """
    m_mmap_threshold = -3
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 2**20)


def limit_memory(room: int) -> None:
    """Limit this process to `room` more bytes. Shared memory does not count."""
    resource.setrlimit(resource.RLIMIT_DATA, (in_use() + room, resource.RLIM_INFINITY))


def main() -> int:
    """Limit the memory, construct the model and train a few steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="construct without Init, which must fail")
    arguments = parser.parse_args()
    if resource is None or not Path("/proc/self/status").exists():
        parser.error("this example needs Linux, to limit its memory")
    torch.set_num_threads(1)
    give_memory_back()
    zero_full.init_distributed("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    model_mib = 4 * arguments.layers * (arguments.width + 1) * arguments.width // 2**20
    room_mib = model_mib * 95 // 100
    limit_memory(room_mib * 2**20)
    if rank == 0:
        print(f"the model has {model_mib} MiB, every process may take {room_mib} MiB more")
    torch.manual_seed(0)
    with zero_full.Init(enabled=not arguments.plain):
        model = Tower(arguments.width, arguments.layers)
    engine, _, _, _ = zero_full.initialize(model=model, config=CONFIG)
    for step in range(arguments.steps):
        loss = engine(torch.randn(4, arguments.width))
        engine.backward(loss)
        engine.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
