"""`pytest --impl min|full|mine`: who is put through the conformance suite."""

from pathlib import Path

import pytest

from tests.trainers import Subject
from zero_min import STAGES


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--impl", choices=["min", "full", "mine"], default="min", help="who is tested")
    parser.addoption("--stage", type=int, help="only this stage")
    parser.addoption("--file", help="with --impl mine: the file with the answer")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--impl") == "full":
        raise pytest.UsageError("--impl full: zero_full has no trainer yet")
    file = config.getoption("--file")
    if config.getoption("--impl") == "mine" and (file is None or not Path(file).exists()):
        raise pytest.UsageError("--impl mine needs --file work/stageN.py and --stage N")


def subjects(config: pytest.Config) -> list[Subject]:
    """The implementations and stages that this run is about."""
    stage = config.getoption("--stage")
    stages = [stage] if stage is not None else list(STAGES)
    return [Subject(config.getoption("--impl"), stage, config.getoption("--file")) for stage in stages]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        metafunc.parametrize("subject", subjects(metafunc.config), ids=str)
