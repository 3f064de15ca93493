"""The page about the format: what it says is in the files, and its program reads them."""

import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worlds import POOL
from tests.zero_full.checkpoint_runs import Layout, saved_by
from zero_full.checkpoint import open_checkpoint
from zero_full.checkpoint.disk import BLOCK
from zero_full.checkpoint.folder import FORMAT, TEMPORARY, VERSION
from zero_full.checkpoint.json_values import DECODERS, MAPPINGS, SEQUENCES

PAGE = (Path(__file__).parents[2] / "site" / "docs" / "guide" / "checkpoint_format.md").read_text()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("format")
    POOL.run(saved_by, 2, Layout(2, 3), folder)
    return folder / "global_step2"


def first_column(heading: str, column: str) -> set[str]:
    """The names in the first column of a table."""
    table = PAGE.partition(f"\n## {heading}\n")[2].partition(f"\n| {column} |")[2].partition("\n\n")[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_the_program_of_the_page_reads_everything(saved: Path) -> None:
    program = re.search(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    assert program is not None
    names: dict[str, Any] = {}
    exec(compile(program[1], "page", "exec"), names)
    found, source = names["whole_tensors"](saved), open_checkpoint(saved)
    assert found.keys() == {key for key, tensor in source.tensors.items() if tensor.numel}
    for key, tensor in found.items():
        assert torch.equal(tensor.flatten(), source.read_across(key, 0, tensor.numel())), key
        assert tuple(tensor.shape) == source.tensors[key].shape
    assert {key.partition("/")[0] for key in found} == {"parameters", "state", "buffers"}
    path = saved / "rank_00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(AssertionError, match="rank_00001"):
        names["whole_tensors"](saved)
    data[-1] ^= 1
    path.write_bytes(data)


def test_fields_are_those_of_the_page(saved: Path) -> None:
    whole = json.loads((saved / "manifest.json").read_text())
    manifest = whole["manifest"]
    assert first_column("Manifest", "field") == manifest.keys()
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    assert whole.keys() == {"crc32", "manifest"} and zlib.crc32(text.encode()) == whole["crc32"]
    told = json.loads((saved / "rank_00000.json").read_text())
    assert first_column("JSON of a rank", "field") == told.keys()
    assert told["plain"].keys() == {"numbers", "private", "shared"}
    assert first_column("JSON of a rank", "shared") == told["plain"]["shared"].keys()
    assert {path.name for path in saved.iterdir()} == {"manifest.json", *manifest["files"]}
    for name in ("manifest.json", *manifest["files"]):
        assert f"run/global_step1000/{name}" in PAGE or name == "rank_00001.json"


def test_names_and_numbers_are_those_of_the_page() -> None:
    kinds = {*SEQUENCES.values(), *MAPPINGS.values(), *DECODERS, "deque", "tensor"}
    listed = PAGE.partition("\nKinds are ")[2].partition("There is no kind")[0]
    assert set(re.findall(r"`([\w/]+)`", listed)) - {"plain/NUMBER"} == kinds
    assert f"`{FORMAT}`, and {VERSION}" in PAGE and f"Version {VERSION}." in PAGE and BLOCK == 1 << 20
    aside = re.findall(r"^run/(\w+-[0-9a-f]{8}-\w+)/", PAGE, re.M)
    assert len(aside) == 3 and all(TEMPORARY.fullmatch(name) for name in aside)
