"""`comm_backend_name`: what is missing for a name, in words."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from zero_full.shard.deal.one_bit_support import BACKENDS, missing_for


@pytest.mark.parametrize(
    ("name", "there", "has_gpu", "missing"),
    [
        ("nccl", True, True, ""),
        ("nccl", True, False, "nccl: there is no GPU"),
        ("nccl", False, True, "nccl: this torch was built without NCCL"),
        ("gloo", True, False, ""),
        ("gloo", False, False, "gloo: this torch was built without gloo"),
        ("mpi", True, False, ""),
        ("mpi", False, False, "mpi: this torch was built without MPI"),
        ("hccl", True, False, ""),
        ("hccl", False, False, "hccl: torch_npu, which brings it, is not installed or not imported"),
    ],
)
def test_what_a_backend_lacks_is_said(name: str, there: bool, has_gpu: bool, missing: str) -> None:
    with (
        mock.patch.object(dist, "is_backend_available", lambda asked: there and asked == name),
        mock.patch.object(torch.accelerator, "is_available", lambda: has_gpu),
    ):
        assert missing_for(name) == missing


def test_a_backend_is_one_of_four() -> None:
    assert BACKENDS == ("nccl", "gloo", "mpi", "hccl") and missing_for("gloo") == ""
    with pytest.raises(ValueError, match="comm_backend_name 'ucc': it can be nccl, gloo, mpi, hccl"):
        missing_for("ucc")
