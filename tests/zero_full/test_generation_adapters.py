"""LoRA adapters merged to generate and to be handed over: base weights come back bit for bit."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_full
from tests.worlds import run_each
from tests.zero_full.generation_runs import PROMPT, Language, Server, same_bits, tokens, train_step
from tests.zero_full.runs import config
from tests.zero_full.stage3_runs import RELEASED, seeded
from zero_full.engine.hybrid_engine import HybridEngine
from zero_full.integrations.deepspeed.engine import DeepSpeedEngine
from zero_full.integrations.deepspeed.engine import initialize as deepspeed_initialize

PROMPTS = tokens(9, 9, PROMPT)


class Adapted(nn.Module):
    """A linear layer with an adapter, with the methods that PEFT's layers have."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)
        self.merged_adapters: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        """The base's output and the adapter's."""
        y = self.base_layer(x)
        return y if self.merged_adapters else y + self.lora_B(self.lora_A(x))

    def get_base_layer(self) -> nn.Module:
        """The layer below."""
        return self.base_layer

    def merge(self) -> None:
        """Add the adapter to the weight."""
        self.base_layer.weight.data += self.lora_B.weight @ self.lora_A.weight
        self.merged_adapters.append("default")

    def unmerge(self) -> None:
        """Subtract it, which rounds."""
        self.base_layer.weight.data -= self.lora_B.weight @ self.lora_A.weight
        self.merged_adapters.clear()


class AdaptedLanguage(Language):
    """A `Language` in which only adapters are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.qkv, block.up = Adapted(block.qkv), Adapted(block.up)


def merged_by_hand(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a plain `Language`."""
    found = {}
    for name, value in state.items():
        if "lora_" in name:
            continue
        layer = name.removesuffix("base_layer.weight")
        if layer != name:
            value = value + state[f"{layer}lora_B.weight"] @ state[f"{layer}lora_A.weight"]
        found[name.replace(".base_layer.", ".")] = value
    return found


def generated(model: nn.Module, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and tokens."""
    return model(prompts), model.generate(prompts)


def adapts(comm: Any, stage: int, precision: str) -> None:
    torch.manual_seed(0)
    keys = {} if precision == "fp32" else {precision: {"enabled": True}}
    found = []
    for generates in (False, True):
        made = config(stage, zero_optimization=RELEASED if stage == 3 else {}, **keys)
        engine = zero_full.initialize(model=seeded(AdaptedLanguage), config=made)[0]
        for step in range(3):
            if generates:
                check(engine)
            torch.manual_seed(step)
            train_step(engine, step, comm.rank)
        found.append(engine.module_state_dict())
        engine.destroy()
    assert [name for name in found[0] if not same_bits(found[0][name], found[1][name])] == []


def check(engine: Any) -> None:
    """Generation and handing over, merged and not; the values stay as they were."""
    before = engine.module_state_dict()
    plain = Language().to(engine.module.embedding.weight.dtype).eval()
    plain.load_state_dict(merged_by_hand(before))
    with torch.no_grad():
        want, want_tokens = generated(plain, PROMPTS)
    with engine.generation() as model:
        logits, _ = generated(model, PROMPTS)
    off = (logits.float() - want.float()).abs().max()
    assert 0 < off < (1e-3 if logits.dtype == torch.float32 else 1.0)  # by rounding
    with (
        zero_full.GatheredParameters(list(engine.module.parameters())),
        engine.generation(None, True) as model,
    ):
        with engine.generation(merge_adapters=True):  # nested, and in parameters that are gathered anyway
            logits, got = generated(model, PROMPTS)
        assert torch.equal(logits, want) and torch.equal(got, want_tokens)
        assert torch.equal(model(PROMPTS), want)
    with engine.generation(merge_adapters=True) as model:
        assert torch.equal(model(PROMPTS), want)
        for read in (engine.module_state_dict, lambda: list(engine.weights()), engine.state_dict):
            with pytest.raises(RuntimeError, match="adapters are merged into base weights"):
                read()
        model.blocks[0].up.unmerge()  # as a model with disabled adapters does
    assert not any(
        module.merged_adapters for module in engine.module.modules() if isinstance(module, Adapted)
    )
    weights = engine.weights(bucket_bytes=2000, merge_adapters=True)
    known, items = dict(zip(weights.names, weights.shapes, strict=True)), dict(weights)
    assert {name: value.shape for name, value in items.items()} == known
    state = {name: value for name, value in plain.state_dict().items() if name != "head.weight"}
    assert items.keys() == state.keys()
    assert [name for name in state if not torch.equal(items[name], state[name])] == []
    after = engine.module_state_dict()
    assert [name for name in before if not same_bits(before[name], after[name])] == []


def merged_changes(comm: Any, stage: int, precision: str, dtype: torch.dtype | None) -> None:
    """A server that gets the changes of merged weights has every bit, and training is not disturbed."""
    torch.manual_seed(0)
    keys: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}
    keys |= {} if precision == "fp32" else {precision: {"enabled": True}}
    made = config(stage, zero_optimization=RELEASED if stage == 3 else {}, **keys)
    engine, server, sizes = zero_full.initialize(model=seeded(AdaptedLanguage), config=made)[0], Server(), []

    def push() -> None:
        before = engine.module_state_dict()
        weights = engine.weights(3000, True, dtype, merge_adapters=True)
        names = {*weights.names}
        server.update(weights)
        sizes.append(server.received)
        want = dict(engine.weights(dtype=dtype, merge_adapters=True))
        assert names == {*want} and server.differs_from(want) == []
        after = engine.module_state_dict()
        assert [name for name in before if not same_bits(before[name], after[name])] == []

    push()
    push()
    assert sizes[1] == 0
    for step in range(2):
        train_step(engine, step, comm.rank)
        push()
        assert server.sparse
    weights = engine.weights(3000, True, dtype, merge_adapters=True)
    train_step(engine, 2, comm.rank)
    next(weights, None)
    del weights  # what was not iterated to its end is sent again
    push()
    base = engine.module.blocks[0].up.base_layer.weight
    with zero_full.GatheredParameters([base], modifier_rank=0):
        base.data.mul_(2)
    push()
    assert sizes[-1] > 0 and "blocks.0.up.weight" not in server.sparse
    engine.weights(delta=True, dtype=dtype)  # another hand-over: it begins with everything
    push()
    assert sizes[-1] == sizes[0]
    plain = Server()
    plain.update(engine.weights(delta=True))
    train_step(engine, 3, comm.rank)
    changed = list(engine.weights(delta=True))
    assert {name.rpartition(".")[0].rpartition(".")[2] for name, _, _ in changed} == {"lora_A", "lora_B"}
    plain.update(changed)
    assert plain.differs_from(engine.module_state_dict()) == []
    engine.destroy()
    assert 0 < max(sizes[2:4]) < sizes[0]


def disabled_meanwhile(comm: Any, delta: bool, begun: bool) -> None:
    """Adapters are disabled after the call, as in PEFT's `disable_adapter`; merged weights are without."""
    engine = zero_full.initialize(model=seeded(AdaptedLanguage), config=config(1))[0]
    layers: list[Any] = [module for module in engine.module.modules() if isinstance(module, Adapted)]
    weights = engine.weights(bucket_bytes=1, delta=delta, merge_adapters=True)
    if begun:
        next(weights)
    for layer in layers:
        layer.disable_adapters = True
    with pytest.raises(RuntimeError, match="other adapters have become active since"):
        list(weights)
    names = {name for name, *_ in engine.weights(delta=delta, merge_adapters=True)}
    assert "blocks.0.up.weight" in names
    engine.destroy()


def test_adapters_that_change_while_an_iterator_is_read_are_an_error() -> None:
    run_each(disabled_meanwhile, 2, [(d, b) for d in (False, True) for b in (False, True)])


def test_changes_of_merged_weights_and_of_adapters_alone() -> None:
    run_each(merged_changes, 2, [(1, "bf16", None), (3, "bf16", None), (3, "fp32", torch.bfloat16)])


def test_adapters_are_merged_and_base_weights_come_back_bit_for_bit() -> None:
    run_each(adapts, 2, [(0, "fp32"), (2, "bf16"), (3, "bf16")])


# DeepSpeed's hybrid engine -----------------------------------------------------------------------


def hybrid(comm: Any, stage: int, by_name: str, keys: Mapping[str, Any]) -> None:
    """`engine.generate` of a configuration's hybrid engine, under either name."""
    initialize = zero_full.initialize if by_name == "zero_full" else deepspeed_initialize
    section = {"enabled": True, **keys}
    made = config(stage, zero_optimization=RELEASED if stage == 3 else {}, hybrid_engine=section)
    engine = initialize(model=seeded(AdaptedLanguage), config=made)[0]
    assert type(engine) is (HybridEngine if by_name == "zero_full" else DeepSpeedEngine)
    before = engine.module_state_dict()
    plain = Language().eval()
    plain.load_state_dict(merged_by_hand(before))
    want = plain.generate(PROMPTS)
    assert torch.equal(engine.generate(PROMPTS), want)
    if keys.get("pin_parameters", True):
        assert engine.generate(PROMPTS, new=2 + 3 * comm.rank).shape[1] == PROMPT + 2 + 3 * comm.rank
    train_step(engine, 0, comm.rank)
    frozen = [name for name in before if "lora_" not in name]
    after = engine.module_state_dict()
    assert [name for name in frozen if not same_bits(before[name], after[name])] == []
    engine.destroy()


def test_the_hybrid_engine_of_a_configuration_generates() -> None:
    cases: list[Any] = [(1, "zero_full", {}), (3, "deepspeed", {"release_inference_cache": True})]
    run_each(hybrid, 2, [*cases, (3, "zero_full", {"pin_parameters": False})])
