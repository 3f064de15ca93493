"""The command line: `python -m zero_full doctor`, `plan`, `check`, `migrate` and others."""

import argparse
import sys
from collections.abc import Sequence

from zero_full import doctor
from zero_full.wording import size_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; argparse exits with 2 where there is none to run."""
    parser = argparse.ArgumentParser(prog="python -m zero_full")
    commands = parser.add_subparsers(dest="command", required=True)
    looking = commands.add_parser("doctor", help="what is installed, what is used and what is wrong with it")
    looking.add_argument(
        "--measure",
        nargs="?",
        const="",
        metavar="DIRECTORY",
        help="measure copies in memory and to an accelerator, and writes and reads of this directory's disk",
    )
    commands.add_parser("build", help="compile the operators for this machine, again if that failed before")
    planning = commands.add_parser("plan", help="how many bytes a run will need on each rank")
    _describe_plan(planning)
    checking = commands.add_parser("check", help="all mistakes of a configuration, with their lines")
    _describe_check(checking)
    migrating = commands.add_parser("migrate", help="make a DeepSpeed script one of zero_full's")
    _describe_migrate(migrating)
    exporting = commands.add_parser("export", help="a checkpoint's weights as safetensors, for everybody")
    _describe_export(exporting)
    inspecting = commands.add_parser("inspect", help="what is in a checkpoint, and whether it is whole")
    _describe_inspect(inspecting)
    options = parser.parse_args(arguments)
    if options.command == "plan":
        return _plan(planning, options)
    if options.command == "check":
        return _check(checking, options)
    if options.command == "migrate":
        return _migrate(migrating, options)
    if options.command == "export":
        return _export(exporting, options)
    if options.command == "inspect":
        return _inspect(options)
    return _build() if options.command == "build" else doctor.main(options.measure)


def _build() -> int:
    load, reason = doctor.imported("zero_full.kernels.load")
    if load is None:
        print(f"nothing can be built: torch is not usable: {reason}")
        return 1
    from zero_full.kernels.build import PARTS
    from zero_full.kernels.toolchain import BuildError

    failed = 0
    for part in PARTS:
        try:
            print(f"{part}: {load.build_now(part)}")
        except (BuildError, OSError) as error:
            failed += part == "cpu"
            print(f"{part}: not built: {error}")
    return failed


def _describe_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="MODULE:FUNCTION", help="called without arguments; makes the model"
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the configuration, a JSON file")
    parser.add_argument("--world", required=True, type=int, metavar="N", help="data-parallel ranks")
    parser.add_argument(
        "--batch",
        nargs="+",
        default=[],
        metavar="SHAPE:TYPE",
        help="the model's inputs for one micro-batch, as in 2x1024:int64, to predict activations",
    )
    parser.add_argument(
        "--expert-parallel",
        type=int,
        metavar="N",
        help="neighbours that hold different experts, if there are any",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="where the run will be")
    parser.add_argument("--stages", action="store_true", help="compare all stages")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each stage")


def _plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from zero_full import plan  # not above: the doctor must work where torch does not
    from zero_full.config import ConfigError

    try:
        return plan.main(options)
    except (ConfigError, plan.PlanError) as error:
        parser.error(str(error))


def _describe_check(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say of a configuration what the engine would say, and start nothing. "
        "Ends with 1 if it cannot be used."
    )
    parser.add_argument("file", metavar="FILE", help="the configuration, a JSON file")
    parser.add_argument("--world", type=int, metavar="N", help="data-parallel ranks")
    parser.add_argument("--json", action="store_true", help="one line of JSON, with a verdict on every key")


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from zero_full import check
    from zero_full.config import ConfigError

    try:
        return check.main(options)
    except ConfigError as error:
        parser.error(str(error))


def _describe_migrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="scripts (.py) and configurations (.json)")
    parser.add_argument("--write", action="store_true", help="change the scripts, and not only show how")
    parser.add_argument("--world", type=int, metavar="N", help="check configurations for so many ranks")


def _migrate(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from zero_full import migrate

    try:
        return migrate.main(options.files, options.write, options.world)
    except migrate.MigrateError as error:
        parser.error(str(error))


def _describe_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help="the folder that was given to save_checkpoint")
    parser.add_argument("--tag", help="which of its checkpoints; without this, the latest")


def _describe_export(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write parameters and buffers of a checkpoint as safetensors, in one process and without the model. "
        "Memory does not grow with the model."
    )
    _describe_checkpoint(parser)
    parser.add_argument(
        "out", metavar="OUT", help="a folder, for model.safetensors or several files and an index"
    )
    parser.add_argument(
        "--dtype",
        choices=["fp32", "bf16", "fp16"],
        help="of floating-point numbers; without this, fp32 from the masters, and float64 as it is",
    )
    parser.add_argument("--exclude-frozen", action="store_true", help="leave frozen parameters out")
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="what does not fit into one file of this size becomes several (default: 5GB)",
    )


def _export(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from zero_full.checkpoint import command

    try:
        max_shard_bytes = size_of(options.max_shard_size)
    except ValueError as error:
        parser.error(f"--max-shard-size: {error}")
    return command.export(options, max_shard_bytes)


def _describe_inspect(parser: argparse.ArgumentParser) -> None:
    _describe_checkpoint(parser)
    parser.add_argument("--verify", action="store_true", help="read everything and compare checksums")
    parser.add_argument("--json", action="store_true", help="one line of JSON")


def _inspect(options: argparse.Namespace) -> int:
    from zero_full.checkpoint import command

    return command.inspect(options)


if __name__ == "__main__":
    sys.exit(main())
