"""DeepSpeed's name for two contexts of torch's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def OnDevice(  # noqa: N802 (DeepSpeed's name, which scripts write)
    dtype: torch.dtype | None = None, device: torch.device | str = "meta", enabled: bool = True
) -> Iterator[None]:
    """Tensors made in this block are on `device`, and floating-point ones have `dtype` if none is given.

    On "meta" a model has shapes and no values. `Init` makes models whose values `initialize` can find.
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
