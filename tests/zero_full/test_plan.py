"""A plan says what the ledgers will show, for models that fit and for those that do not."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_full
from tests import rotation
from tests.worlds import run_in
from tests.zero_full.planned import BF16, SMALL, STAGES, Case, Odd, WithExperts, by_real_ranks, matrix, soon
from tests.zero_full.runs import WIDTH, config
from zero_full.__main__ import main
from zero_full.errors import ConfigError, PlanError
from zero_full.plan import Plan, human, input_of, plan, plan_stages, side_by_side
from zero_full.plan.memory_tracker import MemoryTracker
from zero_full.plan.meta_model import FakeForward
from zero_min.ledger import Ledger

GB, WIDE = 1e9, (160, 160, 16, "cpu")


ALL, SOON = list(matrix()), soon(rotation.seed())


@pytest.mark.parametrize("seed", range(12))
def test_the_cases_of_a_run_have_every_option_and_every_pair_of_stage_and_precision(seed: int) -> None:
    chosen = soon(seed)
    assert {(case.world, case.option) for case in chosen} == {(case.world, case.option) for case in ALL}
    assert {(case.stage, case.precision) for case in chosen} == {(case.stage, case.precision) for case in ALL}
    assert {(case.world, case.stage) for case in chosen} == {(case.world, case.stage) for case in ALL}


def test_the_cases_of_all_seeds_have_every_option_at_every_stage() -> None:
    assert {case for seed in range(12) for case in soon(seed)} >= {
        each for each in ALL if each.option != "plain"
    }


@pytest.mark.rotates
@pytest.mark.parametrize(
    "case", [case if case in SOON else pytest.param(case, marks=pytest.mark.slow) for case in ALL], ids=str
)
def test_the_ledger_shows_what_was_planned_to_the_byte(case: Case) -> None:
    def alike(other: Case) -> bool:
        return (other.world, other.stage, other in SOON) == (case.world, case.stage, case in SOON)

    ranks = [rank[case] for rank in by_real_ranks(tuple(filter(alike, ALL)))]
    most = {kind: max(rank[kind] for rank in ranks) for kind in ranks[0]}
    in_buffers = most.pop("in buffers")
    each = plan(case.model(), case.config, case.world, device="cpu", expert_parallel=case.experts)
    predicted = {kind: getattr(each, kind) for kind in most}
    if not most["communication"]:  # not on Linux
        predicted["communication"] = 0
    if in_buffers:  # as many at a time as the disk is slower, and no more than was planned
        assert most.pop("host") + in_buffers <= predicted.pop("host")
    assert predicted == most


def layers(rows: int, columns: int, count: int, device: str = "meta") -> nn.Sequential:
    """A model that is nothing but matrices."""
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(columns, rows, bias=False) for _ in range(count)))


def peak(comm: Any, given: dict[str, Any]) -> int:
    """The most that was alive at one time in the third step."""
    with comm.ledger.watch():
        engine, _, _, _ = zero_full.initialize(model=layers(*WIDE), config=dict(given))
        for _ in range(3):
            comm.ledger.peak = comm.ledger.live()
            x = torch.ones(1, 160, dtype=next(engine.module.parameters()).dtype)
            engine.backward(engine(x).float().square().mean())
            engine.step()
        engine.destroy()
        return int(comm.ledger.peak)


@pytest.mark.rotates
@pytest.mark.parametrize(("stage", "reuse"), [(0, 0), (1, 0), (2, 0), (3, 0), (3, 10**9)])
@pytest.mark.parametrize("keys", [{}, BF16, {**BF16, "data_types": {"grad_accum_dtype": "bf16"}}], ids=str)
def test_the_peak_is_what_a_step_needs(stage: int, keys: dict[str, Any], reuse: int) -> None:
    zero = {"reduce_bucket_size": 60_000, "overlap_comm": False, "stage3_max_reuse_distance": reuse}
    given = config(stage, **keys, zero_optimization=zero | SMALL)
    predicted = plan(layers(*WIDE), given, 2, inputs=[torch.ones(1, 160)], device="cpu")
    found = max(run_in("processes", peak, 2, given)) + predicted.communication
    assert found == pytest.approx(predicted.peak, rel=0.02)


class TrackerOfValues(MemoryTracker):
    """Of tensors that are on no meta device."""

    def _is_counted(self, tensor: Tensor) -> bool:
        return tensor.dim() > 0


def passing(comm: Any, models: Sequence[nn.Module], given: dict[str, Any]) -> list[dict[str, int]]:
    """What comes and goes on a real rank in the third step of a pass like a plan's, for each model."""
    found = []
    for model in models:
        called: set[nn.Module] = set()
        for module in model.modules():
            vars(module)["forward"] = FakeForward(module, called)
        engine, optimizer, _, _ = zero_full.initialize(model=model, config=dict(given))
        watch = TrackerOfValues()
        for step in range(3):
            watch.begin(flat.full for flat in optimizer.sharded.flats if flat.released_at_rest)
            for micro in reversed(range(engine.gradient_accumulation_steps())):
                engine.set_gradient_accumulation_boundary(micro == 0)
                called.clear()
                with watch if step == 2 else nullcontext():
                    with watch.counting("gathered"):
                        loss = engine(torch.zeros(()))
                    with watch.counting("buckets"):
                        engine.backward(loss)
            optimizer.step()
            if step == 2:
                found.append({kind: watch.peak(kind) for kind in ("gathered", "buckets")})
            optimizer.zero_grad(set_to_none=True)  # as on an accelerator
        engine.destroy()
    return found


@pytest.mark.rotates
@pytest.mark.parametrize("stage", STAGES)
def test_what_passes_within_a_step_is_what_a_rank_sees(stage: int) -> None:
    zero = {"reduce_bucket_size": 60_000, "stage3_max_reuse_distance": 30_000, "overlap_comm": False}
    given = config(stage, gradient_accumulation_steps=2, zero_optimization=zero | SMALL)
    models = [layers(*WIDE), transformer(), transformer()]
    models[2].head.weight = models[2].embedding.weight
    ranks = run_in("processes", passing, 2, models, given)
    for model, found in zip(models, ranks[0], strict=True):
        each = plan(model, given, 2, device="cpu")
        assert each.gathered == found["gathered"] and (each.gathered > 0) == (stage == 3)
        spare = 4 * 60_000 if stage >= 2 else 0  # on a CPU the last buffer may wait for the next bucket
        assert each.buckets <= found["buckets"] <= each.buckets + spare and each.buckets > 0


def test_stages_beside_each_other_have_the_buckets_that_each_derives() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(12)))
    keys: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    one, whole = 4 * 1024**2, 12 * 4 * 1024**2
    for own, bucket in (({}, 3 * one), ({"reduce_bucket_size": 500_000_000}, whole)):
        plans = plan_stages(model, {**keys, "zero_optimization": {"stage": 2, **own}}, 2, device="cpu")
        for stage, each in enumerate(plans):
            alone = plan(model, {**keys, "zero_optimization": {"stage": stage, **own}}, 2, device="cpu")
            assert each.buckets == alone.buckets and each.peak == alone.peak
        assert plans[2].buckets == bucket + one, "and a gradient that arrives"


def test_the_row_of_the_paper() -> None:
    """ZeRO, figure 1: 7.5 billion parameters, 64 ranks, K = 12, gradients in 16 bits."""
    given = {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}}
    plans = plan_stages(layers(7_500, 10_000, 100), {**given, "optimizer": {"type": "Adam"}}, 64)
    assert [each.stage for each in plans] == [0, 1, 2, 3]
    for each, published in zip(plans, [120, 31.4, 16.6, 1.88], strict=True):
        assert each.between_steps / GB == pytest.approx(published, rel=0.02)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.head, side = width // heads, width // heads * groups
        sizes = {"q": width, "k": side, "v": side, "gate": inner, "up": inner}
        self.into = nn.ModuleDict({name: nn.Linear(width, size, bias=False) for name, size in sizes.items()})
        self.out, self.down = nn.Linear(width, width, bias=False), nn.Linear(inner, width, bias=False)
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then a gated layer."""
        y = self.norm_1(x)
        q, k, v = (self.into[m](y).unflatten(-1, (-1, self.head)).transpose(1, 2) for m in "qkv")
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.into["gate"](y)) * self.into["up"](y))


class Llama(nn.Module):
    def __init__(self, sizes: tuple[int, ...], layers: int, words: int, again: bool = False) -> None:
        super().__init__()
        width = sizes[0]
        self.embedding, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.again = again  # whether backward computes the blocks again

    def forward(self, words: Tensor) -> Tensor:
        """Scores for every next word."""
        x = self.embedding(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(self.norm(x))


LLAMA_70B = ((8192, 64, 8, 28672), 80)


@pytest.mark.rotates
def test_large_models_take_seconds_and_no_memory() -> None:
    start = time.monotonic()
    with torch.device("meta"):
        model = Llama(*LLAMA_70B, words=32_000)
    words = torch.empty(1, 4096, dtype=torch.int64, device="meta")
    plans = plan_stages(model, {**BF16, "optimizer": {"type": "AdamW"}}, 64, inputs=[words])
    assert time.monotonic() - start < 60
    numel = sum(p.numel() for p in model.parameters())
    for each, per_parameter in zip(plans, [18 + 2, 4 + 14 / 64, 2 + 16 / 64, 18 / 64], strict=True):
        assert each.between_steps == pytest.approx(per_parameter * numel, rel=0.03)
    for each in plans:  # gradients appear while activations are freed
        during = each.gathered + each.buckets + (each.activations or 0)
        assert max(each.between_steps, during) < each.peak < each.between_steps + during


def at_stage_3(world: int = 4, depth: int = 8, **zero: Any) -> Plan:
    """A model of layers of 64 x 64 elements, none of which are small. Eight are too large to be joined."""
    model = layers(64, 64, depth)
    keys = {"stage3_param_persistence_threshold": 0, **zero}
    return plan_stages(model, config(0, zero_optimization=keys, **BF16), world)[3]


LAYER = 64 * 64


def test_stage_3_keeps_slices_and_gathers_two_units_at_least() -> None:
    near = at_stage_3(stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=1)
    assert near.parameters == 8 * 2 * LAYER // 4
    assert near.master == near.gradients == near.moments // 2 == 8 * 4 * LAYER // 4
    assert near.gathered == 2 * 2 * LAYER
    assert near.sent == 3 * 3 * near.parameters  # two gathers and a reduction, to three others
    three = at_stage_3(stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=3 * LAYER)
    assert three.gathered == (1 + 3) * 2 * LAYER
    joined = at_stage_3(depth=64, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=8 * LAYER)
    assert joined.gathered == (8 + 8) * 2 * LAYER
    assert joined.sent == 3 * 3 * joined.parameters


def test_stage_3_keeps_units_from_forward_to_backward_if_it_may() -> None:
    assert at_stage_3().gathered == 8 * 2 * LAYER
    assert at_stage_3().sent == 2 * 3 * (8 * 2 * LAYER // 4)
    limited = at_stage_3(stage3_max_live_parameters=4 * LAYER)
    assert limited.gathered == (4 + 1) * 2 * LAYER  # and one at work
    assert limited.sent == (3 * 4 + 2 * 4) * 3 * (2 * LAYER // 4)
    # Forward and backward through two layers are a distance of four.
    distant = at_stage_3(stage3_max_reuse_distance=4 * LAYER)
    assert distant.sent == (3 * 6 + 2 * 2) * 3 * (2 * LAYER // 4)


def test_stage_3_keeps_small_parameters_whole() -> None:
    assert at_stage_3(stage3_param_persistence_threshold=LAYER).gathered == 0
    assert at_stage_3(world=1).gathered == 0
    few = {"stage3_param_persistence_threshold": LAYER, "stage3_model_persistence_threshold": 4 * LAYER}
    assert at_stage_3(**few).parameters == 4 * 2 * LAYER + 4 * 2 * LAYER // 4


def transformer(again: bool = False) -> nn.Module:
    return Llama((64, 4, 2, 160), 2, 100, again)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("keys", [{}, BF16], ids=str)
def test_activations_are_what_a_real_forward_leaves(again: bool, keys: dict[str, Any]) -> None:
    words = torch.zeros(3, 50, dtype=torch.int64)
    model = transformer(again).to(torch.bfloat16 if keys else torch.float32)
    predicted = plan(transformer(again), config(1, **keys), 2, inputs=[words]).activations
    ledger = Ledger()
    with ledger.watch():
        outputs = model(words)
    assert predicted == pytest.approx(ledger.live() + words.nbytes, rel=0.02)
    assert outputs.nbytes < ledger.live()


def test_a_model_that_looks_at_values_says_so() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            """A step that depends on the values."""
            return super().forward(x) if x.sum().item() > 0 else x

    with pytest.raises(PlanError, match=r"(?s)forward failed on 2x4:float32 with .*must not depend on them"):
        plan(Looks(4, 4), config(1), 2, inputs=[torch.ones(2, 4)])


def test_a_plan_changes_nothing() -> None:
    model = Odd()
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    given: dict[str, Any] = {"optimizer": {"type": "AdamW"}}
    with torch.device("meta"):
        plan(model, given, 2, inputs=[torch.ones(5, WIDTH)])
    assert given == {"optimizer": {"type": "AdamW"}}
    for name, p in model.named_parameters():
        assert p.data_ptr() == before[name][0] and torch.equal(p, before[name][1]) and p.grad is None


def test_a_config_is_a_dict_a_path_or_a_config(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    ways = (file, str(file), {"zero_optimization": {"stage": 2}}, zero_full.Config())
    plans = [plan(Odd(), given, 3) for given in ways]
    assert plans[0] == plans[1] == plans[2] and plans[0].stage == 2 and plans[3].stage == 0
    with pytest.raises(ConfigError, match="there is no configuration file"):
        plan(Odd(), "none.json", 3)
    file.write_text("{")
    with pytest.raises(ConfigError, match="this is not JSON"):
        plan(Odd(), file, 3)
    with pytest.raises(ConfigError, match="world_size"):
        plan(Odd(), {}, 0)
    with pytest.raises(ConfigError, match="cannot step on pieces"):
        plan(Odd(), {"zero_optimization": {"stage": 1}, "optimizer": {"type": "Adafactor"}}, 2)


def test_experts_need_a_number_of_ranks_that_hold_different_ones() -> None:
    with pytest.raises(PlanError, match=r"last\.weight is marked as an expert .* expert_parallel="):
        plan(WithExperts(), {}, 2)
    for wrong in (0, 3):
        with pytest.raises(PlanError, match=f"expert_parallel {wrong} does not divide the 4 ranks"):
            plan(WithExperts(), {}, 4, expert_parallel=wrong)
    with pytest.raises(PlanError, match="expert_parallel is 2, but no parameter of the model is marked"):
        plan(Odd(), {}, 4, expert_parallel=2)


def test_what_initialize_refuses_is_refused_in_the_same_words() -> None:
    with pytest.raises(PlanError, match="there is nothing to train"):
        plan(Odd().requires_grad_(False), {}, 2)
    with pytest.raises(PlanError, match="has no shape yet, because its module is lazy"):
        plan(nn.LazyLinear(3), {}, 2)
    with pytest.raises(PlanError, match="mics_shard_size needs a topology without"):
        plan(WithExperts(), {"zero_optimization": {"stage": 1, "mics_shard_size": 2}}, 4, expert_parallel=2)


def test_the_table_has_every_number() -> None:
    each = plan(Odd(), config(1), 2, inputs=[torch.ones(5, WIDTH)], device="cpu")
    text = each.table()
    for number in (each.parameters, each.gradients, each.moments, each.between_steps, each.peak, each.sent):
        assert f"{number:,}" in text
    assert "host" not in text and "+ activations" not in text + side_by_side([each])


def test_a_peak_without_activations_says_so_wherever_it_is_shown() -> None:
    each = plan(Odd(), config(1), 2)
    assert f" {human(each.peak)} + activations\n" in each.table()
    lines = side_by_side([each] * 4).splitlines()
    peak = next(place for place, line in enumerate(lines) if line.startswith("peak"))
    assert lines[peak + 1].split() == ["+", "activations"] * 4 and max(map(len, lines)) <= 80
    assert json.loads(each.as_json())["peak_has_activations"] is False


def test_what_waits_on_the_host_is_told_beside_the_device() -> None:
    given = config(1, zero_optimization={"offload_optimizer": {"device": "cpu"}}, **BF16)
    plans = plan_stages(Odd(), given, 2)
    assert [each.host > 0 for each in plans] == [False, True, True, True]
    beside = plan(Odd(), config(1, **BF16), 2)
    state, averaged, copies = beside.master + beside.moments, beside.master, beside.master // 2
    assert plans[1].host == state + averaged + copies > 0
    assert plans[1].between_steps == beside.between_steps - state - averaged
    on_cpu = plan(Odd(), given, 2, device="cpu")
    assert on_cpu.host == state, "nothing is copied"
    assert f"{human(plans[1].host)}{plans[1].host:>24,}" in plans[1].table()
    assert "offloaded to host" in side_by_side(plans)
    assert "offloaded to host" not in side_by_side([beside])


def test_numbers_for_people_have_three_digits() -> None:
    sizes = [0, 999, 1000, 999_600, 4_194_312, 31_400_000_000, 120 * 10**9, 2 * 10**12]
    shown = "0 B, 999 B, 1.00 kB, 1.00 MB, 4.19 MB, 31.4 GB, 120 GB, 2.00 TB"
    assert ", ".join(map(human, sizes)) == shown


def test_inputs_are_shape_and_type() -> None:
    assert input_of("2x1024:int64").shape == (2, 1024) and input_of("2x1024:int64").dtype == torch.int64
    assert input_of("8:bf16").dtype == torch.bfloat16
    for wrong in ("2x1024", "2x:int64", "2:int65", "2:nn", "x:int64"):
        with pytest.raises(PlanError, match="such as"):
            input_of(wrong)


ME = "tests.zero_full.test_plan"
A_MODEL = nn.Linear(4, 4)


def asked(tmp_path: Path, *words: str, **options: str) -> int:
    """Run the command for a small model, with a configuration of stage 2."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**BF16, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}))
    given = {"model": f"{ME}:Odd", "config": str(file), "world": "4", **options}
    return main(["plan", *(word for key, value in given.items() for word in (f"--{key}", value)), *words])


def test_the_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(tmp_path) == 0
    text = capsys.readouterr().out
    assert text.startswith("stage 2, 4 ranks, 448 parameters") and "between steps" in text
    assert asked(tmp_path, "--stages", model=f"{ME}:transformer", batch="2x16:int64") == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[1 : lines.index("")]
    assert table[0].split() == ["stage", "0", "1", "2", "3"] and table[-1].startswith("sent in a step")
    assert {len(line) for line in table} == {80} and "parameters" in lines[-1]  # the bars' legend


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(tmp_path, "--json", model=f"{ME}:A_MODEL", device="cpu") == 0
    [line] = capsys.readouterr().out.splitlines()
    each, answer = plan(A_MODEL, tmp_path / "ds.json", 4, device="cpu"), json.loads(line)
    assert answer["peak"] == each.peak and answer["moments"] == each.moments and answer["activations"] is None
    assert answer["peak_has_activations"] is False
    assert asked(tmp_path, "--json", "--stages") == 0
    assert [json.loads(line)["stage"] for line in capsys.readouterr().out.splitlines()] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("wrong", "answer"),
    [
        ({"model": "transformer"}, "module:function"),
        ({"model": "nowhere.models:gpt"}, "there is no module nowhere"),
        ({"model": f"{ME}:gpt"}, f"{ME} has no gpt; it has "),
        ({"model": "torch.nn:Linear"}, "cannot be called without arguments (missing a required arg"),
        ({"model": "platform:system"}, ", not an nn.Module"),
        ({"model": f"{ME}:GB"}, "cannot be called"),
        ({"config": "none.json"}, "there is no configuration file"),
        ({"world": "0"}, "argument --world: 0 is less than 1"),
        ({"batch": "2y3"}, "shape and dtype"),
    ],
)
def test_mistakes_are_told_in_a_line(
    wrong: dict[str, str], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        asked(tmp_path, **wrong)
    assert stopped.value.code == 2
    assert answer in capsys.readouterr().err


@pytest.mark.rotates
def test_models_are_looked_for_where_the_command_is_run(tmp_path: Path) -> None:
    (tmp_path / "my_models.py").write_text("from torch import nn\ndef tiny(): return nn.Linear(2, 2)\n")
    (tmp_path / "ds.json").write_text("{}")
    command = "-m zero_full plan --model my_models:tiny --config ds.json --world 2"
    answer = subprocess.check_output([sys.executable, *command.split()], cwd=tmp_path, text=True)
    assert "stage 0, 2 ranks, 6 parameters" in answer
