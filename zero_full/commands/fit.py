"""The command `python -m zero_full fit`, which finds the stage at which a model fits."""

from argparse import ArgumentParser, Namespace

from zero_full.commands.command import Command


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--hf-config", required=True, metavar="FILE", help="the model's config.json")
    parser.add_argument("--world", required=True, type=int, metavar="N", help="GPUs, on all hosts together")
    parser.add_argument("--memory", required=True, metavar="SIZE", help="memory of each GPU, such as 80GB")
    parser.add_argument("--hosts", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--host-memory", metavar="SIZE", help="memory of each host for offload (default: none)"
    )
    parser.add_argument("--disk", metavar="SIZE", help="disk space of each host for offload (default: none)")
    parser.add_argument(
        "--sequences", type=int, default=1, metavar="N", help="sequences in a micro-batch (default: 1)"
    )
    parser.add_argument(
        "--context", type=int, default=2048, metavar="N", help="tokens of a sequence (default: 2048)"
    )
    parser.add_argument(
        "--micro-batches", type=int, default=1, metavar="N", help="micro-batches in a step (default: 1)"
    )
    parser.add_argument(
        "--precision",
        choices=["mixed", "mixed16", "fp32"],
        default="mixed",
        help="mixed: bf16 with fp32 master weights and gradients; mixed16: with fp32 master weights only "
        "(default: mixed)",
    )
    parser.add_argument("--checkpointing", action="store_true", help="with activation checkpointing")
    parser.add_argument("--write", metavar="FILE", help="write the configuration to this file")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each candidate")


def _run(options: Namespace) -> int:
    from zero_full import fit

    return fit.main(options)


COMMAND = Command(
    "fit",
    "find the lowest stage at which a Hugging Face model fits",
    (
        "--hf-config config.json --world 8 --memory 80GB",
        "--hf-config config.json --world 8 --memory 24GB \\\n      --host-memory 500GB --checkpointing",
    ),
    _run,
    _add_arguments,
    more="It reads config.json, allocates no model, and writes the configuration for you.",
)
