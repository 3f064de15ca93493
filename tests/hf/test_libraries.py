"""The guide about Hugging Face: what it says works does, and what it quotes is what the libraries say."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not all(map(find_spec, ("transformers", "peft", "accelerate"))):
    pytest.skip("needs Hugging Face's libraries: `make test-hf` installs them", allow_module_level=True)

pytestmark = pytest.mark.hf
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "site" / "docs" / "guide" / "hugging_face_loop.md").read_text()
QUOTED = [
    line for block in re.findall(r"^```text\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()
]
LAUNCHED = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def launched(*arguments: str, folder: Path = ROOT) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*LAUNCHED, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def told() -> dict[str, dict[str, Any]]:
    """What libraries.py has found, in one launch."""
    return json.loads(launched("-m", "tests.hf.libraries").splitlines()[-1])  # type: ignore[no-any-return]


def test_accelerate_s_loop_trains_as_plain_torch_and_adapters_can_be_merged(told: dict[str, Any]) -> None:
    worked = told["worked"]
    assert len(worked) == 7 and {name: off for name, off in worked.items() if off > 1e-5} == {}


def test_what_the_page_warns_of_is_so(told: dict[str, Any]) -> None:
    assert told["warned"] == {"ranks seen without cpu=True": 1, "steps not counted": 0}


def test_what_cannot_work_is_refused_in_the_words_that_the_page_quotes(told: dict[str, Any]) -> None:
    refused = told["refused"]
    assert len(refused) == 8 and all(refused.values())
    assert [line for line in QUOTED if not any(line in text for text in refused.values())] == []
    unquoted = [text for text in refused.values() if not any(line in text for line in QUOTED)]
    assert unquoted == [] and len(QUOTED) == 7


def test_the_page_s_script_trains_and_its_weights_are_read_by_from_pretrained(tmp_path: Path) -> None:
    import transformers

    scripts = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    (script,) = [each for each in scripts if "zero_full.Init()" in each]
    (tmp_path / "train.py").write_text(script)
    (loss,) = re.findall(r"^loss ([\d.]+)$", launched("train.py", folder=tmp_path), re.M)
    assert float(loss) < 3.0  # of 4.6, which knows nothing about 99 words
    model, found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(found.values()) and model.config.vocab_size == 99
