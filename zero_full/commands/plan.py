"""The command `python -m zero_full plan`, which predicts the memory of a run."""

from argparse import ArgumentParser, Namespace

from zero_full.commands.command import Command
from zero_full.errors import UsageError


def _add_arguments(parser: ArgumentParser) -> None:
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


def _run(options: Namespace) -> int:
    from zero_full import plan
    from zero_full.errors import ConfigError, PlanError

    try:
        return plan.main(options)
    except (ConfigError, PlanError) as error:
        raise UsageError(str(error)) from None


COMMAND = Command(
    "plan",
    "how many bytes a run will need on each rank",
    (
        "--model my_models:gpt --config ds.json --world 8 \\\n      --batch 4x1024:int64",
        "--model my_models:gpt --config ds.json --world 64 \\\n      --stages",
    ),
    _run,
    _add_arguments,
    more="The model is not allocated, and there need be no GPU.",
)
