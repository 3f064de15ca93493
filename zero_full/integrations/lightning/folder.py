"""Save and load Lightning's checkpoints as folders, to which every rank writes its shards.

    FOLDER/latest, FOLDER/checkpoint/...     a checkpoint of zero_full, also for `python -m zero_full export`
    FOLDER/optimizer_1/...                       with several optimizers, the parts of the others
    FOLDER/model.safetensors, FOLDER/lightning   instead, if only weights are saved

Lightning's own dictionary (loops, callbacks, LR schedulers, hyperparameters) is pickled, as in the files of
Lightning, and stored beside the weights. Load only checkpoints that you trust.

With several optimizers the parts are written one after the other. Each has the random name of its save, so
that parts of two saves, which a crash between them leaves in a folder that is saved again, are not loaded
together.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import torch
from safetensors import safe_open
from torch import Tensor

from zero_full.checkpoint import export_checkpoint, open_checkpoint
from zero_full.checkpoint.failure import Attempt
from zero_full.engine.engine import Engine
from zero_full.errors import CheckpointError

KEY = "lightning"  # the key in the client state, and the name of a file
SAVE = "save"  # the key of the save's name in the client state of every engine
ENGINES = "engines"  # the key of their number
STATES = (
    "state_dict",
    "optimizer_states",
)  # keys of Lightning's dictionary that engines save themselves


def tag_of(number: int) -> str:
    """Return the tag of the checkpoint of optimizer `number`'s engine."""
    return "checkpoint" if number == 0 else f"optimizer_{number}"


def is_folder(path: Any) -> bool:
    """Return whether a checkpoint is a folder of this strategy, and not a file of Lightning's."""
    return Path(path).is_dir()


def save(engines: Sequence[Engine], folder: str | Path, others: Mapping[str, Any]) -> None:
    """Save the engines, and the first rank's `others`: values of Lightning. Every rank must call this."""
    save = {SAVE: uuid4().hex, ENGINES: len(engines)}  # the first rank's is written
    state = {KEY: torch.frombuffer(bytearray(_pickled(others)), dtype=torch.uint8)}
    if engines[0].global_rank == 0:
        (Path(folder) / KEY).unlink(missing_ok=True)  # of weights, which would be loaded instead
    for number, engine in reversed([*enumerate(engines)]):  # `latest` names the first one, when all are there
        engine.save_checkpoint(
            folder,
            tag_of(number),
            client_state=save | state if number == 0 else save,
            save_latest=number == 0,
        )


def load(
    engines: Sequence[Engine],
    folder: str | Path,
    *,
    states: bool,
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Load the engines, and return the saved `others`. Every rank must call this.

    states        also load optimizer state and random number generators
    strict        raise on missing or unexpected parameters
    weights_only  None or False: unpickle any object of `others`; True: plain ones only
    """
    attempt = Attempt(engines[0].optimizer, "load of a Lightning checkpoint")
    read = None
    if engines[0].global_rank == 0:  # other ranks may not see a new file yet
        read = attempt(partial(_weights_state, folder))
    weights = next(iter(attempt.agree(read).values()))
    if weights is not None:
        for engine in engines:
            engine.load_weights(folder, strict=strict)
        return _unpickled(weights, weights_only)
    saved: dict[str, Any] = {}
    for number, engine in enumerate(engines):
        _, client = engine.load_checkpoint(
            folder,
            tag_of(number),
            load_module_strict=strict,
            load_optimizer_states=states,
            load_lr_scheduler_states=False,
            load_module_only=not states,
        )
        if number == 0:
            saved = client or {}
            if (count := saved.get(ENGINES, len(engines))) != len(engines):
                raise CheckpointError(
                    f"{folder} has the parameters and state of {count} optimizers, and this run has "
                    f"{len(engines)}. Load it with as many"
                )
        _check_save(folder, number, saved, client or {})
    if KEY not in saved:
        raise CheckpointError(
            f"{folder} has no {KEY!r} state: no Lightning strategy of zero_full has saved it. Load a folder "
            "of ZeroStrategy or ZeroFabricStrategy"
        )
    return _unpickled(saved[KEY].numpy().tobytes(), weights_only)


def _weights_state(folder: str | Path) -> bytes | None:
    """Return Lightning's dictionary, pickled, of a folder with weights only; None if it has a checkpoint."""
    file = Path(folder) / KEY
    return file.read_bytes() if file.exists() else None


def _check_save(folder: str | Path, number: int, first: Mapping[str, Any], client: Mapping[str, Any]) -> None:
    if first.get(SAVE) != client.get(SAVE):
        raise CheckpointError(
            f"{folder}: {tag_of(0)} and {tag_of(number)} are of two saves. The run ended while it saved into "
            "this folder again. Load an earlier checkpoint"
        )


def save_weights(engines: Sequence[Engine], folder: str | Path, others: Mapping[str, Any]) -> None:
    """Save weights only, as safetensors, and `others` of the first rank. Every rank must call this."""
    if len(engines) != 1:
        raise NotImplementedError(
            "saving weights only (save_weights_only=True) with several optimizers is not implemented. Save "
            "whole checkpoints"
        )
    engines[0].save_weights(folder)
    attempt = Attempt(engines[0].optimizer, "save of a Lightning checkpoint's weights")
    if engines[0].global_rank == 0:
        attempt(lambda: (Path(folder) / KEY).write_bytes(_pickled(others)))
    attempt.agree()  # no rank returns before the file is there, or if it could not be written


def consolidate(folder: str | Path, file: str | Path) -> None:
    """Write a checkpoint folder as one file of Lightning's, without optimizer state, in one process.

    `LightningModule.load_from_checkpoint` and Trainers with other strategies can load it. The whole model
    must fit into host memory.
    """
    weights = _weights_state(folder)
    if weights is not None:
        others, state = weights, _read(sorted(Path(folder).glob("*.safetensors")))
    else:
        with TemporaryDirectory(dir=Path(file).parent) as exported:
            state, first = {}, _client_state(folder, tag_of(0))
            parts = 1 + len([*Path(folder).glob("optimizer_*")])  # an earlier save may have left more
            for number in range(1, first.get(ENGINES, parts)):
                _check_save(folder, number, first, _client_state(folder, tag_of(number)))
                state |= _exported(folder, Path(exported) / tag_of(number), tag_of(number))
            state |= _exported(folder, Path(exported) / "first", tag_of(0))
        others = first[KEY].numpy().tobytes()
    torch.save(_unpickled(others, weights_only=False) | {"state_dict": state}, file)


def _client_state(folder: str | Path, tag: str) -> dict[str, Any]:
    source = open_checkpoint(Path(folder), tag)
    state: dict[str, Any] = source.shared["client_state"]
    source.close()
    return state


def _exported(folder: str | Path, out: Path, tag: str) -> dict[str, Tensor]:
    return _read([path for path in export_checkpoint(folder, out, tag=tag).files if path.suffix != ".json"])


def _read(files: Iterable[Path]) -> dict[str, Tensor]:
    """Read safetensors files. A tied tensor is stored once, and returned under every name."""
    state: dict[str, Tensor] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            stored = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            tied = {alias: name for alias, name in (file.metadata() or {}).items() if name in stored}
        state |= stored | {alias: stored[name] for alias, name in tied.items()}
    return state


def _pickled(others: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save({key: value for key, value in others.items() if key not in STATES}, buffer)
    return buffer.getvalue()


def _unpickled(data: bytes, weights_only: bool | None) -> dict[str, Any]:
    loaded = torch.load(io.BytesIO(data), weights_only=bool(weights_only))
    assert isinstance(loaded, dict)
    return loaded
