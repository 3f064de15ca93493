"""The forecast of a step's time: its arithmetic on a made-up machine, and what it does not forecast."""

import json
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero_full import LayerSpec, PipelineModule
from zero_full.__main__ import main
from zero_full._compat import fake_process_group
from zero_full.errors import PlanError
from zero_full.measure.rates import QUICK, mean_rates, measure_rates
from zero_full.plan import Plan, plan, plan_stages
from zero_full.plan.machine_facts import machine_facts, threads_of_a_rank
from zero_full.plan.machine_file import (
    CAPTION,
    ENVELOPE,
    FACT,
    RATE,
    MachineRates,
    read_rates,
    seconds_at,
)
from zero_full.plan.work import ACCUMULATE, CAST, COPY, FUNCTION, MIXED, NORM, SCAN, SUM

NOTHING = 1e-30  # seconds
FLOP = 1e-9  # seconds of each multiplication and addition
BYTE = 1e-6  # seconds of each byte of a collective
PASSES = (SUM, FUNCTION, COPY, CAST, ACCUMULATE, MIXED, SCAN, NORM)
TOKENS, IN, OUT = 32, 8, 16
PAIR = [torch.empty(TOKENS, IN, device="meta")] * 2  # inputs and labels


def grid(*axes: tuple[int, ...]) -> list[list[float]]:
    """Points of which the seconds are the product of the sizes."""
    return [[*sizes, FLOP * torch.Size(sizes).numel()] for sizes in product(*axes)]


def machine(**changed: Any) -> MachineRates:
    """A machine on which only products, collectives and Adam take time."""
    kinds = ("reduce_scatter", "all_gather", "all_reduce")
    rates = MachineRates(
        date="2026-11-27",
        **machine_facts("cpu", 2),
        products={f"float32 {layout}": grid((1, 64), (1, 64), (1, 64)) for layout in ("nt", "nn", "tn")},
        attention={},
        passes={f"{kind} float32": [[1, NOTHING]] for kind in PASSES},
        collectives={
            **{f"shared memory {kind} float32": [[1, BYTE], [1000, 1000 * BYTE]] for kind in kinds},
            "shared memory sum float32": [[1, NOTHING]],
        },
        adam={"float32 float32 none": 1e-3},
        operations={"forward": [0.0, 0.0], "backward": [0.0, 0.0]},
        runtime={str(stage): [0.5, 0.25] for stage in range(4)},
        hidden=0.0,
        waiting=0.0,
    )
    return replace(rates, **changed)


class One(nn.Module):
    """One matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, OUT, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum()


class Detached(One):
    """A loss without a backward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class ReadsGradient(nn.Linear):
    """A layer whose backward needs values."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.register_hook(lambda gradient: gradient * float(gradient.sum()))
        return y


class Words(One):
    """One matrix, for tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.one_hot(x, IN).float())


def config(stage: int, **more: Any) -> dict[str, Any]:
    optimizer = more.pop("optimizer", "AdamW")
    zero = {"stage": stage, "overlap_comm": False, **more.pop("zero", {})}
    return {"optimizer": {"type": optimizer, "params": {"lr": 0.1}}, "zero_optimization": zero, **more}


def planned(stage: int, rates: Any = None, model: nn.Module | None = None, **more: Any) -> Plan:
    inputs = more.pop("inputs", [torch.empty(TOKENS, IN, device="meta")])
    world, pipe = more.pop("world", 2), more.pop("pipe", None)
    made = config(stage, **more)
    return plan(
        model or One(), made, world, inputs=inputs, device="cpu", machine=rates or machine(), pipe=pipe
    )


def test_seconds_between_and_beyond_the_measured_sizes() -> None:
    points = [[10, 1.0], [1000, 4.0]]
    assert seconds_at(points, 10) == 1.0 and seconds_at(points, 1000) == pytest.approx(4.0)
    assert seconds_at(points, 100) == pytest.approx(2.0)  # halfway in the logarithm
    assert seconds_at(points, 1) == 1.0 and seconds_at(points, 3000) == pytest.approx(12.0)
    cube = grid((2, 8), (4, 64), (1, 16))
    assert seconds_at(cube, 5, 20, 7) == pytest.approx(FLOP * 5 * 20 * 7)


def test_a_step_is_the_sum_of_its_parts() -> None:
    time = planned(1).step_time
    assert time is not None
    one = FLOP * TOKENS * IN * OUT  # the inputs need no gradient: backward has one product, too
    assert (time.forward, time.backward) == (pytest.approx(one), pytest.approx(one))
    assert time.reduce == pytest.approx(BYTE * 4 * IN * OUT) == pytest.approx(time.gather)
    assert time.update == pytest.approx(1e-3 * IN * OUT / 2)  # of this rank's half
    assert time.runtime == 0.75 and (time.hidden, time.idle, time.messages) == (0, 0, 0)
    parts = time.forward + time.backward + time.reduce + time.gather + time.update + time.runtime
    assert time.total == pytest.approx(parts)
    assert time.tokens is None is time.tokens_per_second


def test_micro_batches_repeat_passes_and_not_the_update() -> None:
    once = planned(2).step_time
    often = planned(2, gradient_accumulation_steps=5, train_micro_batch_size_per_gpu=1).step_time
    assert once is not None and often is not None
    assert often.forward == pytest.approx(5 * once.forward) and often.reduce == pytest.approx(5 * once.reduce)
    assert (often.gather, often.update) == (once.gather, once.update)
    assert often.runtime == 0.5 + 5 * 0.25


def test_stage_3_gathers_for_each_pass_and_stage_0_reduces_whole_gradients() -> None:
    three = planned(3, zero={"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0})
    zero = planned(0)
    assert three.step_time is not None and zero.step_time is not None
    assert three.step_time.gather == pytest.approx(BYTE * 4 * IN * OUT * 2)
    assert zero.step_time.gather == 0 and zero.step_time.update == pytest.approx(1e-3 * IN * OUT)


def pipeline(layers: int = 4, per_rank: int = 2, kind: type[nn.Module] = nn.Linear) -> PipelineModule:
    """Equal layers on two ranks."""
    with torch.device("meta"):
        specs = [LayerSpec(kind, IN, IN, bias=False)] * layers
        return PipelineModule(specs, 2, loss_fn=nn.functional.mse_loss, stages_per_rank=per_rank)


def test_a_pipeline_waits_for_messages_and_for_the_first_and_last_micro_batches() -> None:
    rates = machine()
    rates = replace(rates, runtime={**rates.runtime, "1": [0.0, 0.0], "pipeline": [0.5, 0.0]})
    rates = replace(rates, collectives={**rates.collectives, "message": [[1, NOTHING]]})
    more = {"gradient_accumulation_steps": 4, "pipeline": {"schedule": "gpipe"}, "world": 1, "inputs": PAIR}
    made = planned(1, rates, pipeline(per_rank=1), **more)
    times = [place.step_time for place in made.places]
    one = FLOP * TOKENS * IN * IN  # a layer has one product in forward, and two in backward
    for time in times:
        assert time is not None and time.forward == pytest.approx(4 * 2 * one)
        assert time.runtime == 0.5 and time.reduce + time.gather == pytest.approx(0, abs=1e-12)
    first, last = times
    assert first is not None and last is not None
    # The first layer's inputs need no gradient. Before the last stage's first forward and after its last
    # backward, the other stage's forward and backward pass alone.
    assert last.backward == pytest.approx(4 * 4 * one) and first.backward == pytest.approx(4 * 3 * one)
    assert last.idle == pytest.approx((2 + 3) * one)
    assert made.step_time is not None and made.step_time.total == max(first.total, last.total)
    slow = replace(rates, collectives={**rates.collectives, "message": [[1, 1e-3]]})
    waiting = planned(1, slow, pipeline(per_rank=1), **more).places[1].step_time
    assert waiting is not None and waiting.messages == pytest.approx(4 * 1e-3 * 4 * TOKENS * IN)


def test_overlap_hides_its_measured_share_of_collectives_in_passes() -> None:
    slow = {**machine().collectives, "shared memory reduce_scatter float32": [[1, 1e-12]]}
    rates = machine(hidden=0.5, collectives=slow)
    hidden = planned(2, rates, zero={"overlap_comm": True}).step_time
    plain = planned(2, rates).step_time
    assert hidden is not None and plain is not None and plain.hidden == 0
    assert hidden.hidden == pytest.approx(0.5 * hidden.reduce)
    assert hidden.total == pytest.approx(plain.total - hidden.hidden)


def only(kind: str, dtype: str = "float32") -> MachineRates:
    """A machine on which each byte of one kind of pass takes a second, and nothing else takes time."""
    free = {name: [[*sizes, NOTHING] for *sizes, _ in points] for name, points in machine().products.items()}
    nothing = {name: [[1, NOTHING]] for name in machine().collectives}
    passes = {**machine().passes, f"{kind} {dtype}": [[1, 1.0]]}
    adam = {f"float32 {each}": 0.0 for each in ("float32 none", "float32 bfloat16", "bfloat16 bfloat16")}
    runtime = {str(stage): [0.0, 0.0] for stage in range(4)}
    b16 = {name.replace("float32", "bfloat16"): points for name, points in free.items()}
    sums = {name.replace("float32", "bfloat16"): points for name, points in nothing.items()}
    rates = {"products": {**free, **b16}, "collectives": {**nothing, **sums}}
    return machine(**rates, passes=passes, adam=adam, runtime=runtime)


def test_passes_of_the_runtime_have_their_kind_and_bytes() -> None:
    whole, share = IN * OUT, IN * OUT // 2
    clips: dict[str, Any] = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
    bf16 = {**clips, "bf16": {"enabled": True, "check_grad_overflow": False}, "gradient_clipping": 0.0}
    three = {**bf16, "gradient_accumulation_steps": 3}
    cases = [
        (COPY, "bfloat16", 1, bf16, 4 * whole),  # into the bucket
        (SCAN, "bfloat16", 1, bf16, 0),  # nothing looks for numbers that are not finite
        (SCAN, "bfloat16", 1, clips, 2 * whole),
        (NORM, "float32", 1, bf16, 0),
        (NORM, "float32", 1, clips, 4 * share),  # of this rank's slice
        (NORM, "float32", 0, clips, 4 * whole),
        (CAST, "float32", 1, three, 6 * whole),  # the first micro-batch
        (MIXED, "float32", 1, three, 2 * 10 * whole),  # read, add and write the others
        (ACCUMULATE, "float32", 2, three, 2 * 12 * share),  # averaged slices of micro-batches
        (CAST, "bfloat16", 0, bf16, 0),  # averaged in 16 bits, and then converted
        (CAST, "float32", 0, bf16, 6 * whole),
    ]
    for kind, dtype, stage, more, size in cases:
        time = planned(stage, only(kind, dtype), inputs=[torch.empty(1, IN, device="meta")], **more).step_time
        assert time is not None
        found = time.update if kind == NORM else time.reduce + time.gather
        numbers = 2 * 8 * 13 * (kind == ACCUMULATE)  # that ranks exchange before a step
        assert found == pytest.approx(size + numbers, abs=1e-6), (kind, dtype, stage, more)


def test_ranks_wait_for_the_slowest_and_each_pass_has_a_fixed_time() -> None:
    plain = planned(1).step_time
    waiting = planned(1, machine(waiting=0.5)).step_time
    slow = planned(1, machine(operations={"forward": [3.0, 0.0], "backward": [5.0, 0.0]})).step_time
    assert plain is not None and waiting is not None and slow is not None
    assert waiting.waiting == pytest.approx(0.5 * (plain.forward + plain.backward + plain.update))
    assert waiting.total == pytest.approx(plain.total + waiting.waiting)
    assert slow.forward == pytest.approx(plain.forward + 3) and slow.backward == plain.backward + 5


def test_tokens_per_second_count_all_ranks() -> None:
    made = planned(1, model=Words(), inputs=[torch.empty(4, TOKENS, dtype=torch.int64, device="meta")])
    time = made.step_time
    assert time is not None and time.tokens == 2 * 4 * TOKENS
    assert time.tokens_per_second == pytest.approx(time.tokens / time.total)
    assert "seconds of a step, a forecast" in made.table() and "tokens per second" in made.table()
    shown = json.loads(made.as_json())["step_time"]
    assert shown["total"] == time.total and shown["tokens"] == time.tokens


def test_a_forecast_changes_no_byte_of_the_plan() -> None:
    for stage in range(4):
        forecast = planned(stage, gradient_accumulation_steps=5, train_micro_batch_size_per_gpu=1)
        inputs = [torch.empty(TOKENS, IN, device="meta")]
        more = {"gradient_accumulation_steps": 5, "train_micro_batch_size_per_gpu": 1}
        plain = plan(One(), config(stage, **more), 2, inputs=inputs, device="cpu")
        assert replace(forecast, step_time=None) == plain


def test_without_a_machine_there_is_no_forecast() -> None:
    made = plan(One(), config(1), 2, device="cpu")
    assert made.step_time is None and not made.not_forecast and "forecast" not in made.table()


def test_what_has_no_rate_is_not_forecast() -> None:
    conv = nn.Sequential(nn.Conv1d(2, 2, 1))
    shape = [torch.empty(1, 2, 4, device="meta")]
    two: dict[str, Any] = {"world": 1, "inputs": PAIR, "gradient_accumulation_steps": 2}
    of_pipelines = machine(runtime={**machine().runtime, "pipeline": [0.5, 0.0]})
    cases = {
        "no output requires a gradient": planned(1, model=Detached()),
        "fails without values": planned(1, model=ReadsGradient(IN, OUT)),
        "rate of a backward that": planned(1, of_pipelines, pipeline(per_rank=1, kind=ReadsGradient), **two),
        "without a batch": planned(1, inputs=[]),
        "convolution": planned(1, model=conv, inputs=shape),
        "only the compiled operators of Adam": planned(1, optimizer="SGD"),
        "several kinds of steps": planned(0, optimizer="OneBitAdam"),
        "NVMe": planned(1, zero={"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}),
        "matrix products in": planned(1, machine(products={})),
        "collectives:": planned(1, shared_memory=False),
        "Adam in": planned(1, machine(adam={})),
        "the runtime at stage 1": planned(1, machine(runtime={"0": [0.5, 0.25]})),
        "measured by one rank": planned(1, model=pipeline(per_rank=1), **two),
        "splits backward": planned(
            1, model=pipeline(), pipeline={"schedule": "interleaved_zero_bubble"}, **two
        ),
    }
    for reason, made in cases.items():
        assert made.step_time is None and reason in made.not_forecast, (reason, made.not_forecast)
        assert "time not forecast:" in made.table()


def test_a_wrong_machine_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    good = vars(machine())
    cases = {
        "is not JSON": "{",
        "is no machine file": json.dumps({"device": "cpu"}),
        "is of version 0": json.dumps({**good, "version": 0}),
        "were not measured, in hidden": json.dumps({**good, "hidden": float("nan")}),
        "were not measured, in products, waiting": json.dumps(
            {**good, "products": {"float32 nt": []}, "waiting": None}
        ),
        "lacks products, hidden": json.dumps(
            {k: v for k, v in good.items() if k not in ("products", "hidden")}
        ),
    }
    for words, text in cases.items():
        path.write_text(text)
        with pytest.raises(PlanError, match=words) as raised:
            read_rates(path)
        assert str(path) in str(raised.value) and "Measure again: " in str(raised.value)
    with pytest.raises(PlanError, match="cannot be read"):
        read_rates(tmp_path / "nowhere.json")
    machine().write(path)
    assert read_rates(path) == read_rates(path) and read_rates(path).adam == machine().adam
    with pytest.raises(PlanError, match="measured by 2 ranks at once, and the plan has 3"):
        planned(1, path, world=3)
    with pytest.raises(PlanError, match="measured on device cpu, and the plan is for cuda"):
        plan(One(), config(1), 2, machine=path)
    with pytest.raises(PlanError, match=r"--out: .* cannot be written"):
        machine().write(tmp_path)


def of_kind(kind: str) -> set[str]:
    return {each.name for each in fields(MachineRates) if each.metadata["kind"] == kind}


def test_every_fact_of_a_machine_file_is_compared() -> None:
    every = [of_kind(kind) for kind in (FACT, CAPTION, RATE, ENVELOPE)]
    assert set.union(*every) == {each.name for each in fields(MachineRates)}
    assert of_kind(CAPTION) == {"date"}, "a caption is compared with nothing: may it differ silently?"
    assert of_kind(FACT) == machine_facts("cpu", 2).keys()
    good = planned(1).step_time
    assert planned(1, machine(date="long ago")).step_time == good
    for name in of_kind(FACT):
        value = getattr(machine(), name)
        other = value + 1 if isinstance(value, int) else f"{value}?"
        with pytest.raises(PlanError, match="the rates were measured") as raised:
            planned(1, machine(**{name: other}))
        assert str(other) in str(raised.value) and str(value) in str(raised.value), name
    with pytest.raises(PlanError, match=r"with torch 1\.0, .*; on an abacus, .* Measure here: torchrun"):
        planned(1, machine(torch="1.0", cpu="an abacus"))


def test_a_plan_has_the_threads_that_torchrun_gives_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    with fake_process_group(2):
        assert threads_of_a_rank(2) == 1
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    assert threads_of_a_rank(2) == 1 and threads_of_a_rank(1) == torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_of_a_rank(2) == 3
    monkeypatch.setenv("RANK", "0")
    assert threads_of_a_rank(2) == torch.get_num_threads()


def test_the_command_shows_the_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine().write(tmp_path / "machine.json")
    (tmp_path / "ds.json").write_text(json.dumps(config(1)))
    words = ["plan", "--model", "tests.zero_full.test_step_time:One", "--config", f"{tmp_path}/ds.json"]
    words += ["--world", "2", "--device", "cpu", "--batch", f"{TOKENS}x{IN}:float32"]
    assert main([*words, "--machine", f"{tmp_path}/machine.json"]) == 0
    assert "seconds of a step, a forecast" in capsys.readouterr().out
    assert main([*words, "--machine", f"{tmp_path}/machine.json", "--stages"]) == 0
    assert "step, a forecast" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--out", "m.json"], ["--measure", ".", "--out", "m.json"]])
def test_out_measures_rates_and_no_disk(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", *words])
    assert "--out" in capsys.readouterr().err


@pytest.mark.slow
def test_measured_rates_forecast_every_stage_of_one_rank() -> None:
    rates = measure_rates(None, sizes=QUICK)
    assert mean_rates([rates, rates]).adam == pytest.approx(rates.adam)
    x = torch.empty(TOKENS, IN, device="meta")
    for made in plan_stages(One(), config(1), 1, inputs=[x], device="cpu", machine=rates):
        assert made.step_time is not None and 0 < made.step_time.total < 1
