"""`pytest --impl min|full|mine`: who is put through the suite.

`mine` is zero_min with a learner's file in the place of one of its modules; `lessons/replace.py` says how
to name the file, and `python -m lessons check N` does it all.
"""

import gc
import os
import sys
from collections.abc import Iterator

from lessons import replace

if "zero_min" not in sys.modules:  # `judge` has done it already
    replace.install()

import pytest
import torch

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


def pytest_collection_finish(session: pytest.Session) -> None:
    """What has been imported stays: a test that collects garbage need not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def autograd_is_left_on() -> Iterator[None]:
    """A test that leaves autograd off fails itself, and not the hundreds of tests after it."""
    yield
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        pytest.fail("this test has left autograd off")


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
