"""The monitor of Weights & Biases with the real library, offline."""

from importlib.util import find_spec
from pathlib import Path

import pytest

if not find_spec("wandb"):
    pytest.skip("needs wandb: `make test-hf` installs it", allow_module_level=True)

import wandb

import zero_full
from tests.zero_full.runs import Net, config, data

pytestmark = pytest.mark.hf
LOSS = "Train/Samples/train_loss"


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")


def trained(engine: zero_full.Engine, steps: int) -> float:
    """The last step's loss."""
    for step in range(steps):
        loss = engine(data(step, 0, 0))
        engine.backward(loss)
        engine.step()
    return float(loss.detach())


def engine_of() -> zero_full.Engine:
    section = {"enabled": True, "project": "rebuilt", "group": "tests"}
    return zero_full.initialize(model=Net(), config=config(2, wandb=section, gradient_clipping=0.1))[0]


def test_a_run_of_our_own_ends_with_the_engine(tmp_path: Path) -> None:
    engine = engine_of()
    run = wandb.run
    assert run is not None and (run.project, run.group) == ("rebuilt", "tests")
    loss = trained(engine, 3)
    assert run.summary[LOSS] == pytest.approx(loss) and run.step == 3 * 5 + 1  # in samples
    assert run.summary["Train/Samples/grad_norm"] == pytest.approx(engine.get_global_grad_norm())
    engine.destroy()
    assert wandb.run is None
    assert len([*tmp_path.glob("wandb/offline-run-*/*.wandb")]) == 1


def test_a_run_that_the_script_has_started_goes_on_after_the_engine() -> None:
    with wandb.init(project="the script's") as run:
        engine = engine_of()
        loss = trained(engine, 2)
        engine.destroy()
        assert wandb.run is run and run.project == "the script's"
        run.log({"after": 1.0}, commit=True)  # beside the last step's values
        assert run.summary[LOSS] == pytest.approx(loss) and run.summary["after"] == 1.0
