"""What an engine saves and loads: weights for everybody, and checkpoints to go on from."""

import logging
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_full.checkpoint import (
    Extras,
    LoadOptions,
    SaveOptions,
    Unmatched,
    complete,
    load_checkpoint,
    load_weights,
    save_16bit_model,
    save_checkpoint,
    save_weights,
    unfinished,
    wait_for_checkpoint,
)
from zero_full.config import Resolved
from zero_full.shard.access.gathered_parameters import (
    copy_on_cpu,
    fitting_chunks,
    load_own_state_dict,
    load_whole_state_dict,
    own_state_dict,
    whole_state_dict,
)
from zero_full.shard.contents.state import OwnPart
from zero_full.shard.step.optimizer import ZeroOptimizer

log = logging.getLogger("zero_full")
COUNTERS = ("micro_steps", "global_steps", "global_samples", "skipped_steps")


class Saving:
    """The part of an engine that saves and loads."""

    module: nn.Module
    optimizer: ZeroOptimizer
    resolved: Resolved
    lr_scheduler: Any
    training_dataloader: Any
    micro_steps: int
    global_steps: int
    global_samples: int | None
    kept: dict[str, Any]
    _boundary: bool | None
    _micro_batches: int
    _stepping: bool
    _forwards: int
    _passes: int

    # Checkpoints ---------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        asynchronous: bool = False,
    ) -> bool:
        """Save all that this run goes on from, in `save_dir/tag`. Every rank must call this between steps.

        tag           None: global_stepN
        client_state  plain data of yours, which `load_checkpoint` returns; rank 0's count
        save_latest   `load_checkpoint` finds this one without a tag
        asynchronous  return when all is copied in the host's memory, and write it beside the next steps

        Returns True, or raises on every rank; what was there before stays then. What fails after an
        asynchronous save has returned is raised by the next step, which is not taken then and may be called
        again; or by the next save, load, `wait_for_checkpoint` or `destroy`, whichever comes first.
        """
        self._refuse_between_steps("save_checkpoint")
        keep_last = self.resolved.config.checkpoint.keep_last
        save_checkpoint(
            self.module,
            self.optimizer,
            save_dir,
            self._tag(tag),
            client_state,
            self._extras(),
            SaveOptions(save_latest, exclude_frozen_parameters, keep_last, asynchronous),
        )
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until a checkpoint that an asynchronous save is writing is complete; raise if it fails."""
        wait_for_checkpoint(self.optimizer)

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        drop_errors: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint, at any number of ranks, stage and precision. Every rank must call this.

        tag  None: what the folder's file `latest` names
        load_module_strict         False: parameters and buffers may be missing or additional, with a warning
        load_optimizer_states      False: nor random numbers, loss scale, and what `keep_in_checkpoint` names
        load_lr_scheduler_states   False: the schedule stays as it is
        load_module_only           True: weights and buffers; optimizer and counters keep what they have
        drop_errors                True: give up what each rank of 1-bit and 0/1 Adam had of its own: what it
                                   had not said yet, and where it has gone alone. Another number of ranks
                                   cannot go on without this

        Returns its folder and the client state; (None, None), as DeepSpeed does, if there is no `latest` and
        no tag was given. CheckpointError, on every rank, if anything is wrong; nothing is changed then.
        """
        self._refuse_in_step("load_checkpoint")
        wanted = LoadOptions(
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            drop_errors or self.resolved.config.checkpoint.drop_errors,
        )
        tag = None if tag is None else str(tag)
        found = load_checkpoint(self.module, self.optimizer, load_dir, tag, wanted, self._extras())
        if found is None:
            folder = Path(load_dir)
            told = ", ".join(complete(folder)) or "none"
            told += "".join(f"; being written, or cut off: {path.name}" for path in unfinished(folder))
            log.warning("nothing was loaded: %s has no `latest` (checkpoints there: %s)", load_dir, told)
            return None, None
        self._take_counters(found.counters)
        return str(found.path), found.client_state

    def _take_counters(self, saved: Mapping[str, Any]) -> None:
        for name in COUNTERS:
            if name != "global_samples" or self.global_samples is not None:  # None: no batch size to count by
                setattr(self, name, saved.get(name, getattr(self, name)))
        # What was counted towards the step under way is given up with its gradients.
        self._forwards, self._passes = 0, self.optimizer.reducer.backward.count
        if self.micro_steps % self._micro_batches:  # there a step had another number of them
            self.micro_steps = self.global_steps * self._micro_batches

    def keep_in_checkpoint(self, **objects: Any) -> None:
        """Save and load the state of these, too, each rank its own: where a data loader is, for example.

        Each has `state_dict` and `load_state_dict`, and plain data for a state. At another number of ranks it
        can be loaded if all ranks have saved the same.
        """
        for name, each in objects.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise TypeError(f"{name} has no state_dict and load_state_dict, so it cannot be saved")
        self.kept |= objects

    def _extras(self) -> Extras:
        kept = dict(self.kept)
        if self.training_dataloader is not None:
            kept["training_dataloader"] = self.training_dataloader
        counters = {name: getattr(self, name) for name in COUNTERS}
        return Extras(self.lr_scheduler, counters, kept)

    def _refuse_between_steps(self, call: str) -> None:
        """Raise between the micro-batches of a step, of which a checkpoint has no gradients."""
        self._refuse_in_step(call)
        after = self.micro_steps % self._micro_batches
        if self.resolved.config.managed_gradient_accumulation and self._boundary is None and after:
            raise RuntimeError(
                f"{call} after {after} of a step's {self._micro_batches} micro-batches: save after the "
                "step's last one"
            )

    def _refuse_in_step(self, call: str) -> None:
        if self._stepping:
            raise RuntimeError(
                f"{call} inside engine.step(), by a hook: the weights are of this step already, and counters "
                "and schedule still of the one before. Call it after engine.step()"
            )

    def _tag(self, tag: str | None) -> str:
        return f"global_step{self.global_steps}" if tag is None else str(tag)

    # Weights -------------------------------------------------------------------------------------

    def module_state_dict(self, keep: Callable[[Tensor], Any] = copy_on_cpu) -> dict[str, Any]:
        """Return the module's state dict, with whole parameters. Every rank must call this.

        `keep` says what to keep of a tensor: a copy on the CPU, or what else you make of it.
        """
        return whole_state_dict(self.module, self.optimizer, keep)

    def load_module_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """New parameters, and masters that follow them. Every rank must call this with the same values."""
        load_whole_state_dict(self.module, self.optimizer, state, strict)

    def save_weights(
        self,
        directory: str | PathLike[str],
        dtype: torch.dtype | None = None,
        max_shard_bytes: int = 5 * 10**9,
        names: Callable[[str], str | None] | None = None,
        filename: str = "model.safetensors",
    ) -> None:
        """Write parameters and persistent buffers, whole, as safetensors. Every rank must call this.

        dtype            None: as they are trained; else floating-point numbers are converted to it, from the
                         fp32 masters where there are any
        max_shard_bytes  what does not fit into one file becomes several and an index
        names            a function from the module's names to the file's, the same on every rank; None as its
                         answer leaves a tensor out
        """
        save_weights(self.module, self.optimizer, directory, dtype, max_shard_bytes, names, filename)

    def load_weights(
        self,
        path: str | PathLike[str],
        strict: bool = True,
        names: Callable[[str], str | None] | None = None,
    ) -> Unmatched:
        """Read weights from safetensors; each rank reads its slices. Every rank must call this.

        path     a .safetensors file, an index, or a folder with model.safetensors or its index
        strict   False: what is missing keeps its values, what is unexpected is left alone; both are returned,
                 as lists of names
        names    a function from the module's names to the file's; None as its answer: not to be loaded

        The optimizer's state stays as it is.
        """
        return load_weights(self.module, self.optimizer, path, strict, names)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """The weights in one file, by torch.save or as safetensors. Every rank must call this."""
        return save_16bit_model(
            self.module, self.optimizer, save_dir, save_filename, exclude_frozen_parameters
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of everything, to be saved between steps and loaded by the same rank."""
        self._refuse_between_steps("state_dict")
        scheduler = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None
        return {
            "module": own_state_dict(self.module, self.optimizer),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": scheduler,
            "counters": {name: getattr(self, name) for name in COUNTERS},
        }

    def _refuse_other_state(self, state: Mapping[str, Any]) -> None:
        if missing := [
            key for key in ("module", "optimizer", "lr_scheduler", "counters") if key not in state
        ]:
            raise ValueError(f"this is not what an engine's state_dict has returned: it lacks {missing}")
        if self.lr_scheduler is not None and state["lr_scheduler"] is None:
            raise ValueError(
                f"the state has none of a schedule, so this run's {type(self.lr_scheduler).__name__} would "
                "not go on with the steps. If that is meant, give it the schedule's own: "
                'state["lr_scheduler"] = engine.lr_scheduler.state_dict()'
            )
        if self.lr_scheduler is None and state["lr_scheduler"] is not None:
            log.warning("the state of a schedule is not loaded: give initialize the schedule before loading")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue bit for bit where `state_dict` was taken. Every rank loads its own part."""
        self._refuse_in_step("load_state_dict")
        self._refuse_other_state(state)
        fitting_chunks(self.module, self.optimizer, OwnPart(state["module"]["tensors"], {}))
        self.optimizer.load_state_dict(state["optimizer"])  # which may refuse it, so before anything changes
        load_own_state_dict(self.module, self.optimizer, state["module"])
        if self.lr_scheduler is not None and state["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self._take_counters(state["counters"])
