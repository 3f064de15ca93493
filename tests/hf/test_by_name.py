"""Hugging Face's unmodified programs train with zero_full by DeepSpeed's name as in one plain process."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

if not all(map(find_spec, ("transformers", "peft", "accelerate", "trl"))):
    pytest.skip("needs Hugging Face's libraries: `make test-hf` installs them", allow_module_level=True)

from tests.hf import matrix
from tests.hf.cases import CASES
from tests.hf.refusals import ACTS
from tests.works_with import cases_in

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
AS_DEEPSPEED = ["-m", "zero_full", "as-deepspeed"]
SHORT = [*matrix.AT_STAGE_1, "LoRA"]


def test_in_short(tmp_path: Path) -> None:
    """What `make test` runs where the libraries are installed."""
    plain = matrix.run(tmp_path, None, 1, SHORT)
    rows = list(matrix.compared(plain, {3: matrix.run(tmp_path, 3, 2, SHORT)}))
    assert [(row.case, row.result) for row in rows] == [(case, matrix.EQUAL) for case in SHORT]


@pytest.mark.hf
def test_every_case_is_as_in_one_process_and_the_page_has_all_of_them(tmp_path: Path) -> None:
    rows = matrix.everything(tmp_path)
    assert [row for row in rows if row.result.startswith(matrix.WRONG)] == []
    assert {row.case for row in rows} == {*CASES, matrix.ELSEWHERE}
    assert cases_in("hf") == [(row.framework, row.case, row.ranks) for row in rows]


@pytest.mark.hf
@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_train_as_well(ranks: int, tmp_path: Path) -> None:
    """Three ranks see other batches than one process, so only that they go on is tested."""
    name = "Trainer: checkpoint at step 3"
    found = matrix.run(tmp_path, 3, ranks, [name])[name]
    assert len(found["loss"]) == 6
    if ranks == 1:
        assert matrix.off(found, matrix.run(tmp_path, None, 1, [name])[name]) == ""


def test_numbers_that_differ_or_are_missing_are_noticed() -> None:
    want = {"loss": [1.0, 2.0, 3.0]}
    assert matrix.off({"loss": [1.0, 2.0, 3.0]}, want) == ""
    assert matrix.off({"loss": [2.0, 3.0]}, want, last=True) == ""
    for wrong in ([1.0, 2.0, 3.001], [1.0, 2.0], [], [1.0, 2.0, float("nan")]):
        assert matrix.off({"loss": wrong}, want)
    assert matrix.off({"loss": [1.0, 2.0]}, want, last=True)


@pytest.mark.hf
def test_what_cannot_work_ends_on_every_rank_with_the_reason(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path / "said"), "--folder", str(tmp_path)]
    matrix.launch([*TORCHRUN, "2", *AS_DEEPSPEED, "-m", "tests.hf.refusals", *arguments])
    for rank in range(2):
        said = json.loads((tmp_path / f"said.{rank}").read_text())
        assert {
            name: said.get(name) for name, (_, text) in ACTS.items() if text not in said.get(name, "")
        } == {}


EXAMPLES = {  # with the arguments for several ranks
    "hf_trainer": ["--deepspeed", "zero_full/examples/hf_ds_config.json"],
    "hf_accelerate": ["--stage", "3"],
}


@pytest.mark.hf
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_the_losses_of_one_process(name: str) -> None:
    example = ["-m", f"zero_full.examples.{name}"]
    plain, ours = (
        matrix.launch(example),
        matrix.launch([*TORCHRUN, "2", *AS_DEEPSPEED, *example, *EXAMPLES[name]]),
    )
    losses = [re.findall(r"^losses ([\d. ]+)$", printed, re.M) for printed in (plain, ours)]
    assert losses[0] == losses[1] and len(losses[0]) == 1 and len(losses[0][0].split()) >= 8


SCRIPT = """
import sys
from accelerate import Accelerator
accelerator = Accelerator()
print("seen", accelerator.num_processes, str(accelerator.distributed_type), sys.argv[1:])
"""
YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3, zero3_init_flag: false, gradient_accumulation_steps: 1}
num_processes: 2
num_machines: 1
machine_rank: 0
mixed_precision: 'no'
"""


@pytest.mark.hf
def test_accelerate_launch_starts_ranks_that_see_each_other(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "ds.yaml").write_text(YAML)
    by_file = ["accelerate", "launch", "--config_file", str(tmp_path / "ds.yaml"), "--main_process_port", "0"]
    printed = matrix.launch([*AS_DEEPSPEED, *by_file, str(tmp_path / "train.py"), "--lr", "3"])
    seen = re.findall(r"seen (\d) (\S+) (\[.*?\])", printed)
    assert seen == [("2", "DistributedType.DEEPSPEED", "['--lr', '3']")] * 2
