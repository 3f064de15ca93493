"""1-bit and 0/1 Adam resumed in every phase; what each rank has of its own; meeting, and what needs it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_full
from tests.worlds import POOL, run_each
from tests.zero_full.one_bit_runs import Run, engine_of, everything, one_step, values_of
from tests.zero_full.runs import said_by
from tests.zero_full.test_one_bit import KINDS, PHASES, assert_alike
from zero_full.__main__ import main

BY = ("state_dict", "checkpoint")


def goes_on(comm: Any, first: zero_full.Engine, run: Run, at: int, by: str, folder: str) -> list[Any]:
    """Everything after so many steps and after eight more, of a run that goes on where the first one is."""
    if by == "checkpoint":
        first.save_checkpoint(folder, tag="here")
    state = first.state_dict() if by == "state_dict" else None
    second = engine_of(run)
    one_step(second, comm.rank, 99)  # something that must not stay
    if state is None:
        second.load_checkpoint(folder)
    else:
        second.load_state_dict(state)
    found = [everything(second)]
    for step in range(at, at + 8):
        one_step(second, comm.rank, step)
    found.append(everything(second))
    second.destroy()
    return found


def resumed(comm: Any, run: Run, phases: list[int], folder: str) -> list[tuple[str, list[Any], list[Any]]]:
    """For each phase and way: where, and everything then and later, of the whole run and of one resumed."""
    first, whole, again = engine_of(run), [], dict[tuple[int, str], list[Any]]()
    for step in range(max(phases) + 9):
        for by in BY if step in phases else ():
            again[step, by] = goes_on(comm, first, run, step, by, f"{folder}/{step}")
        whole.append(everything(first))
        one_step(first, comm.rank, step)
    first.destroy()
    return [
        (f"{by} after {at} steps", [whole[at], whole[at + 8]], found) for (at, by), found in again.items()
    ]


@pytest.mark.rotates
def test_a_run_goes_on_bit_for_bit_in_every_phase(tmp_path: Path) -> None:
    """With masters, and masked; other runs are in the contract."""
    runs = [
        (Run(kind, "bf16", stage=stage), [at + 1 for at in PHASES[kind].values()])
        for kind, stage in ((KINDS[0], 0), (KINDS[1], 0), (KINDS[1], 1), ("OneBitLamb", 0))
    ]
    runs.append((Run("ZeroOneAdam", masked=True, options={"per_tensor_scales": False}), [6, 13]))
    one_scale = Run("OneBitLamb", "bf16", options={"per_tensor_scales": False})
    by_world = {2: [*runs, (one_scale, [2, 4, 6])], 1: [(one_scale, [2, 4, 6])]}
    for world, chosen in by_world.items():
        cases = [(*each, str(tmp_path / f"{world} {number}")) for number, each in enumerate(chosen)]
        for (run, phases, _), ranks in zip(cases, run_each(resumed, world, cases), strict=True):
            for rank, found in enumerate(ranks):
                assert len(found) == len(phases) * len(BY)
                for where, plain, again in found:
                    for before, after in zip(plain, again, strict=True):
                        assert_alike([before, after], f"{run}, {where}, rank {rank} of {world}")


def saved(comm: Any, kind: str, at: int, folder: str) -> dict[str, Tensor]:
    """The parameters of this rank where it was saved."""
    engine = engine_of(Run(kind))
    for step in range(at):
        one_step(engine, comm.rank, step)
    engine.save_checkpoint(folder, tag="here")
    values = values_of(engine)
    stepper = engine.optimizer.contents.stepper
    pieces = [piece for _, piece, _ in engine.optimizer.contents.pieces()]
    values |= {f"common {piece.name}": stepper.common(piece).clone() for piece in pieces}
    values |= {f"variance {p.name}": v["exp_avg_sq"] for p in pieces if (v := stepper.state_of(p))}  # type: ignore[attr-defined]
    engine.destroy()
    return values


def loaded(comm: Any, kind: str, folder: str, drops: str) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """What a load says without dropping errors; and what is there after one that does."""
    keys = {"checkpoint": {"drop_errors": True}} if drops == "configuration" else {}
    engine = engine_of(Run(kind))
    before = everything(engine)
    said = said_by(lambda: engine.load_checkpoint(folder))
    assert_alike([before, everything(engine)], "a load that was refused")
    engine.destroy()
    engine = engine_of(Run(kind, keys=keys))
    engine.load_checkpoint(folder, **({"drop_errors": True} if drops == "argument" else {}))
    now = values_of(engine)
    assert not engine.optimizer.contents.stepper.own_tensors()
    variances = {
        f"variance {p.name}": v["exp_avg_sq"].clone()
        for _, p, _ in engine.optimizer.contents.pieces()
        if (v := engine.optimizer.base.state.get(p.master))
    }
    for step in range(12, 20):  # an interval has four at most
        one_step(engine, comm.rank, step)
    engine.optimizer.meet()
    after = values_of(engine)
    engine.destroy()
    return said, now | variances, after


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("kind", "at"), [("OneBitAdam", 6), ("OneBitLamb", 6), ("ZeroOneAdam", 5), ("ZeroOneAdam", 11)]
)
def test_another_number_of_ranks_must_give_up_what_each_had_of_its_own(
    kind: str, at: int, tmp_path: Path
) -> None:
    everyones = POOL.run(saved, 2, kind, at, str(tmp_path))
    for drops in ("argument", "configuration"):
        ranks = POOL.run(loaded, 3, kind, str(tmp_path), drops)
        for said, now, after in ranks:
            assert "local steps of 2 ranks" in said and "drop_errors=True" in said and "Nothing was" in said
            for name in now:
                if name.startswith("parts."):
                    assert torch.equal(now[name], everyones[0].get(f"common {name}", now[name])), name
                else:
                    assert torch.equal(now[name], everyones[0][name]), name
            assert_alike([ranks[0][2], after], "after a meeting of three")
    for each in everyones[1:]:
        assert_alike(
            [{k: v for k, v in e.items() if k[:2] in ("co", "va")} for e in (everyones[0], each)], ""
        )


def a_warm_up_of_two(comm: Any, folder: str, saves: bool) -> str:
    """A checkpoint in which ranks have nothing of their own is loaded anywhere."""
    engine = engine_of(Run("OneBitAdam"))
    if saves:
        one_step(engine, comm.rank, 0)
        engine.save_checkpoint(folder)
    said = "" if saves else said_by(lambda: engine.load_checkpoint(folder))
    engine.destroy()
    return said


def test_a_phase_in_which_all_is_common_needs_no_such_word(tmp_path: Path) -> None:
    POOL.run(a_warm_up_of_two, 2, str(tmp_path), True)
    assert POOL.run(a_warm_up_of_two, 3, str(tmp_path), False) == ["nothing was said"] * 3


def at_stage(comm: Any, stage: int, folder: str, saves: bool) -> dict[str, Tensor]:
    """The variance after two exact steps, or after a load of that: whole, or what this rank has of it."""
    engine = engine_of(Run("ZeroOneAdam", stage=stage))
    if saves:
        for step in range(2):
            one_step(engine, comm.rank, step)
        engine.save_checkpoint(folder)
    else:
        one_step(engine, comm.rank, 7)  # something that must not stay
        engine.load_checkpoint(folder)
    stepper = engine.optimizer.contents.stepper
    found = {f"{p.name} from {start}": values.clone() for p, _, start, values in stepper.cut_state()}
    for _, piece, _ in engine.optimizer.contents.pieces():
        if (state := engine.optimizer.base.state.get(piece.master)) and "exp_avg_sq" in state:
            found[f"{piece.name} from 0"] = state["exp_avg_sq"].clone()
    one_step(engine, comm.rank, 2)
    engine.destroy()
    return found


def test_a_variance_in_parts_is_saved_whole_and_loaded_at_other_ranks_and_stages(tmp_path: Path) -> None:
    folders = {stage: str(tmp_path / f"of {stage}") for stage in (0, 1)}
    whole = {k: v.reshape(-1) for k, v in POOL.run(at_stage, 2, 0, folders[0], True)[0].items()}
    parts = POOL.run(at_stage, 2, 1, folders[1], True)
    parts += [each for ranks in (1, 3) for each in POOL.run(at_stage, ranks, 1, folders[1], False)]
    parts += POOL.run(at_stage, 3, 1, folders[0], False) + POOL.run(at_stage, 3, 0, folders[1], False)
    for each in parts:
        for name, values in each.items():
            of, _, start = name.rpartition(" from ")
            want = whole[f"{of} from 0"][int(start) : int(start) + values.numel()]
            assert torch.equal(values.reshape(-1), want), name
    for held in (parts[:2], parts[2:3], parts[3:6]):
        assert sum(v.numel() for each in held for v in each.values()) == sum(map(len, whole.values()))


def read(comm: Any, folder: Path, stage: int) -> dict[str, Any]:
    """What people are told of a run and its state after four steps, two of them exact."""
    engine = engine_of(Run("ZeroOneAdam", stage=stage))
    weights = dict(engine.module.parts.items())
    found: dict[str, Any] = {"before": zero_full.safe_get_full_optimizer_state(weights["tall"], "exp_avg_sq")}
    for step in range(4):
        one_step(engine, comm.rank, step)
    for name in ("tall", "large", "scalar", "unused"):
        found[name] = zero_full.safe_get_full_optimizer_state(weights[name], "exp_avg_sq")
    found["stage"] = engine.zero_optimization_stage()
    engine.save_checkpoint(folder, tag="here")
    one = weights["large"]
    for call, said in {
        "local": lambda: zero_full.safe_get_local_optimizer_state(one, "exp_avg_sq"),
        "set": lambda: zero_full.safe_set_full_optimizer_state(one, torch.zeros_like(one), "exp_avg_sq"),
        "unknown": lambda: zero_full.safe_get_full_optimizer_state(one, "exp_avg_cubed"),
    }.items():
        found[call] = said_by(said)
    engine.destroy()
    return found


def test_a_variance_in_parts_is_read_whole_and_its_run_says_its_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_stage = {stage: POOL.run(read, 3, tmp_path / str(stage), stage) for stage in (0, 1)}
    for stage, ranks in by_stage.items():
        for found in ranks:
            assert found["before"] is found["unused"] is None and found["stage"] == stage
            assert "has no state 'exp_avg_cubed'" in found["unknown"]
            for name in ("tall", "large", "scalar"):
                assert torch.equal(found[name], by_stage[0][0][name]) and found[name].any(), name
        assert main(["inspect", str(tmp_path / str(stage))]) == 0
        assert f" stage {stage} " in " ".join(capsys.readouterr().out.split())
    for found in by_stage[1]:
        for call in ("local", "set"):
            assert "exp_avg_sq of parts.large is sharded by ZeroOneAdam" in found[call]


def of_another_stage(comm: Any) -> str:
    """What a state dict of stage 1 says at stage 0."""
    first, second = engine_of(Run("ZeroOneAdam", stage=1)), engine_of(Run("ZeroOneAdam"))
    one_step(first, comm.rank, 0)
    state = first.optimizer.state_dict()
    said = said_by(lambda: second.optimizer.load_state_dict(state))
    for engine in (first, second):
        engine.destroy()
    return said


def test_a_state_dict_of_stage_1_is_refused_at_stage_0() -> None:
    for said in POOL.run(of_another_stage, 2):
        assert "saved at stage 1" in said and "variance" in said


# In the middle of an interval --------------------------------------------------------------------


def in_the_middle(comm: Any, folder: str) -> dict[str, Any]:
    """What may be done while each rank has parameters of its own, and what may not."""
    engine = engine_of(Run("ZeroOneAdam"))
    optimizer, large = engine.optimizer, engine.module.parts["large"]
    for step in range(13):
        one_step(engine, comm.rank, step)
    assert optimizer.contents.stepper.ranks_differ
    own = everything(engine)
    state = optimizer.state_dict()
    refused = {
        "state dict": said_by(engine.module_state_dict),
        "load": said_by(lambda: engine.load_module_state_dict({}, strict=False)),
        "weights": said_by(lambda: engine.save_weights(folder)),
        "16 bits": said_by(lambda: engine.save_16bit_model(folder)),
        "torch's": said_by(engine.module.state_dict),
        "a part's": said_by(engine.module.parts.state_dict),
        "torch's load": said_by(lambda: engine.module.load_state_dict({}, strict=False)),
    }
    engine.save_checkpoint(folder, tag="middle")
    refused["module only"] = said_by(lambda: engine.load_checkpoint(folder, load_module_only=True))
    assert_alike([own, everything(engine)], "what was refused")
    engine.backward(engine_loss(engine, comm.rank))
    gradient = zero_full.safe_get_full_grad(large)
    refused["meet"] = said_by(optimizer.meet)
    with torch.no_grad():
        large.mul_(2)
    refused["write"] = said_by(engine.step)
    with torch.no_grad():
        large.div_(2)
    optimizer.zero_grad()
    optimizer.load_state_dict(state)
    assert_alike([own, everything(engine)], "its own state dict")
    optimizer.meet()
    met = values_of(engine)
    assert torch.equal(engine.module.state_dict()["parts.large"], met["parts.large"])
    optimizer.meet()  # nothing more to do
    assert_alike([met, values_of(engine)], "a meeting of those who have met")
    one_step(engine, comm.rank, 13)
    with torch.no_grad():
        zero_full.safe_get_local_fp32_param(large).add_(1)
    refused["master"] = said_by(lambda: one_step(engine, comm.rank, 14))
    engine.optimizer.zero_grad()
    engine.destroy()
    return {"refused": refused, "met": met, "own": own, "gradient": gradient, "state": state}


def engine_loss(engine: zero_full.Engine, rank: int) -> Tensor:
    from tests.zero_full.one_bit_runs import numbers

    loss: Tensor = engine(numbers(13, 0, rank))
    return loss


def test_in_the_middle_of_an_interval_nothing_passes_for_common_that_is_not(tmp_path: Path) -> None:
    ranks = POOL.run(in_the_middle, 2, str(tmp_path))
    for each in ranks:
        assert_alike([ranks[0]["met"], each["met"]], "after meet()")
        assert torch.equal(each["gradient"], ranks[0]["gradient"]), "a full gradient is averaged"
        for what, said in each["refused"].items():
            if what == "meet":
                assert "between the backward passes of a step" in said
            else:
                assert "Call meet()" in said, what
    assert not torch.equal(ranks[0]["own"]["parts.large"], ranks[1]["own"]["parts.large"])


def the_state_dict_of_rank(comm: Any, other: bool) -> str:
    """What a rank's state dict says to another rank."""
    engine = engine_of(Run("OneBitAdam"))
    for step in range(6):
        one_step(engine, comm.rank, step)
    state = engine.optimizer.state_dict()
    if other:
        state["place"] = [1 - comm.rank, 2]
    else:
        state["stepper"]["layout"] += 1
    said = said_by(lambda: engine.optimizer.load_state_dict(state))
    engine.destroy()
    return said


def test_errors_are_refused_where_they_mean_nothing() -> None:
    for rank, said in enumerate(POOL.run(the_state_dict_of_rank, 2, True)):
        assert f"of rank {1 - rank} of 2, which rank {rank} of 2 cannot use" in said
    for said in POOL.run(the_state_dict_of_rank, 2, False):
        assert "belong to other parameters" in said and "drop_errors=True" in said


def leaves(comm: Any, gather: bool) -> tuple[Tensor, list[str]]:
    """A parameter after the engine has left in the middle of an interval."""
    engine = engine_of(Run("ZeroOneAdam"))
    for step in range(13):
        one_step(engine, comm.rank, step)
    large = engine.module.parts["large"]
    engine.destroy(gather=gather)
    return large.detach().clone()


def test_an_engine_that_gathers_leaves_common_parameters() -> None:
    own, common = run_each(leaves, 2, [(False,), (True,)])
    assert torch.equal(*common) and not torch.equal(*own)
