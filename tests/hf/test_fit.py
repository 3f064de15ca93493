"""The shapes that `fit` reads from a config.json are those of transformers, and so are activations."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.hf
hf = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402

from tests.hf import tensor_snippets  # noqa: E402
from tests.worlds import POOL  # noqa: E402
from zero_full.fit import Batch, activations, read, shape_of  # noqa: E402
from zero_full.fit.model_operations import operations_of  # noqa: E402
from zero_full.plan import activations as planned  # noqa: E402
from zero_full.plan.work import MatrixProduct  # noqa: E402
from zero_full.precision.dtypes import Dtypes  # noqa: E402

CONFIGS = sorted((Path(__file__).parents[1] / "zero_full" / "hf_configs").glob("*.json"))
DROPOUT = ("dropout", "pdrop")
LAYERS = ("num_hidden_layers", "n_layer")


def made(config: Any, model: str) -> nn.Module:
    with torch.device("meta"):
        return getattr(hf, model)(config)


def listed(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Parameters, and which modules around them are called."""
    modules = [(name, m) for name, m in model.named_modules() if any(True for _ in m.parameters())]
    return (
        [(name, tuple(p.shape)) for name, p in model.named_parameters()],
        [(name, type(m).forward is not nn.Module.forward) for name, m in modules],
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_read_as_transformers_reads_it(path: Path) -> None:
    shape = read(path)
    assert listed(shape.model()) == listed(made(hf.AutoConfig.from_pretrained(path), shape.family.model))


class WithLabels(nn.Module):
    """Its loss, of words that are their own labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        """The loss."""
        found: Tensor = self.model(input_ids=words, labels=words).loss
        return found


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_activations_are_estimated_to_a_hundredth(
    monkeypatch: pytest.MonkeyPatch, path: Path, bits: int
) -> None:
    """Of three layers of a published shape."""
    # It would look at values to find several texts in a row, which would need a mask.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda *given: None)
    config = hf.AutoConfig.from_pretrained(path)
    told = json.loads(path.read_text())
    for name in [name for name in vars(config) if any(word in name for word in DROPOUT)]:
        if isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    for name in LAYERS:
        if name in told:
            told[name] = 3
            setattr(config, name, 3)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:3]
    config.use_cache = False
    shape, dtypes = shape_of(told), Dtypes(torch.bfloat16 if bits == 16 else None)
    context = min(1024, getattr(config, "max_position_embeddings", 1024))
    for sequences in (1, 2):
        if sequences == 1 and shape.family.model_type == "falcon":
            continue  # its one head of keys is not copied for the others then: 8% less
        batch = Batch(sequences, context)
        estimate = activations(shape, batch, bits // 8)
        if estimate is None:
            pytest.skip(f"nobody has measured {shape.family.model_type} in {bits} bits")
        words = torch.empty(sequences, context, dtype=torch.int64, device="meta")
        model = made(config, shape.family.model).train()
        assert estimate == pytest.approx(planned(WithLabels(model), [words], dtypes), rel=0.01)
        model.gradient_checkpointing_enable()
        kept = activations(shape, Batch(sequences, context, checkpoints=True), bits // 8)
        again = (estimate - planned_outside(shape, batch, bits)) / 3
        assert kept is not None
        assert kept - again == pytest.approx(planned(WithLabels(model), [words], dtypes), rel=0.01)


def planned_outside(shape: Any, batch: Batch, bits: int) -> int:
    """What the formula says of all that is in no layer."""
    sizes = {**shape.sizes, "context": batch.context}
    return batch.sequences * batch.context * int(shape.family.saved[f"{bits} outside"].value(sizes))


def test_the_snippet_of_tensor_parallelism_trains_and_holds_what_was_planned(tmp_path: Path) -> None:
    ranks = POOL.run(tensor_snippets.planned_and_held, 4, tmp_path, limit=300, collective=100)
    for name in tensor_snippets.FAMILIES:
        for stages in zip(*(rank[name] for rank in ranks), strict=True):
            for kind, (told, _) in stages[0].items():
                assert told == max(each[kind][1] for each in stages), (name, kind)


@pytest.mark.parametrize("name", ["bert-base", "gemma-3-1b", "gpt2", "smollm-135m"])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_operations_are_those_of_transformers_model(name: str, checkpoints: bool) -> None:
    """Of its matrix products, each trained matrix has one in forward and two in backward."""
    told = json.loads((CONFIGS[0].parent / f"{name}.json").read_text())
    layers = next(key for key in LAYERS if key in told)
    shape = shape_of({**told, layers: 2})
    run = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    made = operations_of(shape, Batch(2, 64, checkpoints), run, 2)
    assert not made.unknown
    products = {
        part: sum(n for item, n in work.items.items() if isinstance(item, MatrixProduct))
        for part, work in made.recorder.parts.items()
    }
    assert products["forward"] > 0 and products["backward"] >= 2 * products["forward"]
    assert products["backward"] > 2 * products["forward"] or not checkpoints
