"""What zero_full refuses by design: a rule about cases, and what its message must say."""

import re

from tests.fuzz.case import Case


def expected_refusal(case: Case) -> str | None:
    """A pattern of the message; None: the case must run."""
    for layout, _ in case.legs():
        if layout.tier != "device" and layout.stage == 0:
            return r"offload_optimizer\.device: stage 0 keeps"
        if layout.param_tier != "device" and layout.stage < 3:
            return rf"offload_param\.device: stage {layout.stage} keeps unsharded parameters"
        if "delayed" in layout.tier and case.optimizer not in ("Adam", "AdamW"):
            return "delay_update_after .* supports only"
        if case.optimizer == "ZeroOneAdam" and layout.stage and layout.zero.get("mics_shard_size", 0) > 0:
            return "ZeroOneAdam does not support this run: .* mics_shard_size"
    return None


def matches(pattern: str, error: str) -> bool:
    return re.search(pattern, error, re.DOTALL) is not None
