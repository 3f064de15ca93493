"""`python -m tests.gpu.day`, see `run.py`."""

import sys

from tests.gpu.day.run import main

if __name__ == "__main__":
    sys.exit(main())
