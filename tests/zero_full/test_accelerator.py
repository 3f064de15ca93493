"""What scripts for DeepSpeed ask `get_accelerator()`: devices, memory, seeds."""

import inspect
from unittest import mock

import pytest
import torch

import zero_full
from zero_full.engine import accelerator
from zero_full.engine.accelerator import INSTEAD, CurrentAccelerator


@pytest.mark.skipif(torch.accelerator.is_available(), reason="of a host without accelerator")
def test_without_one_it_is_the_cpu() -> None:
    here = zero_full.get_accelerator()
    assert (here.is_available(), here.device_count(), here.current_device()) == (False, 1, 0)
    assert (here.device_name(), here.device_name(3), here.current_device_name()) == ("cpu",) * 3
    assert here.communication_backend_name() == "gloo" and here.is_synchronized_device()
    here.set_device(5), here.synchronize(), here.empty_cache(), here.reset_peak_memory_stats()
    peak = here.memory_allocated()
    with mock.patch.object(
        accelerator, "peak_memory", lambda device: peak
    ):  # which may grow between two calls
        assert here.max_memory_allocated() == here.memory_allocated() == here.max_memory_reserved() > 10**7
    tensor = torch.zeros(3, device=here.device_name())
    assert here.on_accelerator(tensor) and here.pin_memory(tensor) is tensor and not here.is_pinned(tensor)
    drawn = []
    assert here.random() is torch.random and here.memory_reserved() > 10**7
    for seed in (here.manual_seed, here.manual_seed_all):
        seed(7)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn) and here.is_bf16_supported() and here.is_fp16_supported()


def test_with_one_it_asks_torch() -> None:
    device = torch.device("cuda")
    answers = {
        "current_accelerator": device,
        "device_count": 4,
        "current_device_index": 2,
        "memory_allocated": 9,
    }
    calls = ("set_device_index", "synchronize", "empty_cache", "reset_peak_memory_stats")
    with (
        mock.patch.multiple(
            torch.accelerator,
            **{name: mock.Mock(return_value=value) for name, value in answers.items()},
            **{name: mock.Mock() for name in calls},
        ),
        mock.patch.object(torch.cuda, "manual_seed_all") as seeded,
    ):
        here = zero_full.get_accelerator()
        assert (here.device_count(), here.current_device_name(), here.device_name()) == (4, "cuda:2", "cuda")
        assert here.device_name(1) == "cuda:1" and here.communication_backend_name() == "nccl"
        here.set_device(3), here.synchronize(1), here.manual_seed_all(5)
        assert here.memory_allocated() == 9 and here.Stream is torch.cuda.Stream
        torch.accelerator.set_device_index.assert_called_once_with(3)  # type: ignore[attr-defined]
        torch.accelerator.synchronize.assert_called_once_with(1)  # type: ignore[attr-defined]
        seeded.assert_called_once_with(5)


def test_what_it_lacks_names_the_call_of_torch() -> None:
    here = CurrentAccelerator()
    with pytest.raises(AttributeError, match=r"has no amp\. Use torch\.amp\.autocast"):
        here.amp()
    with pytest.raises(AttributeError, match=r"has no zzz\. Use torch\.accelerator, or torch\."):
        here.zzz()
    assert not [name for name in INSTEAD if inspect.getattr_static(CurrentAccelerator, name, None)]
    assert not hasattr(here, "_peak") and "CurrentAccelerator(" in repr(here)
