"""What is done with a model between steps: whole and part by part, to generate; as plain torch does it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zero_full
from tests.hf.families import FAMILIES, Batch
from tests.hf.players import STEPS, Full, Plain, Run, playing
from tests.hf.training import distance, wanted

LATER = "training goes on"
Act = Callable[[nn.Module, Batch, int], list[Tensor]]  # a model, inputs without labels, a rank


@dataclass(frozen=True)
class Use:
    """Something a user does with a model."""

    name: str
    act: Act
    unwrapped: bool = False  # inside unwrap_model_for_generation


# Calls -------------------------------------------------------------------------------------------


def whole(model: Any, inputs: Batch, rank: int) -> list[Tensor]:
    more = {"decoder_input_ids": inputs["input_ids"]} if model.config.is_encoder_decoder else {}
    return [model(**inputs, **more).logits]


def part(path: str, model: nn.Module, inputs: Batch, rank: int) -> list[Tensor]:
    """A module by itself, never the root."""
    return [model.get_submodule(path)(**inputs).last_hidden_state]


def body_then_head(body: str, model: nn.Module, inputs: Batch, rank: int) -> list[Tensor]:
    """Two modules in turn; with tied weights, both use the same parameter."""
    hidden = model.get_submodule(body)(**inputs).last_hidden_state
    return [hidden, model.get_output_embeddings()(hidden)]


def encoder_then_decoder(model: nn.Module, inputs: Batch, rank: int) -> list[Tensor]:
    """As retrieval and distillation do."""
    hidden = model.get_encoder()(**inputs).last_hidden_state
    more = {"encoder_hidden_states": hidden, "encoder_attention_mask": inputs["attention_mask"]}
    decoded = model.get_decoder()(input_ids=inputs["input_ids"], **more).last_hidden_state
    return [hidden, decoded, model.get_output_embeddings()(decoded)]


def embeddings(model: nn.Module, inputs: Batch, rank: int) -> list[Tensor]:
    """The embedding by itself, and its output given to the model."""
    vectors = model.get_input_embeddings()(inputs["input_ids"])
    mask = inputs["attention_mask"]
    return [vectors, model(inputs_embeds=vectors, attention_mask=mask).logits]


def base_model(model: Any, inputs: Batch, rank: int) -> list[Tensor]:
    """Without adapters, as the reference model of preference training."""
    with model.disable_adapter():
        return [model(**inputs).logits]


# Generation --------------------------------------------------------------------------------------


def generated(settings: dict[str, Any], model: Any, inputs: Batch, rank: int) -> list[Tensor]:
    """The logits of every new token."""
    torch.manual_seed(7)  # of sampling
    settings = {"max_new_tokens": 5, **settings}
    out = model.generate(**inputs, **settings, return_dict_in_generate=True, output_logits=True)
    assert len(out.logits) == settings["max_new_tokens"]
    return [torch.stack(out.logits), out.sequences]


def longer_on_later_ranks(model: Any, inputs: Batch, rank: int) -> list[Tensor]:
    return generated({"max_new_tokens": 2 + 3 * rank}, model, inputs, rank)


def ended_by_every_rank_alone(model: Any, inputs: Batch, rank: int) -> list[Tensor]:
    """Ranks that are done go on calling the model for the others: Hugging Face's `synced_gpus`."""
    torch.manual_seed(7)
    new = 2 + 3 * rank
    out = model.generate(
        **inputs, max_new_tokens=new, synced_gpus=True, return_dict_in_generate=True, output_logits=True
    )
    return [torch.stack(out.logits[:new]), out.sequences[:, : inputs["input_ids"].shape[1] + 2]]


GREEDY: dict[str, Any] = {"do_sample": False}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "greedy without a cache": GREEDY | {"use_cache": False},
    "beams": GREEDY | {"num_beams": 3},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "sampled beams": {"do_sample": True, "num_beams": 2},
}
GENERATING = [
    *(Use(f"generate, {name}", partial(generated, settings)) for name, settings in WAYS.items()),
    Use("generate, unwrapped", longer_on_later_ranks, unwrapped=True),
    Use("generate, synced", ended_by_every_rank_alone),
]

# What belongs to whom ----------------------------------------------------------------------------

BODIES = {
    "GPT-2": "transformer",
    "Llama": "model",
    "Qwen3": "model",
    "Mixtral": "model",
    "BERT": "bert",
    "LoRA": "base_model.model.model",
    "LoRA on bf16": "base_model.model.model",
}


def uses(family: str) -> Iterator[Use]:
    """What can be done with this family."""
    kind = FAMILIES[family].inputs
    yield Use("whole", whole)
    yield Use("whole, unwrapped", whole, unwrapped=True)
    if family in BODIES:
        yield Use("body", partial(part, BODIES[family]))
        if family != "BERT":  # has more in its head than the output embedding
            yield Use("body, then head", partial(body_then_head, BODIES[family]))
    if kind == "image":
        yield Use("body", partial(part, "vit"))
    if kind == "translated":
        yield Use("encoder, then decoder", encoder_then_decoder)
    if kind == "causal":
        yield Use("embeddings", embeddings)
    if family.startswith("LoRA"):
        yield Use("adapters disabled", base_model)
    if kind in ("causal", "translated"):
        yield from GENERATING


def plain_copy(full: Full) -> nn.Module:
    """The trained model in plain torch, with what the consolidated state dict says, strictly."""
    state = full.engine.module_state_dict()
    model = FAMILIES[full.run.family].make()
    for mine, theirs in zip(model.parameters(), full.module.parameters(), strict=True):
        mine.data = mine.data.to(theirs.dtype)
    model.load_state_dict(state)
    return model.eval()


def difference(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest of any value; infinite where one of them is not a number."""
    off = [(a.float() - b.float()).abs().nan_to_num(nan=torch.inf) for a, b in zip(got, want, strict=True)]
    return max(float(each.max()) for each in off)


def differences(full: Full, rank: int, spoil: float = 0.0) -> dict[str, float]:
    """Of every use, from plain torch's."""
    family = FAMILIES[full.run.family]
    inputs = {name: value for name, value in family.batch(9, 9, rank).items() if name != "labels"}
    if family.name == "Mixtral":  # its balancing loss cannot generate from masked prompts
        inputs["output_router_logits"] = False
    plain, off = plain_copy(full), {}
    if spoil:
        state = full.engine.module_state_dict()
        full.engine.load_module_state_dict({name: value * (1 + spoil) for name, value in state.items()})
    full.engine.eval()
    for use in uses(family.name):
        unwrapping = zero_full.unwrap_model_for_generation if use.unwrapped else nullcontext
        with torch.no_grad(), unwrapping(full.module) as model:
            got = use.act(model if use.unwrapped else full.module, inputs, rank)
        with torch.no_grad():
            want = use.act(plain, inputs, rank)
        off[use.name] = difference(got, want)
    full.engine.train()
    return off


def all_differences(comm: Any, ranks: int, listed: Sequence[Run], spoil: float = 0.0) -> dict[str, float]:
    """Of every use of every run, after a step; and how far from plain torch training then goes on."""
    off = {}
    for run in listed:
        with playing(run, comm.rank) as full:
            full.train(range(1))
            for name, value in differences(full, comm.rank, spoil).items():
                off[f"{run}, {name}"] = value
            full.train(range(1, STEPS))
            _, before, want = wanted(replace(run, stage=0), ranks)
            off[f"{run}, {LATER}"] = distance(full.values(), before, want)
    return off


# Training part by part ---------------------------------------------------------------------------


def loss_of_parts(model: nn.Module, family: str, batch: Batch) -> Tensor:
    """Body and head are called by themselves, as with a loss of one's own."""
    hidden = model.get_submodule(BODIES[family])(batch["input_ids"]).last_hidden_state
    logits = model.get_output_embeddings()(hidden)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["input_ids"].flatten())


def parts_apart(comm: Any, ranks: int, listed: Sequence[Run]) -> dict[str, float]:
    """How far such a training ends from plain torch's."""
    off = {}
    for run in listed:
        plain = Plain(run, ranks, loss_of_parts)
        before = plain.values()
        plain.train()
        with playing(run, comm.rank, loss_of_parts) as full:
            full.train()
            off[str(run)] = distance(full.values(), before, plain.values())
    return off
