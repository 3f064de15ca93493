"""DeepSpeed's `get_accelerator()` over torch: for scripts that ask it for devices, memory and streams."""

from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_full.engine.metrics import peak_memory

INSTEAD = {  # names of DeepSpeed's accelerator -> the call of torch
    "available_memory": "torch.accelerator.get_memory_info()[0]",
    "total_memory": "torch.accelerator.get_memory_info()[1]",
    "default_generator": "torch.Generator(device), or default_generators of torch's module for the device",
    "amp": 'torch.amp.autocast(device_type="...")',
    "lazy_call": "call the function",
    "op_builder_dir": "zero_full builds its operators itself: python -m zero_full build",
    "create_op_builder": "zero_full builds its operators itself: python -m zero_full build",
    "get_op_builder": "zero_full builds its operators itself: python -m zero_full build",
    **dict.fromkeys(
        (
            *("BFloat16Tensor", "ByteTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor"),
            "LongTensor",
        ),
        "torch.tensor(values, dtype=..., device=...)",
    ),
    **dict.fromkeys(
        ("create_graph", "capture_to_graph", "replay_graph"), "torch.cuda.CUDAGraph and torch.cuda.graph"
    ),
    **dict.fromkeys(("range_push", "range_pop"), "torch.profiler.record_function"),
}


class CurrentAccelerator:
    """The accelerator of this process with the methods of DeepSpeed's; the CPU on a host without one.

    Names that this class lacks are those of torch's module for the device, such as `torch.cuda.Stream`.
    """

    def __init__(self) -> None:
        found = torch.accelerator.current_accelerator(check_available=True)
        self.type = "cpu" if found is None else found.type

    def __repr__(self) -> str:
        return f"CurrentAccelerator({self.current_device_name()!r})"

    # Devices ------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        """Return whether this host has an accelerator that torch can use."""
        return self.type != "cpu"

    def is_synchronized_device(self) -> bool:
        """Return whether operations have ended when they return: on the CPU."""
        return not self.is_available()

    def device_count(self) -> int:
        """Return the number of devices; 1 for the CPU."""
        return torch.accelerator.device_count() if self.is_available() else 1

    def current_device(self) -> int:
        """Return the index of the current device; 0 for the CPU."""
        return torch.accelerator.current_device_index() if self.is_available() else 0

    def set_device(self, index: int) -> None:
        """Make a device the current one. The CPU has no other."""
        if self.is_available():
            torch.accelerator.set_device_index(index)

    def device_name(self, index: int | None = None) -> str:
        """Return the name of a device, such as "cuda:0"; without an index, such as "cuda"."""
        return self.type if index is None or not self.is_available() else f"{self.type}:{index}"

    def current_device_name(self) -> str:
        """Return the name of the current device, such as "cuda:0" or "cpu"."""
        return self.device_name(self.current_device())

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed for these devices, such as "nccl" or "gloo"."""
        return dist.get_default_backend_for_device(self.type)

    def synchronize(self, index: int | None = None) -> None:
        """Wait for all operations of a device. Operations of the CPU have ended already."""
        if self.is_available():
            torch.accelerator.synchronize(index)

    # Random numbers -----------------------------------------------------------------------------

    def random(self) -> ModuleType:
        """Return the module `torch.random`, which has the functions for every device."""
        return torch.random

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of the current device; on the CPU torch's default generator."""
        self._seed("manual_seed", seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices; on the CPU torch's default generator."""
        self._seed("manual_seed_all", seed)

    def _seed(self, name: str, seed: int) -> None:
        module = torch.get_device_module(self.type)
        (getattr(module, name) if self.is_available() else torch.manual_seed)(seed)

    # Memory -------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Return cached memory of torch's allocator to the device."""
        if self.is_available():
            torch.accelerator.empty_cache()

    def memory_allocated(self, index: int | None = None) -> int:
        """Return the bytes of tensors on a device; on the CPU the peak of the process's memory."""
        return self._bytes("memory_allocated", index)

    def max_memory_allocated(self, index: int | None = None) -> int:
        """Return the peak of `memory_allocated`."""
        return self._bytes("max_memory_allocated", index)

    def memory_reserved(self, index: int | None = None) -> int:
        """Return the bytes that torch's allocator holds; on the CPU as `memory_allocated`."""
        return self._bytes("memory_reserved", index)

    def max_memory_reserved(self, index: int | None = None) -> int:
        """Return the peak of `memory_reserved`."""
        return self._bytes("max_memory_reserved", index)

    def _bytes(self, name: str, index: int | None) -> int:
        if self.is_available():
            return int(getattr(torch.accelerator, name)(index))
        return peak_memory(torch.device("cpu")) or 0

    def reset_peak_memory_stats(self, index: int | None = None) -> None:
        """Reset a device's peak of memory. The CPU's peak stays."""
        if self.is_available():
            torch.accelerator.reset_peak_memory_stats(index)

    # Types and tensors --------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        """Return whether the device computes in bf16."""
        ask = getattr(torch.get_device_module(self.type), "is_bf16_supported", None)
        return True if ask is None else bool(ask())

    def is_fp16_supported(self) -> bool:
        """Return whether the device computes in fp16."""
        return True

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """Return a copy in page-locked memory; on a host without accelerator the tensor itself."""
        return tensor.pin_memory() if self.is_available() else tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in page-locked memory."""
        return tensor.is_pinned()

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies on a device of this kind."""
        return tensor.device.type == self.type

    def __getattr__(self, name: str) -> Any:
        module = torch.get_device_module(self.__dict__.get("type", "cpu"))
        if not name.startswith("_") and name not in INSTEAD and hasattr(module, name):
            return getattr(module, name)
        instead = INSTEAD.get(name, f"torch.accelerator, or {module.__name__}")
        raise AttributeError(f"get_accelerator() has no {name}. Use {instead}")


def get_accelerator() -> CurrentAccelerator:
    """Return the accelerator of this process, with the methods that scripts for DeepSpeed call."""
    return CurrentAccelerator()
