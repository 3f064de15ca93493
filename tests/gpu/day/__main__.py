"""`python -m tests.gpu.day`, see `run.py`."""

import signal
import sys

from tests.gpu.day.run import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the running part, too
    sys.exit(main())
