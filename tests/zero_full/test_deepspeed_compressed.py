"""The compressed optimizers beside the real ones: `deepspeed_compressed.safetensors` has DeepSpeed 0.19.6's.

The same gradients and learning rates give the same parameters, to what fp32 leaves, as far as both mean to do
the same. What zero_full does otherwise on purpose, and where here:

* `bias_correction` has no effect in DeepSpeed, which never corrects: everywhere it is switched off.
* DeepSpeed has one scale for a buffer: `per_tensor_scales` is switched off.
* its 0/1 Adam freezes the variance one step later than `var_freeze_step` says: here it is told one less.
* its 0/1 Adam has the weight decay in the walk, from where it gets into the momentum at a meeting; ours keeps
  it out. So with decay both agree until the first meeting after which that matters, and not later.
* its 0/1 Adam adds the errors of walks at one learning rate to walks at another; ours follow the rate. So the
  rate stays the same from the step on in which ranks walk alone.
* its ranks differ by rounding after they have met; ours have the same bits.
* its 1-bit LAMB has a mean of coefficients that begins at zero, so after few steps it is too small, and the
  second phase too slow; ours is a mean from the first step on. With `coeff_beta` 0 there is no mean.
* its mask lets elements travel and count in scales, and clears them afterwards; ours leaves them out. So with
  a mask both agree until something travels at one bit, and masked elements stay where they are in both.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import zero_full
from tests.worlds import run_each
from tests.zero_full.deepspeed_compressed import CASES, FILE, WORLD, Case, learning_rate

GIVEN = load_file(FILE)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class Flat(nn.Module):
    """Parameters whose gradients are what forward is given."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...], first: Tensor) -> None:
        super().__init__()
        sizes = [torch.Size(shape).numel() for shape in shapes]
        pieces = zip(first.split(sizes), shapes, strict=True)
        self.parts = nn.ParameterList(piece.view(shape).clone() for piece, shape in pieces)

    def forward(self, gradient: Tensor) -> Tensor:
        return sum((p.reshape(-1) * g).sum() for p, g in zip(self.parts, self.cut(gradient), strict=True))

    def cut(self, gradient: Tensor) -> list[Tensor]:
        return list(gradient.split([p.numel() for p in self.parts]))


def options(case: Case) -> dict[str, Any]:
    params = {**case.params, "bias_correction": False, "per_tensor_scales": False}
    if "var_freeze_step" in params:
        params["var_freeze_step"] += 1
    return params


def trained(comm: Any, name: str) -> tuple[Tensor, list[int]]:
    """This rank's parameters after every step, and what it sent in each."""
    case = CASES[name]
    mask = GIVEN["mask"] if case.masked else torch.ones_like(GIVEN["mask"])
    model = Flat(case.shapes, GIVEN["first"])
    groups = [{"params": list(model.parameters())}]
    if case.masked:
        groups[0]["exp_avg_mask"] = [mask]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": case.type, "params": options(case)},
    }
    engine = zero_full.initialize(model=model, model_parameters=groups, config=config)[0]
    seen, sent = [], [0]
    for number in range(case.steps):
        engine.optimizer.param_groups[0]["lr"] = learning_rate(number + 1)
        engine.backward(engine(GIVEN["gradients"][comm.rank, number] * mask))
        engine.step()
        seen.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone())
        sent.append(sum(engine.traffic().values()))
    engine.destroy(gather=True)
    return torch.stack(seen), [after - before for before, after in pairwise(sent)]


def all_trained(names: list[str]) -> dict[str, list[tuple[Tensor, list[int]]]]:
    return dict(zip(names, run_each(trained, WORLD, [(name,) for name in names]), strict=True))


@pytest.fixture(scope="module")
def ours() -> dict[str, list[tuple[Tensor, list[int]]]]:
    return all_trained(list(CASES))


def theirs(name: str) -> Tensor:
    return GIVEN[f"{name}/params"]


def test_the_file_is_of_the_last_version_that_has_them() -> None:
    with safe_open(FILE, "pt") as file:
        assert file.metadata()["deepspeed"] == "0.19.6"


@pytest.mark.parametrize("name", ["zero_one", "one_bit", "one_bit_decay", "lamb", "lamb_decay"])
def test_every_step_is_deepspeeds(name: str, ours: Any) -> None:
    for rank in range(WORLD):
        torch.testing.assert_close(ours[name][rank][0], theirs(name)[rank], **CLOSE)


def test_exact_averages_are_in_the_same_steps(ours: Any) -> None:
    """An exact average sends a slice of fp32 there and back, 128 bytes here; one bit sends less."""
    sent = torch.tensor(ours["zero_one"][0][1])
    assert torch.equal(sent == sent.max(), GIVEN["zero_one/exact"][0])


def meetings(name: str) -> list[int]:
    """The steps after which DeepSpeed's ranks stand together again, after having been apart."""
    apart = (theirs(name)[0] - theirs(name)[1]).abs().amax(dim=1) > 1e-3
    return [i for i in range(1, len(apart)) if apart[i - 1] and not apart[i]]


def test_after_a_meeting_our_ranks_have_the_same_bits_and_deepspeeds_nearly(ours: Any) -> None:
    assert len(meetings("zero_one")) > 3
    for step in meetings("zero_one"):
        assert torch.equal(ours["zero_one"][0][0][step], ours["zero_one"][1][0][step])
    last = theirs("zero_one")[:, meetings("zero_one")]
    assert 0 < (last[0] - last[1]).abs().max() < 1e-4  # the difference that is intended


def test_decay_is_the_same_until_a_meeting_mixes_it_into_deepspeeds_momentum(ours: Any) -> None:
    frozen = CASES["zero_one_decay"].params["var_freeze_step"] + 1
    for rank in range(WORLD):
        mine, other = ours["zero_one_decay"][rank][0], theirs("zero_one_decay")[rank]
        torch.testing.assert_close(mine[:frozen], other[:frozen], **CLOSE)
        assert not torch.allclose(mine[-1], other[-1], **CLOSE)


def test_a_mean_of_coefficients_that_begins_at_zero_is_what_is_different_of_lamb(ours: Any) -> None:
    frozen = CASES["lamb_mean"].params["freeze_step"]
    mine, other = ours["lamb_mean"][0][0], theirs("lamb_mean")[0]
    torch.testing.assert_close(mine[:frozen], other[:frozen], **CLOSE)
    steps = [(each[frozen] - each[frozen - 1]).norm() for each in (mine, other)]
    assert float(steps[1] / steps[0]) == pytest.approx(1 - 0.9**frozen, rel=1e-3)


@pytest.mark.parametrize("name", ["zero_one_masked", "one_bit_masked"])
def test_masked_elements_stay_and_the_others_agree_until_bits_travel(name: str, ours: Any) -> None:
    exact = GIVEN[f"{name}/exact"][0].int().tolist()
    before = exact.index(0)
    still = GIVEN["first"][~GIVEN["mask"]]
    for rank in range(WORLD):
        mine, other = ours[name][rank][0], theirs(name)[rank]
        torch.testing.assert_close(mine[:before], other[:before], **CLOSE)
        for each in (mine, other):
            assert all(torch.equal(row[~GIVEN["mask"]], still) for row in each)
        assert not torch.allclose(mine[-1], other[-1], **CLOSE)  # scales count other elements
