"""What zero_full refuses by design: a rule about cases, and what its message must say."""

import re

import torch

from tests.fuzz.case import Case, Layout


def expected_refusal(case: Case) -> str | None:
    """A pattern of the message; None: the case must run."""
    for layout, _ in case.legs():
        if layout.pipe and (pattern := _refused_schedule(case, layout)):
            return pattern
        if layout.tier != "device" and layout.stage == 0:
            return r"offload_optimizer\.device: stage 0 keeps"
        if layout.param_tier != "device" and layout.stage < 3:
            return rf"offload_param\.device: stage {layout.stage} keeps unsharded parameters"
        if "delayed" in layout.tier and case.optimizer not in ("Adam", "AdamW"):
            return "delay_update_after .* supports only"
        if case.optimizer == "ZeroOneAdam" and layout.stage and layout.zero.get("mics_shard_size", 0) > 0:
            return "ZeroOneAdam does not support this run: .* mics_shard_size"
    return None


def _refused_schedule(case: Case, layout: Layout) -> str:
    """Of a pipeline that this schedule cannot run, or torch's version."""
    count, ranks = case.micro_batches, layout.pipe
    if layout.schedule == "zbv" and torch.__version__ < "2.13":
        return r"pipeline\.schedule 'zbv' needs torch 2\.13"
    cannot = rf"'{layout.schedule}' cannot run gradient_accumulation_steps {count} micro-batches"
    if layout.schedule == "1f1b" and count < ranks:
        return cannot
    if layout.schedule.startswith("interleaved") and count % max(1, count // ranks):
        return cannot
    return ""


def matches(pattern: str, error: str) -> bool:
    return re.search(pattern, error, re.DOTALL) is not None
