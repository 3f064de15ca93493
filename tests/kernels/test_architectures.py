"""For which GPUs is compiled, and which a library serves."""

import pytest

from tests.kernels.compilers import NVCC_12_0, NVCC_13_0, Compiler
from zero_full.kernels import architectures, builder
from zero_full.kernels.toolchain import BuildError, toolchain


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("90", ["arch=compute_90,code=sm_90"]),
        ("9.0+PTX", ["arch=compute_90,code=sm_90", "arch=compute_90,code=compute_90"]),
        ("80;90a", ["arch=compute_80,code=sm_80", "arch=compute_90a,code=sm_90a"]),
        ("8.0, 12.0", ["arch=compute_80,code=sm_80", "arch=compute_120,code=sm_120"]),
    ],
)
def test_architectures_are_read_as_people_write_them(text: str, flags: list[str]) -> None:
    assert architectures.options(architectures.parse(text))[1::2] == flags


CHOICES = {  # what is named, which GPUs there are, what nvcc knows; what is compiled
    "nobody to ask, nvcc 13.0": ("", (), NVCC_13_0, ("80", "90", "100+PTX")),
    "nobody to ask, nvcc 12.0": ("", (), NVCC_12_0, ("80", "90+PTX")),
    "nobody to ask, nvcc of the future": ("", (), (100, 120, 200), ("100+PTX",)),
    "an H100": ("", [(9, 0)], NVCC_12_0, ("90",)),
    "two kinds": ("", [(8, 6), (9, 0)], NVCC_13_0, ("86", "90")),
    "newer than nvcc": ("", [(12, 0)], NVCC_12_0, ("90+PTX",)),
    "named": ("80;9.0a", [(9, 0)], NVCC_13_0, ("80", "90a")),
}


@pytest.mark.parametrize("name", CHOICES)
def test_nvcc_is_asked_only_for_what_it_knows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, devices, known, expected = CHOICES[name]
    monkeypatch.setenv(architectures.VARIABLE, text)
    assert architectures.chosen(known, devices) == expected
    if text == "":
        assert all(architectures.serves(expected, device) for device in devices)


@pytest.mark.parametrize(
    ("text", "devices", "known", "reason"),
    [
        ("80;hopper", (), NVCC_13_0, "'hopper' is not a GPU architecture"),
        ("80;100", (), NVCC_12_0, "'80;100': nvcc does not support 100, only 50, 60"),
        ("", (), (200, 210), "nvcc supports none of 80;90;100.PTX, only 200, 210: set ZERO_FULL_CUDA_ARCHS"),
        ("", [(7, 0)], NVCC_13_0, r"does not support this GPU \(70\), only 75, .*CUDA_HOME"),
    ],
)
def test_what_nvcc_cannot_make_is_named(
    text: str,
    devices: list[architectures.Device],
    known: tuple[int, ...],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(architectures.VARIABLE, text)
    with pytest.raises(BuildError, match=reason):
        architectures.chosen(known, devices)


@pytest.mark.parametrize(
    ("text", "served", "native"),
    [
        ("80", {(8, 0), (8, 6), (8, 9)}, {(8, 0), (8, 6), (8, 9)}),
        ("86", {(8, 6), (8, 9)}, {(8, 6), (8, 9)}),
        ("80+PTX", {(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)}, {(8, 0), (8, 6), (8, 9)}),
        ("90a", {(9, 0)}, {(9, 0)}),
        ("80;100+PTX", {(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)}, {(8, 0), (8, 6), (8, 9), (10, 0)}),
    ],
)
def test_a_library_serves_later_devices_of_its_generation_and_with_ptx_all_later_ones(
    text: str, served: set[architectures.Device], native: set[architectures.Device]
) -> None:
    every = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
    mine = architectures.parse(text)
    assert {device for device in every if architectures.serves(mine, device)} == served
    assert {device for device in every if architectures.is_native(mine, device)} == native


def test_an_nvcc_that_does_not_list_is_named(nvcc: Compiler) -> None:
    nvcc.options["gpus"] = ""
    nvcc.become("10")
    with pytest.raises(BuildError, match=r"nvcc does not list architectures .*too old"):
        builder.name_for("cuda", toolchain("cuda"))
