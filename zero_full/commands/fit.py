"""The command `python -m zero_full fit`, which finds the stage at which a model fits."""

from argparse import ArgumentParser, Namespace

from zero_full.commands.command import Command
from zero_full.errors import UsageError


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--hf-config", required=True, metavar="FILE", help="the model's config.json")
    parser.add_argument("--world", required=True, type=int, metavar="N", help="GPUs, on all hosts together")
    parser.add_argument("--memory", required=True, metavar="SIZE", help="of each GPU, as in 80GB")
    parser.add_argument("--hosts", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--host-memory", metavar="SIZE", help="what may wait in each host's memory; without this, nothing"
    )
    parser.add_argument("--disk", metavar="SIZE", help="and in files on each host's disk")
    parser.add_argument("--sequences", type=int, default=1, metavar="N", help="in a micro-batch (default: 1)")
    parser.add_argument(
        "--context", type=int, default=2048, metavar="N", help="tokens of each (default: 2048)"
    )
    parser.add_argument("--micro-batches", type=int, default=1, metavar="N", help="in a step (default: 1)")
    parser.add_argument(
        "--precision",
        choices=["mixed", "mixed16", "fp32"],
        default="mixed",
        help="mixed: bf16, but master and gradients in fp32; mixed16: but the master (default: mixed)",
    )
    parser.add_argument("--checkpointing", action="store_true", help="with activation checkpointing")
    parser.add_argument("--write", metavar="FILE", help="write the configuration there")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each that was tried")


def _run(options: Namespace) -> int:
    from zero_full import fit
    from zero_full.errors import PlanError

    try:
        return fit.main(options)
    except (fit.FitError, PlanError) as error:
        raise UsageError(str(error)) from None


COMMAND = Command(
    "fit",
    "the lowest stage at which a Hugging Face model fits",
    (
        "--hf-config config.json --world 8 --memory 80GB",
        "--hf-config config.json --world 8 --memory 24GB \\\n      --host-memory 500GB --checkpointing",
    ),
    _run,
    _add_arguments,
    more="It reads config.json, allocates no model, and writes the configuration for you.",
)
