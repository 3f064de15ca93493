"""The constructor that both strategies share: it checks the arguments and reads the configuration."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_full.integrations.lightning.configuration import read_config, stage_of
from zero_full.integrations.lightning.engines import check_options

PASSED_ON = ("accelerator", "parallel_devices", "cluster_environment", "process_group_backend", "timeout")


class Arguments:
    """Takes the arguments of a strategy. The next class in the order of inheritance is Lightning's.

    precision_argument  Lightning's name of the argument for a precision plugin
    """

    precision_argument: str

    def __init__(
        self,
        stage: int | None = None,
        config: Mapping[str, Any] | str | Path | None = None,
        **others: Any,
    ) -> None:
        kept = (*PASSED_ON, self.precision_argument)
        check_options(type(self).__name__, {name: others[name] for name in others if name not in kept})
        super().__init__(**{name: value for name, value in others.items() if value is not None})
        self.config = read_config(config)
        self.stage = stage_of(stage, self.config)
