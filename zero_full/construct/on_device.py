"""`OnDevice`, DeepSpeed's context manager for a default device and dtype."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def OnDevice(  # noqa: N802 (DeepSpeed's name, which scripts write)
    dtype: torch.dtype | None = None, device: torch.device | str = "meta", enabled: bool = True
) -> Iterator[None]:
    """Make tensors on `device`, with `dtype` as the default floating-point dtype, inside the context.

    On "meta" a model has shapes and no values, and `initialize` cannot compute these. With `Init` it can.
    """
    usual = torch.get_default_dtype()
    if not enabled:
        yield
        return
    torch.set_default_dtype(dtype or usual)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(usual)
