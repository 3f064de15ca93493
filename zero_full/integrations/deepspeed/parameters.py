"""The attributes that DeepSpeed adds to parameters at stage 3: `ds_status`, `ds_numel`, `ds_shape`.

zero_full keeps a parameter's shape while it is released and sets no attribute on it. So these are properties
of `torch.nn.Parameter`, computed from the engine that owns the parameter. A parameter of no stage-3 engine
does not have them, which programs test with `hasattr`.
"""

from enum import Enum
from typing import Any

from torch.nn import Parameter

from zero_full.shard.group.parameters import is_released
from zero_full.shard.group.registry import owner_of


class ZeroParamStatus(Enum):
    """State of a parameter at stage 3: whether its values are gathered on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3  # never: reading a parameter waits for its all-gather


def _check_stage_3(param: Parameter, name: str) -> None:
    owner = owner_of(param)
    if owner is None or owner.settings.stage != 3:
        raise AttributeError(f"this parameter has no attribute {name!r}: no stage-3 engine owns it")


def _status(param: Parameter) -> ZeroParamStatus:
    _check_stage_3(param, "ds_status")
    return ZeroParamStatus.NOT_AVAILABLE if is_released(param) else ZeroParamStatus.AVAILABLE


def _numel(param: Parameter) -> int:
    _check_stage_3(param, "ds_numel")
    return param.numel()


def _shape(param: Parameter) -> Any:
    _check_stage_3(param, "ds_shape")
    return param.shape


PROPERTIES = {"ds_status": property(_status), "ds_numel": property(_numel), "ds_shape": property(_shape)}


def add_properties() -> None:
    """Add the attributes to `torch.nn.Parameter`."""
    for name, value in PROPERTIES.items():
        setattr(Parameter, name, value)
