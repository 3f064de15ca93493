"""Exception classes of zero_full, in the order of a run."""

from collections.abc import Sequence


class ConfigError(ValueError):
    """Raised for an invalid configuration. The message names every invalid key and the remedy."""


class LaunchError(RuntimeError):
    """Raised if the environment variables do not define this process's rank."""


class SharedDeviceError(RuntimeError):
    """Raised if several ranks have the same device, but the backend requires one for each."""


class CommunicationError(RuntimeError):
    """Raised if a collective has failed, usually because another rank has failed first."""


class DesyncError(RuntimeError):
    """Raised if ranks of a group are about to call different collectives, or one calls none."""


class DisagreementError(ValueError):
    """Raised if arguments differ between ranks, or ranks are about to step with different values."""


class AbsentError(RuntimeError):
    """Raised if another rank's message has not arrived in the store in time."""


class NotFiniteError(ArithmeticError):
    """Raised on all ranks, before any change, if values on some rank or their average are inf or NaN.

    `tensors`: indices of the affected tensors; empty if only values that are not sent are affected.
    """

    def __init__(self, what: str, tensors: Sequence[int]) -> None:
        where = f"in tensor {', '.join(map(str, tensors))}" if tensors else "in values that are not sent"
        super().__init__(
            f"compressed average of {what}: inf or NaN on some rank, {where}. Nothing was changed"
        )
        self.tensors = list(tensors)


class ScaleExhaustedError(RuntimeError):
    """Raised if gradients overflow at the minimum loss scale."""


class NoValuesError(RuntimeError):
    """Raised if an operation needs values of a recorded tensor, before `initialize`."""


class CopyError(RuntimeError):
    """Raised if a copy between the device and the host has failed."""


class CheckpointError(RuntimeError):
    """Raised if a checkpoint or weights could not be saved or loaded."""


class PlanError(ValueError):
    """Raised if no memory plan can be made. The message has the reason and the remedy."""


class FitError(ValueError):
    """Raised for invalid input of `fit`. The message names the key or the option, and the remedy."""


class MigrateError(Exception):
    """Raised if a file cannot be migrated."""


class RecordingError(ValueError):
    """Raised if a recording is missing, or this version cannot read it."""


class MeasureError(RuntimeError):
    """Raised if a bandwidth cannot be measured. The message has the reason."""


class UsageError(Exception):
    """Raised for invalid command line arguments. The message has the reason and the remedy."""
