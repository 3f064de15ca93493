"""Note on an out-of-memory error: the bytes that this rank holds, beside the plan, and settings to change.

Nothing of this runs before an error. What a setting saves is estimated from the bytes held and from the
plan; activations are what torch's allocator has given out beyond those, and unknown on a CPU.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from zero_full.comm.topology import this_rank
from zero_full.config import Config
from zero_full.config.rules import MICRO, STAGE, STATE, STEPS
from zero_full.config.rules import PARAMETERS as OFFLOAD_PARAM
from zero_full.formatting import human
from zero_full.optim import served_stages
from zero_full.shard.access.held_bytes import HeldBytes
from zero_full.shard.group.parameters import FlatParameters, GatherState
from zero_full.shard.step.optimizer import ZeroOptimizer
from zero_full.shard.step.wrapped_optimizer import NoOptimizer

ON_DEVICE = ("parameters", "gradients", "optimizer", "counters")  # kinds of bytes
SHOWN = 3  # settings
BEGIN = "zero_full: out of memory in"
RECOMPUTE = "torch.utils.checkpoint in the model: activations are recomputed in backward"
RECOMPUTE_LAYERS = (
    "pipeline.activation_checkpoint_interval 1, with a schedule without zero bubble: activations are "
    "recomputed in backward"
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an allocation has failed, on the device or on the host, here or in a cause."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error):
            return True
        error = error.__cause__
    return False


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception. Python 3.10 has no notes, so there the text joins the message."""
    add: Callable[[str], None] | None = getattr(error, "add_note", None)
    if add is not None:
        add(note)
    else:
        error.args = (f"{error}\n{note}", *error.args[1:])


@dataclass(frozen=True)
class Remedy:
    """A setting that would save memory."""

    saves: int  # estimated bytes
    text: str


class MemoryNotes:
    """Adds a note to each out-of-memory error of an engine.

    compute_plan  returns the planned bytes by the kinds of `HeldBytes`, each with its peak within a step
    """

    def __init__(
        self,
        optimizer: ZeroOptimizer,
        config: Config,
        device: torch.device,
        compute_plan: Callable[[], Mapping[str, int]],
    ) -> None:
        self.optimizer, self.config, self.device = optimizer, config, device
        self.compute_plan = compute_plan

    @cached_property
    def plan(self) -> tuple[Mapping[str, int], str]:
        """The planned bytes, and the reason if there are none. Computed once, as a loop may try again."""
        try:
            return self.compute_plan(), ""
        except Exception as error:  # a plan of this model may be impossible for any reason
            return {}, str(error).partition("\n")[0] or type(error).__name__

    def explain(self, error: BaseException, phase: str) -> None:
        """Add a note to an out-of-memory error of the call `phase`, unless it has one already."""
        noted = "".join([str(error), *getattr(error, "__notes__", ())])
        if not is_out_of_memory(error) or BEGIN in noted:
            return
        try:
            add_note(error, MemoryNote(self, phase).text())
        except Exception as problem:  # the note must never take the error's place
            add_note(error, f"{BEGIN} {phase}. Its memory could not be described: {problem}")


class MemoryNote:
    """Describes the memory of a rank at an out-of-memory error in the call `phase`."""

    def __init__(self, notes: MemoryNotes, phase: str) -> None:
        optimizer, device = notes.optimizer, notes.device
        self.optimizer, self.config, self.device = optimizer, notes.config, device
        self.ledger = HeldBytes(optimizer)
        self.held = {kind: size for kind, size in self.ledger.now().items() if size}
        self.here = sum(self.held.get(kind, 0) for kind in ON_DEVICE)
        self.planned, self.unplanned = notes.plan
        self.others: int | None = None  # bytes of activations and temporaries; None: unknown
        if device.type != "cpu":
            self.others = max(0, torch.accelerator.memory_allocated(device) - self.here)
        elif phase == "step":
            self.others = 0  # activations are freed
        self.phase, self.is_trained = phase, not isinstance(optimizer.base, NoOptimizer)
        self.is_pipeline = optimizer.communicators.pipe is not None

    def text(self) -> str:
        """Return the note."""
        lines = [
            f"{BEGIN} {self.phase} on rank {this_rank()} ({self.device}). Bytes of zero_full on this rank:"
        ]
        lines += self._table()
        if self.device.type != "cpu":
            free, total = torch.accelerator.get_memory_info(self.device)
            lines.append(
                f"  torch has allocated {human(self.others)} more: activations, temporaries, the script's. "
                f"The device has {human(total)}, of which {human(free)} are free."
            )
        lines.append(
            f"  No plan: {self.unplanned}."
            if self.unplanned
            else "  The plan has the most of each kind within a step, and no activations."
        )
        found = [each for each in self.remedies() if each.saves > 0]
        if remedies := sorted(found, key=lambda each: -each.saves)[:SHOWN]:
            lines.append("What to change first:")
            lines += [f"  {place}. {each.text}" for place, each in enumerate(remedies, 1)]
        return "\n".join(lines)

    def _table(self) -> Iterator[str]:
        yield f"  {'':<14}{'held':>10}" + (f"{'planned':>10}" if self.planned else "")
        for kind in dict.fromkeys((*self.held, *self.planned)):
            if kind == "counters":  # a few bytes each
                continue
            planned = f"{human(self.planned.get(kind, 0)):>10}" if self.planned else ""
            yield f"  {kind:<14}{human(self.held.get(kind, 0)):>10}{planned}"

    # Settings ------------------------------------------------------------------------------------

    def remedies(self) -> Iterator[Remedy]:
        """Yield settings that would save memory in this run."""
        yield from self._smaller_batches()
        yield from self._more_sharding()
        yield from self._offload()
        yield from self._smaller_buffers()

    def _smaller_batches(self) -> Iterator[Remedy]:
        # On a CPU activations are unknown: rank these as if they were as large as the rest.
        others = self.here if self.others is None else self.others
        micro, steps = self.config.train_micro_batch_size_per_gpu, self.config.gradient_accumulation_steps
        size = "" if self.others is None else f", of {human(self.others)}"
        if self.is_pipeline and self.config.pipeline.schedule == "gpipe":
            text = 'pipeline.schedule "1f1b", not "gpipe": activations of fewer micro-batches at a time'
            yield Remedy(others // 2, text + size)
        elif micro > 1:
            change = f"{MICRO} {micro // 2} and {STEPS} {steps * 2}, not {micro} and {steps}"
            yield Remedy(others // 2, f"{change}: half the activations{size}")
        if self.is_trained:
            yield Remedy(others // 3, (RECOMPUTE_LAYERS if self.is_pipeline else RECOMPUTE) + size)
        in_fp32 = any(flat.dtype == torch.float32 for flat in self.optimizer.sharded.flats)
        if in_fp32 and not self.config.torch_autocast.enabled:  # masters take what parameters save
            text = 'bf16 {"enabled": true}: activations and gathered parameters take half the bytes'
            yield Remedy((others + sum(size for _, size in self._gathered())) // 2, text)

    def _more_sharding(self) -> Iterator[Remedy]:
        stage, ranks = self.optimizer.settings.stage, self.optimizer.communicators.dense.shard_comm.size
        higher = min(max(_stages(self.optimizer)), 1 if self.is_pipeline else 3)
        if ranks == 1 or higher <= stage:
            return
        kinds = ["optimizer"] * (stage < 1) + ["gradients"] * (stage < 2 <= higher)
        kinds += ["parameters"] * (higher == 3)
        saves = sum(self._most(kind) for kind in kinds) * (ranks - 1) // ranks
        cut = " and ".join(kinds)
        yield Remedy(saves, f"{STAGE} {higher}, not {stage}: {cut} are sharded, {human(saves)} less")

    def _offload(self) -> Iterator[Remedy]:
        settings, on_cpu = self.optimizer.settings, self.device.type == "cpu"
        place = '{"device": "nvme", "nvme_path": ...}' if on_cpu else '{"device": "cpu"}'
        state = self._most("optimizer")
        if settings.stage > 0 and state and (on_cpu or not settings.tier.is_offloaded):
            yield Remedy(state, f"{STATE} {place}: {human(state)} less")
        slices = sum(self.ledger.at_rest.values()) if not settings.param_tier.is_offloaded else 0
        if settings.stage == 3 and slices:
            yield Remedy(slices, f"{OFFLOAD_PARAM} {place}: {human(slices)} less")

    def _smaller_buffers(self) -> Iterator[Remedy]:
        zero = self.config.zero_optimization
        if gathered := self._gathered():
            flat, largest = max(gathered, key=lambda each: each[1])
            saves, numel = sum(size for _, size in gathered) - largest, largest // flat.dtype.itemsize
            text = f"stage3_max_live_parameters {numel}, not {zero.stage3_max_live_parameters}"
            yield Remedy(saves, f"zero_optimization.{text}: up to {human(saves)} less, more all-gathers")
        if (
            zero.stage == 3
            and (whole := self.ledger.always)
            and self.optimizer.communicators.dense.shard_comm.size > 1
        ):
            text = f"stage3_param_persistence_threshold 0, not {zero.stage3_param_persistence_threshold}"
            yield Remedy(whole, f"zero_optimization.{text}: up to {human(whole)} less")
        unreduced = self.planned.get("gradients", 0) - self.held.get("gradients", 0)
        bucket = zero.reduce_bucket_size // 10
        if zero.stage > 0 and unreduced > 0 and bucket and not self.is_pipeline:  # which reduces in the step
            text = f"zero_optimization.reduce_bucket_size {bucket}, not {zero.reduce_bucket_size}"
            yield Remedy(unreduced // 2, f"{text}: gradients are reduced sooner")

    def _gathered(self) -> list[tuple[FlatParameters, int]]:
        """Return the buffers of parameters that are gathered now, with their bytes."""
        return [each for each in self.ledger.gathered if each[0].state is not GatherState.SHARDED]

    def _most(self, kind: str) -> int:
        """Return the bytes of a kind: held now, or planned where a step has not made them yet."""
        return max(self.held.get(kind, 0), self.planned.get(kind, 0))


def _stages(optimizer: ZeroOptimizer) -> Any:
    """Return the stages that the wrapped optimizer supports."""
    if isinstance(optimizer.base, NoOptimizer):
        return (optimizer.settings.stage,)
    try:
        return served_stages(type(optimizer.base).__name__)
    except ValueError:  # a class of the user's
        return (optimizer.settings.stage,)
