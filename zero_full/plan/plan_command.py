"""The command `python -m zero_full plan`."""

import argparse
import importlib
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_full._compat import fake_process_group
from zero_full.arguments import bad_batch, module_and_function, no_module, shape_and_type
from zero_full.config import auto_keys, fill_auto, resolve
from zero_full.config.auto import STAND_INS, read_filled
from zero_full.config.json_parser import NotJsonError, parse
from zero_full.errors import PlanError
from zero_full.formatting import terminal_width
from zero_full.plan.bars import Style, drawing
from zero_full.plan.planning import plan, plan_stages
from zero_full.plan.result import side_by_side
from zero_full.plan.user_frames import raised
from zero_full.precision.dtypes import NAMES
from zero_full.progress import StatusLine


def main(options: argparse.Namespace) -> int:
    """Run `python -m zero_full plan` and return the exit code."""
    config, remark = config_of(Path(options.config), options.fill)
    if remark:
        print(remark, file=sys.stderr)
    make = plan_stages if options.stages else lambda *args, **kwargs: [plan(*args, **kwargs)]
    inputs = [input_of(text) for text in options.batch]
    names = ("device", "expert_parallel", "tensor", "pipe", "machine")
    options_of_plan = {"inputs": inputs, **{name: getattr(options, name) for name in names}}
    with _tensor_mesh(options.tensor) as mesh, StatusLine(sys.stderr) as line:
        line.show("planning ...")
        plans = make(model_of(options.model, mesh), config, options.world, **options_of_plan)
    if remark := batch_remark(config, options.world, inputs):
        print(remark, file=sys.stderr)
    if options.json:
        print("\n".join(each.as_json() for each in plans))
    else:
        print(side_by_side(plans) if options.stages else plans[0].table())
        print("", drawing(plans, terminal_width(), Style.of(sys.stdout)), sep="\n")
    return 0


def config_of(path: Path, fills: Sequence[str]) -> tuple[Path | dict[str, Any], str]:
    """Return the configuration to plan, with stand-ins for "auto", and a remark that lists these."""
    text = read_filled(path, fills)
    try:
        given = parse(text).value
    except NotJsonError:
        return path, ""  # `plan` reports the mistake, with its position
    given = given if isinstance(given, dict) else {}
    stand_ins = {key: STAND_INS[key] for key in auto_keys(given) if key in STAND_INS}
    if not fills and not stand_ins:
        return path, ""
    memory = [key for key in stand_ins if stand_ins[key] is not None and ".params." not in key]
    said = ", ".join(f"{key}={json.dumps(stand_ins[key])}" for key in memory)
    remark = f'remark: "auto" is planned as {said}. Set the values of your run with --fill' if said else ""
    return fill_auto(given, stand_ins), remark


def batch_remark(config: Path | dict[str, Any], world: int, inputs: Sequence[Tensor]) -> str:
    """Return a remark if no input has the configuration's micro-batch size; "" if one has, or none is set."""
    micro = resolve(config, world).config.train_micro_batch_size_per_gpu
    if not inputs or not micro or any(micro in tensor.shape for tensor in inputs):
        return ""
    return (
        f"remark: activations are those of --batch, of which no size is {micro}, the micro-batch size of the "
        "configuration"
    )


@contextmanager
def _tensor_mesh(ranks: int | None) -> Iterator[Any]:
    """Yield a mesh of `ranks` tensor-parallel ranks, of which this process is the first; None: no mesh."""
    if ranks is None:
        yield None
        return
    from torch.distributed.device_mesh import init_device_mesh  # other plans need none

    with fake_process_group(ranks):
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",))


def model_of(name: str, mesh: Any = None) -> nn.Module:
    """Call `module:function` on the meta device and return the model.

    mesh  of the tensor-parallel ranks; passed to a function that needs an argument
    """
    module_name, attribute = module_and_function(name)
    module = _module(module_name)
    if not hasattr(module, attribute):
        known = [each for each, value in vars(module).items() if callable(value) and each[0] != "_"]
        raise PlanError(
            f"--model: {module.__name__} has no {attribute}; it has {', '.join(known) or 'nothing'}"
        )
    make = getattr(module, attribute)
    if isinstance(make, nn.Module):
        return make
    given: tuple[Any, ...] = ()
    with suppress(ValueError):  # builtins have no signature
        given = () if mesh is None or _takes(make) else (mesh,)
    try:
        with suppress(ValueError):
            inspect.signature(make).bind(*given)
    except TypeError as error:
        raise PlanError(
            f"--model {name} cannot be called without arguments ({error}). Name a function that needs none "
            "and returns the model"
        ) from None
    try:
        with torch.device("meta"):
            model = make(*given)
    except Exception as error:
        raise PlanError(f"--model {name} failed with {raised(error)}") from error
    if not isinstance(model, nn.Module):
        raise PlanError(f"--model {name} returned {model!r:.60}, not an nn.Module")
    return model


def _takes(make: Any, *arguments: Any) -> bool:
    """Return whether a function can be called with these arguments."""
    try:
        inspect.signature(make).bind(*arguments)
    except TypeError:
        return False
    return True


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise PlanError(f"--model: importing {name} failed with {raised(error)}") from error
        raise no_module(name, error.name) from None
    except Exception as error:
        raise PlanError(f"--model: importing {name} failed with {raised(error)}") from error


def input_of(text: str) -> Tensor:
    """Make a meta tensor from a description such as "2x1024:int64"."""
    sizes, name = shape_and_type(text)
    dtype = NAMES.get(name, getattr(torch, name, None))
    if not isinstance(dtype, torch.dtype):
        raise bad_batch(text)
    return torch.empty(sizes, dtype=dtype, device="meta")
