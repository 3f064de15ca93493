"""Hugging Face's `generate` with its cache inside `engine.generation()`, and PEFT's adapters merged."""

from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import pytest

if not (find_spec("transformers") and find_spec("peft")):
    pytest.skip("needs transformers and peft: `make test-hf` installs them", allow_module_level=True)

import torch

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
