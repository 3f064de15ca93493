"""The search, typed into as a reader types, on a server and from the file system."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("material", reason="pip install -e '.[site]'")

import messages

from tests import rotation
from tests.site.browser import Open, served
from tests.site.test_guide import QUOTES, fixed_parts, source

pytest_plugins = ["tests.site.fixtures"]

ERRORS = "guide/troubleshooting.html"
WANTED = {  # what is typed -> the page that must be among the first three
    "save_checkpoint": "guide/checkpoints.html",
    "load_checkpoint": "guide/checkpoints.html",
    "NaN": ERRORS,
    "hang": ERRORS,
    "resume": "guide/checkpoints.html",
    "Accelerate": "guide/hugging_face.html",
    "HF Trainer": "guide/hugging_face.html",
    "lora": "guide/hugging_face_loop.html",
    "glossary": "glossary.html",
    "hysteresis": "configuration.html",
    "gradient_clipping": "configuration.html",
    "zero_optimization.stage": "configuration.html",
    "GatheredParameters": "api/zero_full.html",
    "loss.backward()": ERRORS,
    "torchrun": "guide/launch.html",
    "slurm": "guide/slurm.html",
    "kubernetes": "guide/kubernetes.html",
    "tensorboard": "guide/metrics.html",
    "nvme": "guide/offload.html",
    "no_sync": "guide/loop.html",
    "pipeline": "guide/pipeline.html",
    "tensor parallel": "guide/tensor_parallel.html",
    "vLLM": "guide/generation.html",
    "FSDP": "guide/migrate_fsdp.html",
    "all-gather": "api/zero_min.html",
    "0/1 Adam": "lessons/step6_zero_one_adam/lesson.html",
    "learning rate schedule": "configuration.html",
    "multi node": "guide/launch.html",
    "stage 3 slow": ERRORS,
    "muon": "guide/optimizers.html",
    "throughput": "guide/metrics.html",
    "bf16 master weights": "guide/precision.html",
    "gradient accumulation": "guide/loop.html",
}
THE_FIRST = {  # what is typed -> the page that must be the first
    "out of memory": ERRORS,
    "CUDA out of memory": ERRORS,
    "OOM": ERRORS,
    "stage 3": "stage_3.html",
    "zero3": "stage_3.html",
    "lightning": "guide/lightning.html",
}
FIRST = """([page, n]) => [...document.querySelectorAll('.md-search-result__item')].slice(0, n)
    .some(item => item.querySelector('a').href.includes('/' + page))"""
LINKS = "[...document.querySelectorAll('.md-search-result__item > a')].slice(0, 6).map(link => link.href)"


def cleared(page: Any) -> None:
    page.locator("[data-md-component=search-query]").first.click()
    page.keyboard.press("Control+A")
    page.keyboard.press("Delete")
    page.wait_for_function("!document.querySelector('.md-search-result__item')")


def missed(page: Any) -> dict[str, list[str]]:
    """What was typed and did not lead to its page, with what it led to."""
    from playwright.sync_api import TimeoutError

    wrong = {}
    places = {**dict.fromkeys(WANTED, 3), **dict.fromkeys(THE_FIRST, 1)}
    for typed, wanted in {**WANTED, **THE_FIRST}.items():
        cleared(page)
        page.keyboard.insert_text(typed[:-1])
        page.keyboard.type(typed[-1])
        try:
            page.wait_for_function(FIRST, arg=[wanted, places[typed]], timeout=8000)
        except TimeoutError:
            wrong[typed] = page.evaluate(LINKS)
    return wrong


@pytest.mark.parametrize("place", rotation.one_of(["a server", "the file system"]))
def test_what_readers_look_for_is_among_the_first_three(open_page: Open, site: Path, place: str) -> None:
    if place == "the file system":
        assert missed(open_page("index.html")) == {}
        return
    with served(site) as address:
        assert missed(open_page("index.html", base=address)) == {}


def test_a_word_that_is_nowhere_is_not_found(open_page: Open) -> None:
    page = open_page("index.html")
    cleared(page)
    page.keyboard.type("xylophone")
    page.wait_for_function("document.querySelector('.md-search-result__meta').innerText.startsWith('No ')")


def whole(quote: str) -> str:
    """The message that is quoted as the package says it, with something for what varies."""
    said = min(filter(fixed_parts(quote), source()), key=len)
    return re.sub(r"…|{}", "7", said).strip()


def lost(page: Any, anchors: dict[str, str]) -> dict[str, list[str]]:
    """Messages that, pasted, do not lead to their line by one of the first two pages that are found."""
    from playwright.sync_api import TimeoutError

    wrong = {}
    for quote, anchor in anchors.items():
        cleared(page)
        page.keyboard.insert_text(whole(quote))  # as a paste does: no key but the last
        page.keyboard.press("End")
        first = f".md-search-result__item:nth-child(-n+2) > a[href*='#{anchor}']"
        try:
            page.wait_for_selector(first, timeout=8000)
        except TimeoutError:
            wrong[whole(quote)] = page.evaluate(LINKS)
    return wrong


@pytest.mark.parametrize("part", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2, 3))])
def test_a_pasted_message_leads_to_its_line(open_page: Open, part: int) -> None:
    anchors = {message.text: message.anchor for message in messages.quoted()}
    assert set(QUOTES) < set(anchors)
    page = open_page("index.html")
    assert lost(page, dict([*anchors.items()][part::4])) == {}
    anchor = [*anchors.values()][part::4][-1]
    page.locator(f"a[href*='#{anchor}']").first.click()
    page.wait_for_function(f"document.querySelector(':target')?.id === '{anchor}'")
