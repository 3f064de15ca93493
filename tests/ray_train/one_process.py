"""The example's function in this process, without Ray's workers: what all runs are compared with."""

import sys
from pathlib import Path

import ray.train

from zero_full.examples.ray_train import train

if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir()
    ray.train.report = lambda row: None  # there is no Trainer to report to
    train({"out": str(out), "steps": 22, "save_every": 100, "pause": 0.0})
