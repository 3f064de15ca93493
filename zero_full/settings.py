"""Settings of a sharded run, as typed values."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from torch import nn

from zero_full.offload import DeviceTier, Tier
from zero_full.precision.dtypes import Dtypes


@dataclass(frozen=True)
class Gathering:
    """Options of stage 3 for all-gathering parameters. Numbers are counts of elements."""

    prefetch_numel: int = 50_000_000  # limit of prefetched parameters in flight; 0: no prefetch
    max_live: int = 1_000_000_000  # limit of gathered parameters (stage3_max_live_parameters)
    # A unit stays gathered after forward if backward needs it again within this many elements.
    max_reuse: int = 1_000_000_000
    keep_numel: int = 100_000  # parameters up to this size are never sharded
    keep_total: int = sys.maxsize  # limit of all parameters that are not sharded
    node_ranks: int = 1  # consecutive ranks that keep a secondary shard for backward (hpZ)
    quantized_weights: bool = False  # quantize all-gathers (qwZ)
    quantized_gradients: bool = False  # quantize reduce-scatters (qgZ)
    wrap: Callable[[str, nn.Module], bool] | None = None  # which modules to gather whole; None: by size


@dataclass(frozen=True)
class Settings:
    """Options of a sharded run. Options that DeepSpeed also has have its defaults."""

    stage: int = 1
    dtypes: Dtypes = field(default_factory=Dtypes)
    bucket_numel: int = 500_000_000  # elements of a reduction bucket, at most
    overlap: bool = False  # overlap reductions with backward
    copy_on_arrival: bool = True  # contiguous_gradients: copy gradients into their bucket immediately
    round_robin: bool = False  # round_robin_gradients: see `shard/deal/dealer.py`
    reduce_scatter: bool = True  # False: all-reduce instead
    prescale: bool = False  # divide gradients before they are summed, and not after
    predivide: float = 1.0  # the part of the divisor that is applied before the sum
    average: bool = True  # False: sum
    # Divisor of gradients of a plain loss.backward(); None: the number of micro-batches, which may change.
    plain_divisor: float | None = 1.0
    clip: float = 0.0  # largest gradient norm; 0: no clipping
    check_overflow: bool = True  # skip steps with inf or NaN in the gradients
    require_all_used: bool = False  # raise if a parameter has no gradient
    gathering: Gathering = field(default_factory=Gathering)
    sub_group_numel: int = 1_000_000_000  # elements of this rank that stage 3 steps at a time
    tier: Tier = field(default_factory=DeviceTier)  # offload tier of master weights and optimizer state
    param_tier: Tier = field(default_factory=DeviceTier)  # offload tier of stage 3's parameter shards
    shared_memory: bool = True  # ranks of one host communicate by shared memory over gloo
    check_timeout_s: float | None = None  # compare collective calls, with this timeout; None: no checks
    allow_untested: bool = False  # accept optimizers that are not known to support sharded tensors

    def __post_init__(self) -> None:
        for name, tier in (("tier", self.tier), ("param_tier", self.param_tier)):
            if not isinstance(tier, Tier):
                raise TypeError(f"{name} must be a tier such as HostTier(), not {tier!r}")
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage must be 0, 1, 2 or 3, not {self.stage!r}")
        for name in ("bucket_numel", "predivide", "plain_divisor"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, not {value!r}")
        if not 0 <= self.clip < inf:
            raise ValueError(f"clip must be a finite norm, or 0 for no clipping, not {self.clip!r}")
        if self.stage == 0 and self.tier.is_offloaded:
            raise ValueError("tier: stage 0 keeps the optimizer state on the device. Use stage 1, 2 or 3")
        if self.stage < 3 and self.param_tier.is_offloaded:
            raise ValueError(
                f"param_tier: stage {self.stage} keeps unsharded parameters on the device. Use stage 3"
            )
        if self.tier.delay_after is not None and self.param_tier.is_offloaded:
            raise ValueError(
                "tier.delay_after and param_tier exclude each other: offloaded parameters are updated within "
                "the step. Leave one of them out"
            )

    @cached_property
    def shards_state(self) -> bool:
        """Whether the optimizer state is sharded."""
        return self.stage >= 1

    @cached_property
    def shards_gradients(self) -> bool:
        """Whether gradients are sharded: reduced in every backward pass, and the rest freed."""
        return self.stage >= 2

    @cached_property
    def shards_parameters(self) -> bool:
        """Whether parameters are sharded, and gathered only while they are used."""
        return self.stage >= 3

    @cached_property
    def part_numel(self) -> int | None:
        """The number of this rank's elements that are stepped at a time; None: all."""
        limits = [self.sub_group_numel] if self.shards_parameters else []
        limits += [] if self.tier.part_numel is None else [self.tier.part_numel]
        limits += [self.param_tier.copied_numel] if self.param_tier.is_offloaded else []
        return min(limits, default=None)

    @cached_property
    def needs_norm(self) -> bool:
        """Whether a step needs the gradient norm, which costs a pass over the gradients and a collective."""
        return self.clip > 0 or self.check_overflow

    def divisors(self, ranks: int) -> tuple[float, float]:
        """Return the divisors of gradients before and after their sum over `ranks` ranks."""
        whole = float(ranks) if self.average else 1.0
        before = whole if self.prescale else self.predivide
        return before, whole / before
