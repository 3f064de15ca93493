"""`fit` forecasts the time of each candidate's step, where rates and the model's operations are known."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.zero_full.test_fit import small
from tests.zero_full.test_step_time import TOKENS, Words, config, machine
from zero_full.__main__ import main
from zero_full.errors import FitError, PlanError
from zero_full.fit import Batch, Fit, Machine, Run, choice, fit, shape_of
from zero_full.fit.model_operations import operations_of
from zero_full.plan import ModelWork, model_work

GB = 10**9
RUN = Run(Batch(2, TOKENS), precision="fp32")


def work() -> ModelWork:
    """Operations of another model, which stand for those of transformers."""
    tokens = torch.empty(2, TOKENS, dtype=torch.int64, device="meta")
    return model_work(Words(), config(0), 2, [tokens])


def found(device: str = "cpu", hosts: int = 1, **given: Any) -> Fit:
    cluster = Machine(hosts, 2 // hosts, 10 * GB, 100 * GB, device=device)
    return fit(shape_of(small()), cluster, RUN, **given)


def names(result: Fit) -> list[str]:
    return [each.name for each in result.candidates]


def test_candidates_have_their_time_and_keep_their_order() -> None:
    plain, timed = found(), found(rates=machine(), work=work())
    assert names(plain) == names(timed) == [f"stage {stage}" for stage in range(4)]
    assert timed.chosen is timed.candidates[0]
    for before, after in zip(plain.candidates, timed.candidates, strict=True):
        assert before.plan.peak == after.plan.peak and before.plan.step_time is None
        time = after.plan.step_time
        assert time is not None and time.tokens == 2 * 2 * TOKENS and not after.plan.not_forecast


def test_the_fastest_that_fits_is_chosen_if_it_is_asked_for() -> None:
    result = found(rates=machine(), work=work(), fastest=True)
    times = [each.plan.step_time.total for each in result.candidates if each.plan.step_time is not None]
    assert len(times) == 6 and times == sorted(times) and result.chosen is result.candidates[0]
    assert "stage 2, state on the host" in names(result) and names(result)[0] != "stage 0"
    unknown = ModelWork(work().recorder, (), "nobody knows")
    with pytest.raises(FitError, match="--fastest: stage 0 fits, and its time is not forecast: nobody knows"):
        found(rates=machine(), work=unknown, fastest=True)
    with pytest.raises(FitError, match="--fastest compares forecast times"):
        found(fastest=True)


def test_state_on_the_host_takes_memory_of_ranks_on_cpus() -> None:
    result = found(rates=machine(), work=work(), fastest=True)
    away = next(each for each in result.candidates if each.name == "stage 2, state on the host")
    room = 2 * (away.plan.peak + away.plan.host)
    for host, fits in ((room, True), (room - 1, False)):
        cluster = Machine(1, 2, away.plan.peak, host, device="cpu")
        again = fit(shape_of(small()), cluster, RUN, rates=machine(), work=work(), fastest=True)
        verdict = {each.name: each.verdict for each in again.candidates}["stage 2, state on the host"]
        assert (verdict != "no") is fits


def test_what_has_no_forecast_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    cases = {
        "measured on device cpu, and the run is on cuda": found("cuda", rates=machine()),
        "messages between hosts are not measured": found(hosts=2, rates=machine()),
        "those of transformers' LlamaForCausalLM: install transformers": found(rates=machine()),
    }
    for reason, result in cases.items():
        for each in result.candidates:
            assert each.plan.step_time is None and reason in each.plan.not_forecast
        assert result.chosen is result.candidates[0]
    with pytest.raises(PlanError, match="measured by 3 ranks at once, and the plan has 2"):
        found(rates=machine(ranks=3))


def test_a_model_that_transformers_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise ValueError("no such model")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: Broken)
    monkeypatch.setattr(importlib, "import_module", lambda name: Broken())
    made = operations_of(shape_of(small()), RUN.batch, config(0), 2)
    assert made.unknown == "transformers' LlamaForCausalLM does not run without values: no such model"


def test_the_command_shows_the_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "operations_of", lambda *given: work())
    (tmp_path / "config.json").write_text(json.dumps(small()))
    machine().write(tmp_path / "machine.json")
    asked = ["fit", "--hf-config", f"{tmp_path}/config.json", "--world", "2", "--memory", "10GB"]
    asked += ["--context", str(TOKENS), "--precision", "fp32", "--machine", f"{tmp_path}/machine.json"]
    assert main([*asked, "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert text.count("step, a forecast: ") == 4 == text.count("tokens/s, all ranks: ")
    assert "> stage 0: yes" in text and "2 CPU ranks of 10.0 GB" in text and "GPU" not in text
    assert main([*asked, "--device", "cpu", "--fastest", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["chosen"] for line in lines] == [True, False, False, False]
    totals = [line["plan"]["step_time"]["total"] for line in lines]
    assert totals == sorted(totals) and lines[0]["plan"]["step_time"]["tokens_per_second"] > 0
    assert main(asked) == 0
    assert "time not forecast at stage 0; stage 1; stage 2; stage 3: the" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*asked[:-2], "--fastest"])
    assert "pass a machine file" in capsys.readouterr().err
