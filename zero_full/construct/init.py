"""`Init`: construct a model that is larger than one rank's memory.

    with zero_full.Init():
        model = Model()
    engine, optimizer, _, _ = zero_full.initialize(model=model, config=config)

Inside the context the model is constructed without memory, and what its constructors do is recorded (see
`deferred.py`). `initialize` replays that, one parameter at a time, and every rank keeps its slices. The
values are those of plain construction on the CPU from the same seed, the first rank's.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zero_full.construct.deferred import Recording, recorder
from zero_full.shard.groups import Groups
from zero_full.shard.values import nothing

log = logging.getLogger("zero_full")

# DeepSpeed's other arguments, and why nothing needs them.
DECIDED_LATER = "initialize decides that"
IDLE = {
    "data_parallel_group": DECIDED_LATER,
    "config_dict_or_path": DECIDED_LATER,
    "config": DECIDED_LATER,
    "mpu": DECIDED_LATER,
    "sequence_data_parallel_group": DECIDED_LATER,
    "zero_param_parallel_group": DECIDED_LATER,
    "zero_quantized_weights": DECIDED_LATER,
    "zero_quantized_nontrainable_weights": DECIDED_LATER,
    "mem_efficient_linear": "nn.Linear stays as it is",
    "pin_memory": "nothing is on the host",
}
_finished: list["Init"] = []  # whose models `initialize` has not seen yet


class Init:
    """See the module's docstring.

    module    a model that is constructed already: then there is nothing to do here
    enabled   False: construct as usual
    dtype     the floating-point dtype to construct in; None: as usual
    weights   a safetensors file, index or directory to start from: each rank reads only its slices
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
        unknown = sorted(others.keys() - IDLE.keys())
        if unknown:
            raise TypeError(f"Init has no argument {', '.join(unknown)}")
        for name in others.keys() - {"config_dict_or_path", "config"}:
            log.warning("Init(%s=...) has no effect: %s", name, IDLE[name])
        self.enabled, self.dtype, self.weights = enabled and module is None, dtype, weights

    def __enter__(self) -> "Init":
        """Begin to record."""
        self.usual_dtype = torch.get_default_dtype()
        if self.dtype is not None:
            torch.set_default_dtype(self.dtype)
        if self.enabled:
            self.context = recorder()
            self.recording: Recording = self.context.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        """The model is constructed."""
        torch.set_default_dtype(self.usual_dtype)
        if self.enabled:
            self.context.__exit__(*failure)
            if failure[0] is None:
                _finished.append(self)


class Deferred:
    """The parameters and buffers of a model that have no values yet.

    Making one moves the parameters to the device, where they show NaN and take no memory. They stay the same
    objects, so an optimizer may know them already.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        named = [*model.named_parameters(), *model.named_buffers()]
        self.origins = {name: _origin(name, tensor) for name, tensor in named if tensor.is_meta}
        self.device = device
        self.names: dict[Tensor, str] = {}  # of what was recorded
        self.sources: dict[Tensor, Parameter] = {}  # what was recorded -> what it is now
        self.buffers: dict[Tensor, Tensor] = {}
        for name, param in model.named_parameters():
            if param.is_meta:
                source = _put_on(device, param)
                self.sources[source], self.names[source] = param, name
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:
                    real = self.buffers.setdefault(buffer, torch.empty_like(buffer, device=device))
                    setattr(module, name, real)
        self.names |= {b: name for name, b in named if b in self.buffers}
        self.parameters = set(self.sources.values())

    def weights(self) -> list[Any]:
        """The files that were named instead of initial values."""
        found = dict.fromkeys(init for init in self.origins.values() if init.weights is not None)
        return [init.weights for init in found]

    def fill(self, groups: Groups, put: Callable[[Parameter, Tensor], None]) -> None:
        """Replay: `put` gets every parameter with its values, one at a time. Every rank must call this."""
        if groups.expert is not None and self.names:
            raise ValueError("experts are initialised differently on each rank: construct them without Init")
        for init in dict.fromkeys(self.origins.values()):
            state = init.recording.rng_state_before
            for group in (groups.dense.shard, groups.dense.across):
                state = group.gather_objects(state, "the state of the random numbers")[0]
            init.recording.rng_state_before = state
            wanted = [t for t, name in self.names.items() if self.origins[name] is init]
            init.recording.replay(partial(self._deliver, put), wanted)
            _finished.remove(init)

    def _deliver(self, put: Callable[[Parameter, Tensor], None], source: Tensor, real: Tensor) -> None:
        if source in self.sources:
            put(self.sources[source], real)
        else:
            self.buffers[source].copy_(real)


def _origin(name: str, tensor: Tensor) -> Init:
    for init in _finished:
        if init.recording.knows(tensor):
            return init
    raise ValueError(
        f"{name} is on the meta device, and nothing is known of its values: construct the model inside "
        "zero_full.Init()"
    )


def _put_on(device: torch.device, param: Parameter) -> Tensor:
    """The parameter shows NaN on the device. Returns what it was."""
    shown = nothing(param.dtype, device).expand(param.shape)
    other = Parameter(shown, requires_grad=param.requires_grad)
    torch.utils.swap_tensors(param, other)
    return other
