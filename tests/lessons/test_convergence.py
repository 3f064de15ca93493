"""0/1 Adam must end where Adam ends, up to what the seed changes and two per cent."""

from statistics import mean

import pytest

from lessons.step6_zero_one_adam.experiment import seeds


@pytest.mark.slow
def test_zero_one_adam_ends_within_seed_noise_and_two_per_cent_of_adam() -> None:
    losses = seeds(400, (0, 1, 2))
    adam = losses["Adam"]
    noise = max(adam) - min(adam)
    for name in ("1-bit Adam", "0/1 Adam"):
        assert len(losses[name]) == 3
        assert mean(losses[name]) <= 1.02 * mean(adam) + noise, losses
