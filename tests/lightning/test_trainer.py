"""Lightning's Trainer and Fabric with zero_full train as with plain DDP; what cannot hold is refused."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not find_spec("lightning"):
    pytest.skip("needs Lightning: `make test-lightning` installs it", allow_module_level=True)

from tests.lightning import matrix
from tests.lightning.launch import difference, results, started
from tests.works_with import Row, cases_in

pytestmark = pytest.mark.lightning


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the checkpoints."""
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[str, Any]:
    """The results of two ranks."""
    return matrix.on_two(folder)


@pytest.fixture(scope="module")
def rows(two: dict[str, Any]) -> dict[str, Row]:
    """Two ranks' rows of the record, by case."""
    return {row.case: row for row in matrix.compared(two)}


@pytest.fixture(scope="module", params=[1, 2, 3])
def resumed(request: pytest.FixtureRequest, two: dict[str, Any], folder: Path) -> tuple[int, dict[str, Any]]:
    """What goes on from two ranks' checkpoints, on this many."""
    return request.param, matrix.on(request.param, folder)


@pytest.mark.parametrize("case", [case for case, _ in matrix.ON_TWO.values()])
def test_two_ranks_train_as_with_ddp(rows: dict[str, Row], case: str) -> None:
    assert not rows[case].result.startswith(matrix.DIFFERENT), rows[case].result


def test_runs_go_on_at_any_number_of_ranks(resumed: tuple[int, dict[str, Any]], two: dict[str, Any]) -> None:
    ranks, found = resumed
    assert [row for row in matrix.resumed(ranks, found, two) if row.result != matrix.EQUAL] == []
    for stage in ("1", "2", "3"):
        run = found["resume"][stage]
        assert run["steps"] == 12 and run["lr"] == [0.0046]
        assert difference(run["sum"], two["without_interruption"]["sum"]) < matrix.EXACT
    assert len(found["evaluates_checkpoints"]) == 10
    for stage in ("1", "3"):
        loaded = found["fabric_loads"][stage]
        assert loaded["step"] == 2 and loaded["rest"] == []
        assert difference(loaded["norms"], two["fabric_saves"]["norms"][2:]) < matrix.EXACT
        assert "no 'epoch'" in found["fabric_loads"][f"{stage} missing"]


def test_the_record_has_all_cases(rows: dict[str, Row]) -> None:
    cases = [(row.framework, row.case, row.ranks) for row in rows.values()]
    for ranks in (1, 2, 3):
        for case in (matrix.RESUMED, matrix.EVALUATED, matrix.RELOADED):
            cases.append(("lightning", case, f"2, then {ranks}"))
    assert cases_in("lightning") == cases


def test_low_precision_is_the_same_at_each_stage(two: dict[str, Any]) -> None:
    for case in ("bf16", "bf16_true", "fp16"):
        for stage in ("2", "3"):
            assert difference(two[case][stage]["losses"], two[case]["1"]["losses"]) < 1e-3
    assert two["init"]["2 bf16-true"]["losses"] == two["init"]["3 bf16-true"]["losses"]
    assert two["fabric_loops"]["3 init"] == two["fabric_loops"]["3 32-true"]


def test_manual_clipping_and_gradients_that_are_not_cleared_make_a_difference(two: dict[str, Any]) -> None:
    plain = two["manual_toggled"]["ddp"]["losses"]
    for case in ("manual", "manual_without_zero_grad"):
        assert difference(two[case]["ddp"]["losses"], plain) > 0.1


def test_another_strategy_gets_the_module_after_release(two: dict[str, Any]) -> None:
    for stage in ("1", "3"):
        after = two["one_run_after_another"][f"afterwards {stage}"]
        assert "already belongs to an engine" in after["refused"] and "release()" in after["refused"]
        assert after["seen"][:6] == after["seen"][6:] != []


def test_callbacks_and_loggers_see_what_they_see_with_ddp(two: dict[str, Any]) -> None:
    with_ddp, ours = (two["callbacks_and_loggers"][stage] for stage in ("ddp", "3"))
    assert ours["epochs"] == with_ddp["epochs"] == 2  # of 20: stopped early
    assert ours["left"] == with_ddp["left"] and len(ours["left"]) == 2
    wanted, got = (run["logged"].splitlines() for run in (with_ddp, ours))
    assert len(got) == len(wanted) > 20
    for column in ("train_loss", "val_loss", "lr-AdamW"):
        for one, other in zip(wanted[1:], got[1:], strict=True):
            mine = dict(zip(got[0].split(","), other.split(","), strict=True))[column]
            its = dict(zip(wanted[0].split(","), one.split(","), strict=True))[column]
            assert mine == its or abs(float(mine) - float(its)) < 1e-4


def test_callbacks_that_average_weights_name_a_parameter_at_stage_3(two: dict[str, Any]) -> None:
    for callback in ("StochasticWeightAveraging", "EMAWeightAveraging"):
        assert "is sharded and has no values here" in two["averages_and_tunes"][f"refused {callback}"]


@pytest.mark.parametrize(("case", "count"), [("refusals", 20), ("fabric_refusals", 5)])
def test_options_that_cannot_hold_are_refused_by_name(two: dict[str, Any], case: str, count: int) -> None:
    refused = two[case]
    assert len(refused) == count
    assert [name for name, text in refused.items() if name not in text] == []


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(two: dict[str, Any], tmp_path: Path) -> None:
    run = results(2, tmp_path, "killed", options=("--max-restarts=1",))["killed"]
    assert difference(run["losses"], two["without_interruption"]["losses"][6:]) < matrix.EXACT


def test_ranks_that_call_other_layers_at_stage_3_end_with_an_error(tmp_path: Path) -> None:
    done = started(2, "tests.lightning", tmp_path, "desync")
    assert done.returncode != 0
    assert "DesyncError: the ranks disagree at collective call" in done.stderr


def test_the_example_resumes_at_another_number_of_ranks_with_the_losses_of_ddp(tmp_path: Path) -> None:
    example = ("zero_full.examples.lightning_trainer", "--out")
    plain = started(1, *example, tmp_path / "plain", "--devices", 1, "--strategy", "ddp")
    begun = started(2, *example, tmp_path / "out", "--devices", 2, "--epochs", 1)
    ended = started(3, *example, tmp_path / "out", "--devices", 3)
    lines = [line.split() for run in (plain, begun, ended) for line in run.stdout.splitlines()]
    losses = [float(line[3].rstrip(",")) for line in lines if line[:1] == ["step"]]
    assert len(losses) == 44, (plain.stderr[-2000:], begun.stderr[-2000:], ended.stderr[-2000:])
    assert losses[:22] == pytest.approx(losses[22:], abs=1e-5)


def test_a_version_that_was_not_tested_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import zero_full.integrations.lightning as integration

    integration._check_version()
    assert caplog.messages == []
    monkeypatch.setattr(integration, "version", lambda name: "9.1.2")
    integration._check_version()
    assert len(caplog.messages) == 1 and "lightning 9.1.2 was not tested" in caplog.messages[0]
