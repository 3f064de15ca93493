"""`comm_backend_name`: check that the backend which a configuration names can be used.

DeepSpeed has a class for each of these names. Here one `CompressedReduce` works over any process group, so
the name selects nothing. It states which backend the configuration expects, and that can be checked.
"""

import torch
import torch.distributed as dist

LIBRARIES = {"nccl": "NCCL", "gloo": "gloo", "mpi": "MPI"}  # that torch may be built with
NAMES = (*LIBRARIES, "hccl")


def missing_for(name: str) -> str:
    """Why this process cannot open a group of this backend; an empty string if it can."""
    if name not in NAMES:
        raise ValueError(f"comm_backend_name {name!r}: it can be {', '.join(NAMES)}")
    if name in LIBRARIES and not dist.is_backend_available(name):
        return f"{name}: this torch was built without {LIBRARIES[name]}"
    if name == "nccl" and not torch.cuda.is_available():
        return "nccl: there is no CUDA device"
    if name == "hccl" and not dist.is_backend_available(name):
        return "hccl: torch_npu, which brings it, is not installed or not imported"
    return ""
