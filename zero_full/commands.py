"""The commands of `python -m zero_full`: help texts, arguments and implementations.

An implementation is imported only when its command runs, so that help is available without torch.
"""

import gc
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from zero_full import early_checks
from zero_full.arguments import count, path_text
from zero_full.doctor import machine as doctor

PROGRAM = "python -m zero_full"
NO_CUDA = "not built, because this torch has no CUDA: `python -m zero_full build cuda` builds it anyway"


Script = Callable[[], int]  # runs a user's script, whose errors keep their traceback; returns the exit code


@dataclass(frozen=True)
class Argument:
    """An argument of a command."""

    name: str
    options: dict[str, Any]  # of `add_argument`


@dataclass(frozen=True)
class Command:
    """A command with its help texts, its arguments and its implementation."""

    name: str
    help: str  # purpose, in one line
    examples: tuple[str, ...]  # arguments to show in `--help`; long ones continue after a backslash
    run: Callable[[Namespace], "int | Script"]  # returns the exit code, or the user's script to run
    arguments: tuple[Argument, ...]
    more: str = ""  # further lines for `--help`

    def describe(self, parser: ArgumentParser) -> None:
        """Add this command's texts and arguments to its parser."""
        parser.description = "\n".join(filter(None, [f"{self.help[0].upper()}{self.help[1:]}.", self.more]))
        written = [f"  {PROGRAM} {self.name} {example}".rstrip() for example in self.examples]
        parser.epilog = "\n".join(["examples:", *written])
        for argument in self.arguments:
            parser.add_argument(argument.name, **argument.options)


def _argument(name: str, help: str, **options: Any) -> Argument:
    return Argument(name, {"help": help, **options})


def _flag(name: str, help: str) -> Argument:
    return Argument(name, {"help": help, "action": "store_true"})


def _number(name: str, help: str, **options: Any) -> Argument:
    return Argument(name, {"help": help, "type": count, "metavar": "N", **options})


def _implementation(
    module: str, function: str = "main", check: Callable[[Namespace], None] | None = None
) -> Callable[[Namespace], int | Script]:
    """Return a function that imports the command's implementation and calls it.

    `check` is called before the import, which may take seconds.
    """

    def run(options: Namespace) -> int | Script:
        if check is not None:
            check(options)
        with _without_collections():
            implementation = getattr(import_module(module), function)
        result: int | Script = implementation(options)
        return result

    return run


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable garbage collection in this context: during imports it takes a quarter of a second."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _doctor(options: Namespace) -> "int | Script":
    """Report on the machine, or measure the rates that a forecast needs."""
    if options.out is None:
        return doctor.main(options.measure, options.json)
    return _implementation("zero_full.measure", check=early_checks.doctor)(options)


def _build(options: Namespace) -> int:
    load, reason = doctor.imported("zero_full.kernels.load")
    if load is None:
        print(f"nothing can be built: torch is not usable: {reason}")
        return 1
    import torch

    from zero_full.kernels.builder import PARTS
    from zero_full.kernels.toolchain import BuildError

    failed = False
    for part in [options.part] if options.part else PARTS:
        report = partial(print, f"{part}:", flush=True)
        if part == "cuda" and options.part is None and torch.version.cuda is None:
            report(NO_CUDA)
            continue
        try:
            report(load.build_now(part, report))
        except (BuildError, OSError) as error:
            failed = failed or part in ("cpu", options.part)
            report(f"not built: {error}")
    return 1 if failed else 0


CHECKPOINT = (
    _argument("checkpoint", "the folder that was given to save_checkpoint", type=path_text, metavar="CKPT"),
    _argument("--tag", "tag of the checkpoint (default: the latest)"),
)
FILL = _argument(
    "--fill",
    'a value for a key that is "auto" in the file, such as bf16.enabled=true (may be repeated)',
    action="append",
    default=[],
    metavar="KEY=VALUE",
)
DEVICE = _argument("--device", "device of the run (default: cuda)", choices=["cuda", "cpu"], default="cuda")
MACHINE = _argument(
    "--machine",
    "a file of `doctor --measure --out`, to forecast the time of a step, too",
    metavar="FILE",
)
COMMANDS = (
    Command(
        "doctor",
        "report what is installed, what is used, and any problems",
        ("", "--measure", "--measure /local_nvme", "--measure --out machine.json"),
        _doctor,
        (
            _argument(
                "--measure",
                "measure copies in memory and to an accelerator, and with a directory writes and reads of "
                "its disk",
                nargs="?",
                const=True,  # without a directory: no disk
                default=False,
                type=path_text,
                metavar="DIRECTORY",
            ),
            _argument(
                "--out",
                "with --measure: write the rates of this machine's ranks to this file, for `--machine`",
                type=path_text,
                metavar="FILE",
            ),
            _flag("--json", "print one line of JSON"),
        ),
        more="It starts nothing. The exit code is 1 if there is a problem.",
    ),
    Command(
        "plan",
        "predict the memory of a run on each rank",
        (
            "--model my_models:gpt --config ds.json --world 8 \\\n      --batch 4x1024:int64",
            "--model my_models:gpt --config ds.json --world 64 \\\n      --stages",
            "--model my_models:stages --config ds.json --world 8 \\\n      --pipe 4",
        ),
        _implementation("zero_full.plan", check=early_checks.plan),
        (
            _argument(
                "--model",
                "function that returns the model; without arguments, or with --tensor of the mesh",
                required=True,
                metavar="MODULE:FUNCTION",
            ),
            _argument("--config", "the configuration, a JSON file", required=True, metavar="FILE"),
            FILL,
            _number("--world", "data-parallel ranks", required=True),
            _argument(
                "--batch",
                "the model's inputs of a micro-batch, such as 2x1024:int64, to predict activations; of a "
                "PipelineModule also its labels, as the last",
                nargs="+",
                default=[],
                metavar="SHAPE:TYPE",
            ),
            _number("--expert-parallel", "consecutive ranks that hold different experts, if any"),
            _number("--tensor", "tensor-parallel ranks, beside each data-parallel rank"),
            _number("--pipe", "ranks of a pipeline, in place of the PipelineModule's num_stages"),
            DEVICE,
            MACHINE,
            _flag("--stages", "compare all stages"),
            _flag("--json", "print one line of JSON for each stage"),
        ),
        more="It does not allocate the model, and needs no GPU.",
    ),
    Command(
        "fit",
        "find the lowest stage at which a Hugging Face model fits",
        (
            "--hf-config config.json --world 8 --memory 80GB",
            "--hf-config config.json --world 8 --memory 24GB \\\n      --host-memory 500GB --checkpointing",
            "--hf-config config.json --world 2 --memory 8GB \\\n      --device cpu --machine machine.json",
        ),
        _implementation("zero_full.fit", check=early_checks.fit),
        (
            _argument("--hf-config", "the model's config.json", required=True, metavar="FILE"),
            _number("--world", "GPUs, or CPU ranks, on all hosts together", required=True),
            _argument(
                "--memory", "memory of each GPU or CPU rank, such as 80GB", required=True, metavar="SIZE"
            ),
            _number("--hosts", "default: 1", default=1),
            _number("--tensor", "GPUs that hold parts of the same matrices (default: 1)", default=1),
            _number("--pipe", "GPUs that hold different layers (default: 1)", default=1),
            _argument("--host-memory", "memory of each host for offload (default: none)", metavar="SIZE"),
            _argument("--disk", "disk space of each host for offload (default: none)", metavar="SIZE"),
            _number("--sequences", "sequences in a micro-batch (default: 1)", default=1),
            _number("--context", "tokens of a sequence (default: 2048)", default=2048),
            _number("--micro-batches", "micro-batches in a step (default: 1)", default=1),
            _argument(
                "--precision",
                "mixed: bf16 with fp32 master weights and gradients; mixed16: with fp32 master weights only "
                "(default: mixed)",
                choices=["mixed", "mixed16", "fp32"],
                default="mixed",
            ),
            _flag("--checkpointing", "with activation checkpointing"),
            DEVICE,
            MACHINE,
            _flag("--fastest", "choose the fastest that fits, by the forecast of --machine"),
            _argument("--write", "write the configuration to this file", type=path_text, metavar="FILE"),
            _flag("--json", "print one line of JSON for each candidate"),
        ),
        more="It reads config.json, allocates no model, and writes the configuration for you.",
    ),
    Command(
        "check",
        "check a configuration and list all mistakes, with their lines",
        (
            "ds.json --world 8",
            "ds.json --quick",
            "ds.json --json",
            "ds.json --fill bf16.enabled=true --write out.json",
        ),
        _implementation("zero_full.check.check_command"),
        (
            _argument("file", "the configuration, a JSON file", metavar="FILE"),
            _number("--world", "data-parallel ranks"),
            FILL,
            _flag("--quick", "without torch: skip what depends on the installed torch"),
            _argument(
                "--write", "write the filled file, unless it has a mistake", type=path_text, metavar="FILE"
            ),
            _flag("--json", "print one line of JSON, with a verdict on every key"),
        ),
        more="It prints the errors and warnings of the engine, and starts nothing.\n"
        "It imports torch (seconds) for the optimizer, the scheduler, and a dry run\n"
        "on a tiny model. --quick checks everything else without torch.\n"
        'It lists keys that are "auto", with who fills them in, and judges the rest.\n'
        'The exit code is 1 if the file is invalid, 0 with only warnings and "auto".',
    ),
    Command(
        "migrate",
        "rewrite a DeepSpeed script for zero_full",
        ("train.py ds.json", "--write train.py", "--world 8 ds.json"),
        _implementation("zero_full.migrate"),
        (
            _argument("files", "scripts (.py) and configurations (.json)", nargs="+", metavar="FILE"),
            _flag("--write", "change the scripts, not only show the diff"),
            _number("--world", "check configurations for this many ranks"),
            _flag("--json", "print one line of JSON for each file"),
        ),
        more="Scripts are read, not run. Without --write it only shows the diff.\n"
        "The exit code is 1 if anything is left to do by hand.",
    ),
    Command(
        "inspect",
        "describe a checkpoint, and verify it",
        ("checkpoints", "checkpoints --verify", "checkpoints --tag global_step100 --json"),
        _implementation("zero_full.checkpoint.quick_inspect", "inspect", early_checks.inspect),
        (
            *CHECKPOINT,
            _flag("--verify", "read all data and compare checksums"),
            _flag("--json", "print one line of JSON"),
        ),
    ),
    Command(
        "export",
        "convert a checkpoint's weights to safetensors",
        (
            "checkpoints weights",
            "checkpoints weights --dtype bf16",
            "checkpoints weights --max-shard-size 2GB",
        ),
        _implementation("zero_full.checkpoint.export_inspect", "export", early_checks.export),
        (
            *CHECKPOINT,
            _argument(
                "out", "output folder, for model.safetensors or several files and an index", metavar="OUT"
            ),
            _argument(
                "--dtype",
                "of floating-point tensors (default: fp32 master weights, and float64 unchanged)",
                choices=["fp32", "bf16", "fp16"],
            ),
            _flag("--exclude-frozen", "skip frozen parameters"),
            _argument(
                "--max-shard-size",
                "split the weights into files of at most this size (default: 5GB)",
                default="5GB",
                metavar="SIZE",
            ),
            _flag("--json", "print one line of JSON"),
        ),
        more="One process writes parameters and buffers, without the model.\n"
        "Memory does not grow with the model.",
    ),
    Command(
        "replay",
        "show what each rank did in its last steps, and which ranks waited",
        ("step.json", "step.json --moments"),
        _implementation("zero_full.flight.picture", "replay"),
        (
            _argument("recording", "the path that was passed to engine.record", type=Path, metavar="FILE"),
            _flag("--moments", "also print every event, with a sentence"),
            _flag("--json", "print one line of JSON: the recording, merged"),
        ),
        more="If the run was killed or hangs, the files of the ranks are merged first.",
    ),
    Command(
        "as-deepspeed",
        "run a script that imports deepspeed, with zero_full in its place",
        (
            "train.py --deepspeed ds.json",
            "-m my_package.train --deepspeed ds.json",
            "accelerate launch --config_file ds.yaml \\\n      train.py",
        ),
        _implementation("zero_full.integrations.deepspeed.run", "prepare", early_checks.as_deepspeed),
        (
            _argument(
                "-m", "a module instead of a script, and its arguments", nargs=REMAINDER, metavar="MODULE"
            ),
            _argument("script", "the script", nargs="?", metavar="SCRIPT"),
            _argument("arguments", "the script's arguments", nargs=REMAINDER, metavar="..."),
        ),
        more="Only this process is changed, nothing is installed. For several ranks:\n"
        "  torchrun --nproc-per-node 2 -m zero_full as-deepspeed train.py",
    ),
    Command(
        "build",
        "compile the operators for this machine, again if that failed before",
        ("", "cpu"),
        _build,
        (
            _argument(
                "part",
                "default: the parts that the installed torch can use",
                nargs="?",
                choices=["cpu", "cuda"],
            ),
        ),
        more="Without a compiler torch's own operations are used:\nthey give the same results, slower.",
    ),
)
