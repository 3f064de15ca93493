"""Runs cases; torchrun starts it, and rank 0 prints the results as JSON.

torchrun --standalone --nproc-per-node 2 -m tests.lightning FOLDER fits resume ...
"""

import json
import logging
import sys
import time
import warnings
from pathlib import Path

from tests.lightning import fabric_cases
from tests.lightning.cases import CASES, RANK

assert fabric_cases  # which adds its cases to CASES


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    folder, results = Path(sys.argv[1]), {}
    for name in sys.argv[2:]:
        begin = time.monotonic()
        try:
            results[name] = CASES[name](folder)
        except Exception as error:
            raise RuntimeError(f"case {name}") from error
        if RANK == 0:
            print(f"{name}: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
    if RANK == 0:
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
