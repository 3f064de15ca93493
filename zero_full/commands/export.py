"""The command `python -m zero_full export`, which converts a checkpoint to safetensors."""

from argparse import ArgumentParser, Namespace

from zero_full.commands.command import Command
from zero_full.errors import UsageError
from zero_full.formatting import parse_size


def add_checkpoint(parser: ArgumentParser) -> None:
    """Add the arguments that select a checkpoint."""
    parser.add_argument("checkpoint", metavar="CKPT", help="the folder that was given to save_checkpoint")
    parser.add_argument("--tag", help="tag of the checkpoint (default: the latest)")


def _add_arguments(parser: ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument(
        "out", metavar="OUT", help="output folder, for model.safetensors or several files and an index"
    )
    parser.add_argument(
        "--dtype",
        choices=["fp32", "bf16", "fp16"],
        help="of floating-point tensors (default: fp32 master weights, and float64 unchanged)",
    )
    parser.add_argument("--exclude-frozen", action="store_true", help="skip frozen parameters")
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="split the weights into files of at most this size (default: 5GB)",
    )


def _run(options: Namespace) -> int:
    try:
        max_shard_bytes = parse_size(options.max_shard_size)
    except ValueError as error:
        raise UsageError(f"--max-shard-size: {error}") from None
    from zero_full.checkpoint import export_inspect

    return export_inspect.export(options, max_shard_bytes)


COMMAND = Command(
    "export",
    "convert a checkpoint's weights to safetensors",
    ("checkpoints weights", "checkpoints weights --dtype bf16", "checkpoints weights --max-shard-size 2GB"),
    _run,
    _add_arguments,
    more="One process writes parameters and buffers, without the model.\n"
    "Memory does not grow with the model.",
)
