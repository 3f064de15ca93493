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
from importlib.util import find_spec
from typing import Any

from zero_full.lazy_names import on_first_use

__version__ = "0.1.0"
__all__, _import_name = on_first_use(globals())


def __getattr__(name: str) -> Any:
    # Else `zero_full.config` would be an error until other code has happened to import it.
    if name not in __all__ and not name.startswith("_") and find_spec(f"zero_full.{name}"):
        return import_module(f"zero_full.{name}")
    return _import_name(name)
