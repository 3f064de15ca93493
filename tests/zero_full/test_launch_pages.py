"""The guide's pages on Slurm and Kubernetes: torchrun takes their arguments, and the manifest trains."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from torch.distributed.run import get_args_parser

from tests.worlds import free_port

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "site" / "docs" / "guide"


def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    """The service and the job of the page."""
    text = (GUIDE / "kubernetes.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    service, job = yaml.safe_load_all(text)
    return service, job


def container() -> dict[str, Any]:
    _, job = manifest()
    (only,) = job["spec"]["template"]["spec"]["containers"]
    return only  # type: ignore[no-any-return]


def test_the_manifest_s_torchruns_meet_at_the_first_pod() -> None:
    service, job = manifest()
    pods = job["spec"]["template"]["spec"]
    name, domain = job["metadata"]["name"], service["metadata"]["name"]
    assert container()["command"] == ["torchrun"] and pods["subdomain"] == domain
    assert service["spec"]["selector"] == {"job-name": name} and service["spec"]["clusterIP"] == "None"
    args = get_args_parser().parse_args(container()["args"])
    assert args.rdzv_endpoint == f"{name}-0.{domain}:29500" and args.rdzv_backend == "c10d"
    assert int(args.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(args.nproc_per_node) == container()["resources"]["limits"]["nvidia.com/gpu"]
    assert args.training_script == "train.py"
    assert {each["name"] for each in container()["volumeMounts"]} == {
        each["name"] for each in pods["volumes"]
    }


def test_slurm_s_script_starts_one_torchrun_a_node() -> None:
    text = (GUIDE / "slurm.md").read_text().partition("```bash\n")[2].partition("```")[0]
    command = re.search(r"^srun torchrun ((?:.*\\\n)*.*)$", text, re.M)
    assert command is not None
    words = command[1].replace("\\\n", " ").replace('"', "").replace("$SLURM_NNODES", "2").split()
    args = get_args_parser().parse_args(words)
    assert args.nnodes == "2" and args.rdzv_endpoint == "$first:29500"
    assert f"--gpus-per-node={args.nproc_per_node}" in text and "--ntasks-per-node=1" in text


@pytest.mark.slow
def test_two_pods_of_the_manifest_train_together(tmp_path: Path) -> None:
    """Two torchruns on this host, with one process each, in the place of pods."""
    endpoint, example = f"127.0.0.1:{free_port()}", ["-m", "zero_full.examples.resume", "--out", "out"]
    args = [re.sub(r"(?<=endpoint=).*|(?<=per-node=).*", "", each) for each in container()["args"]]
    args = [each + {"--rdzv-endpoint=": endpoint, "--nproc-per-node=": "1"}.get(each, "") for each in args]
    at = args.index("train.py")
    command = [sys.executable, "-m", "torch.distributed.run", *args[:at], *example]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pods = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = "".join(pod.communicate(timeout=180)[0] for pod in pods)
    assert [pod.returncode for pod in pods] == [0, 0]
    assert len(re.findall(r"^step \d+: loss [\d.]+, 2 ranks$", said, re.M)) == 33
