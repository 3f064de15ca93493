"""State that waits elsewhere: the same bits, other memories, and every copy counted."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import Case
from tests.worlds import POOL
from zero_min import MixedPrecision, Stage2, Stage2Disk, Stage2Offload, StaticScale, run_world
from zero_min.comm import Comm
from zero_min.formula import MIXED, held, moved, padded
from zero_min.gpt import GPT, GPTConfig, batch, load_text
from zero_min.ledger import held as bytes_of

TEXT = load_text()
CONFIG = GPTConfig(context=8, layers=1, heads=2, width=8)
Fp32 = partial(Case, dtype=torch.float32)  # float64 would refuse a master that is always fp32
CASES = [
    Fp32(),
    Fp32("tied", two_groups=True, micro_batches=2),
    Fp32("frozen", max_grad_norm=0.1),
    Fp32("unused", weight_decay=0.1),
    Fp32("empty"),
    Fp32("small"),
    Fp32(decoupled=True, weight_decay=0.1),
]


def options_of(case: Case) -> dict[str, Any]:
    import zero_min

    options = case.options()
    return {**options, "optimizer": getattr(zero_min, options["optimizer"])}


def walk(comm: Comm, case: Case, stage_class: type, extra: dict[str, Any]) -> list[Tensor]:
    model = case.model()
    trainer = stage_class(model, comm, case.groups(model), **options_of(case), **extra)
    for step in range(case.steps):
        trainer.zero_grad()
        for micro in range(case.micro_batches):
            trainer.backward(model(case.data(step, micro, comm.rank)) / case.micro_batches)
        trainer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.rotates
@pytest.mark.parametrize("N", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("where", ["host", "disk", "disk in chunks of 7"])
def test_where_the_state_waits_changes_no_bit(case: Case, where: str, N: int, tmp_path: Path) -> None:
    extra: dict[str, Any] = {} if where == "host" else {"folder": tmp_path}
    if "7" in where:
        extra["chunk"] = 7
    stage_class = Stage2Offload if where == "host" else Stage2Disk
    usual = run_world(walk, N, case, Stage2, {})
    other = run_world(walk, N, case, stage_class, extra)
    for rank in range(N):
        for p, q in zip(usual[rank], other[rank], strict=True):
            assert torch.equal(p, q)


def test_real_processes_agree_too(tmp_path: Path) -> None:
    case = Fp32("tied", micro_batches=2)
    usual = POOL.run(walk, 2, case, Stage2, {})
    for other in (
        POOL.run(walk, 2, case, Stage2Offload, {}),
        POOL.run(walk, 2, case, Stage2Disk, {"folder": tmp_path}),
    ):
        assert all(torch.equal(p, q) for p, q in zip(usual[0], other[0], strict=True))


def after_a_failure(comm: Comm, stage_class: type) -> list[Tensor]:
    """One good step after a backward that failed in the middle."""
    model = Fp32().model()
    trainer = stage_class(model, comm, bucket_size=8)
    loss = model(Fp32().data(0, 0, comm.rank))
    handle = model.first.bias.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.backward(loss)
    handle.remove()
    trainer.zero_grad()
    trainer.backward(model(Fp32().data(1, 0, comm.rank)))
    assert comm.ledger.sent["reduce_scatter"] > 0
    trainer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("stage_class", [Stage2, Stage2Offload])
def test_a_failed_backward_leaves_nothing_behind(stage_class: type) -> None:
    def clean(comm: Comm) -> list[Tensor]:
        model = Fp32().model()
        trainer = Stage2(model, comm, bucket_size=8)
        trainer.backward(model(Fp32().data(1, 0, comm.rank)))
        trainer.step()
        return [p.detach().clone() for p in model.parameters()]

    for got, want in zip(run_world(after_a_failure, 2, stage_class), run_world(clean, 2), strict=True):
        assert all(torch.equal(p, q) for p, q in zip(got, want, strict=True))


def test_the_own_gradient_lives_where_its_pieces_land() -> None:
    def body(comm: Comm) -> str:
        model = Fp32().model()
        trainer = Stage2Offload(model, comm)
        f = trainer.flats[0]
        f.mine = f.mine.to("meta")  # stands for a GPU
        window = trainer.buckets[0].windows[0]
        part = window.part_of(0)
        Stage2._add_to_my_gradient(trainer, window, part, torch.ones(part.stop - part.start))
        return f.grad.device.type

    assert run_world(body, 1) == ["cpu"]


def bill(comm: Comm, stage_class: type, extra: dict[str, Any], micro_batches: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(comm.rank)
    with comm.ledger.watch():
        trainer = MixedPrecision(stage_class(GPT(CONFIG).half(), comm, **extra), StaticScale(8))
        for _ in range(2):
            comm.ledger.clear_traffic()
            trainer.zero_grad()
            for _ in range(micro_batches):
                trainer.backward(trainer.model(*batch(TEXT, 2, CONFIG.context, generator)))
            trainer.step()
        kinds = {kind: bytes_of(tensors) for kind, tensors in trainer.holdings().items()}
        return {"held": kinds, "live": comm.ledger.live(), "moved": dict(comm.ledger.moved)}


@pytest.mark.parametrize("N", [1, 3])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_two_bytes_down_and_two_up_for_each_parameter(N: int, micro_batches: int) -> None:
    sizes = [sum(p.numel() for p in GPT(CONFIG).parameters())]
    answers = run_world(bill, N, Stage2Offload, {}, micro_batches)
    down, up = moved(sizes, N, micro_batches)
    assert sum(a["moved"]["device to host"] for a in answers) == down == 2 * micro_batches * sizes[0]
    assert sum(a["moved"]["host to device"] for a in answers) == up == 2 * padded(sizes, N)
    usual = held(2, sizes, N, MIXED)
    for answer in answers:
        assert answer["held"] == {
            "parameters": usual["parameters"],
            "gradients": 0,  # they never wait on the device
            "host gradients": usual["gradients"],
            "host optimizer": usual["optimizer"],
        }
        assert answer["live"] == sum(usual.values())


@pytest.mark.parametrize("N", [1, 3])
def test_disk_reads_twelve_bytes_and_writes_twelve(N: int, tmp_path: Path) -> None:
    sizes = [sum(p.numel() for p in GPT(CONFIG).parameters())]
    own = padded(sizes, N) // N
    for answer in run_world(bill, N, Stage2Disk, {"folder": tmp_path, "chunk": 100}, 1):
        assert answer["moved"]["disk to host"] == answer["moved"]["host to disk"] == 12 * own
        assert answer["held"]["disk optimizer"] == 12 * own
        memory = sum(n for kind, n in answer["held"].items() if kind != "disk optimizer")
        assert answer["live"] == memory  # the files are not memory
    files = list(tmp_path.iterdir())
    assert len(files) == 3 * N  # master, m and v of every rank
    assert sum(file.stat().st_size for file in files) == 12 * own * N


def resumed(comm: Comm, extra: dict[str, Any]) -> bool:
    case = Fp32("tied", two_groups=True)

    def start(name: str) -> Any:
        model = case.model()
        where = {"folder": Path(extra["folder"]) / name} if extra else {}
        return (Stage2Disk if extra else Stage2Offload)(model, comm, case.groups(model), **where)

    def run(trainer: Any, steps: range) -> None:
        for step in steps:
            trainer.zero_grad()
            trainer.backward(trainer.model(case.data(step, 0, comm.rank)))
            trainer.step()

    whole = start("a")
    run(whole, range(2))
    saved = whole.state_dict()
    run(whole, range(2, 4))
    fresh = start("b")
    fresh.load_state_dict(saved)
    run(fresh, range(2, 4))
    pairs = zip(whole.model.parameters(), fresh.model.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


@pytest.mark.parametrize("disk", [False, True])
def test_a_resumed_run_continues_bit_for_bit(disk: bool, tmp_path: Path) -> None:
    assert all(run_world(resumed, 2, {"folder": tmp_path} if disk else {}))
