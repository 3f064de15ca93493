"""A configuration in a file: JSON with comments, or a sentence with the place where it goes wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.zero_full.test_config import TRAIN, specification_example
from zero_full.config import resolve
from zero_full.errors import ConfigError


@pytest.mark.parametrize("as_what", [str, Path])
def test_a_file_is_read(tmp_path: Path, as_what: Any) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(specification_example("fp16")))
    assert resolve(as_what(path), 4) == resolve(specification_example("fp16"), 4)


COMMENTED = r"""// what this is
{
  # sizes
  "train_batch_size": 8, /* all
  of them */ "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.9, 0.99,],},},
  "checkpoint": {"writer": {"url": "http://x/*y*/#z, ]", "quote": "\\\" // , }"}}, // "train_batch_size": 9,
}"""


def test_comments_and_commas_after_the_last_item_are_read_and_strings_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("\ufeff" + COMMENTED)
    config = resolve(path, 2).config
    assert config.train_batch_size == 8 and config.optimizer is not None
    assert config.optimizer.params == {"lr": 0.1, "betas": [0.9, 0.99]}
    assert config.checkpoint.writer == {"url": "http://x/*y*/#z, ]", "quote": '\\" // , }'}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{\n  "a": True}', "ds.json, line 2, column 8: this is not JSON: expected a value; write true"),
        ('{ // one\n /* two\n */ "a": 1 # three\n "b": 2}', "ds.json, line 4, column 2: this is not JSON"),
        ('{"a": [1,,]}', "ds.json, line 1, column 10: this is not JSON"),
        ('{"a": [,]}', "ds.json, line 1, column 8: this is not JSON"),
        ("{,}", "ds.json, line 1, column 2: this is not JSON"),
        ('{"a": 1 /* no end', "ds.json, line 1, column 9: this is not JSON"),
        ('{"a": "no end // }\n}', "ds.json, line 1, column 19: this is not JSON: a string must end"),
        ("", "ds.json, line 1, column 1: this is not JSON"),
        ("[1]", "ds.json must be an object of keys and values"),
        ("[" * 10**5 + "]" * 10**5, "ds.json, line 1, column 34: nested more than 32 levels deep"),
        (
            '{"fp16": ' + "[" * 50 + "]" * 50 + "}",
            "ds.json, line 1, column 42: nested more than 32 levels deep",
        ),
        (
            '{"train_batch_size": ' + "1" * 5000 + "}",
            "ds.json, line 1, column 22: this is not JSON: a number has more than 1000 digits",
        ),
        (
            '{"fp16": {"enabled": true, "enabled": false}, "train_batch_size": 8}',
            "line 1, column 28: fp16.enabled: duplicate key",
        ),
    ],
    ids=lambda text: text[:20],
)
def test_a_bad_file_is_named_with_the_place(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve(path, 1)
    assert error in str(caught.value)


def test_a_missing_or_unreadable_file_and_what_is_no_configuration_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file .*nowhere.json"):
        resolve(tmp_path / "nowhere.json", 1)
    with pytest.raises(ConfigError, match="cannot be read as text"):
        resolve(tmp_path, 1)
    with pytest.raises(ConfigError, match="cannot be read as text"):
        resolve("ds\0.json", 1)
    with pytest.raises(ConfigError, match=r"must be an object .*got 3"):
        resolve(3, 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="world_size: got 0"):
        resolve({TRAIN: 1}, 0)
    for transport in (True, None, "shared_memory"):
        with pytest.raises(ConfigError, match=r"transport: got .* one of accelerator, shared memory, loop"):
            resolve({TRAIN: 1}, 1, transport)  # type: ignore[arg-type]
