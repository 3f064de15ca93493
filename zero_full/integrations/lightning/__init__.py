"""Strategies for Lightning's Trainer and for Fabric.

import zero_full.integrations.lightning              # registers the names "zero_full", "zero_full_1", ...

trainer = lightning.Trainer(strategy="zero_full_3", devices=2)
trainer = lightning.Trainer(strategy=ZeroStrategy(stage=3, config="ds.json"), devices=2)
fabric = lightning.Fabric(strategy=ZeroFabricStrategy(stage=3), devices=2)

arguments      the constructor of both strategies
trainer        `ZeroStrategy`, for the Trainer
fabric         `ZeroFabricStrategy`, for Fabric
configuration  the configuration of the engines, from the strategy's options and the precision
precision      backward, step and clipping by the engine
engines        one for each optimizer
folder         Lightning's checkpoints as folders
"""

import logging
from importlib.metadata import version

from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from zero_full.integrations.lightning.fabric import ZeroFabricStrategy
from zero_full.integrations.lightning.folder import consolidate
from zero_full.integrations.lightning.trainer import ZeroStrategy

__all__ = ["ZeroFabricStrategy", "ZeroStrategy", "consolidate"]
TESTED = ("2.6",)  # versions of Lightning that tests/lightning has run with
log = logging.getLogger("zero_full")


def _register() -> None:
    for registry, strategy in ((StrategyRegistry, ZeroStrategy), (FABRIC_REGISTRY, ZeroFabricStrategy)):
        registry.register("zero_full", strategy, description="zero_full, ZeRO stage 3", override=True)
        for stage in (0, 1, 2, 3):
            about = f"zero_full, ZeRO stage {stage}"
            registry.register(f"zero_full_{stage}", strategy, description=about, override=True, stage=stage)


def _check_version() -> None:
    found = version("lightning")
    if ".".join(found.split(".")[:2]) not in TESTED:
        log.warning(
            "lightning %s was not tested with zero_full (tested: %s). If a strategy fails, install a tested "
            "version",
            found,
            ", ".join(TESTED),
        )


_check_version()
_register()
