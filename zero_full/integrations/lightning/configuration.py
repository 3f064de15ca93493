"""The configuration of a strategy's engines: the user's, and the values that Lightning decides."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_full.config import drop_auto
from zero_full.errors import ConfigError

# Keys of the configuration that Lightning's own options decide, and these options.
DECIDED = {
    "gradient_accumulation_steps": "Trainer(accumulate_grad_batches=...), or your loop with Fabric",
    "train_batch_size": "the batch size of your DataLoader",
    "gradient_clipping": "Trainer(gradient_clip_val=...), or clip_gradients(...) in each step",
    "optimizer": "configure_optimizers, or Fabric.setup(model, optimizer)",
    "scheduler": "configure_optimizers, or your loop with Fabric",
}
ZERO = "zero_optimization"
PRECISIONS: dict[str, dict[str, dict[str, Any]]] = {
    "32-true": {},
    "bf16-mixed": {"bf16": {"enabled": True}},
    "bf16-true": {
        "bf16": {
            "enabled": True,
            "bf16_master_weights_and_grads": True,
            "bf16_optimizer_states": True,
        }
    },
    "16-mixed": {"fp16": {"enabled": True}},
}


def read_config(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """Return the user's configuration as a dict."""
    if config is None:
        return {}
    if isinstance(config, str | Path):
        config = json.loads(Path(config).read_text(encoding="utf-8"))
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"config must be a dict or the path of a JSON file with an object, not {type(config).__name__}"
        )
    return dict(config)


def stage_of(stage: int | None, given: Mapping[str, Any]) -> int:
    """Return the stage: the argument's or the configuration's, or 3."""
    own = given.get(ZERO, {}).get("stage", "auto")
    if stage is not None and own != "auto" and own != stage:
        raise ConfigError(
            f"{ZERO}.stage is {own} in the strategy's config, and stage={stage} was passed. Remove one"
        )
    found = stage if stage is not None else own if own != "auto" else 3
    if found not in (0, 1, 2, 3):
        raise ConfigError(f"stage must be 0, 1, 2 or 3, not {found!r}")
    return int(found)


def engine_config(stage: int, given: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """Return the configuration for `initialize`.

    stage      see `stage_of`
    given      the user's configuration; a key with the value "auto" counts as not given
    precision  one of `PRECISIONS`
    """
    config = drop_auto(given)
    for key, option in DECIDED.items():
        if key in config:
            raise ConfigError(f"{key}: {option} decides this. Remove the key from the strategy's config")
    for section in ("bf16", "fp16"):
        chosen = PRECISIONS[precision].get(section, {})
        own = dict(config.get(section, {}))
        enabled = own.pop("enabled", "auto")
        if enabled != "auto" and bool(enabled) != bool(chosen):
            raise ConfigError(
                f"{section}.enabled is {enabled} in the strategy's config, but precision={precision!r} "
                "decides this. Remove the key, and pass precision to the Trainer or to Fabric"
            )
        if chosen or own:
            config[section] = own | chosen
    return config | {
        ZERO: {**config.get(ZERO, {}), "stage": stage},
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
    }
