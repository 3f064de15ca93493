"""Where Lightning is installed: a fit is plain DDP's, in half a minute."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.lightning.launch import difference, results
from tests.zero_full.exported import Zoo, engine_of

if not find_spec("lightning"):
    pytest.skip("needs Lightning: `make test-lightning` installs it", allow_module_level=True)


def test_a_fit_with_accumulation_and_clipping_is_ddp_s(tmp_path: Path) -> None:
    fits = results(2, tmp_path, "quick")["quick"]
    for stage in ("2", "3"):
        assert difference(fits[stage]["losses"], fits["ddp"]["losses"]) < 1e-4
        assert difference(fits[stage]["seen"], fits["ddp"]["seen"]) < 1e-4


def test_one_file_has_tied_weights_under_every_name(tmp_path: Path) -> None:
    from zero_full.integrations.lightning.folder import consolidate, save, save_weights

    engine = engine_of(3, {})
    save([engine], tmp_path / "whole", {"epoch": 1})
    save_weights([engine], tmp_path / "weights", {"epoch": 1})
    engine.save_weights(tmp_path / "several", max_shard_bytes=300)
    (tmp_path / "several" / "lightning").write_bytes((tmp_path / "weights" / "lightning").read_bytes())
    for name in ("whole", "weights", "several"):
        consolidate(tmp_path / name, tmp_path / f"{name}.ckpt")
        found = torch.load(tmp_path / f"{name}.ckpt", weights_only=False)
        assert found["epoch"] == 1
        Zoo().load_state_dict(found["state_dict"])  # strictly
