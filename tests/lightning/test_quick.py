"""Where Lightning is installed: a fit is plain DDP's, in half a minute."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.lightning.launch import difference, results

if not find_spec("lightning"):
    pytest.skip("needs Lightning: `make test-lightning` installs it", allow_module_level=True)


def test_a_fit_with_accumulation_and_clipping_is_ddp_s(tmp_path: Path) -> None:
    fits = results(2, tmp_path, "quick")["quick"]
    for stage in ("2", "3"):
        assert difference(fits[stage]["losses"], fits["ddp"]["losses"]) < 1e-4
        assert difference(fits[stage]["seen"], fits["ddp"]["seen"]) < 1e-4
