"""Files and indices from strangers: each is refused on every rank, and the model is as it was."""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import zero_full
from tests.worlds import run_in
from tests.zero_full.runs import config
from zero_full.checkpoint import load_weights, weights
from zero_full.checkpoint.safetensors_writer import CODES
from zero_full.errors import CheckpointError

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
VALUES = bytes(range(16))


class Small(nn.Module):
    """What all of these files pretend to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))


def entry(begin: Any = 0, end: Any = 8, shape: Any = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file_of(header: Any, values: bytes = VALUES, length: int | None = None) -> bytes:
    """A file with this header, which may claim another length; bytes are taken as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + values


GOOD = {"a": entry(), "b": entry(8, 16)}
ONE = json.dumps(entry()).encode()
TWO = json.dumps(entry(8, 16)).encode()
FILES: Mapping[str, bytes] = {
    "nothing": b"",
    "half a length": VALUES[:5],
    "length beyond the file": file_of(GOOD, length=10**6),
    "length of all memory": file_of(GOOD, length=2**64 - 8),
    "negative length": file_of(GOOD, length=2**63),
    "length within the header": file_of(GOOD, length=40),
    "no JSON": file_of(b"\x80\x04."),
    "a list": file_of([GOOD]),
    "not UTF-8": file_of(b'{"\xff": 1}'),
    "deep": file_of(b'{"a":' + b"[" * 10**6 + b"]" * 10**6 + b"}"),
    "deep where nobody looks": file_of(b'{"a":{"x":' + b"[" * 10**6 + b"]" * 10**6 + b"}}"),
    "endless number": file_of(b'{"x":{"dtype":"F32","shape":[' + b"9" * 10**6 + b'],"data_offsets":[0,8]}}'),
    "negative offset": file_of({"a": entry(-8, 0), "b": entry(0, 8)}),
    "negative offset at the end": file_of({"a": entry(), "b": entry(8, -1)}),
    "end before begin": file_of({"a": entry(8, 0), "b": entry(8, 16)}),
    "overlap": file_of({"a": entry(0, 8), "b": entry(4, 12)}),
    "the same place": file_of({"a": entry(), "b": entry()}),
    "gap": file_of({"a": entry(), "b": entry(12, 20)}, VALUES + VALUES),
    "beyond the file": file_of({"a": entry(), "b": entry(8, 16)}, VALUES[:12]),
    "far beyond": file_of({"a": entry(), "b": entry(2**63, 2**63 + 8)}),
    "offset that wraps": file_of({"a": entry(), "b": entry(2**64 - 4, 4)}),
    "offset of 80 bits": file_of({"a": entry(), "b": entry(2**80, 2**80 + 8)}),
    "fraction": file_of({"a": entry(), "b": entry(8.0, 16.0)}),
    "more than is told": file_of(GOOD, VALUES * 4),
    "unknown type": file_of({"a": entry(), "b": entry(8, 16, dtype="F33")}),
    "type of another size": file_of({"a": entry(), "b": entry(8, 16, dtype="F64")}),
    "another shape": file_of({"a": entry(), "b": entry(8, 16, (4,))}),
    "shape that wraps": file_of({"a": entry(), "b": entry(8, 16, (2**33, 2**32))}),
    "shape that wraps to nothing": file_of({"a": entry(), "b": entry(8, 8, (2**62, 4, 0))}, VALUES[:8]),
    "negative shape": file_of({"a": entry(), "b": entry(8, 16, (-1, -2))}),
    "name twice": file_of(b'{"a":%b,"b":%b,"b":%b}' % (ONE, ONE, TWO)),
    "name twice, one in disguise": file_of(b'{"a":%b,"b":%b,"\\u0062":%b}' % (ONE, ONE, TWO)),
    "field twice": file_of(b'{"a":%b,"b":{"dtype":"F32",%b}' % (ONE, TWO[1:])),
    "alias twice": file_of(b'{"__metadata__":{"b":"a","b":"c"},"a":%b,"c":%b}' % (ONE, TWO)),
    "metadata twice": file_of(b'{"__metadata__":{},"__metadata__":{},"a":%b,"b":%b}' % (ONE, TWO)),
    "metadata that is no text": file_of({**GOOD, "__metadata__": {"b": ["a"]}}),
    "four bits": file_of({"a": entry(), "b": entry(8, 9, dtype="F4")}, VALUES[:9]),
    "six bits": file_of({"a": entry(), "b": entry(8, 11, (4,), "F6_E2M3")}, VALUES[:11]),
}
REASONS = {  # where the library leaves it to us
    "name twice": r"model.safetensors has an invalid header: the key 'b' occurs twice",
    "name twice, one in disguise": r"model.safetensors has an invalid header: the key 'b' occurs twice",
    "alias twice": r"model.safetensors has an invalid header: the key 'b' occurs twice",
}


def failures_of_loads(comm: Any, folders: list[Path]) -> list[str]:
    """What a load of each folder says, on one model, which must not change."""
    engine, _, _, _ = zero_full.initialize(model=Small(), config=config(3))
    told = []
    for folder in folders:
        try:
            load_weights(engine.module, engine.optimizer, folder, strict=False)
            told.append("nothing was wrong")
        except CheckpointError as error:
            told.append(str(error))
        assert all(value.eq(1).all() for value in engine.module_state_dict().values()), folder
    return told


def all_refused(folders: list[Path]) -> list[str]:
    """What every rank of two hears of each folder, the same on both; a model is not changed by any."""
    told, other = run_in("processes", failures_of_loads, 2, folders)
    assert told == other
    loaded = [path for path, text in zip(folders, told, strict=True) if text == "nothing was wrong"]
    assert loaded == []
    return list(told)


def test_a_file_that_was_made_to_deceive_is_refused(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in FILES]
    for folder, content in zip(folders, FILES.values(), strict=True):
        folder.mkdir()
        (folder / FILE).write_bytes(content)
    told = dict(zip(FILES, all_refused(folders), strict=True))
    for name, text in told.items():
        assert re.search(REASONS.get(name, FILE), text) and len(text) < 1000, (name, text)
    assert re.search("F4|unknown|Invalid", told["four bits"])


def test_the_files_are_refused_for_what_is_wrong_with_them(tmp_path: Path) -> None:
    """The same file without anything wrong loads, so it is not its form that is refused."""
    (tmp_path / FILE).write_bytes(file_of(GOOD))
    engine, _, _, _ = zero_full.initialize(model=Small(), config=config(3))
    load_weights(engine.module, engine.optimizer, tmp_path)
    want = torch.frombuffer(bytearray(VALUES), dtype=torch.float32)
    state = engine.module_state_dict()
    assert torch.equal(torch.cat([state["a"], state["b"]]), want)


def test_a_type_that_torch_cannot_read_is_told_before_anything_changes(tmp_path: Path) -> None:
    """Whatever safetensors opens is either of a type that is read, or refused."""
    (tmp_path / FILE).write_bytes(file_of({"a": entry(), "b": entry(8, 10, dtype="F8_E8M0")}, VALUES[:10]))
    (text,) = all_refused([tmp_path])
    known = "torch cannot read" if "b has dtype" in text else "not a complete safetensors file"
    assert known in text and "F8_E8M0" not in CODES.values()


# Indices -----------------------------------------------------------------------------------------


def index_of(folder: Path, content: bytes | str | dict[str, Any]) -> None:
    text = json.dumps({"weight_map": content}) if isinstance(content, dict) else content
    (folder / INDEX).write_bytes(text.encode() if isinstance(text, str) else text)


def link_up(folder: Path) -> None:
    """The weights are a link to a file outside, by way of one inside."""
    outside = folder.parent / "secret.safetensors"
    (folder / "first.safetensors").symlink_to("second.safetensors")
    (folder / "second.safetensors").symlink_to(outside)
    index_of(folder, {"a": "first.safetensors"})


def circle(folder: Path) -> None:
    (folder / "one.safetensors").symlink_to("two.safetensors")
    (folder / "two.safetensors").symlink_to("one.safetensors")
    index_of(folder, {"a": "one.safetensors"})


def folder_link(folder: Path) -> None:
    (folder / "below").symlink_to(folder.parent)
    index_of(folder, {"a": "below/secret.safetensors"})


def pipe(folder: Path) -> None:
    os.mkfifo(folder / FILE)
    index_of(folder, {"a": FILE})


def pipe_as_index(folder: Path) -> None:
    os.mkfifo(folder / INDEX)


def endless_index(folder: Path) -> None:
    (folder / INDEX).symlink_to("/dev/zero")


def large_index(folder: Path) -> None:
    """As large as a disk, and nothing but a hole."""
    with (folder / INDEX).open("wb") as file:
        file.truncate(2**40)


OUTSIDE = "names .* which is not a file in its folder"
NO_INDEX = "index.json is not an index of safetensors files: "
INDICES: Mapping[str, tuple[Callable[[Path], None] | bytes | str | dict[str, Any], str]] = {
    "up": ({"a": "../secret.safetensors"}, OUTSIDE),
    "absolute": ({"a": "SECRET"}, OUTSIDE),
    "backslashes": ({"a": "..\\secret.safetensors"}, OUTSIDE),
    "a zero": ({"a": f"{FILE}\0"}, OUTSIDE),
    "the folder": ({"a": ".."}, OUTSIDE),
    "link by way of another": (link_up, OUTSIDE),
    "folder that is a link": (folder_link, OUTSIDE),
    "links in a circle": (circle, f"{OUTSIDE}|does not exist"),  # the latter from Python 3.13 on
    "half a character": ({"a": "\ud800.safetensors"}, f"{NO_INDEX}UnicodeEncodeError"),
    "pipe": (pipe, "model.safetensors is not a regular file"),
    "pipe as index": (pipe_as_index, "index.json is not a regular file"),
    "endless": (endless_index, "index.json is not a regular file"),
    "a disk long": (large_index, f"{NO_INDEX}ValueError: it is longer than {weights.LONGEST} bytes"),
    "deep": ("[" * 10**6, f"{NO_INDEX}RecursionError"),
    "name twice": ('{"weight_map": {"a": "x", "a": "y"}}', f"{NO_INDEX}ValueError: the key 'a' occurs twice"),
    "map twice": (
        '{"weight_map": {}, "weight_map": {}}',
        f"{NO_INDEX}ValueError: the key 'weight_map' occurs",
    ),
    "itself": ({"a": INDEX}, "index.json is not a complete safetensors file"),
    "list of files": ({"a": ["../secret.safetensors"]}, OUTSIDE),
    "number": ({"a": 5}, "does not exist"),
    "secret text": (
        b"\xff\xfe" + b"secret" * 1000,
        f"{NO_INDEX}UnicodeDecodeError|{NO_INDEX}JSONDecodeError",
    ),
}


def test_an_index_that_was_made_to_deceive_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, secret)
    folders = [tmp_path / name for name in INDICES]
    for folder, (content, _) in zip(folders, INDICES.values(), strict=True):
        folder.mkdir()
        if callable(content):
            content(folder)
        elif isinstance(content, dict):
            index_of(folder, {k: str(secret) if v == "SECRET" else v for k, v in content.items()})
        else:
            index_of(folder, content)
    for (name, (_, want)), text in zip(
        INDICES.items(), all_refused([f / INDEX for f in folders]), strict=True
    ):
        assert re.search(want, text) and len(text) < 1000, (name, text)


@pytest.mark.parametrize("name", [FILE, INDEX])
def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name / "x").mkdir(parents=True)
    (text,) = all_refused([tmp_path])
    assert f"{name} is not a regular file" in text
