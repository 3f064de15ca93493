"""Record a trainer's step on one device: bytes by kind, the allocator's history, and when each rank works.

`python -m lessons.one_gpu --out FILE` trains on the GPU, or on the CPU if there is none. The ranks are
threads that share the device and its default stream, so nothing travels over a network and NCCL is not used.
The recording is one JSON file. It names the device, the version of torch and the date.
"""

import argparse
import copy
import gc
import json
import platform
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from lessons.registry import ROOT
from zero_min import STAGES, formula
from zero_min.gpt import GPT, GPTConfig, batch, load_text
from zero_min.ledger import Listener, held, tensors_in
from zero_min.thread_comm import ThreadComm, run_world

KINDS = ("parameters", "gradients", "optimizer", "forward", "backward", "buckets", "step")
PHASES = ("forward", "backward", "bucket", "step")
FOLLOWING = {"begin": "forward", "forward": "backward", "backward": "step"}  # what comes after a moment
POINTS = 150  # pairs of a curve in the file: the lowest and the highest of what each stands for
KIB = 1024
MOST = 40_000  # requests and frees in the file
RUN_GAP = 3.0  # microseconds between two kernels of a rank that are drawn as one
SECONDS = 90.0  # that a rank waits for another
JSON = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """What is trained, on how many ranks."""

    layers: int
    width: int
    context: int
    rows: int  # of each rank in a step
    world: int = 4
    bucket_size: int = 2**22  # elements

    @property
    def config(self) -> GPTConfig:
        """The model."""
        return GPTConfig(context=self.context, layers=self.layers, heads=8, width=self.width)


SIZES = {"cuda": Size(8, 1024, 256, 2), "cpu": Size(4, 128, 64, 2, bucket_size=2**17)}


def default_device() -> str:
    """The GPU, if torch sees one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@cache
def initial(config: GPTConfig) -> GPT:
    """The model before training, on the host: made once, because drawing its numbers takes seconds."""
    return GPT(config)


def numel_of(size: Size) -> int:
    """Parameters of the model."""
    return sum(p.numel() for p in initial(size.config).parameters())


# --- one rank ---------------------------------------------------------------------------------------------


class Rank:
    """One rank's model, trainer and data on the device."""

    def __init__(
        self,
        comm: ThreadComm,
        stage: int,
        size: Size,
        device: torch.device,
        prepare: Callable[[nn.Module], None] = lambda model: None,
    ) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.comm, self.size, self.device = comm, size, device
        self.generator = torch.Generator().manual_seed(comm.rank)
        options: JSON = {"bucket_size": size.bucket_size} if stage == 2 else {}
        self.model = copy.deepcopy(initial(size.config)).to(device)
        prepare(self.model)  # hooks that are called before the trainer's
        self.trainer: Any = STAGES[stage](self.model, comm, lr=1e-3, **options)

    def data(self) -> tuple[Tensor, Tensor]:
        """This step's rows."""
        tokens, targets = batch(load_text(), self.size.rows, self.size.context, self.generator)
        return tokens.to(self.device), targets.to(self.device)

    def step(self, at: Callable[[str], None] = lambda moment: None) -> Tensor:
        """One training step; `at` is called between its parts. Python does not wait for the loss."""
        self.trainer.zero_grad()
        at("begin")
        loss = self.model(*self.data())
        at("forward")
        self.trainer.backward(loss)
        value: Tensor = loss.detach()
        del loss
        at("backward")
        self.trainer.step()
        at("step")
        return value

    def close(self) -> None:
        """Let the trainer hold nothing: parameters' hooks hold it, in a circle that is never collected."""
        vars(self.trainer).clear()

    def held(self) -> dict[str, int]:
        """Bytes of what the trainer says that it keeps, by kind."""
        return {kind: held(tensors) for kind, tensors in self.trainer.holdings().items()}


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocator(device: torch.device) -> dict[str, int]:
    """What torch's allocator counts on a GPU, in bytes; nothing on a CPU, where torch does not count."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "requested": stats.get("requested_bytes.all.current", 0),
        "allocated": stats.get("allocated_bytes.all.current", 0),
        "peak": stats.get("allocated_bytes.all.peak", 0),
        "reserved": stats.get("reserved_bytes.all.current", 0),
        "in use": total - free,  # of the whole card: CUDA's own and other programs', too
    }


@contextmanager
def clean(device: torch.device) -> Iterator[None]:
    """Let go of what earlier worlds have left, so that each one begins alike."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    yield


# --- bytes at a few moments, and seconds ------------------------------------------------------------------


def _moments(comm: ThreadComm, stage: int, size: Size, device: torch.device) -> JSON:
    """Bytes at the moments of a step, where all ranks wait for each other; and seconds of whole steps."""
    moments: JSON = {}

    def at(moment: str) -> None:
        wait_for(device)
        comm.barrier()
        if comm.rank == 0:
            moments[moment] = allocator(device)
        comm.barrier()

    at("nothing")
    rank = Rank(comm, stage, size, device)
    at("made")
    losses = [rank.step() for _ in range(2)]  # warms up
    at("before")
    if comm.rank == 0 and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    comm.barrier()
    comm.ledger.clear_traffic()
    losses.append(rank.step(at))
    sent, keeps = comm.ledger.total_sent(), rank.held()
    seconds = []
    for _ in range(5):
        wait_for(device)
        comm.barrier()
        start = time.perf_counter()
        losses.append(rank.step())
        wait_for(device)
        comm.barrier()
        seconds.append(time.perf_counter() - start)
    rank.close()
    return {
        "moments": moments,
        "held": keeps,
        "sent": sent,
        "seconds": seconds,
        "losses": [float(each) for each in losses],
    }


def bytes_of(stage: int, size: Size, device: torch.device) -> JSON:
    """Bytes of every rank beside the formula's, the allocator's at the moments of a step, and seconds."""
    with clean(device):
        ranks = run_world(_moments, size.world, stage, size, device, timeout=SECONDS)
    numel = numel_of(size)
    return {
        "formula": formula.held(stage, [numel], size.world),
        "held": [rank["held"] for rank in ranks],
        "sent": [rank["sent"] for rank in ranks],
        "formula sent": formula.sent(stage, [numel], size.world),
        "moments": ranks[0]["moments"],
        "seconds": [round(each, 6) for each in ranks[0]["seconds"]],
        "losses": [[round(each, 5) for each in rank["losses"]] for rank in ranks],
    }


# --- bytes by kind over time, from the tensors ------------------------------------------------------------


class Census:
    """The storages that all ranks hold, by kind, and how their bytes change."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.kind_of: dict[tuple[int, int], tuple[str, int]] = {}  # (rank, storage) -> kind, bytes
        self.live: Counter[str] = Counter()
        self.curve: list[tuple[float, tuple[int, ...]]] = []
        self.order: list[int] = []  # of all requests and frees, as `encoded` has them
        self.made: dict[tuple[int, int], int] = {}
        self.count = 0
        self.marks: list[tuple[float, int, str]] = []  # when which rank ended what
        self.start = 0.0

    def now(self) -> float:
        """Microseconds since the step began."""
        return (time.perf_counter() - self.start) * 1e6

    def put(self, key: tuple[int, int], kind: str, nbytes: int) -> None:
        """A storage is there, or is of another kind from now on."""
        with self.lock:
            old = self.kind_of.pop(key, None)
            if old is not None:
                self.live[old[0]] -= old[1]
            else:
                self.made[key] = self.count
                self.count += 1
                self.order.append(nbytes)
            self.kind_of[key] = (kind, nbytes)
            self.live[kind] += nbytes
            self._note()

    def gone(self, key: tuple[int, int]) -> None:
        """A storage is freed."""
        with self.lock:
            old = self.kind_of.pop(key, None)
            if old is not None:
                self.live[old[0]] -= old[1]
                self.order.append(self.made.pop(key) - self.count)
                self._note()

    def _note(self) -> None:
        self.curve.append((self.now(), tuple(self.live[kind] for kind in KINDS)))

    def begin(self) -> None:
        """The step that is kept begins now."""
        self.curve.clear()
        self.marks.clear()
        self.start = time.perf_counter()
        self._note()


class Counting(Listener):
    """Tells the census of each storage that comes out of an operation of this rank's thread."""

    def __init__(self, census: Census, rank: int, device: torch.device) -> None:
        super().__init__()
        self.census, self.rank, self.device, self.phase = census, rank, device, "forward"
        self.refs: dict[int, Any] = {}

    def see(self, tensor: Tensor, kind: str) -> None:
        """Count the storage under this kind."""
        storage = tensor.untyped_storage()
        if storage.device.type != self.device.type or not storage.nbytes():
            return
        key = id(storage)
        if key not in self.refs:
            self.refs[key] = weakref.ref(storage, lambda _, key=key: self._gone(key))  # type: ignore[misc]
        self.census.put((self.rank, key), kind, storage.nbytes())

    def _gone(self, key: int) -> None:
        self.refs.pop(key, None)
        self.census.gone((self.rank, key))

    def keeps(self, kinds: dict[str, list[Tensor | None]]) -> None:
        """What the trainer names is of the kind that it says."""
        for kind, tensors in kinds.items():
            for tensor in tensors:
                if tensor is not None:
                    self.see(tensor, kind)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: JSON | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        came_in = {id(t.untyped_storage()) for t in tensors_in((*args, *kwargs.values()))}
        for tensor in tensors_in((result,)):
            key = id(tensor.untyped_storage())
            if key not in came_in and key not in self.refs:
                self.see(tensor, self.phase)
        return result


def _counted(comm: ThreadComm, stage: int, size: Size, device: torch.device, census: Census) -> None:
    counting = Counting(census, comm.rank, device)

    def arrived(param: Tensor) -> None:
        if param.grad is not None:
            counting.see(param.grad, "gradients")

    def prepare(model: nn.Module) -> None:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(arrived)

    with counting:
        rank = Rank(comm, stage, size, device, prepare)
        in_buckets(rank.trainer, counting)
        rank.step()
        gc.collect()
        counting.keeps(rank.trainer.holdings())
        comm.barrier()
        rank.trainer.zero_grad()
        counting.phase = "forward"
        comm.barrier()
        if comm.rank == 0:
            census.begin()
        comm.barrier()

        def at(moment: str) -> None:
            counting.phase = FOLLOWING.get(moment, "step")
            counting.keeps(rank.trainer.holdings())
            census.marks.append((census.now(), comm.rank, moment))

        rank.step(at)
        comm.barrier()
        rank.close()


def in_buckets(trainer: Any, counting: Any, mark: Callable[[], Any] | None = None) -> None:
    """Let the phase be `bucket` while the trainer reduces one."""
    reduce = getattr(trainer, "_reduce", None)
    if reduce is None:
        return

    def reduce_it(bucket: Any) -> Any:
        before = counting.phase if counting is not None else ""
        if counting is not None:
            counting.phase = "buckets"
        try:
            if mark is None:
                return reduce(bucket)
            with mark():
                return reduce(bucket)
        finally:
            if counting is not None:
                counting.phase = before
                counting.keeps({"gradients": trainer.holdings()["gradients"]})

    trainer._reduce = reduce_it


def over_time(stage: int, size: Size, device: torch.device) -> JSON:
    """Bytes of all ranks together by kind during one step, from the tensors that operations make."""
    census = Census()
    with clean(device):
        run_world(_counted, size.world, stage, size, device, census, timeout=SECONDS)
    marks = [[round(t), rank, what] for t, rank, what in census.marks]
    order = {} if device.type == "cuda" else {"order": census.order[:MOST]}  # a GPU's allocator has its own
    end = max(t for t, _, what in census.marks if what == "step")
    curve = [(t, values) for t, values in census.curve if t <= end]
    return {"kinds": KINDS, "curve": thinned(curve), "changes": len(curve), "marks": marks, **order}


def thinned(curve: Sequence[tuple[float, Sequence[int]]]) -> list[list[int]]:
    """At most `POINTS` pairs of points in KiB: the lowest and the highest of each part, so the peak stays."""
    each = -(-len(curve) // POINTS)
    kept: set[int] = {0, len(curve) - 1}
    for start in range(0, len(curve), each):
        part = range(start, min(start + each, len(curve)))
        kept |= {max(part, key=lambda i: sum(curve[i][1])), min(part, key=lambda i: sum(curve[i][1]))}
    return [[round(curve[i][0]), *(n // KIB for n in curve[i][1])] for i in sorted(kept)]


# --- when each rank works: torch's profiler ---------------------------------------------------------------


def _profiled(comm: ThreadComm, stage: int, size: Size, device: torch.device) -> int:
    rank = Rank(comm, stage, size, device)
    rank.step()  # warms up: its spans have no names
    wait_for(device)
    comm.barrier()
    open_span: list[Any] = []

    def begin(what: str) -> Any:
        return record_function(f"rank {comm.rank} {what}")

    def at(moment: str) -> None:
        while open_span:
            open_span.pop().__exit__(None, None, None)
        following = FOLLOWING.get(moment)
        if following is not None:
            open_span.append(begin(following))
            open_span[-1].__enter__()

    in_buckets(rank.trainer, None, lambda: begin("bucket"))
    rank.step(at)
    wait_for(device)
    comm.barrier()
    rank.close()
    return threading.get_native_id()


def traced(stage: int, size: Size, device: torch.device, keep: Path | None = None) -> JSON:
    """One step under torch's profiler: spans of each rank's thread, and what the GPU worked on for whom."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    every_thread: Any = None
    try:  # the ranks are threads; torch's option for that has no public name
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except (AttributeError, TypeError):
        print("this torch does not profile other threads: spans of ranks will be missing", file=sys.stderr)
    with clean(device), profile(activities=activities, experimental_config=every_thread) as profiler:
        threads = run_world(_profiled, size.world, stage, size, device, timeout=SECONDS)
        wait_for(device)
    with tempfile.TemporaryDirectory() as folder:
        path = keep or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[JSON] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return read_trace(events, threads)


def read_trace(events: Sequence[JSON], threads: Sequence[int]) -> JSON:
    """The spans of each rank, and runs of its kernels, in microseconds since the first span began."""
    rank_of = {thread: rank for rank, thread in enumerate(threads)}
    spans: list[tuple[float, float, int, str]] = []
    for event in events:
        words = str(event.get("name", "")).split()
        named = event.get("cat") == "user_annotation" and len(words) == 3 and words[0] == "rank"
        if named and words[2] in PHASES:
            rank_of[event["tid"]] = int(words[1])
            spans.append((event["ts"], event["dur"], int(words[1]), words[2]))
    first = min((ts for ts, *_ in spans), default=min((e["ts"] for e in events if "ts" in e), default=0.0))
    spans.sort()
    last = max((ts + dur for ts, dur, *_ in spans), default=float("inf"))
    launches: dict[int, tuple[int, float]] = {}
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            number = event.get("args", {}).get("correlation")
            if number is not None and event.get("tid") in rank_of:
                launches[number] = (rank_of[event["tid"]], event["ts"])
    works: list[tuple[float, float, int, str]] = []
    names: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    streams = set()
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        arguments = event.get("args", {})
        rank, asked = launches.get(arguments.get("correlation", -1), (-1, float(event["ts"])))
        if not first <= asked <= last:
            continue  # of the step before, which only warms up
        works.append((event["ts"], event["dur"], rank, phase_at(spans, rank, asked)))
        streams.add(arguments.get("stream"))
        name = str(event["name"]).replace("void ", "")[:70]
        names[name][0] += 1
        names[name][1] += event["dur"]
    works.sort()
    busy, until = 0.0, 0.0
    for ts, dur, _, _ in works:
        busy += max(0.0, ts + dur - max(ts, until))
        until = max(until, ts + dur)
    sums: Counter[str] = Counter()
    for _, dur, rank, phase in works:
        sums[f"rank {rank} {phase}"] += round(dur)
    top = sorted(names.items(), key=lambda item: -item[1][1])[:15]
    return {
        "spans": [
            [round(ts - first), round(dur), rank, PHASES.index(phase)] for ts, dur, rank, phase in spans
        ],
        "phases": PHASES,
        "kernels": len(works),
        "streams": len(streams),
        "busy": round(busy),
        "work begins": round(works[0][0] - first) if works else None,
        "work ends": round(until - first) if works else None,
        "by rank and phase": dict(sums),
        "names": [[name, int(count), round(total)] for name, (count, total) in top],
        "runs": runs_of(works, first),
        "operations": Counter(
            str(e["name"]) for e in events if e.get("cat") == "cpu_op" and e["ts"] >= first
        ).most_common(12),
    }


def phase_at(spans: Iterable[tuple[float, float, int, str]], rank: int, when: float) -> str:
    """The innermost span of a rank that was open then; `other` if none was."""
    inside = [(dur, phase) for ts, dur, who, phase in spans if who == rank and ts <= when <= ts + dur]
    return min(inside)[1] if inside else "other"


def runs_of(works: Iterable[tuple[float, float, int, str]], first: float) -> list[list[int]]:
    """[start, duration, rank, phase, kernels]: neighbours of one rank and phase together."""
    runs: list[list[Any]] = []
    for ts, dur, rank, phase in works:
        last = runs[-1] if runs else None
        if last and last[2:4] == [rank, phase] and ts - (last[0] + last[1]) < RUN_GAP:
            last[1] = max(last[1], ts + dur - last[0])
            last[4] += 1
        else:
            runs.append([ts, dur, rank, phase, 1])
    order = [*PHASES, "other"]
    return [[round(a - first), round(d), rank, order.index(phase), n] for a, d, rank, phase, n in runs]


# --- torch's memory snapshot ------------------------------------------------------------------------------


def _remembered(comm: ThreadComm, stage: int, size: Size, device: torch.device, control: JSON) -> None:
    rank = Rank(comm, stage, size, device)
    rank.step()
    rank.trainer.zero_grad()

    def at(moment: str) -> None:
        wait_for(device)
        comm.barrier()
        if comm.rank == 0:
            control[moment] = time.time_ns() // 1000
        comm.barrier()

    at("start")
    rank.step(at)
    if comm.rank == 0:
        control["stop"]()
    comm.barrier()
    rank.close()


def snapshot_of(stage: int, size: Size, device: torch.device, keep: Path | None = None) -> JSON:
    """The allocator's own history of one step: bytes by the line of Python that asked for them.

    torch documents these functions ("Understanding CUDA Memory Usage"), though their names begin with an
    underscore. There is no such history of a CPU's memory.
    """
    if device.type != "cuda":
        return {"missing": "torch keeps no history of the CPU's memory"}
    taken: list[JSON] = []

    def stop() -> None:
        if keep is not None:
            torch.cuda.memory._dump_snapshot(str(keep))
        taken.append(torch.cuda.memory._snapshot(device))

    moments: JSON = {"stop": stop}
    with clean(device):
        torch.cuda.memory._record_memory_history(
            enabled="all", context="alloc", stacks="python", max_entries=200_000, device=device
        )
        try:
            run_world(_remembered, size.world, stage, size, device, moments, timeout=SECONDS)
        finally:
            torch.cuda.memory._record_memory_history(enabled=None, device=device)
    (snapshot,) = taken
    times = {name: moment for name, moment in moments.items() if name != "stop"}
    index = device.index if device.index is not None else torch.cuda.current_device()
    return read_history(snapshot["device_traces"][index], times)


def place_of(frames: Sequence[JSON]) -> str:
    """The innermost line of the project that asked for memory: `stage2.py:_reduce:131`."""
    for frame in frames:
        path = Path(str(frame.get("filename", "")))
        if path.parent.name in ("zero_min", "work"):
            return f"{path.name}:{frame.get('name', '')}:{frame.get('line', 0)}"
    return "other"


def read_history(history: Sequence[JSON], times: dict[str, int]) -> JSON:
    """Live bytes by place during the step, and the places at the peak, from the allocator's events."""
    live: Counter[str] = Counter()
    known: dict[int, tuple[str, int]] = {}
    actions = Counter(str(event.get("action")) for event in history)
    start, end = times.get("start", 0), times.get("step", 2**63)
    timed = any(start <= event.get("time_us", 0) <= end for event in history)
    curve: list[tuple[float, dict[str, int]]] = []
    peak, at_peak, total = 0, dict[str, int](), 0
    for number, event in enumerate(history):
        when = event["time_us"] - start if timed else number  # without times: in order, from the first
        if timed and when > end - start:
            break
        if event["action"] == "alloc":
            place = place_of(event.get("frames", ()))
            known[event["addr"]] = (place, event["size"])
            live[place] += event["size"]
            total += event["size"]
        elif event["action"] == "free_completed" and event["addr"] in known:
            place, size = known.pop(event["addr"])
            live[place] -= size
            total -= size
        else:
            continue
        if when >= 0:
            curve.append((when, by_function(live)))
            if total > peak:
                peak, at_peak = total, {p: n for p, n in live.items() if n}
    ever: Counter[str] = Counter()
    for _, values in curve:
        for name, nbytes in values.items():
            ever[name] = max(ever[name], nbytes)
    places = [name for name, _ in ever.most_common(9)]
    rows = []
    for t, values in curve:
        shown = [values.get(name, 0) for name in places]
        rows.append((t, [*shown, sum(values.values()) - sum(shown)]))
    return {
        "places": [*places, "rest"],
        "curve": thinned(rows) if rows else [],
        "changes": len(curve),
        "timed": timed,
        "peak": peak,
        "at peak": sorted(at_peak.items(), key=lambda item: -item[1])[:25],
        "actions": dict(actions),
        "history": encoded(history),
        "moments": {name: moment - start for name, moment in times.items()},
    }


def encoded(history: Sequence[JSON]) -> JSON:
    """All requests in order: bytes, or -k where the k-th last request is freed. And the segments.

    A segment is memory that the allocator takes from CUDA or gives back: [events before it, bytes].
    """
    order: list[int] = []
    segments: list[list[int]] = []
    made, number_of = 0, dict[int, int]()
    for event in history:
        action = event["action"]
        if action == "alloc":
            number_of[event["addr"]] = made
            made += 1
            order.append(event["size"])
        elif action == "free_completed" and event["addr"] in number_of:
            order.append(number_of.pop(event["addr"]) - made)
        elif action in ("segment_alloc", "segment_map"):
            segments.append([len(order), event["size"]])
        elif action in ("segment_free", "segment_unmap"):
            segments.append([len(order), -event["size"]])
    return {"order": order[:MOST], "events": len(order), "segments": segments}


def by_function(live: dict[str, int]) -> Counter[str]:
    """Bytes by file and function, all lines of it together."""
    sums: Counter[str] = Counter()
    for place, nbytes in live.items():
        if nbytes:
            sums[place.rpartition(":")[0] or place] += nbytes
    return sums


# --- all of it --------------------------------------------------------------------------------------------


def about(size: Size, device: torch.device) -> JSON:
    """The device, the versions, the date and the model: what every figure made of a recording must say."""
    is_cuda = device.type == "cuda"
    found = torch.cuda.get_device_properties(device) if is_cuda else None
    return {
        "device": device.type,
        "name": found.name if found else "CPU",
        "memory": found.total_memory if found else None,
        "processors": found.multi_processor_count if found else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if is_cuda else None,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "float32 matmul": torch.get_float32_matmul_precision(),
        "size": asdict(size),
        "parameters": numel_of(size),
        "tensors": [p.numel() for p in initial(size.config).parameters()],
    }


def without_paths(text: str) -> str:
    """The text without the folders of this machine."""
    for folder, name in ((ROOT, "."), (Path(torch.__file__).parent, "torch"), (Path(sys.prefix), "python")):
        text = text.replace(str(folder), name)
    return text


def record(device: torch.device, size: Size, keep: Path | None = None) -> JSON:
    """All parts of a recording. A part that fails is written down as such, and the others go on.

    In the folder `keep` lie torch's own files afterwards, for the viewers that are made for them.
    """
    recording: JSON = {"about": about(size, device), "failures": {}}
    trace, pickle = (keep / "trace.json", keep / "snapshot.pickle") if keep else (None, None)
    alone = replace(size, world=1)
    parts: list[tuple[str, Callable[[], Any]]] = [
        (
            "snapshot 2",
            partial(snapshot_of, 2, size, device, pickle),
        ),  # first: the allocator holds nothing yet
        ("snapshot 1", partial(snapshot_of, 1, size, device)),
        ("bytes alone", partial(bytes_of, 0, alone, device)),
        *((f"bytes {stage}", partial(bytes_of, stage, size, device)) for stage in (0, 1, 2)),
        *((f"over time {stage}", partial(over_time, stage, size, device)) for stage in (1, 2)),
        ("trace 2", partial(traced, 2, size, device, trace)),
    ]
    for name, part in parts:
        start = time.perf_counter()
        try:
            recording[name] = part()
        except Exception as error:  # whatever this machine does differently
            traceback.print_exc()
            recording["failures"][name] = without_paths(f"{type(error).__name__}: {error}")[:2000]
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    return recording


def show(width: int | None, **others: Any) -> str:
    """Record a step on this machine's GPU and return the tables; without one, the project's recording."""
    from lessons import gpu_report

    if torch.cuda.is_available():
        folder = ROOT / "build" / "lessons" / "gpu"
        folder.mkdir(parents=True, exist_ok=True)
        size = SIZES["cuda"] if width is None else replace(SIZES["cuda"], width=width)
        found = record(torch.device("cuda"), size, folder)
        (folder / "recording.json").write_text(json.dumps(found, separators=(",", ":")), encoding="utf-8")
        gpu_report.over_time(found).save(folder / "over_time.svg")
        gpu_report.timeline(found).save(folder / "timeline.svg")
        end = f"in {folder.relative_to(ROOT)}: recording.json, snapshot.pickle, trace.json and two pictures"
    else:
        found = gpu_report.recorded()
        end = "Torch sees no GPU on this machine. The tables above are a recording that the project has."
    return f"{gpu_report.report(found)}\n\n{end}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Record, and write the file."""
    parser = argparse.ArgumentParser("python -m lessons.one_gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the recording, as JSON")
    parser.add_argument("--device", default=default_device(), help="cuda or cpu; else cuda if there is one")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a folder for torch's trace and snapshot")
    for name in ("layers", "width", "context", "rows", "world", "bucket-size"):
        parser.add_argument(f"--{name}", type=int, help="of the model, or of a step")
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    given = {
        name: getattr(chosen, name) for name in asdict(SIZES["cpu"]) if getattr(chosen, name) is not None
    }
    size = Size(**{**asdict(SIZES.get(device.type, SIZES["cuda"])), **given})
    if chosen.keep:
        chosen.keep.mkdir(parents=True, exist_ok=True)
    recording = record(device, size, chosen.keep)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(recording, separators=(",", ":")) + "\n", encoding="utf-8")
    failed = ", ".join(recording["failures"]) or "none"
    print(f"{chosen.out}: {chosen.out.stat().st_size:,} bytes; parts that failed: {failed}")
    return 0 if not recording["failures"] else 1


if __name__ == "__main__":
    sys.exit(main())
