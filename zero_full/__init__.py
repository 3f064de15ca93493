"""ZeRO for production training: DeepSpeed's configuration keys, PyTorch's training loop.

    engine, optimizer, loader, schedule = zero_full.initialize(model=model, config="ds_config.json")
    for inputs, targets in loader:
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()

Names are imported on first use, so that `python -m zero_full doctor` runs even if dependencies are missing.
`__init__.pyi` lists them, for this file as for type checkers.
"""

from importlib import import_module
from typing import Any

from zero_full.lazy_names import on_first_use

__version__ = "0.1.0"
__all__, _import_name = on_first_use(globals())


def __getattr__(name: str) -> Any:
    # `assemble` is a module, not a name of one.
    return import_module("zero_full.assemble") if name == "assemble" else _import_name(name)
