"""Keys of tensors in state dicts and checkpoints. They name the kind and the tensor:

    parameters/NAME        a parameter; for a trained one its master weights, which are the most exact values
    state/ENTRY/NAME       elementwise optimizer state of a parameter: state/exp_avg/layers.0.weight
    buffers/NAME           any other tensor of the module's state dict
    own/RANK/NAME          state of one rank alone, see [Note: a rank's own state] in `optim/step.py`

If ranks hold different parameters of the same name, the first word has a suffix: `parameters@expert1/NAME`.
"""

PARAMETERS, STATE, BUFFERS, OWN = "parameters", "state", "buffers", "own"
STEP = "step"  # always a number; other state of a 0-dimensional parameter is elementwise


def state_key(key: str, entry: str) -> str:
    """Return the key of an entry of the optimizer's state, from the key of its parameter."""
    kind, _, name = key.partition("/")
    return f"{STATE}{kind.removeprefix(PARAMETERS)}/{entry}/{name}"


def entry_of(key: str) -> tuple[str, str] | None:
    """Split a key of the optimizer's state into the parameter's key and the entry; None for other keys."""
    kind, _, rest = key.partition("/")
    entry, _, name = rest.partition("/")
    if kind.partition("@")[0] != STATE:
        return None
    return f"{PARAMETERS}{kind.removeprefix(STATE)}/{name}", entry
