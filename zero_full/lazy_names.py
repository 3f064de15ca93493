"""Packages whose names are imported on first use. Their `__init__.pyi` lists the names."""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def on_first_use(package: dict[str, Any]) -> tuple[list[str], Callable[[str], Any]]:
    """Return `__all__` and `__getattr__` of the package with these globals."""
    text = Path(package["__file__"]).with_suffix(".pyi").read_text(encoding="utf-8")
    module_of = {name: module for module, name in re.findall(r"from (\S+) import \(?\s*(\w+) as", text)}

    def import_name(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        value = package[name] = getattr(import_module(module_of[name]), name)
        return value

    return sorted(module_of), import_name
