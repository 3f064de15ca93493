"""Every exception class of zero_full that a caller may want to catch, in the order of a run."""

from collections.abc import Sequence


class ConfigError(ValueError):
    """The configuration cannot be used; the text names every key at fault and the remedy."""


class LaunchError(RuntimeError):
    """The environment does not say which rank this is."""


class SharedDeviceError(RuntimeError):
    """Several ranks have the same device, and the backend wants one for each."""


class CommunicationError(RuntimeError):
    """A collective failed, which usually means that another rank has failed first."""


class DesyncError(RuntimeError):
    """The ranks of a group are about to make different calls, or one of them makes none."""


class DisagreementError(ValueError):
    """The ranks were given different things, or are about to step with different numbers."""


class AbsentError(RuntimeError):
    """A rank has not left its note in time."""


class NotFiniteError(ArithmeticError):
    """Some rank has inf or NaN, or the average has. All ranks raise it, and nothing has changed on any.

    `tensors`: the numbers of those where it is; none if it is only in what does not travel.
    """

    def __init__(self, what: str, tensors: Sequence[int]) -> None:
        where = f"in tensor {', '.join(map(str, tensors))}" if tensors else "outside of what travels"
        super().__init__(
            f"compressed average of {what}: inf or NaN on some rank, {where}; nothing has changed"
        )
        self.tensors = list(tensors)


class ScaleExhaustedError(RuntimeError):
    """Gradients overflow although the loss scale is as small as it may be."""


class NoValuesError(RuntimeError):
    """What was asked for depends on values that are only recorded."""


class CopyError(RuntimeError):
    """A copy between the device and the host has failed."""


class CheckpointError(RuntimeError):
    """Something could not be saved or loaded."""


class PlanError(ValueError):
    """There can be no plan; the text says why and what to do."""


class FitError(ValueError):
    """There can be no answer; the text names the key or the option, and says what to do."""


class MigrateError(Exception):
    """A file that cannot be looked at."""


class RecordingError(ValueError):
    """There is no recording there, or none that this version can read."""


class MeasureError(RuntimeError):
    """There is nothing to be measured at that place; the text says why."""


class UsageError(Exception):
    """What was asked for cannot be done; the text says why, and what to do."""
