"""What a run may choose about sharding, in one value."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from torch import nn

from zero_full.offload import DeviceTier, Tier
from zero_full.precision.dtypes import Dtypes


@dataclass(frozen=True)
class Gathering:
    """How long stage 3 keeps parameters gathered. All numbers are elements."""

    prefetch_numel: int = 50_000_000  # units are gathered early until this is on its way; 0: none is
    max_live: int = 1_000_000_000
    max_reuse: int = 1_000_000_000  # a unit that backward needs sooner stays after forward
    keep_numel: int = 100_000  # smaller parameters are always whole
    keep_total: int = sys.maxsize
    node_ranks: int = 1  # neighbours that keep among them what forward has gathered, for backward
    quantized_weights: bool = False
    quantized_gradients: bool = False
    wrap: Callable[[str, nn.Module], bool] | None = None  # which modules are units; None: by size


@dataclass(frozen=True)
class Settings:
    """What a run may choose. Defaults are DeepSpeed's where it has the same choice; numel are elements."""

    stage: int = 1
    dtypes: Dtypes = field(default_factory=Dtypes)
    bucket_numel: int = 500_000_000
    overlap: bool = False  # reduce buckets beside backward
    copy_on_arrival: bool = True  # contiguous_gradients: gradients move into their bucket as they appear
    round_robin: bool = False
    reduce_scatter: bool = True
    prescale: bool = False
    predivide: float = 1.0
    average: bool = True
    plain_divisor: float = 1.0  # what gradients are divided by whose loss nobody here has divided
    clip: float = 0.0
    check_overflow: bool = True  # a step with inf or NaN in its gradients is skipped
    refuse_unused: bool = False
    gathering: Gathering = field(default_factory=Gathering)
    sub_group_numel: int = 1_000_000_000  # stage 3 steps so many elements of its own at a time
    tier: Tier = field(default_factory=DeviceTier)  # where masters and the optimizer's state wait
    param_tier: Tier = field(default_factory=DeviceTier)  # where stage 3's slices of parameters wait
    shared_memory: bool = True  # among ranks of one host over gloo; without it they send messages
    check_timeout_s: float | None = None  # compare every collective call, waiting so long for a rank
    allow_untested: bool = False  # optimizers that nobody has said can step pieces of tensors

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be meant."""
        for name, tier in (("tier", self.tier), ("param_tier", self.param_tier)):
            if not isinstance(tier, Tier):
                raise TypeError(f"{name} must be one such as HostTier(), not {tier!r}")
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage must be 0, 1, 2 or 3, not {self.stage!r}")
        for name in ("bucket_numel", "predivide", "plain_divisor"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)!r}")
        if not 0 <= self.clip < inf:
            raise ValueError(f"clip must be a norm, or 0 for no clipping, not {self.clip!r}")
        if self.stage == 0 and self.tier.apart:
            raise ValueError("stage 0 keeps the optimizer's state beside the parameters: use stage 1, 2 or 3")
        if self.stage < 3 and self.param_tier.apart:
            raise ValueError(
                f"stage {self.stage} keeps whole parameters on the device: param_tier needs stage 3"
            )
        if self.tier.delay_after is not None and self.param_tier.apart:
            raise ValueError(
                "delay_after and param_tier: parameters that wait elsewhere come up to date in a step"
            )

    @property
    def cuts_state(self) -> bool:
        """Whether each rank keeps its slice of the optimizer's state only."""
        return self.stage >= 1

    @property
    def frees_gradients(self) -> bool:
        """Whether gradients are reduced in every backward pass, and each rank keeps its slice only."""
        return self.stage >= 2

    @property
    def releases_parameters(self) -> bool:
        """Whether parameters are whole only while they are used."""
        return self.stage >= 3

    @property
    def part_numel(self) -> int | None:
        """How many of this rank's elements are stepped at a time; None: all."""
        limits = [self.sub_group_numel] if self.releases_parameters else []
        limits += [] if self.tier.part_numel is None else [self.tier.part_numel]
        limits += [self.param_tier.copied_numel] if self.param_tier.apart else []
        return min(limits, default=None)

    @property
    def needs_norm(self) -> bool:
        """Whether a step asks for the gradients' norm, which costs a pass over them and a collective."""
        return self.clip > 0 or self.check_overflow

    def divisors(self, ranks: int) -> tuple[float, float]:
        """What to divide gradients by before and after they are summed over so many ranks."""
        whole = float(ranks) if self.average else 1.0
        before = whole if self.prescale else self.predivide
        return before, whole / before
