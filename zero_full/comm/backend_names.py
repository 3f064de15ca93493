"""`comm_backend_name`: what a process group of that backend would lack here.

DeepSpeed has a class for each of these names. Here there is one `CompressedReduce` over whatever group it is
given, so the name decides nothing. It says what its author counts on, and that can be looked up.
"""

import torch
import torch.distributed as dist

LIBRARIES = {"nccl": "NCCL", "gloo": "gloo", "mpi": "MPI"}  # torch is built with them, or without
NAMES = (*LIBRARIES, "hccl")


def missing_for(name: str) -> str:
    """Why there can be no group of this backend in this process; empty if there can."""
    if name not in NAMES:
        raise ValueError(f"comm_backend_name {name!r}: it can be {', '.join(NAMES)}")
    if name in LIBRARIES and not dist.is_backend_available(name):
        return f"{name}: this torch was built without {LIBRARIES[name]}"
    if name == "nccl" and not torch.cuda.is_available():
        return "nccl: there is no CUDA device"
    if name == "hccl" and not dist.is_backend_available(name):
        return "hccl: torch_npu, which brings it, is not installed or not imported"
    return ""
