"""Hugging Face's models do at every stage what they do in plain torch: train, generate, are saved."""

from importlib.util import find_spec
from pathlib import Path

import pytest

if not (find_spec("transformers") and find_spec("peft")):
    pytest.skip("needs transformers and peft: `make test-hf` installs them", allow_module_level=True)

from tests.hf import saving, training, uses
from tests.hf.families import FAMILIES
from tests.hf.players import NUMBERS, Run, limits
from tests.worlds import POOL

pytestmark = pytest.mark.hf
SAME = {"fp32": 1e-5, "bf16": 1e-2}  # logits of the same values
EVERYTHING = [Run(family, numbers) for family in FAMILIES for numbers in NUMBERS]
TIED_AND_NOT = [Run(family, numbers) for family in ("GPT-2", "Qwen3", "Llama") for numbers in NUMBERS]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_family_trains_as_in_plain_torch(stage: int) -> None:
    assert training.wrong(training.runs(stage), 2) == []


def test_three_ranks_have_parts_of_unequal_sizes() -> None:
    assert training.wrong((Run(family) for family in FAMILIES), 3) == []


def test_modules_by_themselves_and_generation_give_plain_torchs_logits_at_stage_3() -> None:
    for off in POOL.run(uses.all_differences, 2, 2, EVERYTHING, limit=170, collective=60):
        limits = {cell: limit_of(cell) for cell in off}
        assert {cell: value for cell, value in off.items() if not value <= limits[cell]} == {}


def limit_of(cell: str) -> float:
    numbers = "bf16" if "bf16," in cell else "fp32"
    return limits(cell.split(" (")[0], numbers).parameters if cell.endswith(uses.LATER) else SAME[numbers]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_body_and_head_called_by_themselves_are_trained(stage: int) -> None:
    listed = [Run(run.family, run.numbers, stage=stage) for run in TIED_AND_NOT]
    for off in POOL.run(uses.parts_apart, 2, 2, listed, limit=120, collective=60):
        assert max(off.values()) <= 1e-4, off


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_reach_from_pretrained_and_come_back_unchanged(stage: int, tmp_path: Path) -> None:
    listed = [Run(run.family, run.numbers, stage=stage) for run in EVERYTHING]
    for lost in POOL.run(saving.all_lost, 2, listed, tmp_path, limit=170, collective=60):
        assert len(lost) > len(listed)
        assert {cell: names for cell, names in lost.items() if names} == {}


@pytest.mark.parametrize("start", ["initial values", "Init(weights)", "from_pretrained"])
def test_models_constructed_without_memory_have_the_same_values(tmp_path: Path, start: str) -> None:
    # Adapters: in files there are only theirs, and on the meta device PEFT does not round them to bf16.
    left_out = ["LoRA on bf16"] if start == "initial values" else ["LoRA", "LoRA on bf16"]
    families = [family for family in FAMILIES if family not in left_out]
    for others in POOL.run(saving.constructed, 2, families, tmp_path, start, limit=120, collective=60):
        assert others == {family: [] for family in families}


def test_a_vocabulary_grows_between_init_and_initialize_and_not_later(tmp_path: Path) -> None:
    for found in POOL.run(saving.resized, 2, tmp_path, limit=120, collective=60):
        (refusal,) = found
        assert "model.embed_tokens.weight is sharded" in refusal


# What must not pass ------------------------------------------------------------------------------


def test_a_rank_with_anothers_data_is_noticed_in_every_family() -> None:
    listed = [Run(family, stage=2) for family in FAMILIES]
    assert len(training.wrong(listed, 2, fooled=True)) == 2 * len(listed)


def test_weights_off_by_a_hundredth_are_noticed_in_every_use() -> None:
    listed = [Run(family) for family in FAMILIES]
    for off in POOL.run(uses.all_differences, 2, 2, listed, 1e-2, limit=170, collective=60):
        assert {cell: value for cell, value in off.items() if value <= limit_of(cell)} == {}


def test_weights_changed_on_the_way_are_noticed(tmp_path: Path) -> None:
    listed = [Run("GPT-2"), Run("Mixtral"), Run("LoRA")]
    for lost in POOL.run(saving.all_lost, 2, listed, tmp_path, 1e-3, limit=120, collective=60):
        from_given = [cell for cell in lost if cell.endswith(("pretrained", "module_state_dict", "adapters"))]
        assert from_given and all(lost[cell] for cell in from_given)
