"""The context managers `Init`, to construct a model larger than one rank's memory, and `OnDevice`.

    with zero_full.Init():
        model = Model()
    engine, optimizer, _, _ = zero_full.initialize(model=model, config=config)

See [Note: recording and replay] in `recording.py`.
"""

import logging
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from zero_full.construct.session import Session, latest, local

log = logging.getLogger("zero_full")

# DeepSpeed's other arguments, and why they have no effect.
DECIDED_LATER = "initialize decides that"
WITHOUT_WARNING = ("config", "config_dict_or_path")  # which `initialize` gets, too
IGNORED_ARGUMENTS = {
    "mem_efficient_linear": "nn.Linear stays as it is",
    "pin_memory": "nothing is on the host",
    **dict.fromkeys((*WITHOUT_WARNING, "data_parallel_group", "mpu"), DECIDED_LATER),
    **dict.fromkeys(("sequence_data_parallel_group", "zero_param_parallel_group"), DECIDED_LATER),
    **dict.fromkeys(("zero_quantized_weights", "zero_quantized_nontrainable_weights"), DECIDED_LATER),
}


class Init:
    """Context manager to construct a model that is larger than one rank's memory.

    No memory is allocated: the operations of constructors are recorded, and so are later changes of the
    model. `initialize` replays them, one parameter at a time, and every rank keeps its shards. The values
    equal those of plain construction on the first rank's CPU.

    module    a model that exists already; then nothing is recorded
    enabled   False: record nothing; `dtype` still applies
    dtype     the floating-point dtype to construct in; None: torch's default dtype
    weights   a safetensors file, index or directory with initial values; each rank reads only its shards
    others    DeepSpeed's other arguments, which have no effect; all but the configuration cause a warning

    A nested context joins the outer one. Consecutive contexts share one recording, until a model is
    initialized.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        weights: Any = None,
        **others: Any,
    ) -> None:
        unknown = sorted(others.keys() - IGNORED_ARGUMENTS.keys())
        if unknown:
            raise TypeError(f"Init has no argument {', '.join(unknown)}")
        for name in others.keys() - set(WITHOUT_WARNING):
            log.warning("Init(%s=...) has no effect: %s", name, IGNORED_ARGUMENTS[name])
        self.enabled, self.dtype, self.weights = enabled and module is None, dtype, weights
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> "Init":
        stack, usual_dtype = ExitStack(), torch.get_default_dtype()
        stack.callback(torch.set_default_dtype, usual_dtype)
        if self.dtype is not None:
            torch.set_default_dtype(self.dtype)
        if self.enabled:
            try:
                self._record(stack, usual_dtype)
            except BaseException:
                stack.close()
                raise
        self._stacks.append(stack)
        return self

    def __exit__(self, *failure: Any) -> None:
        self._stacks.pop().__exit__(*failure)

    def _record(self, stack: ExitStack, usual_dtype: torch.dtype) -> None:
        if local.pauses:
            raise RuntimeError(
                "zero_full.Init was entered inside GatheredParameters, where nothing is recorded. Leave "
                "GatheredParameters before constructing a model"
            )
        if local.session is not None and not local.session.is_over:
            if self.weights is not None:
                raise ValueError("Init(weights=...) is inside another Init. Pass weights to the outer one")
            return
        session = stack.enter_context(Session(latest(), constructs=True))
        local.latest = weakref.ref(session.recorder)
        recording = session.recorder.recording
        known = list(recording.names.modules)

        def is_recording() -> bool:
            return session.is_on and local.session is session

        def on_end() -> None:
            torch.set_default_dtype(usual_dtype)
            if self.weights is not None:
                mine = [module for module in recording.names.modules if not any(module is m for m in known)]
                recording.load_later(self.weights, mine)

        session.on_end = on_end
        stack.enter_context(recording.names.watch(is_recording, session.recorder))


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
