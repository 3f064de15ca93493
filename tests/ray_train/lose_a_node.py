"""Starts a Ray of two nodes with one CPU each, trains by the example, and removes a node while it trains.

python -m tests.ray_train.lose_a_node OUT KILL_AT RETURN_AT OPTIONS...

The losses are in OUT/ray/losses.jsonl. Those of the same steps in this process, without Ray's workers, are in
OUT/alone/losses.jsonl.

KILL_AT    a node is removed, and its worker killed, after this many steps
RETURN_AT  another node comes after this many steps with one worker; 0: never
OPTIONS    of the example
"""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.cluster_utils import Cluster

from zero_full.examples.ray_train import main, train

STORE = 80 * 2**20  # bytes of shared memory a node, the least that Ray takes


def rows_in(losses: Path) -> list[dict[str, Any]]:
    text = losses.read_text() if losses.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def change_nodes(
    cluster: Cluster,
    node: object,
    losses: Path,
    kill_at: int,
    return_at: int,
    returned: list["subprocess.Popen[bytes]"],
) -> None:
    while len(rows_in(losses)) < kill_at:
        time.sleep(0.05)
    cluster.remove_node(node, allow_graceful=False)  # its processes are killed
    while return_at and sum(row["workers"] == 1 for row in rows_in(losses)) < return_at:
        time.sleep(0.05)
    if return_at:  # in a process of its own: `add_node` sets signal handlers, in the main thread only
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1"]
        start += ["--address", cluster.address, "--object-store-memory", str(STORE)]
        returned.append(subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))


if __name__ == "__main__":
    out, kill_at, return_at, options = Path(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4:]
    soon = {"health_check_period_ms": 1000, "health_check_failure_threshold": 5}  # a lost node is noticed
    head = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False, "_system_config": soon}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(num_cpus=1, object_store_memory=STORE)
    ray.init(address=cluster.address, log_to_driver=False)
    losses = out / "ray" / "losses.jsonl"
    returned = list["subprocess.Popen[bytes]"]()
    changes = (cluster, node, losses, kill_at, return_at, returned)
    threading.Thread(target=change_nodes, args=changes, daemon=True).start()
    sys.argv = ["ray_train", "--out", str(out / "ray"), *options]
    code = main()
    ray.shutdown()
    for process in returned:
        process.terminate()
        process.wait(60)
    cluster.shutdown()
    ray.train.report = lambda row: None  # there is no Trainer to report to
    (out / "alone").mkdir()
    steps = rows_in(losses)[-1]["step"]
    train({"out": str(out / "alone"), "steps": steps, "save_every": steps + 1, "pause": 0.0})
    sys.exit(code)
