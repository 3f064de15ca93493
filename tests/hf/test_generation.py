"""Hugging Face's `generate` with its cache inside `engine.generation()`, and PEFT's adapters merged."""

from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import pytest

if not (find_spec("transformers") and find_spec("peft")):
    pytest.skip("needs transformers and peft: `make test-hf` installs them", allow_module_level=True)

import torch
from peft import LoraConfig, get_peft_model

import zero_full
from tests.hf.families import FAMILIES
from tests.worlds import run_each
from tests.zero_full.generation_runs import Server, same_bits
from tests.zero_full.runs import config
from tests.zero_full.stage3_runs import RELEASED

pytestmark = pytest.mark.hf
PROMPTS = torch.arange(1, 13).view(2, 6)
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def generates(comm: Any, family: str, stage: int, precision: str) -> None:
    torch.manual_seed(0)
    model = FAMILIES[family].make()
    plain = deepcopy(model)
    keys = {} if precision == "fp32" else {precision: {"enabled": True}}
    zero = RELEASED if stage == 3 else {}
    engine = zero_full.initialize(model=model, config=config(stage, zero_optimization=zero, **keys))[0]
    server, adapts = Server(), "LoRA" in family
    for step in range(2):
        before = engine.module_state_dict()
        plain.load_state_dict(before)
        plain = plain.to(next(iter(before.values())).dtype) if precision != "fp32" and not adapts else plain
        check(engine, plain.eval(), adapts)
        if not adapts:
            server.update(engine.weights(delta=True))
            held = {name: before[name] for name in server.tensors}
            assert [name for name, value in held.items() if not same_bits(value, server.tensors[name])] == []
        after = engine.module_state_dict()
        assert [name for name in before if not same_bits(before[name], after[name])] == []
        x = PROMPTS + comm.rank + step
        engine.backward(engine(input_ids=x, labels=x).loss)
        engine.step()
    engine.destroy()


def check(engine: Any, plain: Any, adapts: bool) -> None:
    """Tokens are the plain model's, also with adapters merged; so are merged weights."""
    want = plain.generate(PROMPTS, **GREEDY)
    with engine.generation() as model:
        assert torch.equal(model.generate(PROMPTS, **GREEDY), want)
        assert torch.equal(model.generate(PROMPTS, use_cache=False, **GREEDY), want)
    if not adapts:
        return
    merged = deepcopy(plain).merge_and_unload()
    with torch.no_grad():
        logits = merged(PROMPTS).logits
    with engine.generation(merge_adapters=True) as model:
        assert torch.equal(model(PROMPTS).logits, logits)
        with model.disable_adapter():
            model(PROMPTS)  # PEFT unmerges in this forward
    items = dict(engine.weights(bucket_bytes=5000, merge_adapters=True))
    state = merged.state_dict()
    assert items.keys() == state.keys(), items.keys() ^ state.keys()
    assert [name for name in state if not torch.equal(items[name], state[name])] == []


def test_generation_of_hugging_faces_models_and_pefts_adapters() -> None:
    cases = [("Llama", 3, "bf16"), ("Qwen3", 1, "bf16"), ("GPT-2", 3, "fp32")]
    run_each(generates, 2, [*cases, ("LoRA", 1, "fp32"), ("LoRA", 3, "fp32"), ("LoRA on bf16", 3, "bf16")])


def switches(comm: Any, stage: int, precision: str) -> None:
    """A server that gets changes has the merged weights of the adapter that PEFT has made the active one."""
    torch.manual_seed(0)
    base = FAMILIES["Llama"].make()
    adapted = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(base, adapted)
    model.add_adapter("other", adapted)
    for name, param in model.named_parameters():
        if "lora_B" in name or "modules_to_save.other" in name:
            param.data.normal_(std=0.1)
    model.set_adapter("default")
    plain = deepcopy(model)
    keys: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}
    keys |= {} if precision == "fp32" else {precision: {"enabled": True}}
    zero = RELEASED if stage == 3 else {}
    later = [p for n, p in model.named_parameters() if "lora_" in n or "modules_to_save" in n]
    made = config(stage, zero_optimization=zero, **keys)
    engine = zero_full.initialize(model=model, model_parameters=later, config=made)[0]
    state = engine.module_state_dict()
    for name, param in plain.named_parameters():
        param.data = param.data.to(state[name].dtype)
    server, step, received = Server(), 0, list[int]()

    def push(active: str) -> None:
        state = engine.module_state_dict()
        plain.load_state_dict(state)
        if active:
            plain.set_adapter(active)
            want = deepcopy(plain).merge_and_unload().state_dict()
        else:
            want = deepcopy(plain).unload().state_dict()
            want["lm_head.weight"] = state["base_model.model.lm_head.original_module.weight"]
        for merged in (engine.weights(merge_adapters=True), None):
            if merged is None:
                server.update(engine.weights(delta=True, merge_adapters=True))
                received.append(server.received)
            found = server.tensors if merged is None else dict(merged)
            assert found.keys() == want.keys(), found.keys() ^ want.keys()
            assert [name for name in want if not same_bits(want[name], found[name])] == [], active
        after = engine.module_state_dict()
        assert [name for name in state if not same_bits(state[name], after[name])] == []

    def train() -> None:
        nonlocal step
        x = PROMPTS + comm.rank + step
        engine.backward(engine(input_ids=x, labels=x).loss)
        engine.step()
        step += 1

    push("default")
    train()
    push("default")
    assert received[1] < received[0]
    for active in ("other", "default", "other"):
        engine.module.set_adapter(active)
        push(active)
        train()
        push(active)
        assert received[-1] < received[0]
    with engine.module.disable_adapter():
        push("")
        push("")
    assert received[-1] == 0
    push("other")
    train()
    push("other")
    engine.destroy()


def test_changes_of_merged_weights_follow_pefts_switches() -> None:
    run_each(switches, 2, [(1, "bf16"), (3, "bf16"), (3, "fp32")])


def differs(comm: Any) -> None:
    model = get_peft_model(FAMILIES["Llama"].make(), LoraConfig(r=2, target_modules=["q_proj"]))
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    engine = zero_full.initialize(model=model, config=config(3, zero_optimization=RELEASED))[0]
    engine.module.set_adapter(["default", "other"][comm.rank])
    with pytest.raises(zero_full.DesyncError, match=r"with adapters \['other'\]"):
        list(engine.weights(delta=True, merge_adapters=True))
    engine.destroy()


def test_ranks_with_other_adapters_active_are_an_error() -> None:
    run_each(differs, 2, [()])
