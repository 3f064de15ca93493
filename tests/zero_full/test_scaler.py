"""The loss scale: DeepSpeed's printed rule, step by step, against a second reading of it."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_full.errors import ScaleExhaustedError
from zero_full.precision import DynamicScale, StaticScale


@dataclass
class PrintedRule:
    """The rule as DeepSpeed prints it, line by line and with its names. `update` says whether it raises."""

    cur_scale: float
    scale_window: int
    min_scale: float
    hysteresis: int
    consecutive_hysteresis: bool
    cur_iter: int = 0
    last_overflow_iter: int = -1

    def __post_init__(self) -> None:
        self.cur_hysteresis = self.hysteresis

    def update(self, overflow: bool) -> bool:
        if overflow:
            if self.hysteresis == 1 or self.cur_hysteresis == 1:
                if self.cur_scale == self.min_scale:
                    return True
                self.cur_scale = max(self.cur_scale / 2, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.hysteresis
            stable = self.cur_iter - self.last_overflow_iter - 1
            if stable > 0 and stable % self.scale_window == 0:
                if not self.consecutive_hysteresis:
                    self.cur_hysteresis = self.hysteresis
                self.cur_scale *= 2
        self.cur_iter += 1
        return False


def test_the_known_trace_of_scales_and_lives() -> None:
    scaler = DynamicScale(16, window=2, hysteresis=2)
    trace = []
    for overflow in (1, 1, 1, 0, 0, 0, 0, 1, 1):
        scaler.update(bool(overflow))
        trace.append((scaler.scale, scaler.lives))
    assert [scale for scale, _ in trace] == [16, 8, 4, 4, 4, 8, 8, 8, 4]
    assert [lives for _, lives in trace] == [1, 1, 1, 1, 1, 2, 2, 1, 1]


@settings(max_examples=500)
@given(
    power=st.integers(0, 20),
    window=st.integers(1, 5),
    minimum=st.sampled_from([1.0, 2.0, 3.0, 64.0]),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
    overflows=st.lists(st.booleans(), max_size=60),
)
def test_every_sequence_goes_as_the_printed_rule_says(
    power: int, window: int, minimum: float, hysteresis: int, consecutive: bool, overflows: list[bool]
) -> None:
    start = max(2.0**power, minimum)
    scaler = DynamicScale(start, window, minimum, hysteresis, consecutive)
    rule = PrintedRule(start, window, minimum, hysteresis, consecutive)
    for overflow in overflows:
        if rule.update(overflow):
            with pytest.raises(ScaleExhaustedError):
                scaler.update(overflow)
        else:
            scaler.update(overflow)
        assert (scaler.scale, scaler.lives) == (rule.cur_scale, rule.cur_hysteresis)


def test_the_defaults_are_deepspeeds() -> None:
    scaler = DynamicScale()
    assert (scaler.scale, scaler.window, scaler.minimum, scaler.hysteresis) == (65536, 1000, 1, 2)
    assert not scaler.consecutive_hysteresis


def test_the_scale_grows_without_bound() -> None:
    scaler = DynamicScale(1, window=1)
    for _ in range(201):  # the first step has no good one before it
        scaler.update(False)
    assert scaler.scale == 2.0**200


def test_at_the_minimum_an_overflow_says_so_and_leaves_the_scale() -> None:
    scaler = DynamicScale(8, minimum=3, hysteresis=1)
    scaler.update(True)
    scaler.update(True)
    assert scaler.scale == 3  # not 2
    before = scaler.state_dict()
    for _ in range(2):  # however often
        with pytest.raises(ScaleExhaustedError, match="smallest loss scale, 3"):
            scaler.update(True)
    assert scaler.state_dict() == before


def test_a_static_scale_learns_nothing() -> None:
    scaler = StaticScale(128)
    for overflow in (True, False) * 50:
        scaler.update(overflow)
    assert scaler.scale == 128
    assert StaticScale().scale == 1


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("kind", [StaticScale, DynamicScale])
def test_a_scale_that_is_not_positive_is_refused(kind: type[StaticScale], scale: float) -> None:
    with pytest.raises(ValueError, match=r"fp16.loss_scale must be positive"):
        kind(scale)


@given(
    before=st.lists(st.booleans(), max_size=20),
    after=st.lists(st.booleans(), max_size=20),
    consecutive=st.booleans(),
)
def test_a_saved_scale_continues_as_if_never_stopped(
    before: list[bool], after: list[bool], consecutive: bool
) -> None:
    scaler = DynamicScale(2.0**60, window=3, hysteresis=3, consecutive_hysteresis=consecutive)
    for overflow in before:
        scaler.update(overflow)
    saved = scaler.state_dict()
    continued = DynamicScale()
    continued.load_state_dict(saved)
    for overflow in after:
        scaler.update(overflow)
        continued.update(overflow)
        assert continued.state_dict() == scaler.state_dict()


def test_what_is_saved_is_a_copy() -> None:
    scaler = DynamicScale(16, hysteresis=1)
    saved = scaler.state_dict()
    scaler.update(True)
    assert saved["scale"] == 16 and scaler.scale == 8
    scaler.load_state_dict(saved)
    scaler.update(True)
    assert saved["scale"] == 16


@pytest.mark.parametrize("saved, into", [(StaticScale(8), DynamicScale()), (DynamicScale(), StaticScale(8))])
def test_a_scale_of_the_other_kind_is_refused_with_the_remedy(saved: StaticScale, into: StaticScale) -> None:
    before = into.state_dict()
    with pytest.raises(ValueError, match=r"static, .* dynamic.*fp16.loss_scale"):
        into.load_state_dict(saved.state_dict())
    assert into.state_dict() == before
