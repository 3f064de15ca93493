"""The page "Fit my model" says what `zero_full.fit` says, and its address holds all that was asked."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import fit_page
import pytest

from tests import rotation
from tests.site.browser import Open
from tests.zero_full.test_fit import given
from zero_full.errors import FitError
from zero_full.fit import PRECISIONS, Batch, Machine, Run, Shape, fit, shape_of, snippet, torchrun

pytest_plugins = ["tests.site.fixtures"]

NAMES = sorted(path.stem for path in fit_page.CONFIGS.glob("*.json"))
KINDS = ("parameters", "gradients", "master", "moments", "gathered", "buckets", "activations", "update")
PLACES = ("sent", "host", "disk", "peak")
LAYERS = ("num_hidden_layers", "n_layer")
GB = 10**9


def shallow(name: str, generator: random.Random) -> dict[str, Any]:
    """A published shape with few layers: as many kinds of buffers, in less time."""
    config = given(name)
    few = {key: generator.choice([4, 5, 7]) for key in LAYERS if key in config}
    return {**config, **few}


def machines(generator: random.Random) -> Machine:
    """From one GPU to many; the host and its disk have room, or nobody says."""
    hosts = generator.choice([1, 1, 2, 8])
    memory = generator.choice([2, 8, 16, 24, 80, 141]) * GB
    host = generator.choice([None, 64 * GB, 10**13])
    disk = None if host is None else generator.choice([None, 10**13])
    return Machine(hosts, generator.choice([1, 2, 3, 8]), memory, host, disk)


def runs(generator: random.Random) -> Run:
    """Of every precision, with checkpointing and without."""
    batch = Batch(generator.choice([1, 2, 5]), generator.choice([128, 1000, 2048]), generator.random() < 0.3)
    return Run(batch, generator.choice([1, 1, 2, 3]), generator.choice(list(PRECISIONS)))


def within(shape: Shape, run: Run) -> Run:
    """With no more tokens than the model has positions."""
    context = min(run.batch.context, shape.sizes.get("positions", run.batch.context))
    return replace(run, batch=replace(run.batch, context=context))


def for_page(machine: Machine, run: Run) -> list[dict[str, Any]]:
    """The same as the page has them."""
    sizes = {"memory": machine.memory, "hostMemory": machine.host_memory, "disk": machine.disk}
    batch = {"sequences": run.batch.sequences, "context": run.batch.context}
    return [
        {"world": machine.world, "hosts": machine.hosts, **sizes},
        {
            **{**batch, "checkpoints": run.batch.checkpoints, "microBatches": run.micro_batches},
            "precision": run.precision,
        },
    ]


FIT = """([config, machine, run]) => {
  const shape = zeroFitShape.shapeOf(config), found = zeroFit.fit(shape, machine, run), { chosen } = found
  const files = chosen && [zeroFit.torchrun(machine), zeroFit.snippet(shape, run)]
  return { ...found, chosen: found.tried.indexOf(chosen), files, notes: shape.notes }
}"""


@pytest.mark.parametrize(
    "names",
    [rotation.part_of(NAMES), pytest.param(3 * NAMES, marks=pytest.mark.slow)],
    ids=["those whose turn it is", "all of them three times"],
)
def test_the_page_says_what_python_says_in_random_runs(open_page: Open, names: Sequence[str]) -> None:
    page, generator = open_page("fit.html"), random.Random(len(names))
    for name in names:
        config = shallow(name, generator)
        shape = shape_of(config)
        machine, run = machines(generator), within(shape, runs(generator))
        expected, shown = fit(shape, machine, run), page.evaluate(FIT, [config, *for_page(machine, run)])
        told = (config, machine, run)
        assert shown["numel"] == expected.candidates[0].plan.numel and shown["notes"] == list(shape.notes), (
            told
        )
        assert len(shown["tried"]) == len(expected.candidates), told
        for each, theirs in zip(expected.candidates, shown["tried"], strict=True):
            sizes = {kind: getattr(each.plan, kind) for kind in (*KINDS, *PLACES)}
            assert {kind: theirs["plan"][kind] for kind in sizes} == sizes, (each.name, *told)
            for said in ("name", "verdict", "reason", "config"):
                assert theirs[said] == getattr(each, said), (each.name, *told)
        if expected.chosen is None:
            assert shown["chosen"] == -1, told
            continue
        assert shown["chosen"] == expected.candidates.index(expected.chosen), told
        assert shown["files"] == [torchrun(machine), snippet(shape, run)], told


WRONG: list[Any] = [
    *([1], {}, given("llama-3-8b", model_type="mamba"), given("llama-3-8b", intermediate_size=None)),
    *(given("llama-3-8b", hidden_size="4096"), given("llama-3-8b", hidden_size=4097)),
    *(given("llama-3-8b", num_hidden_layers=10**8), given("opt-1.3b", word_embed_proj_dim=512)),
    *(given("falcon-7b", bias=True), given("deepseek-v3", first_k_dense_replace=62)),
    {"model_type": "gemma3", "text_config": given("gemma-3-1b")},
    {"model_type": "gemma3", "text_config": {"model_type": ["llama"]}},
    *(given("gemma-2b", num_key_value_heads=None), given("llama-3-8b", num_key_value_heads=5)),
    *(given("mixtral-8x7b", num_experts_per_tok=9), given("gpt2")),
    given("llama-3-8b", vocab_size=10**9, hidden_size=10**9, num_attention_heads=8),
]


def test_the_page_names_the_key_that_python_names(open_page: Open) -> None:
    page = open_page("fit.html")
    for config in WRONG:
        with pytest.raises(FitError) as error:
            fit(shape_of(config), Machine(1, 8, 80 * GB), Run(Batch(1, 2048)))
        page.fill("[name=config]", json.dumps(config))
        said = page.inner_text("#fit-said").replace("tokens in each:", "--context:")
        assert said.replace('"', "'") == str(error.value).replace('"', "'")
        assert page.locator(".tried li").count() == 0 and not page.is_visible(".finished")
    page.fill("[name=config]", "{")
    assert "config.json is not JSON" in page.inner_text("#fit-said")


def test_all_that_was_asked_is_in_the_address(open_page: Open) -> None:
    page = open_page("fit.html", width=390, scheme="dark")
    page.select_option("[name=preset]", "GPT-2 XL")
    fields = {
        "world": "6",
        "hosts": "3",
        "memory": "23.5",
        "hostMemory": "64",
        "sequences": "2",
        "context": "512",
    }
    for name, value in {**fields, "microBatches": "2"}.items():
        page.fill(f"[name={name}]", value)
    page.select_option("[name=precision]", "mixed16")
    page.check("[name=checkpoints]")
    before, url = page.inner_text("#fit-result"), page.url
    assert "torchrun --nnodes 3 --nproc-per-node 2" in before
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    other = open_page(f"fit.html#{url.partition('#')[2]}", width=390)
    assert other.inner_text("#fit-result") == before and other.url == url
    assert other.input_value("[name=config]").count("n_embd") == 1
    assert other.input_value("[name=preset]") == "", "it is the address's, whatever its name"


def test_it_is_used_with_keys_and_its_link_is_copied(open_page: Open) -> None:
    page = open_page("fit.html", permissions=["clipboard-read", "clipboard-write"])
    page.focus("[name=world]")
    page.keyboard.press("Control+A")
    page.keyboard.type("64")
    assert "--nproc-per-node 64" in page.inner_text("[data-name=start]")
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.name") == "copy":
            break
    page.keyboard.press("Enter")
    page.get_by_text("Copied.").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == page.url


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("world", "0", "GPUs: give a number from 1 to 16,384."),
        ("hosts", "3", "GPUs: 8 cannot be divided equally among 3 hosts."),
        ("memory", "", "memory of a GPU, GB: give a number from 1"),
    ],
)
def test_a_machine_that_makes_no_sense_is_named(
    open_page: Open, field: str, value: str, message: str
) -> None:
    page = open_page("fit.html")
    page.fill(f"[name={field}]", value)
    assert message in page.inner_text("#fit-said") and not page.is_visible(".tried li")
