"""An accelerator that is not there, as torch shows one, and threads that run when they are asked to.

The package under test is as it is. What it asks torch for is answered here: on which device a tensor is, a
tensor on another device, streams and events. All memory is the CPU's, and `Recorder` knows which of it would
be the device's. An operation with tensors of both is an error, as in torch.

A job of a thread is run where it is submitted, or as late as it can be, where somebody waits for it
(`Recorder.late`). What may happen in between follows from the record.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # made while torch.Event is replaced, its classes would extend the replacement
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.order.trace import BYTES, Recorder, SimEvent, here
from zero_full.kernels.files import Failure, Span
from zero_full.offload import BlockTier, spill_file
from zero_full.offload.spill_file import SpillFile, whole_pages

DEVICE, CPU = torch.device("cuda", 99), torch.device("cpu")
DEVICE_OF, IS_CPU, IS_CUDA = (getattr(Tensor, name).__get__ for name in ("device", "is_cpu", "is_cuda"))


class Places(TorchFunctionMode):
    """Shows torch's callers which tensors are on the device, and makes and copies tensors there."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.answers: Mapping[Any, Callable[..., Any]] = {
            DEVICE_OF: self._device,
            IS_CPU: lambda tensor: not recorder.is_on_device(tensor),
            IS_CUDA: recorder.is_on_device,
            Tensor.to: self._to,
            Tensor.cpu: self._cpu,
            Tensor.cuda: lambda tensor, **how: self._moved(tensor, DEVICE),
            Tensor.tolist: partial(self._read, Tensor.tolist),
            Tensor.numpy: partial(self._read, Tensor.numpy),
            Tensor.pin_memory: self._pin,
            Tensor.is_pinned: lambda tensor, *_: tensor.untyped_storage()._cdata in recorder.locked,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self.answers:
            return self.answers[func](*args, **kwargs)
        if not kwargs.keys() & {"device", "pin_memory"}:
            return func(*args, **kwargs)
        locks = kwargs.pop("pin_memory", False)
        made = self._made(torch.device(kwargs.pop("device", None) or CPU), func, *args, **kwargs)
        if locks:
            self.recorder.locked.add(made.untyped_storage()._cdata)
        return made

    def _made(self, device: torch.device, make: Callable[..., Any], *args: Any, **how: Any) -> Any:
        recorder = self.recorder
        recorder.makes_on_device = device == DEVICE
        try:
            made = make(*args, **how, device=CPU)
        finally:
            recorder.makes_on_device = None
        if device == DEVICE:
            recorder.put_on_device(made)
        return made

    def _device(self, tensor: Tensor) -> torch.device:
        return DEVICE if self.recorder.is_on_device(tensor) else CPU

    def _to(self, tensor: Tensor, *args: Any, **how: Any) -> Tensor:
        """All forms of `Tensor.to`."""
        device, dtype = how.get("device"), how.get("dtype")
        flags = [each for each in args if isinstance(each, bool)]
        for each in args:
            if isinstance(each, Tensor):
                device, dtype = self._device(each), each.dtype
            elif isinstance(each, torch.dtype):
                dtype = each
            elif isinstance(each, (torch.device, str)):
                device = each
        non_blocking = how.get("non_blocking", bool(flags) and flags[0])
        copy = how.get("copy", len(flags) > 1 and flags[1])
        device = self._device(tensor) if device is None else torch.device(device)
        return self._moved(tensor, device, dtype or tensor.dtype, non_blocking, copy)

    def _moved(
        self,
        tensor: Tensor,
        device: torch.device,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        copy: bool = False,
    ) -> Tensor:
        if device == self._device(tensor):
            return tensor.to(dtype or tensor.dtype, copy=copy)
        made = self._made(device, torch.empty_like, tensor, dtype=dtype)
        return made.copy_(tensor, non_blocking=non_blocking)  # type: ignore[no-any-return]

    def _cpu(self, tensor: Tensor) -> Tensor:
        """Who asks for this will read it, perhaps by its address, of which no operation tells."""
        if not self.recorder.is_on_device(tensor):
            self.recorder.host_reads(tensor)
        return self._moved(tensor, CPU)

    def _read(self, read: Callable[[Tensor], Any], tensor: Tensor, *args: Any) -> Any:
        self.recorder.host_reads(tensor)
        with torch._C.DisableTorchFunction():
            return read(tensor, *args)

    def _pin(self, tensor: Tensor) -> Tensor:
        locked = tensor.clone()
        self.recorder.locked.add(locked.untyped_storage()._cdata)
        return locked


# Threads -----------------------------------------------------------------------------------------


class SimExecutor:
    """What the package asks of a ThreadPoolExecutor, whose jobs it orders only where there is one thread."""

    def __init__(
        self,
        recorder: Recorder,
        max_workers: int,
        thread_name_prefix: str = "a thread",
        initializer: Callable[..., object] = lambda: None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        self.recorder, self.waiting = recorder, deque[SimFuture]()
        self.thread = recorder.new_thread(thread_name_prefix)
        with self.thread.running():
            initializer(*initargs)

    def submit(self, job: Callable[..., Any], *args: Any) -> "SimFuture":
        """The thread does it after what it does already."""
        future = SimFuture(self, self.recorder.thread.record_event(), partial(job, *args))
        self.waiting.append(future)
        if not self.recorder.late:
            self.work()
        return future

    def work(self, until: "SimFuture | None" = None) -> None:
        """Do what has been asked for, up to this job."""
        while self.waiting and (until is None or until in self.waiting):
            self.waiting.popleft().run()

    def shutdown(self, wait: bool = True) -> None:
        """Do all of it."""
        self.work()


class SimFuture(Future[Any]):
    """A job. A thread that has not asked for its end does not know of it, even if it has been run."""

    def __init__(self, executor: SimExecutor, asked: SimEvent, job: Callable[[], Any]) -> None:
        super().__init__()
        self.executor, self.asked, self.job = executor, asked, job
        self.end = SimEvent(executor.recorder)

    def run(self) -> None:
        """Do it, on its thread."""
        thread, job = self.executor.thread, self.job
        del self.job  # and with it what it refers to
        with thread.running():
            thread.wait_event(self.asked)
            try:
                self.set_result(job())
            except BaseException as error:
                self.set_exception(error)
            self.end = thread.record_event()

    def result(self, timeout: float | None = None) -> Any:
        """Whoever asks comes after it."""
        self.executor.work(until=self)
        self.executor.recorder.thread.wait_event(self.end)
        return super().result(timeout)


class SimPythonThread:
    """What the package asks of a threading.Thread."""

    def __init__(
        self,
        recorder: Recorder,
        target: Callable[..., object],
        args: tuple[Any, ...] = (),
        name: str = "a thread",
        daemon: bool = False,
    ) -> None:
        self.executor, self.target = SimExecutor(recorder, 1, name), partial(target, *args)

    def start(self) -> None:
        """Run it."""
        self.future = self.executor.submit(self.target)

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not self.future.done()

    def join(self) -> None:
        """Whoever waits comes after it."""
        self.future.result()


class SimLock:
    """A lock: who gets it comes after who had it."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.released = recorder, recorder.main.record_event()

    def __enter__(self) -> None:
        self.recorder.thread.wait_event(self.released)

    def __exit__(self, *_: object) -> None:
        self.released = self.recorder.thread.record_event()


class SimFileThreads:
    """The threads of a spill file. A transfer is a copy between memory and the file's own pages."""

    def __init__(self, recorder: Recorder) -> None:
        self.executor = SimExecutor(recorder, 1, "reads and writes of a file")
        self.file: SpillFile | None = None

    def start(self, spans: list[Span], block: int, write: bool, keep: Any) -> Any:
        """Begin a transfer of the tensor in `keep`."""
        assert self.file is not None
        memory = keep[0].reshape(-1).view(BYTES)
        pages = self.file.window(spans[0].offset, memory.numel())
        return self.executor.submit(pages.copy_ if write else memory.copy_, memory if write else pages)

    def finish(self, started: SimFuture) -> Failure:
        """Wait."""
        started.result()
        return Failure(0, 0)

    def forget(self, started: SimFuture) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is left to do."""


LOCKS_ALL = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)


# All of it ---------------------------------------------------------------------------------------


@contextmanager
def simulated_device(recorder: Recorder) -> Iterator[Path]:
    """Inside, `DEVICE` is there, and threads are the recorder's. Gives a folder for files."""

    def stream(device: Any = None, **how: Any) -> Any:
        return recorder.stream(f"a stream of {here()}")

    def synchronize(device: Any = None) -> None:
        for each in recorder.streams:
            each.synchronize()

    def mapped(file: int, begin: int, size: int) -> Tensor:
        return MAPPED(file, begin, whole_pages(size))  # once: transfers are of whole pages

    def file_of(tier: BlockTier) -> SpillFile:
        file, threads = FILE(tier), SimFileThreads(recorder)
        file.io.threads.close()
        file.io.threads, threads.file = threads, file
        return file

    def run_backward(*args: Any, **how: Any) -> Any:
        with places:  # for hooks, which torch calls without the mode that has let `backward` through
            return RUN_BACKWARD(*args, **how)

    places, locks = Places(recorder), SimpleNamespace(Lock=partial(SimLock, recorder))
    with ExitStack() as stack:
        for patch in (
            mock.patch.object(torch.autograd, "_engine_run_backward", run_backward),
            mock.patch.object(torch, "Stream", stream),
            mock.patch.object(torch, "Event", lambda *_, **how: SimEvent(recorder)),
            mock.patch.object(torch.accelerator, "current_stream", lambda device=None: recorder.current()),
            mock.patch.object(torch.accelerator, "synchronize", synchronize),
            mock.patch.object(torch.cuda, "synchronize", synchronize),
            mock.patch.object(torch.cuda, "cudart", lambda: LOCKS_ALL),
            mock.patch("zero_full.threads.ThreadPoolExecutor", partial(SimExecutor, recorder)),
            mock.patch("zero_full.threads.Thread", partial(SimPythonThread, recorder)),
            mock.patch("zero_full.offload.nvme_params.threading", locks),
            mock.patch.object(BlockTier, "_file", file_of),
            mock.patch("zero_full.offload.spill_file._mapped", mapped),
        ):
            stack.enter_context(patch)
        folder = stack.enter_context(TemporaryDirectory())
        stack.enter_context(recorder)
        stack.enter_context(places)
        yield Path(folder)


FILE, MAPPED, RUN_BACKWARD = BlockTier._file, spill_file._mapped, torch.autograd._engine_run_backward
