"""Weights on their way to `from_pretrained` and back: each way must end at the same values."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import zero_full
from tests.hf.families import FAMILIES, llama
from tests.hf.players import Full, Run, playing

State = dict[str, Tensor]
Way = Callable[[Full, State, Path], State]  # an engine, its consolidated state dict, a folder of this way


def read(directory: Path, dtype: torch.dtype, like: nn.Module) -> State:
    """By Hugging Face, and nothing may be missing."""
    model, told = type(like).from_pretrained(directory, dtype=dtype, output_loading_info=True)
    assert not any(told.values()), told
    return model.state_dict()


def by_save_pretrained(full: Full, state: State, directory: Path) -> State:
    """Hugging Face writes what zero_full has consolidated."""
    if full.rank == 0:
        full.module.save_pretrained(directory, state_dict=dict(state), max_shard_size="20KB")
    dist.barrier()
    return read(directory, dtype_of(state), full.module)


def by_16bit_model(filename: str, full: Full, state: State, directory: Path) -> State:
    """zero_full writes one file."""
    full.engine.save_16bit_model(directory, filename)
    if full.rank == 0:
        full.module.config.save_pretrained(directory)
    dist.barrier()
    return read(directory, dtype_of(state), full.module)


def by_weights(full: Full, state: State, directory: Path) -> State:
    """zero_full writes files and an index."""
    full.engine.save_weights(directory, max_shard_bytes=20_000)
    if full.rank == 0:
        full.module.config.save_pretrained(directory)
    dist.barrier()
    return read(directory, dtype_of(state), full.module)


def back_by_load_weights(full: Full, state: State, directory: Path) -> State:
    """What Hugging Face wrote under the module's own names, read into an engine whose weights are others."""
    if full.rank == 0:
        own_names: dict[str, Any] = {"save_original_format": False, "max_shard_size": "20KB"}
        full.module.save_pretrained(directory, state_dict=dict(state), **own_names)
    dist.barrier()
    full.engine.load_module_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    full.engine.load_weights(directory)
    return full.engine.module_state_dict()


def refused(full: Full, state: State, directory: Path) -> State:
    """Files with the names and shapes of an older model are refused, and nothing is loaded."""
    if full.rank == 0:
        full.module.save_pretrained(directory, state_dict=dict(state))
    dist.barrier()
    with pytest.raises(zero_full.CheckpointError, match=OLDER_NAMES[full.run.family]):
        full.engine.load_weights(directory)
    return full.engine.module_state_dict()


def back_by_state_dict(full: Full, state: State, directory: Path) -> State:
    """The state dict of a model from `from_pretrained`, loaded into an engine whose weights are others."""
    if full.rank == 0:
        full.module.save_pretrained(directory, state_dict=dict(state))
    dist.barrier()
    full.engine.load_module_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    full.engine.load_module_state_dict(read(directory, dtype_of(state), full.module))
    return full.engine.module_state_dict()


def adapters(full: Full, state: State, directory: Path) -> State:
    """Only the adapters, by PEFT, put on a base model again."""
    if full.rank == 0:
        full.module.save_pretrained(directory, state_dict=dict(state))
    dist.barrier()
    torch.manual_seed(0)
    base = llama()
    for p, theirs in zip(base.parameters(), base_parameters(full.module), strict=True):
        p.data = p.data.to(theirs.dtype)
    assert {value.dtype for value in load_file(directory / "adapter_model.safetensors").values()} == {
        torch.float32
    }
    return peft.PeftModel.from_pretrained(base, directory).state_dict()


def base_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Without the adapters'."""
    return (p for name, p in model.named_parameters() if "lora_" not in name)


def dtype_of(state: State) -> torch.dtype:
    return next(iter(state.values())).dtype


WAYS: dict[str, Way] = {
    "save_pretrained": by_save_pretrained,
    "save_16bit_model": partial(by_16bit_model, "pytorch_model.bin"),
    "save_16bit_model, safetensors": partial(by_16bit_model, "model.safetensors"),
    "save_weights": by_weights,
    "load_module_state_dict": back_by_state_dict,
    "load_weights": back_by_load_weights,
}


OLDER_NAMES = {"Mixtral": "block_sparse_moe.experts.0.w1", "ViT": "attention.attention.query"}


def ways(run: Run) -> dict[str, Way]:
    """What can be done with this family."""
    if run.family.startswith("LoRA"):
        return {"adapters": adapters}
    return WAYS | ({"load_weights, older names": refused} if run.family in OLDER_NAMES else {})


def lost(full: Full, name: str, directory: Path, spoil: float = 0.0) -> list[str]:
    """Names whose values are others after this way."""
    state = full.engine.module_state_dict()
    for key, value in full.values().items():
        assert torch.equal(value.to(state[key].dtype), state[key]), f"{key} is not its master"
    assert state.keys() == FAMILIES[full.run.family].make().state_dict().keys()
    given = {key: value * (1 + spoil) for key, value in state.items()} if spoil else state
    after = ways(full.run)[name](full, given, directory)
    return [
        key
        for key in sorted(state.keys() | after.keys())
        if key not in state or key not in after or not torch.equal(after[key], state[key])
    ]


def all_lost(comm: Any, listed: Sequence[Run], directory: Path, spoil: float = 0.0) -> dict[str, list[str]]:
    """What every way of every run has lost, after a step."""
    losses = {}
    for place, run in enumerate(listed):
        with playing(run, comm.rank) as full:
            full.train(range(1))
            for number, name in enumerate(ways(run)):
                folder = directory / f"{place}-{number}"
                losses[f"{run}, {name}"] = lost(full, name, folder, spoil)
    return losses


# Constructed without memory ----------------------------------------------------------------------


def constructed(comm: Any, families: Sequence[str], directory: Path, start: str) -> dict[str, list[str]]:
    """Names whose values are not those of plain construction, or not those in files of Hugging Face."""
    others = {}
    for family in families:
        plain, weights = FAMILIES[family].make(), None
        if start != "initial values":
            weights = directory / family
            with torch.no_grad():
                for p in plain.parameters():
                    p.mul_(1.5)
            if comm.rank == 0:
                plain.save_pretrained(weights, save_original_format=False)
            dist.barrier()
        if start == "from_pretrained":
            with zero_full.Init():
                model = type(plain).from_pretrained(weights)
        else:
            with zero_full.Init(weights=weights):
                model = FAMILIES[family].make()
        with playing(Run(family), comm.rank, module=model) as full:
            state = full.engine.module_state_dict()
        others[family] = [name for name, value in plain.state_dict().items() if not value.equal(state[name])]
    return others


# A larger vocabulary -----------------------------------------------------------------------------


def resized(comm: Any, directory: Path) -> list[str]:
    """Parameters whose old rows are others after `resize_token_embeddings`, and what a later resize says."""
    plain = llama()
    if comm.rank == 0:
        plain.save_pretrained(directory)
    dist.barrier()
    with zero_full.Init():
        model = type(plain).from_pretrained(directory)
    more = plain.config.vocab_size + 8
    model.resize_token_embeddings(more)
    with playing(Run("Llama"), comm.rank, module=model) as full:
        state = full.engine.module_state_dict()
        changed = [
            name for name, value in plain.state_dict().items() if not value.equal(state[name][: len(value)])
        ]
        new = state["lm_head.weight"][-8:]
        assert len(state["model.embed_tokens.weight"]) == len(state["lm_head.weight"]) == more
        full.train(range(1))
        assert new.isfinite().all() and not new.equal(full.engine.module_state_dict()["lm_head.weight"][-8:])
        with pytest.raises(RuntimeError) as error:
            full.module.resize_token_embeddings(more + 8)
    return [*changed, str(error.value)]
