"""Checks across ranks before anything is built: raise on all ranks if one fails, or if two differ.

Ranks that differ would issue different collectives later, and hang.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_full._compat import backend_of, default_store, prefix_store
from zero_full.comm.devices import describe_shared, shared_devices
from zero_full.comm.error_dedup import print_once
from zero_full.comm.fake_ranks import FakeGroup
from zero_full.comm.stores import numbered_topic
from zero_full.comm.topology import Topology, this_rank
from zero_full.errors import CommunicationError, DesyncError, DisagreementError, SharedDeviceError
from zero_full.formatting import by_value

log = logging.getLogger("zero_full")
Returned = TypeVar("Returned")
POLL_S = 0.01  # seconds between two polls of the store
Facts = Mapping[str, Any]
SHOWN = 8  # largest number of differences in a message


def groups_of(topology: Topology) -> list[dist.ProcessGroup]:
    """Return the process groups that together reach every rank that has the same parameters."""
    if isinstance(topology.data, FakeGroup):
        return []
    if topology.shard is not None and topology.replicate is not None:
        return [topology.shard, topology.replicate]
    data = topology.data
    if data is None and dist.is_initialized():
        data = dist.group.WORLD
    return [data] if data is not None and data.size() > 1 else []


def members_of(topology: Topology) -> list[int]:
    """Return the global ranks that have the same parameters, sorted."""
    return sorted({rank for group in groups_of(topology) for rank in dist.get_process_group_ranks(group)})


def _store_of_call(purpose: str, ranks: Sequence[int]) -> Any:
    """Return a part of the store for this call."""
    return prefix_store(f"zero_full/{numbered_topic(purpose, ranks, this_rank())}", default_store())


def gather_objects(mine: Any, topology: Topology) -> dict[int, Any]:
    """Gather an object from every rank that has the same parameters, by global rank. All must call this."""
    return _gather(mine, groups_of(topology))


def gather_everywhere(mine: Any, topology: Topology) -> dict[int, Any]:
    """Gather an object from every rank, also from those with other parts of the model. All must call this."""
    parts = [] if isinstance(topology.data, FakeGroup) else topology.model_parallel
    return _gather(mine, [*groups_of(topology), *parts])


def _gather(mine: Any, groups: Sequence[dist.ProcessGroup]) -> dict[int, Any]:
    """Gather an object over these groups, one after the other, by global rank."""
    known = {this_rank(): mine}
    for group in groups:
        answers: list[Any] = [None] * group.size()
        try:
            dist.all_gather_object(answers, known, group=group)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise CommunicationError(
                f"rank {this_rank()}: all_gather_object in initialize failed: {reason}\n"
                "Usually another rank failed first (look for the earliest error), or does not call initialize"
            ) from error
        known = {rank: each for answer in answers for rank, each in answer.items()}
    return dict(sorted(known.items()))


class StartupBarrier:
    """Waits until all ranks have called `initialize`, with a timeout. Every rank creates one.

    Uses the process group's store, because a collective would hang if a rank is missing.
    """

    def __init__(self, topology: Topology) -> None:
        self.ranks = members_of(topology)
        if self.ranks:
            self.store = _store_of_call("initialize", self.ranks)
            self.store.set(str(this_rank()), "")

    def wait(self, timeout_s: float) -> None:
        """Wait until all ranks have called `initialize`; DesyncError after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while absent := [rank for rank in self.ranks if not self.store.check([str(rank)])]:
            if time.monotonic() > deadline:
                raise DesyncError(
                    f"ranks {absent} have not called initialize within {timeout_s:g} s. Look for an earlier "
                    "error on them; every rank must call initialize"
                )
            time.sleep(POLL_S)


def check_shared_devices(topology: Topology, device: torch.device) -> None:
    """Raise SharedDeviceError on every rank if two ranks share a device and the backend does not allow it.

    NCCL itself would hang in its first collective, or report a duplicate GPU.
    """
    if device.type == "cpu" or not (ranks := members_of(topology)):
        return
    backend = backend_of(groups_of(topology)[0], device)
    if backend == "gloo":
        return
    shared = shared_devices(_store_of_call("devices", ranks), ranks, this_rank(), device)
    if shared:
        raise SharedDeviceError(
            f"{describe_shared(shared)}, but {backend} needs a device for each rank. Call "
            "zero_full.init_distributed() instead of torch.distributed.init_process_group: then ranks that "
            "share a device stage shards in host memory. Or give each rank its own device: "
            "torch.accelerator.set_device_index(...)"
        )


def attempt(act: Callable[[], Returned], topology: Topology) -> Returned:
    """Call `act` and return its result; if it raises on any rank, raise on all. Every rank must call this."""
    result, failure = None, None
    try:
        result = act()
    # DesyncError: a rank is missing, so gathering would hang. SharedDeviceError: all ranks raise it.
    except (DesyncError, SharedDeviceError):
        raise
    except Exception as error:
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    answers = gather_everywhere(text, topology)
    failures = {rank: each for rank, each in answers.items() if each is not None}
    if failures:
        rank, first_text = next(iter(failures.items()))
        own_error = failure or RuntimeError(f"initialize failed on rank {rank}: {first_text}")
        raise print_once(own_error, _ranks_with(text or first_text, failures, [*answers]))
    return result  # type: ignore[return-value]


def _ranks_with(text: str, failures: Mapping[int, str], ranks: Sequence[int]) -> list[int]:
    """Return the ranks that failed with this text. Ranks without a failure raise the first text as well."""
    alike = [rank for rank in failures if failures[rank] == text]
    is_first = text == next(iter(failures.values()))
    return alike + [rank for rank in ranks if rank not in failures and is_first]


def compare(sections: Mapping[str, Facts], topology: Topology, may_differ: str = "") -> None:
    """Raise DisagreementError on every rank if values differ between ranks. Every rank must call this.

    sections    names and values, by section
    may_differ  the section whose differences are only a warning, on the first rank
    """
    digests = {name: _digest(facts) for name, facts in sections.items()}
    known = gather_objects(digests, topology)
    differing = [name for name in sections if len({each[name] for each in known.values()}) > 1]
    if not differing:
        return
    if differing == [may_differ]:
        everyone = gather_objects(sections[may_differ], topology)
        if this_rank() == min(everyone):
            log.warning("%s", _disagreement(everyone, f"the ranks have different {may_differ}:"))
        return
    mine = {key: value for name in differing for key, value in sections[name].items() if name != may_differ}
    error = DisagreementError(
        _disagreement(gather_objects(mine, topology), "models, optimizers or arguments differ between ranks:")
    )
    raise print_once(error, members_of(topology))


def _digest(facts: Facts) -> str:
    return hashlib.sha256(repr(list(facts.items())).encode()).hexdigest()


def _disagreement(known: Mapping[int, Facts], heading: str) -> str:
    lines = []
    for key in dict.fromkeys(key for facts in known.values() for key in facts):
        values = by_value({rank: str(facts.get(key, "absent")) for rank, facts in known.items()})
        if len(values) > 1:
            lines.append(f"{key}: {'; '.join(values)}")
    lines = lines or ["the same values in another order"]
    more = f"\n  and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "\n  ".join([heading, *lines[:SHOWN]]) + more


def facts_of(model: nn.Module, base: Optimizer | None) -> dict[str, dict[str, Any]]:
    """Return the properties of a model and its optimizer that must be equal on all ranks, in sections."""
    return {
        "optimizer": dict(_optimizer_facts(base)),
        "parameters": dict(_parameter_facts(model, base)),
        "buffers": {
            f"buffer {name}": f"{b.dtype} of shape {tuple(b.shape)}" for name, b in model.named_buffers()
        },
    }


def _optimizer_facts(base: Optimizer | None) -> Iterator[tuple[str, Any]]:
    if base is None:
        yield "optimizer", None
        return
    yield "optimizer", f"{type(base).__module__}.{type(base).__qualname__}"
    yield from getattr(base, "model_options", {}).items()  # of an optimizer that reduces gradients itself
    for number, group in enumerate(base.param_groups):
        for key, value in group.items():
            if key != "params":
                yield f"{key} of parameter group {number}", float(value) if _is_number(value) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _parameter_facts(model: nn.Module, base: Optimizer | None) -> Iterator[tuple[str, str]]:
    groups = base.param_groups if base is not None else []
    group_of = {p: number for number, group in enumerate(groups) for p in group["params"]}
    names = {p: name for name, p in model.named_parameters()}
    for number, param in enumerate(dict.fromkeys([*names, *group_of])):
        what = f"{names.get(param, 'not in the model')}, {param.dtype} of shape {tuple(param.shape)}"
        how = f"{'trained' if param.requires_grad else 'frozen'}, group {group_of.get(param, 'none')}"
        state = base.state.get(param, {}) if base is not None else {}
        since = f", optimizer state {sorted(state)} at step {_step(state)}" if state else ""
        yield f"parameter {number}", f"{what}, {how}{since}"


def _step(state: Mapping[str, Any]) -> Any:
    step: Any = state.get("step")
    return float(step) if _is_number(step) else step
