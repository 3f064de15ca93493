"""Step 5. Let Adam's state wait in a cheaper memory.

The master and both averages, 12 of the 16 bytes, are touched once a step. So they can live on the host:
each reduced gradient is copied down as it arrives, Adam runs where its state is, and only the new
parameters are copied up. In 16-bit training that is 2 bytes down and 2 up for each parameter and step.
Without a GPU, "device" and "host" are two names for the same memory; the copies, the ledger and the
order of events are the real ones. `Stage2Disk` goes one step further down.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_min.comm import Comm
from zero_min.ledger import Ledger
from zero_min.stage2 import Stage2, Window


class Host:
    """The memory below the device. Every copy down or up is written into the ledger."""

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        self.ledger = ledger
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros on the host; pinned if there is a GPU, so that a copy can run beside the computation."""
        return torch.zeros(numel, dtype=dtype, pin_memory=self.stream is not None)

    def down(self, tensor: Tensor) -> Tensor:
        """Start a copy to the host; `wait` before reading it, and keep `tensor` until then."""
        self.ledger.move("device to host", tensor.nbytes)
        landing = self.room(tensor.numel(), tensor.dtype)
        if self.stream is None:
            return landing.copy_(tensor)
        self.stream.wait_stream(torch.cuda.current_stream())  # the gradient must be complete first
        with torch.cuda.stream(self.stream):
            return landing.copy_(tensor, non_blocking=True)

    def up(self, source: Tensor, into: Tensor) -> None:
        """Copy to the device; rounded to the device's type first, so that fewer bytes travel."""
        self.ledger.move("host to device", into.nbytes)
        into.copy_(self.room(source.numel(), into.dtype).copy_(source))

    def wait(self) -> None:
        """Until every copy down has landed."""
        if self.stream is not None:
            self.stream.synchronize()


class Stage2Offload(Stage2):
    """Stage 2 whose own gradients, masters and averages wait on the host."""

    def __init__(self, model: nn.Module, comm: Comm, *args: Any, **kwargs: Any) -> None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.host = Host(device, comm.ledger)
        self.flying: list[tuple[Window, slice, Tensor, Tensor]] = []
        super().__init__(model, comm, *args, **kwargs)

    def place(self, mine: Tensor) -> Tensor:
        """An fp32 master on the host. Adam makes its averages like it, hence beside it."""
        # --8<-- [start:ex_place]
        master = self.host.room(mine.numel(), torch.promote_types(mine.dtype, torch.float32))
        return master.copy_(mine)
        # --8<-- [end:ex_place]

    # --8<-- [start:offload_down]
    def _add_to_my_gradient(self, window: Window, part: slice, piece: Tensor) -> None:
        """Send the reduced piece down while backward goes on above."""
        # --8<-- [start:ex_down]
        landing = self.host.down(piece)
        self.flying.append((window, part, piece, landing))
        # --8<-- [end:ex_down]

    def _reduce_leftovers(self) -> None:
        super()._reduce_leftovers()
        self.host.wait()
        for window, part, _, landed in self.flying:
            super()._add_to_my_gradient(window, part, landed)
        self.flying.clear()

    # --8<-- [end:offload_down]

    def zero_grad(self) -> None:
        """Let go of the gradients, also of those on their way."""
        self.host.wait()
        self.flying.clear()
        super().zero_grad()

    def gather_parameters(self) -> None:
        """Copy the new own slices up, then exchange slices as ever."""
        for f in self.flats:
            # --8<-- [start:ex_up]
            self.host.up(f.master, f.mine)
            self.comm.all_gather(f.flat, f.mine)  # (N-1)/N n
            f.master.grad = None
            # --8<-- [end:ex_up]

    def holdings(self) -> dict[str, list[Tensor | None]]:
        """What this rank keeps, by kind. Only parameters, and gradients on their way, are on the device."""
        state = [*(f.master for f in self.flats), *self.optimizer.state()]
        return {
            "parameters": super().holdings()["parameters"],
            "gradients": [p.grad for f in self.flats for p in f.params],
            "host gradients": [g for f in self.flats for g in (f.grad, f.master.grad)],
            "host optimizer": [*state],
        }


class Stage2Disk(Stage2Offload):
    """Stage 2 whose masters and averages are files. A chunk at a time visits the host to be stepped."""

    def __init__(self, *args: Any, folder: Path, chunk: int = 2**16, **kwargs: Any) -> None:
        self.folder, self.chunk, self.files = Path(folder), chunk, 0
        self.folder.mkdir(parents=True, exist_ok=True)
        super().__init__(*args, **kwargs)
        for averages in (self.optimizer.m, self.optimizer.v):
            for master in averages:
                averages[master] = self.file(averages[master])

    def file(self, tensor: Tensor) -> Tensor:
        """A tensor whose memory is a file of its own."""
        name = f"rank{self.comm.rank}_{self.files}.bin"
        self.files += 1
        if tensor.numel() == 0:
            return tensor  # no file can be mapped to nothing
        (self.folder / name).unlink(missing_ok=True)  # an older run may still have it open: leave it alone
        mapped = torch.from_file(
            str(self.folder / name), shared=True, size=tensor.numel(), dtype=tensor.dtype
        )
        return mapped.copy_(tensor)

    def place(self, mine: Tensor) -> Tensor:
        """An fp32 master in a file."""
        return self.file(super().place(mine))

    @torch.no_grad()
    def update(self) -> None:
        """Adam, chunk by chunk: 12 bytes per parameter are read, and 12 written back."""
        adam, ledger = self.optimizer, self.comm.ledger
        adam.steps += 1
        for each, group in zip(self.flats, adam.groups, strict=True):
            on_disk = (each.master, adam.m[each.master], adam.v[each.master])
            for start in range(0, each.master.numel(), self.chunk):
                here = slice(start, start + self.chunk)
                p, m, v = (tensor[here].clone() for tensor in on_disk)
                ledger.move("disk to host", p.nbytes + m.nbytes + v.nbytes)
                adam.update_one(p, each.master.grad[here], m, v, group)
                for tensor, new in zip(on_disk, (p, m, v), strict=True):
                    tensor[here] = new
                ledger.move("host to disk", p.nbytes + m.nbytes + v.nbytes)
                self.host.up(p, each.mine[here])
            self.comm.all_gather(each.flat, each.mine)  # (N-1)/N n
            each.master.grad = None

    def holdings(self) -> dict[str, list[Tensor | None]]:
        """Live tensors by kind; the optimizer's are on disk."""
        holdings = super().holdings()
        holdings["disk optimizer"] = holdings.pop("host optimizer")
        return holdings
