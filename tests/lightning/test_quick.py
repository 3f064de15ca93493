"""Where Lightning is installed: a fit is plain DDP's, in half a minute."""

from importlib.util import find_spec
from pathlib import Path
from shutil import copytree, rmtree

import pytest
import torch

from tests.lightning.launch import difference, results
from tests.zero_full.exported import Zoo, engine_of
from zero_full.errors import CheckpointError

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


def test_parts_of_two_saves_are_not_loaded_together(tmp_path: Path) -> None:
    from zero_full.integrations.lightning import folder

    engines = [engine_of(3, {}), engine_of(3, {})]
    folder.save(engines, tmp_path / "a", {"epoch": 1})
    assert folder.load(engines, tmp_path / "a", states=True) == {"epoch": 1}
    folder.save(engines, tmp_path / "b", {"epoch": 2})
    rmtree(tmp_path / "a" / "optimizer_1")  # as if the second save had ended after its first part
    copytree(tmp_path / "b" / "optimizer_1", tmp_path / "a" / "optimizer_1")
    with pytest.raises(CheckpointError, match="are of two saves"):
        folder.load(engines, tmp_path / "a", states=True)
    with pytest.raises(CheckpointError, match="are of two saves"):
        folder.consolidate(tmp_path / "a", tmp_path / "a.ckpt")


def test_a_whole_checkpoint_replaces_saved_weights(tmp_path: Path) -> None:
    from zero_full.integrations.lightning import folder

    engine = engine_of(3, {})
    folder.save_weights([engine], tmp_path / "a", {"epoch": 1})
    folder.save([engine], tmp_path / "a", {"epoch": 2})
    assert folder.load([engine], tmp_path / "a", states=True) == {"epoch": 2}


def test_a_save_with_fewer_optimizers_leaves_no_part_of_an_earlier_one(tmp_path: Path) -> None:
    from zero_full.integrations.lightning import folder

    engines = [engine_of(3, {}), engine_of(3, {})]
    folder.save(engines, tmp_path / "a", {"epoch": 1})
    folder.save(engines[:1], tmp_path / "a", {"epoch": 2})
    assert folder.load(engines[:1], tmp_path / "a", states=True) == {"epoch": 2}
    folder.consolidate(tmp_path / "a", tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=False)["epoch"] == 2
    with pytest.raises(CheckpointError, match="state of 1 optimizers, and this run has 2"):
        folder.load(engines, tmp_path / "a", states=True)


def test_weights_whose_file_cannot_be_written_or_read_raise_on_all_ranks(tmp_path: Path) -> None:
    from zero_full.integrations.lightning import folder

    engine = engine_of(3, {})
    (tmp_path / "a" / "lightning").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="Is a directory"):
        folder.save_weights([engine], tmp_path / "a", {"epoch": 1})
    with pytest.raises(CheckpointError, match="Is a directory"):
        folder.load([engine], tmp_path / "a", states=False)
