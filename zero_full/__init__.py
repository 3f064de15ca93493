"""ZeRO for production training: DeepSpeed's configuration keys, PyTorch's training loop.

    engine, optimizer, loader, schedule = zero_full.initialize(model=model, config="ds_config.json")
    for inputs, targets in loader:
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()

Names are imported on first use, so that `python -m zero_full doctor` runs even if dependencies are missing.
`__init__.pyi` lists them, for this file as for type checkers.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"
# The public names, and the modules that they are imported from.
_MODULE_OF = {
    name: module
    for module, name in re.findall(
        r"from (\S+) import \(?\s*(\w+) as", Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    )
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name == "assemble":  # a module, not a name of one
        return import_module("zero_full.assemble")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'zero_full' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value
