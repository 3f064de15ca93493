"""The DeepSpeed-style configuration: read it, check it, fill in what follows, say where each value came from.

Nothing here imports torch, so a configuration can be checked on any machine.
"""

from .resolve import Resolved, resolve
from .schema import Config, ConfigError, LeafModuleConfig

__all__ = ["Config", "ConfigError", "LeafModuleConfig", "Resolved", "resolve"]
