"""What a pipeline cannot do is one clear sentence on every rank, and the next batch trains."""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL, run_each
from tests.zero_full.pipeline_runs import (
    MICRO_BATCHES,
    WIDTH,
    Block,
    Case,
    Embed,
    batch,
    data_of,
    loss_of,
    specs,
)
from zero_full import LayerSpec, PipelineModule, TiedLayerSpec
from zero_full.pipeline.handover import Handover
from zero_full.pipeline.partition import balanced, partition
from zero_full.pipeline.stage_options import DIFFERENT

TWO = Case(2)
SHARED = nn.Linear(WIDTH, WIDTH)


def message(act: Callable[[], Any]) -> str:
    """The class and the text of what `act` raises."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def no_layer() -> nn.Module:
    raise OSError("no such file")


def no_module(**options: Any) -> PipelineModule:
    return PipelineModule(**{"layers": specs(), "num_stages": 2, "loss_fn": loss_of, **options})


class Once(Block):
    """A layer that fails when it is told to."""

    fails, does = False, "raise"

    def forward(self, inputs: Any) -> Any:
        if not self.fails:
            return super().forward(inputs)
        if self.does == "raise":
            raise ArithmeticError("this layer has given up")
        if self.does == "backward":
            x, mask = super().forward(inputs)
            x.register_hook(lambda gradient: 1 // 0)
            return x, mask
        return "no tensor" if self.does == "kind" else super().forward((inputs[0][:1], inputs[1][:1]))


MODULES: dict[str, tuple[Callable[[], Any], str]] = {
    "more stages than layers": (
        lambda: no_module(layers=specs()[:1]),
        "ValueError: 2 pipeline stages, but the model has only 1 layers. A stage needs at least one layer",
    ),
    "ranks": (
        lambda: no_module(num_stages=3),
        "ValueError: 2 ranks cannot be divided into pipelines of 3 stages. Start a multiple of 3 ranks",
    ),
    "no layers": (lambda: no_module(layers=[]), "ValueError: a PipelineModule needs at least one layer"),
    "kind of layer": (lambda: no_module(layers=["a", "b"]), "TypeError: layer 0 is str. Pass a LayerSpec"),
    "cannot be built": (
        lambda: no_module(layers=[*specs(), LayerSpec(no_layer)], partition_method="uniform"),
        "layer 8 (no_layer) of stage 1 cannot be built: OSError: no such file",
    ),
    "cannot be counted": (
        lambda: no_module(layers=[*specs(), LayerSpec(no_layer)]),
        "layer 8 (no_layer) cannot be built on the meta device, to count its parameters: OSError: no such",
    ),
    "method": (
        lambda: no_module(partition_method="best"),
        'partition_method must be "uniform", "parameters"',
    ),
    "type": (
        lambda: no_module(partition_method="type:Conv"),
        "matches no layer's class. The model has ['Block',",
    ),
    "shared by modules": (
        lambda: no_module(layers=[SHARED, nn.Sequential(nn.Tanh(), SHARED)]),
        "module 1.weight of layer 1 (stage 1) is also in layer 0 (stage 0). Each stage would train a copy",
    ),
    "used by a function": (
        lambda: no_module(
            layers=[SHARED, lambda x, w=SHARED: w(x), *specs()[1:]], partition_method="uniform"
        ),
        "nothing was raised",
    ),
    "function of another stage": (
        lambda: no_module(
            layers=[SHARED, nn.Tanh(), using(SHARED), nn.Linear(1, 1)], partition_method="uniform"
        ),
        "of layer 2 (stage 1) is also in layer 0 (stage 0). Each stage would train a copy of its own",
    ),
    "function of no layer": (
        lambda: no_module(layers=[nn.Linear(1, 1), using(SHARED)]),
        "layer 1 is a function that uses a module which is no layer of this model",
    ),
    "function of a global module": (
        lambda: no_module(
            layers=[SHARED, nn.Tanh(), global_function, nn.Linear(1, 1)], partition_method="uniform"
        ),
        "of layer 2 (stage 1) is also in layer 0 (stage 0). Each stage would train a copy of its own",
    ),
    "function of a list of modules": (
        lambda: no_module(
            layers=[SHARED, nn.Tanh(), using_one_of([SHARED]), nn.Linear(1, 1)], partition_method="uniform"
        ),
        "of layer 2 (stage 1) is also in layer 0 (stage 0). Each stage would train a copy of its own",
    ),
    "shared by arguments": (
        lambda: no_module(
            layers=[LayerSpec(nn.Sequential, SHARED), LayerSpec(nn.Sequential, nn.Tanh(), SHARED)]
        ),
        "Each stage would train a copy of its own. Use TiedLayerSpec with one key for both layers",
    ),
    "shared by an argument and a module": (
        lambda: no_module(layers=[SHARED, LayerSpec(nn.Sequential, SHARED)]),
        "is also in layer",
    ),
    "a parameter as an argument": (
        lambda: no_module(layers=[LayerSpec(Scaled, scale=FACTOR), LayerSpec(Scaled, scale=FACTOR)]),
        "scale of layer ",
    ),
    "an argument that is copied": (
        lambda: no_module(layers=[LayerSpec(copied, SHARED), LayerSpec(copied, SHARED)]),
        "nothing was raised",
    ),
    "arguments of one key": (
        lambda: no_module(layers=[TiedLayerSpec("a", nn.Sequential, SHARED)] * 2),
        "nothing was raised",
    ),
    "buffers in several stages": (
        lambda: no_module(layers=[LayerSpec(WithTable, TABLE), LayerSpec(WithTable, TABLE)]),
        "nothing was raised",
    ),
    "half tied": (
        lambda: no_module(layers=[TiedLayerSpec("a", nn.Linear, 2, 2, tied_weight_attr="weight")] * 2),
        "tied_weight_attr is ['weight'], but Linear has the parameters ['bias', 'weight']",
    ),
    "placement": (lambda: no_module(placement="v"), 'placement "v" needs stages_per_rank=2, not 1'),
    "differs": (
        lambda: no_module(layers=specs()[: 7 + dist.get_rank()], partition_method="uniform"),
        "DisagreementError: models, optimizers or arguments differ between ranks:",
    ),
}


class Scaled(nn.Linear):
    """A layer that multiplies by a parameter which it is given."""

    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__(1, 1)
        self.scale = scale


class Table(nn.Module):
    """A constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(4))


class WithTable(nn.Linear):
    """A layer with a constant that all layers have."""

    def __init__(self, table: Table) -> None:
        super().__init__(1, 1)
        self.table = table


FACTOR, TABLE = nn.Parameter(torch.ones(())), Table()


def global_function(x: Tensor) -> Tensor:
    return SHARED(x)


def using_one_of(modules: list[nn.Module]) -> Callable[[Tensor], Tensor]:
    return lambda x: modules[0](x)


def copied(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


def using(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: module(x)


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "stage 2": ({}, {"zero_optimization": {"stage": 2}}, "zero_optimization.stage 2 with a PipelineModule"),
    "stage 3": ({}, {"zero_optimization": {"stage": 3}}, "zero_optimization.stage 3 with a PipelineModule"),
    "schedule": ({}, {"pipeline": {"schedule": "zigzag"}}, "pipeline.schedule"),
    "one stage a rank": (
        {},
        {"pipeline": {"schedule": "interleaved_1f1b"}},
        "'interleaved_1f1b' needs several stages per rank, but the PipelineModule has stages_per_rank=1",
    ),
    "several stages a rank": ({"stages_per_rank": 2}, {}, "'1f1b' needs one stage per rank"),
    "placement": (
        {"stages_per_rank": 2},
        {"pipeline": {"schedule": "zbv"}},
        "'zbv' needs a PipelineModule with placement='v', not 'loop'",
    ),
    "checkpointing": (
        {"stages_per_rank": 2},
        {"pipeline": {"schedule": "interleaved_zero_bubble", "activation_checkpoint_interval": 1}},
        "runs backward in two parts, of which each would recompute the activations",
    ),
    "stages": ({}, {"pipeline": {"stages": 4}}, "pipeline.stages is 4, but the PipelineModule has 2"),
    "partition": ({}, {"pipeline": {"partition": "uniform"}}, "but the PipelineModule has 'parameters'"),
    "unknown key": ({}, {"pipeline": {"depth": 4}}, "pipeline.depth"),
    "unmanaged": (
        {},
        {"managed_gradient_accumulation": False},
        "managed_gradient_accumulation is false, but",
    ),
    "hybrid engine": (
        {},
        {"hybrid_engine": {"enabled": True}},
        "hybrid_engine.enabled with a PipelineModule",
    ),
    "1-bit": (
        {},
        {"optimizer": {"type": "OneBitAdam", "params": {}}, "zero_optimization": {"stage": 0}},
        "OneBitAdam averages with compression, which would let the copies of tied layers on several",
    ),
    "no parameters": (
        {"layers": [nn.Linear(1, 1), nn.Tanh()], "partition_method": "uniform"},
        {},
        "stages [1] (layers [1]) have no parameter to train",
    ),
    "differs": (
        {},
        {"steps_per_print": None, "gradient_clipping": "rank"},
        "models, optimizers or arguments differ between ranks:\n  gradient_clipping: 0.5 on rank 0",
    ),
    "groups": ({}, {"given": True}, "process_group with a PipelineModule, which has its groups already"),
}


def everything(comm: Any) -> dict[str, str]:
    """The message of every case, on this rank."""
    found = {f"module: {name}": message(act) for name, (act, _) in MODULES.items()}
    for name, (module, keys, _) in CONFIGS.items():
        options: dict[str, Any] = {}
        config = {**TWO.config(), **keys}
        if config.pop("given", False):
            options["process_group"] = dist.group.WORLD
        if config["gradient_clipping"] == "rank":
            config["gradient_clipping"] = 0.5 + dist.get_rank()
        made = no_module(**module)
        found[f"config: {name}"] = message(
            lambda: zero_full.initialize(model=made, config=config, **options)  # noqa: B023
        )
    return found


def test_a_module_or_a_configuration_that_cannot_be_a_pipeline() -> None:
    expected = {f"module: {name}": text for name, (_, text) in MODULES.items()}
    expected |= {f"config: {name}": text for name, (_, _, text) in CONFIGS.items()}
    for rank, found in enumerate(POOL.run(everything, 2)):
        for name, text in expected.items():
            assert text in found[name], f"rank {rank}, {name}: {found[name]}"


# Batches -------------------------------------------------------------------------------------------


def start(loss: Any = loss_of, micro_batches: int = MICRO_BATCHES, training: bool = False) -> Any:
    """An engine whose last block fails on demand."""
    layers = [*specs(tied=False)[:-2], LayerSpec(Once), *specs(tied=False)[-1:]]
    module = PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")
    return zero_full.initialize(model=module, config=TWO.config(micro_batches))[0]


def some(count: int) -> Iterator[Any]:
    return iter(batch(0, data_of(TWO)[0])[:count])


def fail(engine: Any, does: str, rank: int) -> None:
    """Let the block fail, on one of the ranks that have it."""
    for block in engine.module.modules():
        if isinstance(block, Once) and dist.get_rank() == rank:
            block.fails, block.does = bool(does), does


def fails_in_a_step(comm: Any) -> tuple[str, bool]:
    """A step that raises; whether the batches after it train as without it."""
    engine, other, alone = start(), start(), [comm.rank == 1]

    def hook(*_: Any) -> None:
        if alone and alone.pop():
            raise ArithmeticError("not this step")

    for number in range(3):
        if number == 1:
            handle = engine.basic_optimizer.register_step_pre_hook(hook)
            said = message(lambda: engine.train_batch(iter(batch(1, data_of(TWO)[0]))))
            handle.remove()
            continue
        for each in (engine, other):
            each.train_batch(iter(batch(number, data_of(TWO)[0])))
    pairs = zip(engine.module.parameters(), other.module.parameters(), strict=True)
    is_equal = all(torch.equal(one, another) for one, another in pairs)
    is_equal = is_equal and engine.global_steps == other.global_steps == 2
    engine.destroy()
    other.destroy()
    return said, is_equal


def test_after_a_step_that_raises_the_next_batch_trains_alone() -> None:
    for said, is_equal in POOL.run(fails_in_a_step, 2):
        assert "not this step" in said and is_equal


def mistakes(comm: Any) -> dict[str, str]:
    """What each mistake raises on this rank; afterwards the run equals one without mistakes."""
    rank, engine, other = dist.get_rank(), start(), start()
    found = {}
    for does in ("raise", "backward", "kind", "shape"):
        for batches in (0, 1):  # in the first batch shapes are looked for
            fail(engine, does, 3)
            found[f"{does} {batches}"] = message(lambda: engine.train_batch(some(MICRO_BATCHES)))
            fail(engine, "", 3)
            if batches == 0 and does == "raise":
                engine.train_batch(some(MICRO_BATCHES))
                other.train_batch(some(MICRO_BATCHES))
    found["ended"] = message(lambda: engine.train_batch(some(2)))
    found["ended on one rank"] = message(lambda: engine.train_batch(some(3 if rank == 2 else MICRO_BATCHES)))
    found["clean end"] = message(lambda: engine.train_batch(some(0)))
    found["no data"] = message(engine.train_batch)
    found["no pair"] = message(lambda: engine.train_batch(iter([torch.zeros(2)] * MICRO_BATCHES)))
    odd = [*batch(0, data_of(TWO)[0])[:-1], tuple(each[:1] for each in batch(0, 0)[0])]
    found["shapes"] = message(lambda: engine.train_batch(iter(odd)))
    for call in (*WHOLE, *PARTLY):
        argument = [] if call == "step" else [torch.zeros(())]
        found[call] = message(lambda: getattr(engine, call)(*argument))  # noqa: B023
    (group,) = engine.optimizer.param_groups
    rate, group["lr"] = group["lr"], 0.5 if rank < 2 else group["lr"]
    found["lr of a stage"] = message(lambda: engine.train_batch(some(MICRO_BATCHES)))
    group["lr"] = rate
    engine.eval_batch(some(MICRO_BATCHES))
    short = [
        tuple(t[:, :3] for t in pair) for pair in batch(1, data_of(TWO)[0])
    ]  # other shapes are found anew
    losses = [float(each.train_batch(iter(short))) for each in (engine, other)]
    losses += [float(each.train_batch(some(MICRO_BATCHES))) for each in (engine, other)]
    same = [
        torch.equal(a, b) for a, b in zip(engine.module.parameters(), other.module.parameters(), strict=True)
    ]
    found["afterwards"] = (
        f"{all(same)} {losses[0] == losses[1] and losses[2] == losses[3]} {engine.global_steps}"
    )
    for each in (engine, other):
        each.destroy()
    engine = TWO.start()
    engine.optimizer.param_groups[0]["maximize"] = rank < 2
    found["maximize of a stage"] = message(lambda: engine.train_batch(some(MICRO_BATCHES)))
    engine.destroy()
    engine = start(loss=lambda logits, labels: logits)
    found["no scalar"] = message(lambda: engine.train_batch(some(MICRO_BATCHES)))
    engine.destroy()
    engine = start(micro_batches=1)
    found["micro-batches"] = message(lambda: engine.train_batch(some(1)))
    engine.destroy()
    found["destroyed"] = message(lambda: engine.train_batch(some(1)))
    return found


WHOLE = ("forward", "backward", "scale", "step")
PARTLY = ("save_weights", "load_weights", "save_16bit_model", "generation", "weights")
DIFFER = DIFFERENT.partition("{")[0]
FAILED = "RuntimeError: the batch failed, and no parameter has changed. "
EXPECTED = {
    "raise 0": f"{FAILED}rank 3: forward of stage 1, micro-batch 0: ArithmeticError: this layer has given up",
    "raise 1": f"{FAILED}rank 3: forward of stage 1, micro-batch 0: ArithmeticError: this layer has given up",
    "backward 1": f"{FAILED}rank 3: backward of stage 1, micro-batch 0: ZeroDivisionError",
    "kind 1": f"{FAILED}rank 3: forward of stage 1, micro-batch 0: ",
    "shape 1": f"{FAILED}rank 3: forward of stage 1, micro-batch 0: ",
    "ended": f"{FAILED}rank 0: the data iterator ended after 2 of 4 micro-batches; rank 1: the data iterator",
    "ended on one rank": f"{FAILED}rank 2: the data iterator ended after 3 of 4 micro-batches",
    "clean end": "StopIteration: ",
    "no data": "this rank has the first or the last stage and no data. Pass data_iter to train_batch",
    "no pair": "TypeError: a micro-batch must be a pair (inputs, labels), not a Tensor",
    "shapes": "micro-batch 3 of the step has inputs of other shapes ((1, 5)) than the first ((2, 5))",
    **dict.fromkeys(WHOLE, "RuntimeError: a PipelineEngine runs whole batches, not "),
    **dict.fromkeys(PARTLY, "each rank has the layers of its own stages only"),
    "lr of a stage": f"{FAILED}{DIFFER}rank 0: lr: 0.5; rank 1: lr: 0.5; rank 2: lr: 0.01; rank 3: lr: 0.01",
    "maximize of a stage": f"{FAILED}{DIFFER}rank 0: options of the tied layer",
    "afterwards": "True True 3",
    "no scalar": "ValueError: loss_fn returns a tensor of shape (2, 5, 11), but the loss must be a scalar",
    "micro-batches": "pipeline.schedule '1f1b' cannot run gradient_accumulation_steps 1 micro-batches on 2",
    "destroyed": "RuntimeError: train_batch after destroy",
}


def test_a_mistake_in_a_batch_is_an_error_on_every_rank_and_changes_nothing() -> None:
    for rank, found in enumerate(POOL.run(mistakes, 4)):
        for name, text in EXPECTED.items():
            assert text in found[name], f"rank {rank}, {name}: {found[name]}"


# Parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "parts", "sizes"),
    [
        ("uniform", 3, [2, 2, 2]),
        ("parameters", 2, [1, 5]),
        ("type:block", 2, [3, 3]),
        ("parameters", 6, [1] * 6),
    ],
)
def test_layers_are_cut_into_balanced_parts(method: str, parts: int, sizes: list[int]) -> None:
    names = ["Embed", "Block", "Block", "Block", "Block", "Head"]
    made = partition(method, names, lambda: [100, 10, 10, 10, 10, 50], parts)
    assert [len(part) for part in made] == sizes
    assert [number for part in made for number in part] == [*range(6)]


def test_no_cut_is_better_than_the_one_found() -> None:
    weights = torch.randint(0, 9, (7,), generator=torch.Generator().manual_seed(0)).tolist()
    largest = [
        max(sum(weights[:a]), sum(weights[a:b]), sum(weights[b:]))
        for a in range(1, 6)
        for b in range(a + 1, 7)
    ]
    assert max(sum(weights[n] for n in part) for part in balanced(weights, 3)) == min(largest)


def test_a_handover_gives_back_what_it_sends() -> None:
    value = (
        torch.randn(2, 3, requires_grad=True),
        torch.tensor([True, False, True]),
        torch.arange(5),
        torch.tensor(2.5, dtype=torch.float64),
        torch.zeros(0, 4, dtype=torch.int16),
    )
    handover = Handover.of(value, 0)
    sent = handover.pack(value, 0)
    assert all(tensor.is_floating_point() for tensor in sent)
    assert [t.shape for t in sent] == [t.shape for t in handover.carriers("cpu")]
    got = handover.unpack(sent)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, value, strict=True))
    with pytest.raises(
        ValueError, match=re.escape("but in the first micro-batch float32 of shape (2, 3) and bool")
    ):
        handover.pack((value[0][:1], *value[1:]), 0)
    with pytest.raises(
        TypeError, match=r"returns a tuple with str\. Between two stages a value must be a tensor"
    ):
        Handover.of((value[0], "text"), 0)


def test_layers_have_the_same_values_at_any_number_of_stages() -> None:
    (two, four), *_ = zip(*run_each(weights_of, 4, [(2,), (4,)]), strict=True)
    both: dict[int, dict[str, Any]] = {}
    for stages, rank in ((2, two), (4, four)):
        both[stages] = rank
    assert both[2] == both[4] and len(both[2]) > 3


def weights_of(comm: Any, stages: int) -> dict[str, Any]:
    """The values of all parameters of a model on two ranks or four, by name."""
    torch.manual_seed(dist.get_rank())
    module = PipelineModule([LayerSpec(Embed), *(LayerSpec(Block) for _ in range(3))], num_stages=stages)
    everyones: list[Any] = [None] * 4
    dist.all_gather_object(everyones, {name: p.tolist() for name, p in module.named_parameters()})
    return {name: values for each in everyones for name, values in each.items()}
