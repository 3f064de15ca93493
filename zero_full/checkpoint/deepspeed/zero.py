"""Read DeepSpeed checkpoints of stages 1 to 3: every rank has saved its partition of the flat buffers.

[Note: where a parameter lies] At stages 1 and 2 a parameter group is one flat buffer. It has the parameters
in the order of `param_shapes` and is divided into equal partitions. It is padded at its end and, with
`parameter_alignment`, after each parameter. `param_slice_mappings` has the same information, but is wrong
with `round_robin_gradients`. At stage 3 every parameter is divided into equal parts, the last ones padded. A
sub-group's buffer on a rank is the concatenation of its parts.

Master weights are saved without the padding at the end of the buffer, and moments with it. All other elements
have the same offsets in both.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import accumulate, chain, pairwise
from math import prod
from pathlib import Path
from typing import Any

from zero_full.checkpoint.deepspeed.model import ModelStates, Shapes, add_scaler, add_untrained
from zero_full.checkpoint.deepspeed.saved_source import (
    SavedSource,
    StoredRanges,
    even_share,
    numbers_of,
    python_values,
    states_of,
)
from zero_full.checkpoint.torch_file import SavedTensor
from zero_full.checkpoint.unpickle import load_saved
from zero_full.errors import CheckpointError
from zero_full.shard.contents.keys import PARAMETERS, STATE, STEP


class RankStates:
    """The content of one rank's optimizer state file.

    Raises CheckpointError if it is another file or of a model with experts.
    """

    def __init__(self, path: Path) -> None:
        content = load_saved(path)
        states = content.get("optimizer_state_dict") if isinstance(content, Mapping) else None
        if not isinstance(states, Mapping) or "partition_count" not in states:
            raise CheckpointError(
                f"{path} is not an optimizer state file of DeepSpeed's ZeRO. Copy it again, or load "
                "another tag"
            )
        counts = states["partition_count"]
        counts = set(counts) if isinstance(counts, list) else {counts}
        if states.get("ds_zero_partition_groups") or len(counts) != 1:  # experts have groups with fewer ranks
            raise CheckpointError(
                f"{path} is of a model with experts, which are not supported. Load it with DeepSpeed, and "
                "save the weights to load here"
            )
        self.path, self.content = path, states
        self.world = int(counts.pop())  # ranks that have saved
        # DeepSpeed's BF16_Optimizer does not save the stage, and exists at stage 1 only.
        self.stage = int(states.get("zero_stage", 1))
        name = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        # The master weights, by group, at stage 3 by sub-group.
        self.masters: list[SavedTensor] = states[name]
        # The wrapped optimizer's state dict; in an elastic checkpoint a list of states.
        self.base: Any = states["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]

    @cached_property
    def states(self) -> list[dict[str, Any]]:
        """The optimizer state, by group or sub-group."""
        if isinstance(self.base, list):
            step = self.content.get("base_optimizer_state_step")
            return [state if step is None else {STEP: step, **state} for state in self.base]
        return list(chain.from_iterable(states_of(self.base)))

    def moments(self, group: int) -> dict[str, SavedTensor]:
        """Return the entries of a group's state that have one value for each element."""
        # At stages 1 and 2 moments have the padding at the end of the buffer, which master weights lack.
        is_padded = not isinstance(self.base, list) and self.stage < 3 and "zero_stage" in self.content
        padding = int(self.content["group_paddings"][group]) if is_padded else 0
        shape = (self.masters[group].numel + padding,)
        return {
            k: v for k, v in self.states[group].items() if isinstance(v, SavedTensor) and v.shape == shape
        }


class ZeroSource(SavedSource):
    """A DeepSpeed checkpoint of stage 1, 2 or 3."""

    def __init__(self, path: Path, models: list[ModelStates], ranks: list[RankStates]) -> None:
        first = ranks[0]
        super().__init__(path, f"DeepSpeed, stage {first.stage}")
        self.models, self.ranks = models, ranks
        self._check_same_save()
        shapes = models[0].trained
        if shapes is None or len(shapes) != len(first.masters):
            raise CheckpointError(
                f"{models[0].path} and {first.path.name} have different groups: they are of different saves. "
                "Copy all files of one save here, or load another tag"
            )
        self.shared = models[0].shared(first.stage, len(ranks))
        for group, named in enumerate(shapes):
            self._add_group(group, named)
        add_untrained(self, models, first.stage)
        base = first.base
        # An elastic checkpoint has no options, so the current ones stay.
        groups = [{"params": [0]} for _ in shapes] if isinstance(base, list) else base["param_groups"]
        self.add_groups(groups, shapes)
        add_scaler(self, first.content.get("loss_scaler"))

    def _check_same_save(self) -> None:
        """Raise CheckpointError if the ranks' files are of different runs or steps."""
        first = self.ranks[0]
        for other in self.ranks[1:]:
            if other.stage != first.stage or len(other.masters) != len(first.masters):
                raise CheckpointError(
                    f"{other.path} and {first.path.name} are of different runs. Copy all files of one "
                    "run here"
                )
            for group, (theirs, ours) in enumerate(zip(other.states, first.states, strict=True)):
                steps = python_values(numbers_of(theirs)), python_values(numbers_of(ours))
                if steps[0] != steps[1] or other.moments(group).keys() != first.moments(group).keys():
                    raise CheckpointError(
                        f"{other.path} has {steps[0] or 'no state'} where {first.path.name} has "
                        f"{steps[1] or 'none'}: they are of different saves, as after an interrupted one. "
                        "Load an older tag"
                    )

    def _add_group(self, group: int, named: Shapes) -> None:
        entries = {
            key: [rank.moments(group)[key] for rank in self.ranks] for key in self.ranks[0].moments(group)
        }
        numbers = numbers_of(self.ranks[0].states[group])
        masters = [rank.masters[group] for rank in self.ranks]
        cuts_of = self._cuts_at_3 if self.ranks[0].stage == 3 else self._cuts_before_3
        for name, cuts in cuts_of(group, named, masters):
            self.add(f"{PARAMETERS}/{name}", cuts, masters)
            for entry, parts in entries.items():
                self.add(f"{STATE}/{entry}/{name}", cuts, parts)
            if numbers:
                self.numbers[f"{PARAMETERS}/{name}"] = dict(numbers)

    def _cuts_before_3(
        self, group: int, named: Shapes, masters: list[SavedTensor]
    ) -> Iterator[tuple[str, StoredRanges]]:
        bounds = [0, *accumulate(master.numel for master in masters)]
        known = self.ranks[0].content.get("param_alignment_paddings")
        paddings = known[group] if known else [0] * len(named)
        begin = end = 0
        for (name, shape), padding in zip(named.items(), paddings, strict=True):
            end = begin + prod(shape)
            yield name, StoredRanges.of(shape, _overlaps(begin, end, bounds))
            begin = end + padding
        self._check_size(group, end, bounds[-1], 2 * len(masters))

    def _cuts_at_3(
        self, group: int, named: Shapes, masters: list[SavedTensor]
    ) -> Iterator[tuple[str, StoredRanges]]:
        begin = 0
        for name, shape in named.items():
            yield name, StoredRanges.even(shape, len(masters), begin)
            begin += even_share(shape, len(masters))
        for master in masters:
            self._check_size(group, begin, master.numel, 1)

    def _check_size(self, group: int, needed: int, found: int, alignment: int) -> None:
        if not needed <= found < needed + alignment:
            raise CheckpointError(
                f"{self.path}: the parameters of group {group} have {needed} elements in "
                f"{self.models[0].path.name}, but {found} in the optimizer state files. These are of "
                "different runs. Copy all files of one run here"
            )


def _overlaps(begin: int, end: int, bounds: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield rank, start and stop in the parameter, and offset in the rank's part, of each of its ranges.

    The parameter occupies `begin` to `end` of a buffer that is divided at `bounds`.
    """
    for rank, (first, last) in enumerate(pairwise(bounds)):
        start, stop = max(begin, first), min(end, last)
        if start < stop:
            yield rank, start - begin, stop - begin, start - first
