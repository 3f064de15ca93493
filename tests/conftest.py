"""`pytest --impl min|full|mine`: who is put through the suite.

`mine` is zero_min with a learner's file in the place of one of its modules; `lessons/replace.py` says how
to name the file, and `python -m lessons check N` does it all.
"""

import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from lessons import replace

if "zero_min" not in sys.modules:  # `judge` has done it already
    replace.install()

import pytest
import torch

from tests import rotation
from tests.pairwise import pairwise
from tests.trainers import STAGES_OF, Subject
from zero_min import STAGES


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--impl", choices=["min", "full", "mine"], help="who is tested; default: min and full")
    parser.addoption("--stage", type=int, choices=list(STAGES), help="only this stage")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--impl") == "mine" and not os.environ.get(replace.VARIABLE):
        raise pytest.UsageError(f"--impl mine: set {replace.VARIABLE}=zero_min.stage1=work/stage1.py")
    if config.getoption("--impl") != "mine":
        from hypothesis import settings  # a learner's `check` waits for no import of it

        settings.register_profile("here", deadline=None, max_examples=100)  # time says nothing here
        settings.load_profile("here")


@pytest.hookimpl(tryfirst=True)  # before pytest takes out what `-m` leaves out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what this run leaves out. A learner's `check` has a selection of its own: `thorough`."""
    if config.getoption("--impl") != "mine":
        leave_pairs(items)
        take_turns(items)


def take_turns(items: list[pytest.Item]) -> None:
    """Mark three quarters of the cases of `@pytest.mark.rotates` tests as slow; others for each commit."""
    numbers = Counter[str]()
    for item in items:
        if item.get_closest_marker("rotates") and not item.get_closest_marker("slow"):
            test = item.nodeid.partition("[")[0]
            if not rotation.has_turn(test, numbers[test]):
                item.add_marker(pytest.mark.slow)
            numbers[test] += 1


def leave_pairs(items: list[pytest.Item]) -> None:
    """Mark rows of `@pytest.mark.pairwise` tests as slow that add no pair of values to the other rows.

    A row that `skips` meets no pair.
    """
    tables: dict[str, dict[tuple[Any, ...], pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("pairwise")
        if mark is not None and not item.get_closest_marker("slow"):
            values = item.callspec.params  # type: ignore[attr-defined]
            skips = mark.kwargs.get("skips", lambda **values: False)
            if not skips(**values):
                row = tuple(map(repr, values.values()))  # a dictionary has no hash
                tables.setdefault(item.nodeid.partition("[")[0], {})[row] = item
    for rows in tables.values():
        chosen = {*pairwise([*rows])}
        for row, item in rows.items():
            if row not in chosen:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What has been imported stays: a test that collects garbage need not look at it again and again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The seed is what a failure is repeated with."""
    if config.getoption("--impl") != "mine":
        terminalreporter.write_line(rotation.in_words())


@pytest.fixture(autouse=True)
def autograd_and_torch_function_are_left_on() -> Iterator[None]:
    """A test that leaves one of them off fails itself, and not the hundreds of tests after it."""
    yield
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        pytest.fail("this test has left autograd off")
    if not torch._C._is_torch_function_enabled():
        torch._C._set_torch_function_state(torch._C._TorchFunctionState.ENABLED)
        pytest.fail("this test has left __torch_function__ off")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        impl, stage = metafunc.config.getoption("--impl"), metafunc.config.getoption("--stage")
        subjects = [
            Subject(each, number)
            for each in ([impl] if impl else ["min", "full"])
            for number in STAGES_OF[each]
            if stage in (None, number)
        ]
        metafunc.parametrize("subject", subjects, ids=str)
