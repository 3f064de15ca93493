"""What people do around saves: their data, schedules and folders, and moments in the middle of a step."""

import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

import zero_full
from tests.worlds import POOL
from tests.zero_full.checkpoint_runs import Layout, batch, differences, everything, go
from tests.zero_full.checkpoint_runs import engine_of as rich
from tests.zero_full.damaged import bits, refusal, state_of
from tests.zero_full.dying import Small, engine_of, save, step
from tests.zero_full.runs import said_by
from zero_full.checkpoint import export_checkpoint

# The user's data --------------------------------------------------------------------------------------------


class Odd(torch.Tensor):
    """A tensor with a class of its own."""


def nested(levels: int) -> Any:
    """Lists in lists."""
    return [nested(levels - 1)] if levels else 0


KEPT: dict[str, Any] = {
    "nothing": None,
    "numbers": [1, -1.5, True, 2**200, math.inf, -0.0, 1 + 2j],
    "texts": ["é\n\0\ud800", b"\x00\xff", ""],
    "containers": [(1, (2,)), {3}, frozenset((4,)), deque([5, 6], 3), OrderedDict(a=1), Counter("aab")],
    "keys of all kinds": {1: 2, None: 3, (1, 2): 4, "~": 5, 1.5: 6},
    "keys like ours": {"~": "tuple", "is": [1]},
    "types": [torch.bfloat16, torch.device("cpu"), torch.Size((1, 2))],
    "arrays": [
        numpy.arange(6).reshape(2, 3)[:, ::-1],
        numpy.float16(1.5),
        numpy.array(3),
        numpy.zeros((0, 2)),
    ],
    "an array of another machine": numpy.arange(3, dtype=">i4"),
    "tensors": [torch.arange(6).reshape(2, 3).t(), torch.ones(1).expand(3), torch.zeros(0, 3)],
    "numbers that are tensors": [
        torch.tensor(0.1),
        torch.tensor(7),
        torch.tensor(True),
        torch.tensor(1 + 2j),
    ],
    "views": [torch.tensor([1 + 2j, 3]).conj(), torch.tensor([1 + 2j, 3]).conj().imag],
    "small types": [torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3).half(), torch.tensor([1, 2]).byte()],
    "many lists": nested(98),
}
REFUSED: dict[str, tuple[Any, str]] = {  # and where it is
    "a function": ([1, {"a": len}], r"\['key'\]\[1\]\['a'\] is a builtins.builtin_function_or_method, which"),
    "an object": (Path("x"), r"\['key'\] is a pathlib"),
    "an object in a set": ({Path("x")}, r"\['key'\]\[...\] is a pathlib"),
    "an object as a key": ({Path("x"): 1}, r"a key of client_state\['key'\] is a pathlib"),
    "a dict that makes values": (defaultdict(int), "is a collections.defaultdict"),
    "bytes that change": (bytearray(b"x"), r"\['key'\] is a builtins.bytearray"),
    "a text of numpy": (numpy.str_("x"), "is a numpy.str_"),
    "an array with a mask": (numpy.ma.array([1, 2], mask=[0, 1]), "is a numpy.ma"),
    "an array of objects": (numpy.array([None]), "is a numpy.ndarray"),
    "a tensor with a class": (torch.ones(3).as_subclass(Odd), "is a .*Odd"),
    "a sparse tensor": (torch.eye(3).to_sparse(), "is a tensor of torch.float32, torch.sparse_coo"),
    "a tensor without values": (torch.ones(3, device="meta"), "is a tensor of .* on meta"),
    "a type that no file has": (torch.ones(3, dtype=torch.complex128), "is a tensor of torch.complex128"),
    "too many lists": (nested(101), r"\['key'\]\[0\]\[0\].* is nested more than 100 levels"),
    "a very long number": (10**5000, r"\['key'\] is an integer of 16610 bits"),
}


def test_plain_data_come_back_as_they_were(tmp_path: Path) -> None:
    engine = engine_of()
    engine.save_checkpoint(tmp_path, client_state=KEPT)
    found = engine.load_checkpoint(tmp_path)[1]
    assert found is not None
    for key, value in KEPT.items():
        assert bits(found[key]) == bits(value) and type(found[key]) is type(value), key
    assert [type(each) for each in found["containers"]] == [type(each) for each in KEPT["containers"]]
    assert [each.dtype for each in found["arrays"]] == [each.dtype for each in KEPT["arrays"]]
    assert found["containers"][3].maxlen == 3


def test_what_is_not_plain_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    engine = engine_of()
    itself: list[Any] = []
    itself.append(itself)
    for what, (value, message) in {**REFUSED, "itself": (itself, "or contains itself")}.items():
        with pytest.raises(zero_full.CheckpointError, match=message):
            engine.save_checkpoint(tmp_path, client_state={"fine": 1, "key": value})
        assert list(tmp_path.iterdir()) == [], what


def aliases(comm: Any, stage: int, folder: Path) -> Any:
    """What comes back of the user's data that are the model's own parameters."""
    engine = rich(Layout(2, stage))
    go(engine, comm.rank, range(1))
    own = engine.module.first.weight
    whole = engine.module_state_dict()["first.weight"]
    said = refusal(lambda: engine.save_checkpoint(folder, client_state={"mine": own}))
    if said:
        return said
    found = engine.load_checkpoint(folder)[1]
    assert found is not None and type(found["mine"]) is torch.Tensor
    return torch.equal(found["mine"], whole)


def test_parameters_among_the_users_data_are_copies_or_an_error(tmp_path: Path) -> None:
    assert POOL.run(aliases, 2, 1, tmp_path / "1") == [True, True]
    for said in POOL.run(aliases, 2, 3, tmp_path / "3"):
        assert "client_state['mine'] is a sharded parameter" in said


# Schedules --------------------------------------------------------------------------------------------------


class Grows:
    """A function with a state."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, step: int) -> float:
        return self.factor**step


def cut(base: Any) -> Any:
    """A warm-up, and what follows."""
    parts = [schedules.LinearLR(base, 0.1, 1.0, 3), schedules.CosineAnnealingLR(base, 5)]
    return schedules.SequentialLR(base, parts, milestones=[3])


def chained(base: Any) -> Any:
    """Two at once."""
    return schedules.ChainedScheduler(
        [schedules.LinearLR(base, 0.1, 1.0, 3), schedules.ExponentialLR(base, 0.9)]
    )


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda base: schedules.LambdaLR(base, lambda step: 0.9**step),
    "LambdaLR of an object": lambda base: schedules.LambdaLR(base, Grows(0.9)),
    "MultiplicativeLR": lambda base: schedules.MultiplicativeLR(base, lambda step: 0.9),
    "SequentialLR": cut,
    "ChainedScheduler": chained,
    "OneCycleLR": lambda base: schedules.OneCycleLR(base, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda base: schedules.ReduceLROnPlateau(base, patience=1, factor=0.5),
    "CyclicLR": lambda base: schedules.CyclicLR(base, 0.01, 0.1, 2, scale_fn=lambda x: 0.5),
    "CosineAnnealingWarmRestarts": lambda base: schedules.CosineAnnealingWarmRestarts(base, 3),
    "MultiStepLR": lambda base: schedules.MultiStepLR(base, [2, 4]),
    "SWALR": lambda base: SWALR(base, 0.05, anneal_epochs=3),
}


def with_schedule(name: str) -> tuple[zero_full.Engine, Any]:
    """An engine and a schedule of the user's."""
    model = Small()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = SCHEDULES[name](base)
    on_plateau = name == "ReduceLROnPlateau"  # which the loop steps, with what it measures
    keys = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
    own = None if on_plateau else schedule
    engine = zero_full.initialize(model=model, optimizer=base, lr_scheduler=own, config=keys)[0]
    if on_plateau:
        engine.keep_in_checkpoint(schedule=schedule)
    return engine, schedule


def rates(engine: zero_full.Engine, schedule: Any, steps: int) -> list[Any]:
    """Take steps; the learning rates, momenta and parameters after each."""
    found = []
    for _ in range(steps):
        step(engine)
        if isinstance(schedule, schedules.ReduceLROnPlateau):
            schedule.step(1.0)
        group = engine.optimizer.param_groups[0]
        found.append((float(group["lr"]), group["momentum"], bits(engine.module.layer.weight)))
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_go_on(name: str, tmp_path: Path) -> None:
    engine, schedule = with_schedule(name)
    rates(engine, schedule, 4)
    engine.save_checkpoint(tmp_path)
    expected = rates(engine, schedule, 6)
    assert len({rate for rate, _, _ in expected}) > 1 or name in ("MultiStepLR", "SWALR")
    other, schedule = with_schedule(name)
    other.load_checkpoint(tmp_path)
    assert rates(other, schedule, 6) == expected


# Moments ----------------------------------------------------------------------------------------------------


def micro_batch(engine: zero_full.Engine, number: int) -> None:
    """Forward and backward."""
    engine.backward(engine(batch(number, 0, torch.float32)))


def whole_step(engine: zero_full.Engine, number: int) -> None:
    """Both micro-batches."""
    for each in (number, number + 1):
        micro_batch(engine, each)
        engine.step()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_load_in_the_middle_of_a_step_begins_a_new_one(stage: int, tmp_path: Path) -> None:
    engine = rich(Layout(1, stage, more={"gradient_accumulation_steps": 2}))
    whole_step(engine, 0)
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    whole_step(engine, 2)
    expected = everything(engine)
    for stepped in (False, True):
        micro_batch(engine, 4)
        if stepped:
            engine.step()
        said = refusal(partial(engine.load_checkpoint, tmp_path, load_module_only=True))
        assert "load_checkpoint(load_module_only=True) between the backward passes of a step" in said, said
        engine.load_checkpoint(tmp_path)
        whole_step(engine, 2)
        assert not differences(expected, everything(engine))


def test_moments_at_which_nothing_is_saved_or_loaded(tmp_path: Path) -> None:
    engine = rich(Layout(1, 2))
    with engine.no_sync():
        micro_batch(engine, 0)
        assert "between the backward passes" in said_by(lambda: engine.save_checkpoint(tmp_path))
    engine.step()
    engine.save_checkpoint(tmp_path, tag="fine")
    engine.offload_states()
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        assert "engine.reload_states()" in said_by(partial(call, tmp_path))
    engine.reload_states()
    engine.destroy()
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        assert "after destroy" in said_by(partial(call, tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fine", "latest"]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_that_is_skipped_is_over_though_its_gradients_are_still_there(
    stage: int, tmp_path: Path
) -> None:
    """As in a loop of PyTorch, which clears them before the next backward pass."""
    engine = rich(Layout(1, stage, "fp16"))
    for number in range(2):
        loss = engine(batch(number, 0, torch.float16))
        (loss * (1.0 if number else float("inf"))).backward()
        assert "between the backward passes" in said_by(partial(engine.save_checkpoint, tmp_path / "early"))
        engine.optimizer.step()
        assert engine.was_step_applied() is bool(number) and engine.skipped_steps == 1
        engine.save_checkpoint(tmp_path)
        assert engine.state_dict()["counters"]["global_steps"] == number + 1
        engine.optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_load_right_after_the_save_changes_nothing(precision: str, tmp_path: Path) -> None:
    engine = rich(Layout(1, 3, precision))
    go(engine, 0, range(2))
    engine.save_checkpoint(tmp_path)
    before = state_of(engine)
    engine.load_checkpoint(tmp_path)
    assert state_of(engine) == before


# Folders and ranks ------------------------------------------------------------------------------------------


def test_the_same_tag_again_and_again_is_the_last_one(tmp_path: Path) -> None:
    engine = engine_of()
    for _ in range(3):
        step(engine)
        save(engine, tmp_path, "last")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "latest"]
    assert engine.load_checkpoint(tmp_path)[1] == {"step": 3}


def test_a_relative_folder_is_where_it_was_when_the_save_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of()
    monkeypatch.chdir(tmp_path)
    save(engine, Path("out"), "x")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert engine.load_checkpoint("../out")[1] == engine.load_checkpoint(tmp_path / "out", tag="x")[1]
    assert refusal(lambda: engine.load_checkpoint("out", tag="x")).startswith(
        "out does not exist or is not a folder"
    )


def test_a_url_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a path "s3://bucket" is a folder "s3:" in the working directory
    engine = engine_of()
    for call in (
        engine.save_checkpoint,
        engine.load_checkpoint,
        engine.save_weights,
        engine.load_weights,
        engine.save_16bit_model,
        partial(export_checkpoint, tmp_path),
    ):
        for url in ("s3://bucket/run", Path("gs://bucket/run")):
            assert refusal(partial(call, url)).startswith(f"{url} is a URL"), call
    assert list(tmp_path.iterdir()) == []


TAGS = (
    "",
    ".",
    "..",
    "a/b",
    "a\\b",
    "a\0b",
    "a ",
    "a\nb",
    "latest",
    "manifest.json",
    "partial-x",
    "x" * 201,
    "\ud800",
)


def test_tags_that_are_no_names_of_folders_are_refused_first(tmp_path: Path) -> None:
    engine = engine_of()
    for tag in TAGS:
        assert "cannot be the name of a folder" in refusal(partial(engine.save_checkpoint, tmp_path, tag)), (
            tag
        )
    assert list(tmp_path.iterdir()) == []
    for tag in ("step 5", "é", "x" * 200, 7):
        engine.save_checkpoint(tmp_path, tag)  # type: ignore[arg-type]
        assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / str(tag))
        assert engine.load_checkpoint(tmp_path, tag)[0] == str(tmp_path / str(tag))  # type: ignore[arg-type]


def differing(comm: Any, place: Path) -> list[str]:
    """What ranks hear that do not mean the same."""
    engine, mine = engine_of(), str(comm.rank)
    home = place / f"home {mine}"
    home.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        said = [refusal(lambda: engine.save_checkpoint("relative"))]
    for call in (
        partial(engine.save_checkpoint, place, mine),
        partial(engine.save_checkpoint, place / mine),
        partial(engine.save_checkpoint, place, save_latest=comm.rank == 0),
        partial(engine.save_checkpoint if comm.rank else engine.load_checkpoint, place),
        partial(engine.save_checkpoint if comm.rank else engine.save_weights, place),
    ):
        said.append(refusal(call))
    for tag in "01":
        engine.save_checkpoint(place / "two", tag=tag, save_latest=tag == "0")
    said.append(refusal(lambda: engine.load_checkpoint(place / "two", tag=mine)))
    return [*said, *sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_dir())]


DIFFERENT = (
    "directory differs between ranks: '.*home 0/relative' on rank 0; '.*home 1/relative' on rank 1",
    "tag differs between ranks: '0' on rank 0; '1' on rank 1",
    "directory differs between ranks: '.*/0' on rank 0; '.*/1' on rank 1",
    "save_latest differs between ranks: True on rank 0; False on rank 1",
    "different calls, and nothing was sent:\n  rank 0: load_checkpoint\n  rank 1: save_checkpoint",
    "different calls, and nothing was sent:\n  rank 0: save_weights\n  rank 1: save_checkpoint",
    "ranks found different checkpoints: {0: '.*two/0', 1: '.*two/1'}",
)


def test_ranks_that_do_not_mean_the_same_hear_of_it(tmp_path: Path) -> None:
    one, other = POOL.run(differing, 2, tmp_path)
    assert one == other
    for said, expected in zip(one, DIFFERENT, strict=False):
        assert re.search(expected, said), (said, expected)
    assert one[7:] == ["home 0", "home 1", "two", "two/0", "two/1"]
