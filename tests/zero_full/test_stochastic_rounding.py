"""Stochastic rounding of Adam's bf16 numbers: the same bits however they are dealt, and after a resume."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL, run_each
from tests.zero_full.runs import Net, config, data
from zero_full.errors import ConfigError
from zero_full.kernels import reference
from zero_full.optim.fused_adam import RoundingKeys
from zero_full.plan import plan
from zero_full.precision import Dtypes

SECTION = {
    "enabled": True,
    "bf16_master_weights_and_grads": True,
    "bf16_optimizer_states": True,
    "stochastic_rounding": True,
    "stochastic_rounding_seed": 11,
}
ADAMW = {"lr": 0.01, "betas": [0.9, 0.999], "weight_decay": 0.1}
SHAPES = {"matrix": (9, 11), "vector": (37,), "small": (2,), "one": (), "large": (300,), "empty": (0,)}
BATCHES = 12  # in all, whoever has them


class Dots(nn.Module):
    """Its gradients are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """The loss."""
        return torch.stack([(p * inputs[name]).float().sum() for name, p in self.named_parameters()]).sum()


def inputs_of(step: int, batch: int) -> dict[str, Tensor]:
    """Multiples of 1/4 up to 2: no sum of twelve of them is rounded in bf16."""
    generator = torch.Generator().manual_seed(100 * step + batch)
    return {n: torch.randint(-8, 9, shape, generator=generator).bfloat16() / 4 for n, shape in SHAPES.items()}


def keys(stage: int, low_state: bool = True, seed: int = 11, **zero: Any) -> dict[str, Any]:
    cut = {"stage3_param_persistence_threshold": 0, "sub_group_size": 60} if stage == 3 else {}
    return config(
        stage,
        bf16={**SECTION, "bf16_optimizer_states": low_state, "stochastic_rounding_seed": seed},
        optimizer={"type": "AdamW", "params": ADAMW},
        gradient_allreduce_op="sum",
        zero_optimization={"stage": stage, "reduce_bucket_size": 100, **cut, **zero},
    )


def one_step(engine: zero_full.Engine, comm: Any, step: int) -> None:
    """Each rank has every so-manieth batch."""
    batches = range(comm.rank, BATCHES, comm.world_size)
    engine.backward(torch.stack([engine(inputs_of(step, batch)) for batch in batches]).sum())
    engine.step()


def values_of(engine: zero_full.Engine) -> dict[str, Tensor]:
    """Parameters and moments, whole. Every rank must call this."""
    found = {name: value.clone() for name, value in engine.module_state_dict().items()}
    for name, p in engine.module.named_parameters():
        for entry in ("exp_avg", "exp_avg_sq") if p.numel() else ():
            whole = zero_full.safe_get_full_optimizer_state(p, entry)
            assert whole is not None
            found[f"{entry} of {name}"] = whole.clone()
    return found


def trained(comm: Any, chosen: dict[str, Any], steps: int = 3) -> dict[str, Tensor]:
    engine, *_ = zero_full.initialize(model=Dots(), config=chosen)
    for step in range(steps):
        one_step(engine, comm, step)
    found = values_of(engine)
    engine.destroy()
    return found


def expected(low_state: bool = True, seed: int = 11, steps: int = 3) -> dict[str, Tensor]:
    """By the reference, on whole parameters."""
    found, keys = {}, RoundingKeys(seed)
    for name, p in Dots().named_parameters():
        master, moments = p.detach().bfloat16(), torch.bfloat16 if low_state else torch.float32
        m, v, count = (
            torch.zeros_like(master, dtype=moments),
            torch.zeros_like(master, dtype=moments),
            torch.zeros(()),
        )
        for step in range(steps):
            gradient = torch.stack([inputs_of(step, batch)[name] for batch in range(BATCHES)]).sum(0)
            count += 1
            about = ([master], [gradient], [m], [v], [count], [keys.key(name)], [0])
            reference.adam_step_stochastic(*about, 0.01, 0.9, 0.999, 1e-8, 0.1, True, 1.0)
        found |= {name: master} | ({f"exp_avg of {name}": m, f"exp_avg_sq of {name}": v} if p.numel() else {})
    return found


def differing(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    names = [name for name in want if not torch.equal(got[name].to(want[name].dtype), want[name])]
    return [*names, *(got.keys() ^ want.keys())]


@pytest.mark.rotates
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_layout_has_the_bits_of_whole_parameters(world: int) -> None:
    """Any number of ranks, stage, size of buckets and place of the state."""
    host = {"offload_optimizer": {"device": "cpu"}}
    cases = [
        *((keys(stage, low_state), low_state) for stage in range(4) for low_state in (True, False)),
        *((keys(stage, reduce_bucket_size=10_000), True) for stage in (1, 2)),
        *((keys(stage, **host), True) for stage in (1, 3)),
        *([(keys(2, mics_shard_size=2), True)] if world == 4 else []),
    ]
    want = {low_state: expected(low_state) for low_state in (True, False)}
    for (chosen, low_state), ranks in zip(
        cases, run_each(trained, world, [c[:1] for c in cases]), strict=True
    ):
        assert [differing(got, want[low_state]) for got in ranks] == [[]] * world, chosen


def test_another_seed_rounds_otherwise() -> None:
    one, other = expected(), expected(seed=12)
    assert differing(one, other)
    (got,) = POOL.run(trained, 1, keys(1, seed=12))
    assert not differing(got, other)


def save(comm: Any, folder: str) -> None:
    engine, *_ = zero_full.initialize(model=Dots(), config=keys(2))
    one_step(engine, comm, 0)
    engine.save_checkpoint(folder)
    engine.destroy()


def go_on(comm: Any, folder: str, stage: int) -> dict[str, Tensor]:
    """With another seed in the configuration; what the rank has kept of itself goes on, too."""
    engine, *_ = zero_full.initialize(model=Dots(), config=keys(stage, seed=99))
    engine.load_checkpoint(folder)
    one_step(engine, comm, 1)
    other, *_ = zero_full.initialize(model=Dots(), config=keys(stage, seed=98))
    other.load_state_dict(engine.state_dict())
    engine.destroy()
    one_step(other, comm, 2)
    found = values_of(other)
    other.destroy()
    return found


@pytest.mark.parametrize(("world", "stage"), [(2, 2), (3, 3), (1, 0)])
def test_a_resumed_run_rounds_as_if_it_had_never_stopped(tmp_path: Path, world: int, stage: int) -> None:
    POOL.run(save, 2, str(tmp_path))
    want = expected()
    for got in POOL.run(go_on, world, str(tmp_path), stage):
        assert not differing(got, want)


def from_file(comm: Any, path: str) -> tuple[float, float]:
    """The mean of weights of 1 after steps that are too small for bf16, with it and without."""
    found = []
    for stochastic in (True, False):
        chosen = json.loads(Path(path).read_text())
        chosen["bf16"]["stochastic_rounding"] = stochastic
        Path(path).with_suffix(f".{comm.rank}.json").write_text(json.dumps(chosen))
        model = nn.Linear(64, 8, bias=False)
        nn.init.ones_(model.weight)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine, *_ = zero_full.initialize(
                model=model, config=str(Path(path).with_suffix(f".{comm.rank}.json"))
            )
        for _ in range(100):
            engine.backward(engine(torch.ones(5, 64, dtype=torch.bfloat16)).float().mean())
            engine.step()
        found.append(float(engine.module_state_dict()["weight"].float().mean()))
        engine.destroy()
    return found[0], found[1]


def test_from_a_file_small_updates_count(tmp_path: Path) -> None:
    """A hundred steps of 0.001 away from 1, where bf16's next number is 0.0039 below."""
    chosen = config(2, bf16=SECTION, optimizer={"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.0}})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(chosen))
    for stochastic, nearest in POOL.run(from_file, 2, str(path)):
        assert stochastic == pytest.approx(0.9, abs=0.005) and nearest == 1.0


def test_it_is_refused_where_it_would_have_no_effect() -> None:
    with pytest.raises(ConfigError, match=r"bf16.bf16_master_weights_and_grads"):
        zero_full.initialize(
            model=Net(), config=config(1, bf16={"enabled": True, "stochastic_rounding": True})
        )
    with pytest.raises(ValueError, match="rounding_seed needs low_master"):
        Dtypes(rounding_seed=0)
    for kind, params in (("SGD", {"lr": 0.1}), ("Lamb", {}), ("AdamW", {"amsgrad": True}), ("NAdam", {})):
        with pytest.raises(TypeError, match=r"bf16.stochastic_rounding"):
            zero_full.initialize(
                model=Net(), config=config(1, bf16=SECTION, optimizer={"type": kind, "params": params})
            )


def test_an_option_that_needs_another_step_is_refused_in_the_step() -> None:
    engine, *_ = zero_full.initialize(model=Net(), config=config(1, bf16=SECTION))
    engine.optimizer.param_groups[0]["maximize"] = True
    engine.backward(engine(data(0, 0, 0, torch.bfloat16)))
    with pytest.raises(TypeError, match=r"bf16.stochastic_rounding .* maximize"):
        engine.step()
    engine.destroy()


def test_second_moments_become_smaller_so_nobody_is_warned() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine, *_ = zero_full.initialize(model=Net(), config=config(1, bf16=SECTION))
    engine.destroy()


@pytest.mark.filterwarnings("ignore:betas")
def test_it_takes_no_memory() -> None:
    either = ({**SECTION, "stochastic_rounding": each} for each in (True, False))
    stochastic, nearest = (plan(Net(), {**keys(2), "bf16": section}, 2) for section in either)
    assert stochastic.moments == nearest.moments > 0
