"""Pipelines, tensor parallelism, generation and weights beside torch's own ways, and DeepSpeed's.

    python -m tests.bench.engines [--topics pipeline tensor generation weights] [--small]

Every topic is measured in turn on ranks of this machine: see `engines_pipeline.py`, `engines_tensor.py`,
`engines_generation.py` and `engines_weights.py`. DeepSpeed has a row for pipelines where it is installed; its
hybrid engine is not run. `--small`: the smallest sizes, to see that it runs. The last line is JSON.
"""

import argparse

from tests.bench import (
    engines_generation,
    engines_pipeline,
    engines_tensor,
    engines_weights,
    interleave,
)
from tests.worlds import Pool

TOPICS = {
    "pipeline": engines_pipeline.report,
    "tensor": engines_tensor.report,
    "generation": engines_generation.report,
    "weights": engines_weights.report,
}


def main() -> None:
    """Print the tables of each topic, all ratios, and the JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--topics", nargs="+", choices=TOPICS, default=list(TOPICS))
    parser.add_argument("--small", action="store_true", help="the smallest sizes, to see that it runs")
    asked = parser.parse_args()
    print(interleave.heading())
    pool, ratios, found = Pool(), list[interleave.Ratio](), dict[str, object]()
    try:
        for topic in asked.topics:
            print(f"\n## {topic}")
            more, found[topic] = TOPICS[topic](pool.run, asked.small)
            ratios += more
    finally:
        pool.stop()
    print("\n" + interleave.table(interleave.RATIO_HEAD, [ratio.cells() for ratio in ratios]))
    print("\n" + interleave.json_line(ratios, **found))


if __name__ == "__main__":
    main()
