"""The command `python -m zero_full plan`, which predicts the memory of a run."""

from argparse import ArgumentParser, Namespace

from zero_full.commands.command import Command


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODULE:FUNCTION",
        help="function without arguments that returns the model",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the configuration, a JSON file")
    parser.add_argument("--world", required=True, type=int, metavar="N", help="data-parallel ranks")
    parser.add_argument(
        "--batch",
        nargs="+",
        default=[],
        metavar="SHAPE:TYPE",
        help="the model's inputs of a micro-batch, such as 2x1024:int64, to predict activations",
    )
    parser.add_argument(
        "--expert-parallel",
        type=int,
        metavar="N",
        help="consecutive ranks that hold different experts, if any",
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="device of the run (default: cuda)"
    )
    parser.add_argument("--stages", action="store_true", help="compare all stages")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each stage")


def _run(options: Namespace) -> int:
    from zero_full import plan

    return plan.main(options)


COMMAND = Command(
    "plan",
    "predict the memory of a run on each rank",
    (
        "--model my_models:gpt --config ds.json --world 8 \\\n      --batch 4x1024:int64",
        "--model my_models:gpt --config ds.json --world 64 \\\n      --stages",
    ),
    _run,
    _add_arguments,
    more="It does not allocate the model, and needs no GPU.",
)
