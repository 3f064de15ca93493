"""The DeepSpeed-style configuration: read it, check it, fill in what follows, say where each value came from.

Nothing here imports torch, so a configuration can be checked on any machine.
"""

from .resolve import Resolved, resolve
from .schema import Config, ConfigError, LeafModuleConfig
from .verdicts import Checked, Verdict, check, implied_world

__all__ = [
    "Checked",
    "Config",
    "ConfigError",
    "LeafModuleConfig",
    "Resolved",
    "Verdict",
    "check",
    "implied_world",
    "resolve",
]
