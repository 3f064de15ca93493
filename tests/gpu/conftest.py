"""What pytest hands to tests of the CUDA operators by name."""

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from tests.gpu import samples
from tests.gpu.samples import Sample
from zero_full.kernels import load, ops


@pytest.fixture(scope="module")
def compiled() -> Iterator[Any]:
    """Asked for by name: see [Note: CUDA]. Other tests of this process get them, too."""
    with mock.patch.dict(os.environ, ZERO_FULL_KERNELS="all"):
        _ask_again()
        loaded = load.load(torch.device("cuda"))
        assert loaded.path is not None, loaded.reason
        yield torch.ops.zero_full
    _ask_again()


def _ask_again() -> None:
    for answer in (load.load, load.compiled_for, load.operators):
        answer.cache_clear()


@pytest.fixture(params=ops.SCHEMAS)
def sample(request: pytest.FixtureRequest) -> Sample:
    """Of each operator."""
    return samples.one_of_each(50_001)[request.param]
