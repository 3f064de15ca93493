"""`install`: put the module `deepspeed`, its submodules and its distribution's metadata into this process.

Libraries decide that DeepSpeed is installed if `importlib.util.find_spec` finds the module and
`importlib.metadata` finds the distribution. So both are there: the modules in `sys.modules`, and a finder in
`sys.meta_path` that knows the distribution. The finder also raises for submodules that are missing, and
adapts accelerate when that is imported (`accelerate.py`).
"""

import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, version
from types import ModuleType
from typing import Any

from zero_full.integrations.deepspeed.accelerate import adapt
from zero_full.integrations.deepspeed.engine import add_parameter_offload
from zero_full.integrations.deepspeed.parameters import add_properties
from zero_full.integrations.deepspeed.surface import VERSION, modules
from zero_full.migrate.name_table import instead_of

NAME = "deepspeed"
# Modules that look for DeepSpeed once, when they are imported.
LOOKED = ("accelerate", "transformers.trainer", "transformers.integrations.deepspeed")


class StandIn(ModuleType):
    """Module that stands in for one of DeepSpeed's, with the names that zero_full has."""

    def __init__(self, name: str, names: dict[str, Any]) -> None:
        super().__init__(name, f"zero_full stands in for {name} of DeepSpeed {VERSION} in this process.")
        self.__spec__ = ModuleSpec(name, None, origin="zero_full", is_package=True)
        self.__path__: list[str] = []
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(_missing(f"{self.__name__}.{name}"))


def _missing(path: str) -> str:
    return (
        f"{path} does not exist here: zero_full stands in for DeepSpeed {VERSION} in this process. Instead: "
        f"{instead_of(path)}"
    )


class DeepSpeedDistribution(Distribution):
    """The metadata of a distribution named deepspeed."""

    def read_text(self, filename: str) -> str | None:
        """Return the text of a metadata file, or None."""
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\nAuthor: zero_full\n",
            "top_level.txt": f"{NAME}\n",
        }.get(filename)

    def locate_file(self, path: Any) -> Any:
        """Return the given path, as the interface asks for. This distribution has no files."""
        return path


class Finder(DistributionFinder):
    """Import finder: finds the distribution, raises for missing submodules, and adapts accelerate."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return None or the spec of accelerate's module; raise for a missing module of DeepSpeed."""
        if name.startswith(f"{NAME}."):
            raise ModuleNotFoundError(_missing(name))  # without `name`: `from` would replace the message
        if name != "accelerate.accelerator":
            return None
        others = (each for each in sys.meta_path if each is not self)
        specs = (each.find_spec(name, path, target) for each in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                adapt(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def find_distributions(
        self,
        context: DistributionFinder.Context = DistributionFinder.Context(),  # noqa: B008
    ) -> Iterator[Distribution]:
        """Yield the distribution, if it is asked for by name or all are."""
        if context.name is None or context.name.lower() == NAME:
            yield DeepSpeedDistribution()


def install() -> None:
    """Put `deepspeed` into this process: the module, its submodules and its distribution's metadata.

    Call it before transformers and accelerate are imported. A second call does nothing. Raises ImportError if
    DeepSpeed itself is installed or imported, or if a library has already looked for it.
    """
    if isinstance(sys.modules.get(NAME), StandIn):
        return
    _check_absent()
    made = {name: StandIn(name, names) for name, names in modules().items()}
    for name, module in made.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    sys.modules.update(made)
    sys.meta_path.insert(0, Finder())
    add_properties()
    add_parameter_offload()


def _check_absent() -> None:
    """Raise ImportError if DeepSpeed is installed or imported, or if a library has looked for it already."""
    if NAME in sys.modules:
        raise ImportError(
            f"{NAME} is imported already. Call zero_full.integrations.deepspeed.install() before, or start "
            "the script by python -m zero_full as-deepspeed"
        )
    spec = importlib.util.find_spec(NAME)
    try:
        known = version(NAME)
    except PackageNotFoundError:
        known = ""
    if known or (spec is not None and spec.origin is not None):  # no origin: a folder of that name
        where = f" {known}" if known else f" ({spec.origin})" if spec is not None else ""
        raise ImportError(
            f"DeepSpeed{where} is installed. Uninstall it (pip uninstall deepspeed), so that programs which "
            "import it get zero_full, or run them without zero_full"
        )
    if early := [name for name in LOOKED if name in sys.modules]:
        raise ImportError(
            f"{' and '.join(early)} was imported before and has found no DeepSpeed. Call "
            "zero_full.integrations.deepspeed.install() before, or start the script by python -m zero_full "
            "as-deepspeed"
        )
