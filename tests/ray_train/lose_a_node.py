"""Starts a Ray of two nodes with one CPU each, trains by the example, and removes a node while it trains.

python -m tests.ray_train.lose_a_node OUT KILL_AT WORKERS...
"""

import sys
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from zero_full.examples.ray_train import main


def steps_in(losses: Path) -> int:
    return len(losses.read_text().splitlines()) if losses.exists() else 0


def remove_later(cluster: Cluster, node: object, losses: Path, at: int) -> None:
    while steps_in(losses) < at:
        time.sleep(0.05)
    cluster.remove_node(node, allow_graceful=False)  # its processes are killed


if __name__ == "__main__":
    out, kill_at, workers = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    store = 80 * 2**20  # bytes of shared memory a node, the least that Ray takes
    soon = {"health_check_period_ms": 1000, "health_check_failure_threshold": 5}  # a lost node is noticed
    head = {"num_cpus": 1, "object_store_memory": store, "include_dashboard": False, "_system_config": soon}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(num_cpus=1, object_store_memory=store)
    ray.init(address=cluster.address, log_to_driver=False)
    losses = out / "losses.jsonl"
    if kill_at:
        threading.Thread(target=remove_later, args=(cluster, node, losses, kill_at), daemon=True).start()
    sys.argv = ["ray_train", "--out", str(out), "--workers", *workers, "--pause", "0.2" if kill_at else "0"]
    code = main()
    ray.shutdown()
    cluster.shutdown()
    sys.exit(code)
