"""The guide for real runs: its code compiles, its files and commands are accepted, its messages exist."""

import ast
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from torch.distributed.run import get_args_parser

from zero_full.__main__ import build_parser
from zero_full.config import Config, resolve
from zero_full.config.messages import entries
from zero_full.errors import ConfigError

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "site" / "docs" / "guide"
PAGES = sorted(GUIDE.rglob("*.md"))
MOST = 130  # lines of a page
MOST_OF_A_PART = 145  # readers of the page of errors come to one heading, by the search or a link
BLOCK = re.compile(r"(?:^<!-- (?P<mark>\w+) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
VARIES = re.compile(r"%\.?\d*[sdgf]|\{\}")  # in a message of the log, or for `format`
GAP = "…"  # what varies, on the page


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    kind: str
    mark: str | None  # a comment on the line before
    text: str


def blocks(kind: str) -> list[Block]:
    found = [(page.name, match) for page in PAGES for match in BLOCK.finditer(page.read_text())]
    return [Block(page, m["kind"], m["mark"], m["text"]) for page, m in found if m["kind"] == kind]


def commands(program: str) -> list[list[str]]:
    """The arguments of every line that starts `program`, continued lines joined."""
    lines = [line for b in blocks("bash") for line in b.text.replace("\\\n", " ").splitlines()]
    return [
        shlex.split(line[len(program) :], comments=True) for line in lines if line.startswith(program + " ")
    ]


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    kinds = {m["kind"] for page in PAGES for m in BLOCK.finditer(page.read_text())}
    assert kinds == {"python", "json", "bash", "text", "yaml"}  # yaml: tests/zero_full/test_launch_pages.py
    assert all(page.read_text().count("```") % 2 == 0 for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_are_short(page: Path) -> None:
    lines = re.sub(r"\A---\n.*?\n---\n+", "", page.read_text(), flags=re.S).splitlines()  # without settings
    assert len(lines) <= (MOST_OF_A_PART if page.parent.name == "errors" else MOST)
    assert lines[0].startswith("# ")


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.page)
def test_python_compiles(block: Block) -> None:
    compile(ast.parse(block.text), block.page, "exec")


@pytest.mark.parametrize("block", blocks("json"), ids=lambda block: block.page)
def test_configurations_resolve(block: Block) -> None:
    if block.mark == "fragment":
        json.loads(block.text)
    elif block.mark == "refused":
        with pytest.raises(ConfigError) as caught:
            resolve(json.loads(block.text), 2)
        said = [b.text.strip() for b in blocks("text") if b.page == block.page]
        assert str(caught.value) in said
    else:
        assert resolve(json.loads(block.text), 2).warnings == ()


@pytest.mark.parametrize("block", blocks("bash"), ids=lambda block: block.page)
def test_the_shell_can_read_it(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", commands("python -m zero_full"), ids=" ".join)
def test_our_command_line_takes_them(arguments: list[str]) -> None:
    assert build_parser().parse_args(arguments).command == arguments[0]


@pytest.mark.parametrize("arguments", [*commands("torchrun"), *commands("srun torchrun")], ids=" ".join)
def test_torchrun_takes_them(arguments: list[str]) -> None:
    parser = get_args_parser()
    if "--shutdown-timeout" in arguments and "--shutdown-timeout" not in parser.format_help():
        pytest.skip("this torch is older than 2.12, where the option came")
    options = parser.parse_args(arguments)
    if options.module:
        parts = options.training_script.split(".")
        assert (ROOT.joinpath(*parts).with_suffix(".py")).exists() or (
            ROOT / parts[0] / "__main__.py"
        ).exists()
    else:
        assert options.training_script == "train.py"


# Messages ----------------------------------------------------------------------------------------


def texts() -> Iterator[str]:
    """Every string of the package, with a gap for what is filled in."""
    for path in sorted((ROOT / "zero_full").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield VARIES.sub(GAP, node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else GAP for p in node.values]
                yield "".join(map(str, parts))


@cache
def source() -> list[str]:
    return list(texts())


def fixed_parts(quote: str) -> Callable[[str], bool]:
    """Whether a string has all fixed parts of the quote, in their order."""
    wanted = re.compile(".*".join(re.escape(part) for part in quote.split(GAP) if part.strip()), re.S)
    return lambda text: wanted.search(text) is not None


def occurs(quote: str) -> bool:
    """Whether the package can say what is quoted."""
    return any(map(fixed_parts(quote), source()))


QUOTES = [
    line
    for b in blocks("text")
    if b.page in ("symptoms.md", "refused.md", "metrics.md")
    for line in b.text.splitlines()
]


@pytest.mark.parametrize("quote", QUOTES)
def test_a_quoted_message_is_one_of_ours(quote: str) -> None:
    assert len(max(quote.split(GAP), key=len)) >= 10, "hardly anything is quoted"
    assert occurs(quote)


def test_a_message_that_nobody_raises_is_noticed() -> None:
    assert not occurs("the ranks have lost … their way")
    assert not occurs("has ended … the process of rank")


def test_inline_messages_of_the_configuration_page_are_ours() -> None:
    page = (GUIDE / "configuration.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \| [a-z]", page.partition("## Errors")[2], re.M)
    assert len(quoted) == 5
    assert [quote for quote in quoted if not occurs(quote)] == []


def test_requirements_are_those_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    needed = re.search(r"^dependencies = \[\n(.*?)^\]", project, re.M | re.S)
    python = re.search(r'^requires-python = "(.*)"', project, re.M)
    assert needed and python
    page = (GUIDE / "install.md").read_text()
    missing = [each for each in [python[1], *re.findall(r'^  "(.*?)"', needed[1], re.M)] if each not in page]
    assert missing == []


def test_defaults_are_those_of_the_schema() -> None:
    page = (GUIDE / "configuration.md").read_text()
    rows = re.findall(r"^\| ((?:`[\w.]+`(?:, )?)+) \| `(\S+)` \|", page, re.M)
    shown = {key: json.loads(value) for keys, value in rows for key in re.findall(r"`(.*?)`", keys)}
    assert len(shown) == 6
    real = {entry.key: entry.default for entry in entries(Config())}
    assert {key: real[key] for key in shown} == shown
