"""A model that transformers has cut by its own plan trains on a mesh as in one plain process."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

if not find_spec("transformers"):
    pytest.skip("needs transformers: `make test-hf` installs it", allow_module_level=True)

import zero_full
from tests.worlds import POOL

CLIP, STEPS = 0.5, 3


def tokens(step: int) -> Tensor:
    return torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def save_model(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(folder)


def trained(comm: Any, folder: Path, stages: list[int]) -> list[tuple[dict[str, Tensor], list[float]]]:
    from transformers import LlamaForCausalLM

    mesh, answers = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor")), []
    for stage in stages:
        model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto")
        keys = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": stage},
        }
        engine, *_ = zero_full.initialize(model=model, optimizer=adamw, config=keys, mesh=mesh)
        norms = []
        for step in range(STEPS):
            engine.backward(engine(input_ids=tokens(step), labels=tokens(step)).loss)
            engine.step()
            norms.append(engine.get_global_grad_norm())
        answers.append((engine.module_state_dict(), norms))
        engine.destroy()
    return answers


@pytest.mark.hf
def test_a_model_cut_by_tp_plan_trains_as_in_one_process(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    save_model(tmp_path)
    model, norms = LlamaForCausalLM.from_pretrained(tmp_path), []
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        model(input_ids=tokens(step), labels=tokens(step)).loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    for answers in POOL.run(trained, 2, tmp_path, [0, 1, 2, 3]):
        for whole, found in answers:
            assert found == pytest.approx(norms, rel=1e-4)
            for key, value in model.state_dict().items():
                torch.testing.assert_close(whole[key], value, atol=1e-4, rtol=1e-3)
