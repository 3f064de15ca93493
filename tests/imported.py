"""What every rank of a pool of processes needs, imported before it is forked. Nothing is called here."""

import zero_full
from tests import trainers, worlds  # noqa: F401

FIRST_USE_IMPORTS = (zero_full.initialize, zero_full.Engine)
