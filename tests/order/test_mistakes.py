"""A search that finds nothing proves little: here is what it must find."""

import pytest

from tests.order.clocks import races
from tests.order.mistakes import MISTAKES
from tests.order.playback import Player, script_first, seeded, side_first, side_last
from tests.order.runs import Case, recorded


@pytest.mark.rotates
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name: str) -> None:
    mistake = MISTAKES[name]
    with mistake.plant():
        record = recorded(mistake.case)
    found = [str(race) for race in races(record)]
    assert any(mistake.inside in told for told in found), found
    player = Player(record)
    orders = [side_first, side_last, script_first, *map(seeded, range(20))]
    assert any(map(player.differences, orders)) or not mistake.shows


@pytest.mark.parametrize("case", {repr(each.case): each.case for each in MISTAKES.values()}.values(), ids=str)
def test_without_mistakes_nothing_is_found(case: Case) -> None:
    assert not [str(race) for race in races(recorded(case))]
