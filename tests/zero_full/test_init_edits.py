"""Between `Init` and `initialize` a model is what it would be without `Init`, or an error says what to do."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import POOL, RankError
from tests.zero_full.init_edits import REFUSED, WORKS, Model
from tests.zero_full.test_deferred import LiveBytes
from zero_full import DisagreementError, GatheredParameters, Init


def config(stage: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 10
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    return {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "zero_optimization": zero}


def values_of(model: nn.Module, stage: int) -> dict[str, Tensor]:
    """What a model starts with: on this rank, of parameters and buffers of all kinds, whole."""
    engine, _, _, _ = zero_full.initialize(model=model, config=config(stage))
    assert all(type(b) is Tensor for b in model.buffers())
    with GatheredParameters(model.parameters()):
        assert all(type(p) is nn.Parameter for p in model.parameters())
        named = [*model.named_parameters(), *model.named_buffers()]
        values = {name: tensor.detach().clone() for name, tensor in named}
    engine.destroy()
    return values


def unlike(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of what is not bit for bit the same."""
    if list(one) != list(other):
        return [f"{list(one)} and {list(other)}"]
    return [
        name
        for name in one
        if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])
    ]


# The table -------------------------------------------------------------------------------------------


def outcome(edit: Callable[[Model], Any], deferred: bool, stage: int, rank: int) -> dict[str, Tensor] | str:
    torch.manual_seed(11 + rank)
    with Init(enabled=deferred):
        model = Model()
    objects = dict(model.named_parameters())
    try:
        changed = edit(model) or model
        values = values_of(changed, stage)
    except Exception as error:
        return re.sub(r"<.*?>", "", str(error))
    kept = [name for name, p in changed.named_parameters() if objects.get(name) is p]
    attributes = {"noise": changed.noise, "table": changed.tables["a"][0], "kept": torch.tensor(len(kept))}
    numbers = {"numbers": torch.rand(3)} if rank == 0 else {}  # the others have seeds of their own
    return {**values, **attributes, **numbers}


def the_table(comm: Any, stage: int) -> list[str]:
    """What is neither as without `Init` nor refused in the right words."""
    wrong = []
    for name, edit in WORKS.items():
        plain, deferred = (outcome(edit, deferred, stage, comm.rank) for deferred in (False, True))
        if isinstance(plain, str) or isinstance(deferred, str):
            wrong += [f"{name}: {plain} / {deferred}"] if plain != deferred else []
        else:
            wrong += [f"{name}: {different}" for different in unlike(plain, deferred)]
    for name, (edit, words) in REFUSED.items():
        answer = outcome(edit, True, stage, comm.rank)
        if not isinstance(answer, str) or not re.search(words, answer):
            wrong.append(f"{name}: {answer}")
    return wrong


@pytest.mark.rotates
@pytest.mark.parametrize(
    "stage, world",
    [(0, 2), (3, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 3), (2, 4), (3, 2)))],
)
def test_an_edit_works_as_without_init_or_says_what_to_do(stage: int, world: int) -> None:
    assert POOL.run(the_table, world, stage, limit=200) == [[]] * world


# Ranks that construct differently --------------------------------------------------------------------


class ByRank(Model):
    """Every way in which a constructor may do something else on another rank."""

    def __init__(self, rank: int, way: str) -> None:
        super().__init__()
        self.rank = rank
        getattr(self, way)()

    def weights_on_the_first_rank(self) -> None:
        if self.rank == 0:
            self.layers[0].load_state_dict({"weight": torch.ones(6, 6), "bias": torch.zeros(6)})
            self.frozen.data.fill_(3)
            self.scale.fill_(4)

    def other_numbers(self) -> None:
        numbers = torch.arange(72.0, device="cpu") * self.rank  # as NumPy's would be
        self.embed.weight.data.copy_(numbers.view(12, 6))
        self.count.data.add_(self.rank)
        self.shift.add_(self.rank)

    def another_order(self) -> None:
        for layer in self.layers if self.rank else reversed(self.layers):
            nn.init.normal_(layer.weight)
        self.layers[self.rank % 3].weight.data.copy_(self.layers[2].weight)

    def memory_without_values(self) -> None:
        self.layers[0].weight = nn.Parameter(torch.empty(6, 6).bfloat16().float() * 0 + torch.empty(6, 6))
        self.layers[0].weight.data.fill_(1)
        self.old.data = torch.empty(3, 4).zero_() if self.rank else torch.randn(3, 4)


WAYS = [name for name in vars(ByRank) if not name.startswith("_")]


def constructed_by_rank(comm: Any, stage: int) -> list[str]:
    wrong = []
    for way in WAYS:
        torch.manual_seed(comm.rank)
        plain = values_of(ByRank(comm.rank, way), stage)
        for recorded in ("everywhere", "not on the first rank"):
            torch.manual_seed(comm.rank)
            with Init(enabled=recorded == "everywhere" or comm.rank > 0):
                model = ByRank(comm.rank, way)
            wrong += [f"{way}, {recorded}: {name}" for name in unlike(plain, values_of(model, stage))]
    return wrong


@pytest.mark.rotates
@pytest.mark.parametrize("stage, world", [(0, 2), (1, 4), (2, 3), (3, 1), (3, 2), (3, 4)])
def test_the_first_ranks_values_are_everywhere(stage: int, world: int) -> None:
    assert POOL.run(constructed_by_rank, world, stage, limit=100) == [[]] * world


def in_sixteen_bits(comm: Any, stage: int, section: str) -> list[str]:
    """The first rank's values of models whose ranks differ, rounded to what the run trains in."""
    dtype, wrong = {"bf16": torch.bfloat16, "fp16": torch.float16}[section], list[str]()
    for way in [*WAYS, "modifier"]:
        made = []
        for rank in (0, comm.rank):
            torch.manual_seed(rank)
            with Init(enabled=len(made) > 0):
                made.append(Model() if way == "modifier" else ByRank(rank, way))
        if way == "modifier":
            for layer in made[0].layers:
                layer.weight.data.fill_(7)
            with GatheredParameters(made[1].parameters(), modifier_rank=0):
                for layer in made[1].layers if comm.rank == 0 else ():
                    layer.weight.data.fill_(7)
        expected = {
            name: t.to(dtype) if t.is_floating_point() else t for name, t in made[0].state_dict().items()
        }
        engine, _, _, _ = zero_full.initialize(model=made[1], config={**config(stage), section: SIXTEEN})
        got = {name: t.to(expected[name].dtype) for name, t in engine.module_state_dict().items()}
        wrong += [f"{way}: {name}" for name in unlike(expected, got)]
        engine.destroy()
    return wrong


SIXTEEN = {"enabled": True}


@pytest.mark.rotates
@pytest.mark.parametrize("section", ["bf16", "fp16"])
@pytest.mark.parametrize("stage, world", [(1, 2), (3, 3)])
def test_the_first_ranks_values_are_everywhere_in_sixteen_bits(stage: int, world: int, section: str) -> None:
    assert POOL.run(in_sixteen_bits, world, stage, section) == [[]] * world


def of_another_kind(comm: Any) -> str:
    """One rank makes its parameter another one; then all look at it again, before `initialize`."""
    with Init():
        model = nn.Linear(3, 3)
    with GatheredParameters(model.weight, modifier_rank=1):
        if comm.rank == 1:
            model.weight.data = torch.ones(4, 3, dtype=torch.float64)
    with pytest.raises(DisagreementError) as error, GatheredParameters(model.weight):
        pass
    return str(error.value)


def test_a_parameter_that_one_rank_has_made_another_one_is_named_on_every_rank() -> None:
    first, second = POOL.run(of_another_kind, 2)
    assert first == second
    assert "weight is float32 of shape (3, 3) on rank 0 and float64 of shape (4, 3) on rank 1" in first


class Unlike(nn.Module):
    def __init__(self, rank: int, how: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3 + (how == "shape" and rank)), nn.Linear(3, 3)
        if how == "besides" and rank:
            self.c = nn.Linear(3, 3)
        if how == "frozen" and rank:
            self.b.requires_grad_(False)
        if how == "order" and rank:
            self.a, self.b = self.b, self.a
            a = self._modules.pop("a")
            self.a = a


MESSAGES = {
    "shape": r"a.weight, .* of shape \(3, 3\), .* on rank 0; a.weight, .* of shape \(4, 3\), .* on rank 1",
    "besides": r"absent on rank 0; c.weight, .* on rank 1",
    "frozen": r"b.weight, .*, trained, .* on rank 0; b.weight, .*, frozen, .* on rank 1",
    "order": r"a.weight, .* on rank 0; b.weight, .* on rank 1",
}


def unlike_models(comm: Any) -> dict[str, str]:
    said = {}
    for how in MESSAGES:
        with Init():
            model = Unlike(comm.rank, how)
        with pytest.raises(DisagreementError, match="parameter") as error:
            zero_full.initialize(model=model, config=config(3))
        said[how] = str(error.value)
    return said


def test_ranks_with_different_models_are_told_so_on_every_rank() -> None:
    for said in POOL.run(unlike_models, 2):
        for how, message in MESSAGES.items():
            assert re.search(message, said[how])


def a_failure_on_one_rank(comm: Any) -> None:
    source = torch.ones(3, 3)
    with Init():
        model = nn.Linear(3, 3)
    model.weight.data.copy_(source)
    source.add_(comm.rank == 1)
    zero_full.initialize(model=model, config=config(3))


def test_a_rank_that_cannot_construct_stops_all() -> None:
    with pytest.raises(RankError) as error:
        POOL.run(a_failure_on_one_rank, 3)
    told = "initialize failed on rank 1: RuntimeError: "
    for rank, other in ((0, told), (1, ""), (2, told)):
        assert re.search(
            rf"rank {rank}: RuntimeError: {other}.*weight was made from .* changed", str(error.value)
        )


# The rank whose changes count ------------------------------------------------------------------------


def change(model: Model, rank: int, by: int) -> None:
    """As one does it: everybody enters, one rank writes."""
    with GatheredParameters(model.parameters(), modifier_rank=by):
        if rank == by:
            model.layers[0].weight.data.fill_(10 + by)
            model.embed.weight.data.mul_(0).add_(20 + by)
            model.frozen.data.fill_(30 + by)
        else:
            model.layers[1].weight.data.fill_(-1)  # does not count


def changed_by(comm: Any, stage: int, by: int) -> list[str]:
    torch.manual_seed(comm.rank)
    expected = values_of(Model(), stage)
    expected["layers.0.weight"].fill_((10 + by) * 3)
    expected["embed.weight"].fill_(by)
    expected["frozen"].fill_(30 + by)
    torch.manual_seed(comm.rank)
    with Init():
        model = Model()
    change(model, comm.rank, 0)
    change(model, comm.rank, by)
    with GatheredParameters(model.parameters()):  # everybody sees it
        assert bool(model.embed.weight.eq(20 + by).all()) and model.frozen[0] == 30 + by
    with GatheredParameters(model.embed.weight, modifier_rank=0):
        model.embed.weight.data.sub_(20)  # of the other rank's values
    with torch.no_grad():
        model.layers[0].weight.mul_(3)  # on every rank: also where the newest values are
    return unlike(expected, values_of(model.float(), stage))


@pytest.mark.rotates
@pytest.mark.parametrize(
    "stage, world, by", [(0, 2, 1), (1, 3, 2), (2, 4, 3), (3, 2, 0), (3, 2, 1), (3, 3, 1)]
)
def test_changes_of_one_rank_become_everybodys(stage: int, world: int, by: int) -> None:
    assert POOL.run(changed_by, world, stage, by) == [[]] * world


def changed_once_more(comm: Any) -> None:
    with Init():
        model = Model()
    change(model, comm.rank, 1)
    if comm.rank == 0:
        model.layers[0].weight.data.mul_(3)
    zero_full.initialize(model=model, config=config(3))


def test_a_later_change_on_one_rank_only_is_refused() -> None:
    with pytest.raises(
        RankError, match=r"layers.0.weight was changed in .*modifier_rank=1.* and then differently"
    ):
        POOL.run(changed_once_more, 2)


def bytes_kept(comm: Any, by: int) -> int:
    with Init():
        model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(8)))
    with GatheredParameters(model.parameters(), modifier_rank=by):
        pass  # what is loaded once stays
    with LiveBytes() as live:
        for layer in model[:4]:
            with GatheredParameters(layer.weight, modifier_rank=by):
                layer.weight.data.add_(1)
        assert live.peak - live.now <= 3 * 40_000
        time.sleep(0.3)  # gloo's thread lets go of the last tensor that it has sent
    return live.now // 40_000  # beside them there are states of generators, of 5 kB


def test_only_the_rank_whose_changes_count_keeps_them_in_memory() -> None:
    assert POOL.run(bytes_kept, 2, 1) == [0, 4]
