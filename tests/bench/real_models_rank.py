"""Ranks of `real_models.py`: a process imports the libraries once, and forks a set of ranks for each job.

It prints a line of JSON when it is ready, and another one for each job that it reads from stdin. A rank
builds the model, trains it for a few steps with one engine, and returns seconds, losses and its peak memory.
"""

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from tests.bench.peers import Masters, Plain
from zero_min.gpt import load_text

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
CLIP = 1.0  # the Trainer's default
SIZE = 2048  # of the matrices whose product is the peak of MFU
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Job:
    """One visit of a row."""

    model: str
    dtype: str
    way: str
    row: str
    ranks: int
    tokens: int
    warmup: int
    steps: int

    @property
    def all_steps(self) -> int:
        """Of the whole run."""
        return self.warmup + self.steps

    @property
    def stage(self) -> int:
        """Of rows that have one in their name."""
        return int(self.row.split()[-1])


class NotAvailable(Exception):  # noqa: N818 - an answer, not an error
    """The row cannot be run; the text says why."""


# Models and data ---------------------------------------------------------------------------------


def gpt2(layers: int = 12, width: int = 768, words: int = 50257) -> Any:
    """GPT-2 from its configuration, without dropout: 124M parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    off = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    sizes = {"n_layer": layers, "n_head": width // 64, "n_embd": width, "vocab_size": words}
    return GPT2LMHeadModel(GPT2Config(**sizes, **off, bos_token_id=None, eos_token_id=None))


def llama(layers: int = 12, width: int = 640, words: int = 32000) -> Any:
    """Llama with 100M parameters; embedding and head are two matrices."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": layers, "num_attention_heads": width // 64, "hidden_size": width}
    inner = width * 27 // 10
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=inner, vocab_size=words))


MODELS: dict[str, Callable[[], Any]] = {
    "GPT2-124M": gpt2,
    "Llama-100M": llama,
    "GPT2-tiny": lambda: gpt2(2, 64, 128),  # to see that it runs
    "Llama-tiny": lambda: llama(2, 64, 128),
}


def built(job: Job) -> Any:
    """The same weights in every row and on every rank."""
    torch.manual_seed(0)
    return MODELS[job.model]()


def layers_of(model: Any) -> Any:
    """The repeated layers."""
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def data(job: Job) -> list[Batch]:
    """Sequences of a text, one for each rank and step; rank r takes the r-th of a step's."""
    text = load_text()
    pieces = text[: job.tokens * job.ranks * job.all_steps].view(-1, job.tokens)
    return [{"input_ids": piece.clone(), "labels": piece.clone()} for piece in pieces]


def flops_per_step(name: str, tokens: int) -> int:
    """Operations of all matrix products in forward and backward of one sequence."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = MODELS[name]()
        model.set_attn_implementation("eager")  # the fused kernel's products are not counted
        words, mask = torch.zeros(1, tokens, dtype=torch.long), torch.zeros(1, 1, tokens, tokens)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=words, labels=words, attention_mask=mask).loss.backward()
    return counter.get_total_flops()


# Time and memory ---------------------------------------------------------------------------------


class Meter:
    """This rank's clock and its peak resident memory, from here on."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is resident now
        self.before = self.resident("VmRSS")
        self.ends: list[float] = []
        self.losses: list[float] = []

    def resident(self, key: str) -> int:
        """Bytes: VmRSS now, VmHWM at most."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))

    def part_ended(self, name: str) -> None:
        """Nothing here; `real_models_peak` notes the memory of each part of a step."""

    def step_ended(self) -> None:
        """Note the time."""
        self.ends.append(time.perf_counter())

    def report(self, job: Job) -> dict[str, Any]:
        """Seconds of the timed steps, losses of all, and bytes above those before the model was built."""
        both = zip(self.ends, self.ends[1:], strict=False)
        seconds = [end - start for start, end in both][job.warmup - 1 :]
        return {
            "seconds": seconds,
            "losses": self.losses,
            "peak": self.resident("VmHWM") - self.before,
        }


# A plain loop ------------------------------------------------------------------------------------


@dataclass
class Training:
    """How a loop trains with one engine."""

    forward: Callable[..., Any]
    backward: Callable[[Tensor], Any]
    update: Callable[[], Any]


def of_torch(model: nn.Module, optimizer: Plain | Masters) -> Training:
    """A loop with an optimizer of torch."""

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.update()

    return Training(model, lambda loss: loss.backward(), update)


def config(job: Job, size: Any) -> dict[str, Any]:
    """The same keys for zero_full and DeepSpeed."""
    zero: dict[str, Any] = {"stage": job.stage, "reduce_bucket_size": 5_000_000}
    if job.stage == 3:
        zero["stage3_max_reuse_distance"] = 0  # released after forward, as FSDP2 does
    return {
        "train_micro_batch_size_per_gpu": size,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": job.dtype == "bf16"},
        "zero_optimization": zero,
    }


def ddp(job: Job) -> Training:
    """DDP; in bf16 with parameters in bf16 and fp32 master copies."""
    model = built(job).to(DTYPES[job.dtype])
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer: Plain | Masters
    optimizer = Plain(wrapped, adamw(model)) if job.dtype == "fp32" else Masters(wrapped, ADAMW)
    return of_torch(wrapped, optimizer)


def fsdp2(job: Job) -> Training:
    """FSDP2, layers and root sharded; in bf16 with fp32 shards and bf16 compute."""
    model = built(job)
    mesh = dist.device_mesh.init_device_mesh("cpu", (job.ranks,))
    mixed = MixedPrecisionPolicy(param_dtype=None if job.dtype == "fp32" else DTYPES[job.dtype])
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)
    return of_torch(model, Plain(model, adamw(model)))


def engine(job: Job) -> Training:
    """zero_full or DeepSpeed: the same calls."""
    model = built(job)
    if job.row.startswith("DeepSpeed"):
        initialize, model = deepspeed().initialize, model.to(DTYPES[job.dtype])
    else:
        import zero_full

        initialize = zero_full.initialize
    made = initialize(model=model, optimizer=adamw(model), config=config(job, 1))[0]
    return Training(made, made.backward, made.step)


def deepspeed() -> Any:
    """DeepSpeed itself, which is not in every server."""
    return importlib.import_module("deepspeed")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the Trainer makes by default, too."""
    return torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)


def by_loop(job: Job, rank: int, meter: Meter | None = None) -> dict[str, Any]:
    """A loop of a few lines."""
    meter = meter or Meter()
    if job.row.startswith("zero_full"):
        import zero_full

        zero_full.init_distributed()
    elif job.row.startswith("DeepSpeed"):
        deepspeed().init_distributed("gloo", verbose=False)
    else:
        dist.init_process_group("gloo")
    training = {"DDP": ddp, "FSDP2": fsdp2}.get(job.row, engine)(job)
    meter.part_ended("initialize")
    for batch in data(job)[rank :: job.ranks]:
        loss = training.forward(**{name: words[None] for name, words in batch.items()}).loss
        meter.part_ended("forward")
        training.backward(loss)
        meter.part_ended("backward")
        training.update()
        meter.part_ended("update")
        meter.losses.append(loss.item())
        meter.step_ended()
    return meter.report(job)


# The Trainer -------------------------------------------------------------------------------------


KINDS = {"DDP": "MULTI_CPU", "FSDP2": "FSDP"}  # accelerate's names; zero_full goes by DeepSpeed's


def by_trainer(job: Job, rank: int) -> dict[str, Any]:
    """transformers' own Trainer, with the arguments that a user would give it."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    meter = Meter()

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Notes when a step has ended."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.step_ended()

    more: dict[str, Any] = {"use_cpu": not job.row.startswith("DeepSpeed")}  # with it accelerate ignores that
    if job.row == "FSDP2":
        more |= {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}
    elif job.row != "DDP":
        more |= {"deepspeed": config(job, "auto")}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=job.all_steps,
            per_device_train_batch_size=1,
            learning_rate=ADAMW["lr"],
            lr_scheduler_type="constant",
            bf16=job.dtype == "bf16",
            train_sampling_strategy="sequential",
            dataloader_pin_memory=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            ddp_find_unused_parameters=False,  # the default, True, costs DDP time
            **more,
        )
        trainer = Trainer(built(job), arguments, train_dataset=data(job), callbacks=[Clock()])
        accelerate = f"accelerate {version('accelerate')}"
        kind, seen = trainer.accelerator.distributed_type, trainer.accelerator.num_processes
        if kind != KINDS.get(job.row, "DEEPSPEED"):
            raise NotAvailable(f"{accelerate} does not run it on CPUs, and would train DDP")
        trainer.train()
    meter.losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    note = f"{accelerate} sees {seen} process on CPUs, so all ranks train on the same sequences"
    return {**meter.report(job), **({"note": note} if seen != job.ranks else {})}


# Jobs --------------------------------------------------------------------------------------------


def products(job: Job, rank: int) -> dict[str, Any]:
    """Operations a second of large matrix products on all ranks at once: what MFU is a part of."""
    dist.init_process_group("gloo")
    a, b = (torch.randn(SIZE, SIZE).to(DTYPES[job.dtype]) for _ in range(2))
    torch.mm(a, b)
    seconds = []
    for _ in range(job.steps):
        dist.barrier()
        start = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds}


WAYS: dict[str, Callable[[Job, int], dict[str, Any]]] = {
    "Trainer": by_trainer,
    "loop": by_loop,
    "products": products,
}


def _rank(job: Job, rank: int, port: int, pipe: Connection) -> None:
    """The life of a rank: send what it has found, or why it found nothing."""
    sys.stdout = sys.stderr
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.ranks))
    os.environ.update(LOCAL_WORLD_SIZE=str(job.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        pipe.send(WAYS[job.way](job, rank))
    except BaseException as error:
        pipe.send({"missing": f"{type(error).__name__}: {error}".removeprefix("NotAvailable: ")})
    finally:
        pipe.close()
        sys.stderr.flush()
        os._exit(0)  # other ranks may still wait for a collective: no teardown is measured


def results(job: Job, port: int, limit: float) -> list[dict[str, Any]]:
    """Fork the ranks of a job. If one fails, the others are ended."""
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    processes: list[Any] = []
    for rank in range(job.ranks):
        mine, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=_rank, args=(job, rank, port, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(mine)
    found = list(_answers(pipes, limit))
    for process in processes:
        process.kill()
        process.join()
    return found


def _answers(pipes: list[Connection], limit: float) -> Iterator[dict[str, Any]]:
    """What ranks send, until one has failed."""
    end, left = time.monotonic() + limit, list(pipes)
    while left:
        ready = wait(left, max(0.0, end - time.monotonic()))
        if not ready:
            yield {"missing": f"no answer in {limit:.0f} s"}
            return
        for pipe in ready:
            assert isinstance(pipe, Connection)
            left.remove(pipe)
            try:
                answer = pipe.recv()
            except EOFError:
                answer = {"missing": "a rank ended without an answer"}
            yield answer
            if "missing" in answer:
                return


def prepare(server: str) -> dict[str, str]:
    """Import what the jobs of this server need; versions."""
    torch.set_num_threads(1)
    import zero_full

    names = ["torch", "transformers", "accelerate"]
    if server == "zero_full by name":
        import zero_full.integrations.deepspeed

        zero_full.integrations.deepspeed.install()
    elif server == "DeepSpeed":
        names.append("deepspeed")
        deepspeed().utils.logger.setLevel("ERROR")
    from transformers import GPT2LMHeadModel, LlamaForCausalLM, Trainer, logging  # noqa: F401

    logging.set_verbosity_error()
    zero_full.initialize  # noqa: B018 - its module is imported here, not by each rank
    load_text()
    return {name: version(name) for name in names}


def serve(server: str, limit: float) -> None:
    """Answer jobs until stdin ends."""
    from tests.worlds import free_port

    answers, sys.stdout = sys.stdout, sys.stderr
    try:
        ready: dict[str, Any] = prepare(server)
    except ImportError as error:
        ready = {"missing": str(error)}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        job = Job(**json.loads(line))
        print(json.dumps(results(job, free_port(), limit)), file=answers, flush=True)
