"""Models are read from a config.json, and the lowest stage that fits is found."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_full.__main__ import main
from zero_full.config import resolve
from zero_full.errors import FitError
from zero_full.fit import (
    LOSS,
    Batch,
    Fit,
    Machine,
    Run,
    activations,
    fit,
    read,
    shape_of,
    snippet,
    torchrun,
    with_loss,
)
from zero_full.fit.mesh import cut_for_tensor, layers_of
from zero_full.plan import plan

CONFIGS = Path(__file__).with_name("hf_configs")
PUBLISHED = {  # parameters, as they are published or counted in the published weights
    "bert-base": 109_514_298,
    "bloom": 176_247_271_424,
    "bloom-560m": 559_214_592,
    "deepseek-llm-7b": 6_910_365_696,
    # 671,026,419,200 with the 256 numbers of 58 layers that balance experts, which are a buffer.
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    "falcon-7b": 6_921_720_704,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2b": 2_506_172_416,
    "gemma-3-1b": 999_885_952,
    "gpt-neox-20b": 20_554_567_680,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-2-70b": 68_976_648_192,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "olmo-1b": 1_176_764_416,
    "olmo-2-7b": 7_298_617_344,
    "opt-1.3b": 1_315_758_080,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "pythia-1.4b": 1_414_647_808,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
    "smollm-135m": 134_515_008,
    "stablelm-2-1.6b": 1_644_515_328,
    "tinyllama-1.1b": 1_100_048_384,
}
GB = 10**9


def given(name: str, **keys: Any) -> dict[str, Any]:
    """A published config.json with other keys; None takes one out."""
    config = {**json.loads((CONFIGS / f"{name}.json").read_text()), **keys}
    return {key: value for key, value in config.items() if value is not None}


def small() -> dict[str, Any]:
    return given("llama-3.2-1b", num_hidden_layers=2, hidden_size=256, intermediate_size=512)


def test_each_published_model_has_its_number_of_parameters() -> None:
    assert sorted(PUBLISHED) == sorted(path.stem for path in CONFIGS.glob("*.json"))
    for name, count in PUBLISHED.items():
        model = read(CONFIGS / f"{name}.json").model()
        assert sum(p.numel() for p in model.parameters()) == count, name


@pytest.mark.parametrize(
    "config, message",
    [
        ([1], "must be a JSON object"),
        ({}, "model_type is missing"),
        (given("llama-3-8b", model_type="mamba"), "model_type: 'mamba' is not supported, only bert, bloom"),
        ({"model_type": "gemma3", "text_config": given("gemma-3-1b")}, r"text_config is \(gemma3_text\)"),
        (given("llama-3-8b", intermediate_size=None), "intermediate_size is missing: llama"),
        (given("qwen3-8b", head_dim=None), "head_dim is missing: qwen3"),
        (given("llama-3-8b", hidden_size="4096"), "hidden_size: '4096' is not a whole number"),
        (given("llama-3-8b", hidden_size=True), "hidden_size: True is not a whole number"),
        (given("llama-3-8b", num_hidden_layers=10**8), "num_hidden_layers: 100,000,000 layers exceed"),
        (
            given("llama-3-8b", hidden_size=4097),
            "hidden_size: 4,097 is not divisible by num_attention_heads",
        ),
        (
            given("llama-3-8b", tie_word_embeddings="no"),
            "tie_word_embeddings: 'no' is not true or false",
        ),
        (
            given("opt-1.3b", word_embed_proj_dim=512),
            "word_embed_proj_dim: 512 is not supported for opt, only 2048",
        ),
        (given("falcon-7b", bias=True), "bias: true is not supported for falcon, only none"),
        (
            given("deepseek-v3", first_k_dense_replace=62),
            "first_k_dense_replace is larger than num_hidden_layers",
        ),
        (given("deepseek-v3", q_lora_rank=None), "q_lora_rank is missing"),
        *(
            (given(name, num_key_value_heads=None), "num_key_value_heads is missing")
            for name in ("mistral-7b", "mixtral-8x7b", "qwen2.5-7b", "qwen3-8b", "qwen3-30b-a3b")
        ),
        *(
            (given(name, num_key_value_heads=None), "num_key_value_heads is missing")
            for name in ("gemma-2b", "gemma-2-2b", "gemma-3-1b", "stablelm-2-1.6b")
        ),
        (
            given("llama-3-8b", num_key_value_heads=5),
            "num_attention_heads: 32 is not divisible by num_key_value_heads, 5",
        ),
        (
            given("mixtral-8x7b", num_experts_per_tok=9),
            "num_experts_per_tok is larger than num_local_experts",
        ),
        (given("bert-base", add_cross_attention=True), "add_cross_attention: true is not supported"),
        ({"model_type": "x", "text_config": {"model_type": ["llama"]}}, "model_type: 'x' is not supported"),
    ],
    ids=str,
)
def test_what_is_not_known_is_named(config: Any, message: str) -> None:
    with pytest.raises(FitError, match=message):
        shape_of(config)


@pytest.mark.parametrize(
    "config, context, message",
    [
        (given("gpt2"), 2048, "--context: 2,048 tokens exceed n_positions, 1,024"),
        (given("bert-base"), 513, "--context: 513 tokens exceed max_position_embeddings, 512"),
        (
            given("llama-3-8b", vocab_size=10**9, hidden_size=10**9, num_attention_heads=8),
            1024,
            "vocab_size: a parameter of 1,000,000,000,000,000,000 elements exceeds",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_named(config: Any, context: int, message: str) -> None:
    with pytest.raises(FitError, match=message):
        fit(shape_of(config), Machine(1, 8, 80 * GB), Run(Batch(1, context)))


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "phi-2", "olmo-1b"])
def test_a_head_is_as_wide_as_it_says(name: str) -> None:
    shape = shape_of(given(name, head_dim=48, num_hidden_layers=1))
    weights = dict(shape.model().named_parameters())
    assert weights["model.layers.0.self_attn.q_proj.weight"].shape[0] == 48 * shape.sizes["heads"]


def test_the_loss_is_counted_where_the_vocabulary_is_large() -> None:
    shape, run = shape_of(given("gemma-2b")), Run(Batch(1, 8192, checkpoints=True))
    saved, most = activations(shape, run.batch, 2), with_loss(shape, run.batch, 2)
    assert saved is not None and most == saved + LOSS[2] * 256_000 * 8192
    found = fit(shape, Machine(1, 8, 32 * GB), run)
    assert {each.verdict for each in found.candidates[:3]} == {"no"}


def test_what_transformers_takes_for_a_missing_key_is_told() -> None:
    shape = shape_of(given("gpt2", architectures=["GPT2ForSequenceClassification"]))
    assert shape.notes == (
        "architectures: 'GPT2ForSequenceClassification'; counted as GPT2LMHeadModel",
        "n_inner: not given, so 3,072",
        "tie_word_embeddings: not given, so true",
    )


def test_the_lowest_stage_that_leaves_room_is_taken_and_its_files_are_those_that_were_planned() -> None:
    shape, run = shape_of(given("llama-3.2-1b", num_hidden_layers=4)), Run(Batch(1, 512))
    every = fit(shape, Machine(1, 8, 10**13), run)
    assert every.chosen is every.candidates[0]
    peaks = [each.plan.peak for each in every.candidates]
    assert peaks[0] > peaks[1] > peaks[2] and len(peaks) == 4
    for place, peak in enumerate(peaks[:3]):
        roomy = fit(shape, Machine(1, 8, peak * 10 // 9 + 1), run)
        assert [each.verdict for each in roomy.candidates].index("yes") == place
        assert roomy.chosen is roomy.candidates[place]
    tight = fit(shape, Machine(1, 8, peaks[2]), run)
    assert tight.chosen is tight.candidates[2] and tight.chosen.verdict == "tight"
    config = roomy.chosen.config if roomy.chosen else {}
    assert resolve(config, 8).warnings == ()
    again = plan(shape.model(), config, 8)
    assert again.between_steps == roomy.candidates[2].plan.between_steps
    assert roomy.candidates[2].plan.activations == with_loss(shape, run.batch, 2)


def test_state_waits_elsewhere_only_where_there_is_room_and_need() -> None:
    shape, run = shape_of(small()), Run(Batch(1, 16))
    least = fit(shape, Machine(1, 1, GB), run).candidates[0].plan
    too_small = least.parameters * 2
    assert fit(shape, Machine(1, 1, too_small), run).chosen is None
    names = [each.name for each in fit(shape, Machine(1, 1, too_small, GB // 100, GB), run).candidates]
    assert names[4:] == [
        "stage 2, state on the host",
        "stage 3, state on the host",
        "stage 3, state in a file",
    ]
    found = fit(shape, Machine(1, 1, 10 * GB, 100 * GB), run)
    assert len(found.candidates) == 4, "nothing waits where there is no need"


def test_checkpointing_keeps_less_and_unknown_activations_are_no_yes() -> None:
    shape = shape_of(given("llama-3-8b"))
    kept = [activations(shape, Batch(2, 4096, checkpoints), 2) or 0 for checkpoints in (False, True)]
    assert kept[1] < kept[0] / 4
    unknown = fit(
        shape_of(given("deepseek-v3", num_hidden_layers=4)), Machine(1, 64, 10**13), Run(Batch(1, 16))
    )
    assert unknown.candidates[0].verdict == "perhaps" and "not known" in unknown.candidates[0].reason


def test_the_command_prints_and_writes_what_is_to_be_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, written = tmp_path / "config.json", tmp_path / "ds.json"
    config.write_text(json.dumps(small()))
    asked = ["fit", "--hf-config", str(config), "--world", "4", "--hosts", "2", "--memory", "80GB"]
    assert main([*asked, "--context", "64", "--checkpointing", "--write", str(written)]) == 0
    printed = capsys.readouterr().out
    assert "> stage 0: yes" in printed and "gradient_checkpointing_enable" in printed
    assert torchrun(Machine(2, 2, GB)) in printed
    assert all(len(line) <= 90 for line in printed.splitlines() if not line.startswith("torchrun"))
    assert resolve(str(written), 4).config.zero_optimization.stage == 0
    assert main([*asked, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["chosen"] for line in lines] == [True, False, False, False]
    assert main([*asked[:-1], "1MB"]) == 1
    assert "Nothing fits. Try --checkpointing, --host-memory, --disk or" in capsys.readouterr().out
    for wrong, message in {
        ("--world", "3"): "--world: 3 GPUs cannot be divided equally among 2 hosts",
        ("--write", str(tmp_path)): f"--write: {tmp_path} is a directory. Name a file in it",
        ("--memory", "much"): "--memory: 'much' is not a size",
        ("--memory", "80"): "--memory 80 has no unit: write it as in 80GB",
        ("--context", "0"): "--context: 0 is less than 1",
        ("--write", str(tmp_path / "none" / "ds.json")): "none is not a directory",
        ("--hf-config", str(tmp_path / "none")): "config.json",
        ("--hf-config", str(Path(__file__))): "is not JSON",
    }.items():
        with pytest.raises(SystemExit):
            main([*asked, *wrong])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "precision, dtype, checkpoints",
    [("fp32", "float32", False), ("mixed", "bfloat16", True), ("mixed16", "bfloat16", False)],
)
def test_the_snippet_constructs_what_was_planned(precision: str, dtype: str, checkpoints: bool) -> None:
    text = snippet(shape_of(given("bert-base")), Run(Batch(1, 16, checkpoints), precision=precision))
    compile(text, "train.py", "exec")
    assert f"AutoModelForMaskedLM.from_config(config, dtype=torch.{dtype})" in text
    assert ("gradient_checkpointing_enable" in text) is checkpoints


def test_a_shape_allocates_nothing() -> None:
    model = read(CONFIGS / "bloom.json").model()
    assert {p.device for p in model.parameters()} == {torch.device("meta")}


def on_mesh(name: str, micro_batches: int = 4, **mesh: int) -> Fit:
    machine = Machine(1, 8, 80 * 10**9, host_memory=10**12, **mesh)
    return fit(read(CONFIGS / f"{name}.json"), machine, Run(Batch(1, 1024), micro_batches))


def test_a_tensor_parallel_rank_holds_parts_of_the_matrices() -> None:
    width, inner, layers, words = 4096, 14336, 32, 128_256
    block = 2 * width * width + 2 * width * (width // 4) + 3 * width * inner
    ranks = 4
    found = on_mesh("llama-3-8b", tensor=ranks)
    norms = (2 * layers + 1) * width
    numel = words * width + norms + (layers * block + words * width) // ranks
    plans = [each.plan for each in found.candidates]
    assert [each.stage for each in plans] == [0, 1, 2, 3]
    assert plans[0].numel == numel and plans[0].parameters == pytest.approx(2 * numel, rel=1e-4)
    assert {each.world for each in plans} == {8 // ranks} and {each.tensor_ranks for each in plans} == {ranks}
    assert "yes" not in {each.verdict for each in found.candidates}  # activations are not known


def test_a_tied_output_layer_is_not_cut() -> None:
    shape = read(CONFIGS / "llama-3.2-1b.json")
    assert "lm_head" not in cut_for_tensor(shape, shape.model(), 2)
    untied = read(CONFIGS / "llama-3-8b.json")
    assert cut_for_tensor(untied, untied.model(), 2)["lm_head"] == "Colwise"


def test_a_pipeline_is_tried_at_stages_0_and_1_and_holds_what_its_stages_have() -> None:
    for name in ("llama-3.2-1b", "gpt2"):
        shape = read(CONFIGS / f"{name}.json")
        found = on_mesh(name, pipe=4)
        assert {each.plan.stage for each in found.candidates} == {0, 1}
        made = found.candidates[1].plan
        assert made.numel == PUBLISHED[name] and len(made.places) == 4 and made.world == 2
        layer = activations(shape, Batch(1, 1024), 2, 1, 1, False)
        first = made.places[0].pipeline
        assert first is not None and first.in_flight == (4,) and layer is not None
        blocks = first.layers[0][1] - sum(not block for _, block in [*layers_of(shape.model())][:3])
        assert made.places[0].activations == 4 * blocks * layer
        whole = activations(shape, Batch(1, 1024), 2)
        last = made.places[-1].activations
        assert (
            whole is not None
            and last is not None
            and last < whole + LOSS[2] * 1024 * shape.sizes["vocabulary"]
        )
        assert (
            made.places[1].received == 2 * made.places[0].received == 4 * 2 * 2 * 1024 * shape.sizes["width"]
        )


@pytest.mark.parametrize(
    ("name", "mesh", "message"),
    [
        ("llama-3-8b", {"tensor": 3}, "--tensor: 8 GPUs cannot be divided into groups of 3"),
        ("llama-3-8b", {"pipe": 3}, "--pipe: 8 GPUs cannot be divided into groups of 3"),
        ("llama-3-8b", {"pipe": 2, "tensor": 2}, "not supported inside a pipeline stage"),
        ("llama-3-8b", {"pipe": 8}, "1F1B needs at least as many micro-batches as --pipe, 8, not 4"),
        ("gemma-2b", {"tensor": 2}, "--tensor: num_key_value_heads, 1, is not divisible by 2"),
        ("gpt2", {"tensor": 2}, "--tensor: gpt2 is not supported, only gemma, "),
    ],
)
def test_meshes_that_cannot_be_are_named(name: str, mesh: dict[str, int], message: str) -> None:
    with pytest.raises(FitError, match=message):
        on_mesh(name, **mesh)


def test_the_command_knows_meshes(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["fit", "--hf-config", str(CONFIGS / "llama-3-8b.json"), "--world", "16", "--memory", "80GB"]
    assert main([*asked, "--tensor", "2"]) == 0
    text = capsys.readouterr().out
    assert "8 data ranks x 2 tensor ranks" in text and f"{PUBLISHED['llama-3-8b']:,} parameters" in text
    code = text[text.index("train.py:\n") + 10 : text.index("start:")]
    compile(code, "train.py", "exec")
    assert "mesh=mesh)" in code and '"model.layers.*.self_attn.o_proj": RowwiseParallel()' in code
    assert main([*asked, "--pipe", "4", "--micro-batches", "4"]) == 0
    text = capsys.readouterr().out
    assert "4 data ranks x 4 pipeline ranks (1f1b)" in text and "PipelineModule(layers, num_stages=4" in text
    with pytest.raises(SystemExit):
        main([*asked, "--tensor", "0"])
    assert "--tensor: 0 is less than 1" in capsys.readouterr().err
