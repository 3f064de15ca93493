"""DeepSpeed-style configuration: read, validate, derive missing values, and record each value's origin.

This package does not import torch, so a configuration can be checked on any machine.
"""

from zero_full.config.auto import auto_keys, drop_auto, fill_auto
from zero_full.config.resolve import Resolved, resolve
from zero_full.config.schema import Config, LeafModuleConfig
from zero_full.config.verdicts import Checked, Verdict, check, implied_world
from zero_full.errors import ConfigError

__all__ = [
    "Checked",
    "Config",
    "ConfigError",
    "LeafModuleConfig",
    "Resolved",
    "Verdict",
    "auto_keys",
    "check",
    "drop_auto",
    "fill_auto",
    "implied_world",
    "resolve",
]
