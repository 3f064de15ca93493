"""Export: plain torch reads the same bits, whoever trained; a file is complete or not there."""

import json
import resource
import subprocess
import sys
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

from tests.worlds import RankError, run_in
from tests.zero_full.exported import BF16, DTYPES, PLACES, Other, Zoo, engine_of, masters, save
from tests.zero_full.runs import assert_same
from zero_full.checkpoint import load_weights, save_16bit_model, save_weights, weights
from zero_full.checkpoint.safetensors_writer import TensorEntry, WeightFiles, header_of, split_into_files
from zero_full.errors import CheckpointError


def keys_of(dtype: str) -> dict[str, Any]:
    return BF16 if dtype == "bf16" else {}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def as_plain_torch_reads(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a fresh model has after a load without zero_full, whether it is one file or many."""
    model = Other().to(dtype)
    for file in sorted(folder.glob("*.safetensors")):
        keys = model.load_state_dict(safetensors.torch.load_file(file), strict=False)
        assert not keys.unexpected_keys
    return model.state_dict()


# What is in the files ----------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("stage", "world_size"), PLACES)
def test_plain_torch_reads_the_same_bits(tmp_path: Path, stage: int, world_size: int, dtype: str) -> None:
    want = run_in("processes", save, world_size, tmp_path, stage, keys_of(dtype))[0]
    assert names_in(tmp_path) == ["model.safetensors"]
    assert_same(as_plain_torch_reads(tmp_path, DTYPES[dtype]), want)
    model = Other().to(DTYPES[dtype])
    assert safetensors.torch.load_model(model, tmp_path / "model.safetensors") == (set(), [])
    assert_same(model.state_dict(), want)


def save_untrained(comm: Any, folder: Path, stage: int) -> None:
    engine = engine_of(stage, BF16)
    save_weights(engine.module, engine.optimizer, folder, max_shard_bytes=300)


def test_files_do_not_tell_who_wrote_them(tmp_path: Path) -> None:
    contents = []
    for stage, world_size in PLACES:
        folder = tmp_path / f"{stage} {world_size}"
        run_in("processes", save_untrained, world_size, folder, stage)
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert len(contents[0]) > 3 and all(content == contents[0] for content in contents)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_several_files_have_an_index(tmp_path: Path, stage: int) -> None:
    want = run_in("processes", save_in_pieces, 2, tmp_path, stage)[0]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    count = len(names)
    assert names == [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    assert len(names_in(tmp_path)) == count + 1
    total = 0
    for name in names:
        tensors = safetensors.torch.load_file(tmp_path / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == tensors.keys()
        sizes = [tensor.nbytes for tensor in tensors.values()]
        assert sum(sizes) <= 400 or len(sizes) == 1
        total += sum(sizes)
    assert index["metadata"]["total_size"] == total
    assert index["weight_map"].keys() == want.keys() - {"out.weight"}
    assert_same(as_plain_torch_reads(tmp_path, torch.float32), want)


def save_in_pieces(comm: Any, folder: Path, stage: int) -> dict[str, Tensor]:
    return save(comm, folder, stage, {}, max_shard_bytes=400)


def save_exactly(comm: Any, folder: Path, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = engine_of(stage, BF16, steps=2)
    save_weights(engine.module, engine.optimizer, folder, dtype=torch.float32)
    return masters(engine), engine.module_state_dict()


@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (2, 3), (3, 1), (3, 3)])
def test_fp32_comes_from_the_masters(tmp_path: Path, stage: int, world_size: int) -> None:
    exact, rounded = run_in("processes", save_exactly, world_size, tmp_path, stage)[0]
    found = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert not torch.equal(exact["words.weight"], rounded["words.weight"].float())
    for name, tensor in found.items():
        want = exact.get(name, rounded[name].float() if tensor.is_floating_point() else rounded[name])
        assert tensor.dtype == want.dtype and torch.equal(tensor, want), name


def save_after_rounding_gathers(comm: Any, folder: Path) -> dict[str, Tensor]:
    zero = {"zero_quantized_weights": True, "stage3_param_persistence_threshold": 0}
    engine = engine_of(3, {**BF16, "zero_optimization": zero}, steps=1)
    save_weights(engine.module, engine.optimizer, folder)
    return masters(engine)


def test_weights_that_are_quantized_on_their_way_are_saved_as_they_are(tmp_path: Path) -> None:
    exact = run_in("processes", save_after_rounding_gathers, 2, tmp_path)[0]
    found = as_plain_torch_reads(tmp_path, torch.bfloat16)
    assert_same({name: found[name] for name in exact}, {n: t.bfloat16() for n, t in exact.items()})


def test_names_rename_and_leave_out(tmp_path: Path) -> None:
    engine = engine_of(2, {})

    def names(name: str) -> str | None:
        return None if name.startswith("body.1") else f"model.{name}"

    save_weights(engine.module, engine.optimizer, tmp_path, names=names)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {
            f"model.{n}" for n in Zoo().state_dict() if "body.1" not in n and n != "out.weight"
        }
        assert file.metadata() == {"format": "pt", "model.out.weight": "model.words.weight"}
    with pytest.raises(ValueError, match=r"maps scale and empty to the same name, x"):
        save_weights(engine.module, engine.optimizer, tmp_path, names=lambda name: "x")


def test_what_safetensors_cannot_hold_is_an_error() -> None:
    class Stateful(Zoo):
        def get_extra_state(self) -> Any:
            return {"a": 1}

    engine = engine_of(2, {}, Stateful)
    with pytest.raises(ValueError, match=r"the extra state .*_extra_state.*names=.*\.bin"):
        save_weights(engine.module, engine.optimizer, "nowhere")
    with pytest.raises(ValueError, match=r"x is torch.complex128, which safetensors does not support"):
        TensorEntry("x", torch.complex128, (1,))
    with pytest.raises(ValueError, match=r"floating-point, not 5, torch.int8"):
        engine = engine_of(2, {})
        save_weights(engine.module, engine.optimizer, "nowhere", dtype=torch.int8, max_shard_bytes=5)
    assert not Path("nowhere").exists()


def save_as_deepspeed_does(comm: Any, folder: Path, stage: int) -> dict[str, Tensor]:
    engine = engine_of(stage, BF16, steps=1)
    parts = engine.module, engine.optimizer
    assert save_16bit_model(*parts, folder)
    assert save_16bit_model(*parts, folder, "trained.bin", exclude_frozen_parameters=True)
    assert save_16bit_model(*parts, folder, "16.safetensors")
    return engine.module_state_dict()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_save_16bit_model_writes_what_deepspeed_users_reload(tmp_path: Path, stage: int) -> None:
    want = run_in("processes", save_as_deepspeed_does, 2, tmp_path, stage)[0]
    assert names_in(tmp_path) == ["16.safetensors", "pytorch_model.bin", "trained.bin"]
    state = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert_same(state, want)
    assert state["out.weight"].data_ptr() == state["words.weight"].data_ptr()
    trained = torch.load(tmp_path / "trained.bin", weights_only=True)
    assert want.keys() - trained.keys() == {n for n in want if n.startswith(("frozen", "stiff"))}
    found = safetensors.torch.load_file(tmp_path / "16.safetensors")
    assert_same(found, {name: want[name] for name in found})


def test_what_is_offloaded_is_not_read(tmp_path: Path) -> None:
    engine = engine_of(2, BF16)
    for kind in ("lp_params", "hp_params"):
        engine.offload_states([kind])
        with pytest.raises(CheckpointError, match=r"engine.reload_states\(\)"):
            save_weights(engine.module, engine.optimizer, tmp_path)
        with pytest.raises(CheckpointError, match=r"engine.reload_states\(\)"):
            load_weights(engine.module, engine.optimizer, tmp_path)
        engine.reload_states()
    save_weights(engine.module, engine.optimizer, tmp_path)
    assert_same(as_plain_torch_reads(tmp_path, torch.bfloat16), engine.module_state_dict())


# Memory ------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Eight units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))


def most_in_memory(comm: Any, folder: Path) -> tuple[int, int]:
    """(units, how many of them there were at a time)."""
    engine = engine_of(3, {}, Deep)
    made: list[weakref.ref[Tensor]] = []
    most, whole = 0, weights._all_gather

    def counted(values: Any, mine: Tensor) -> Tensor:
        nonlocal most
        made.append(weakref.ref(gathered := whole(values, mine)))
        most = max(most, sum(one() is not None for one in made))
        return gathered

    weights._all_gather = counted
    try:
        save_weights(engine.module, engine.optimizer, folder)
    finally:
        weights._all_gather = whole
    return len(made), most


def test_one_unit_is_in_memory_at_a_time(tmp_path: Path) -> None:
    assert run_in("processes", most_in_memory, 2, tmp_path) == [(8, 1)] * 2


# Complete or not there ---------------------------------------------------------------------------


def fail_while_saving(comm: Any, folder: Path, stage: int, limit: int) -> tuple[str, str]:
    """(what this rank hears, the same for a .bin): the system lets the first rank write so many bytes."""
    engine = engine_of(stage, {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    heard = []
    if comm.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        for write in (save_weights, save_16bit_model):
            with pytest.raises(CheckpointError) as caught:
                write(engine.module, engine.optimizer, folder)
            heard.append(str(caught.value))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return heard[0], heard[1]


@pytest.mark.parametrize(("stage", "world_size", "limit"), [(0, 2, 100), (2, 2, 2500), (3, 3, 2500)])
def test_a_disk_that_is_full_fails_every_rank_and_leaves_nothing(
    tmp_path: Path, stage: int, world_size: int, limit: int
) -> None:
    heard = run_in("processes", fail_while_saving, world_size, tmp_path, stage, limit)
    assert len(set(heard)) == 1
    assert "File too large" in heard[0][0] and ("rank 0: " in heard[0][0])
    assert names_in(tmp_path) == []


def test_an_older_export_survives_a_failure(tmp_path: Path) -> None:
    want = run_in("processes", save, 2, tmp_path, 2, {})[0]
    run_in("processes", fail_while_saving, 2, tmp_path, 3, 2500)
    assert names_in(tmp_path) == ["model.safetensors"]
    assert_same(as_plain_torch_reads(tmp_path, torch.float32), want)


def test_a_place_that_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RankError) as caught:
        run_in("processes", save, 2, tmp_path / "file" / "folder", 3, {}, 0)
    for rank in range(2):
        assert f"rank {rank}: CheckpointError: rank 0: [Errno 20] Not a directory" in str(caught.value)


def save_differently(comm: Any, folder: Path) -> list[str]:
    """What is said where only rank 0, which writes, has the argument."""
    engine, said = engine_of(3, BF16), []
    for given in ({"dtype": torch.float32}, {"names": lambda name: None if "out" in name else name}):
        with pytest.raises(CheckpointError) as caught:
            save_weights(engine.module, engine.optimizer, folder, **(given if comm.rank == 0 else {}))
        said.append(str(caught.value))
    return said


def test_ranks_save_the_same_weights(tmp_path: Path) -> None:
    said = run_in("processes", save_differently, 2, tmp_path)
    assert said[0] == said[1] and names_in(tmp_path) == []
    assert said[0][0].startswith("dtype differs between ranks: torch.float32 on rank 0; None on rank 1")
    assert said[0][1].startswith("names differs between ranks: '")


KILLED = """
import gc, os, shutil, sys
from itertools import count
from pathlib import Path
from tests.zero_full.exported import engine_of
from zero_full.checkpoint import safetensors_writer, save_weights

def dying(function, left):
    def counted(*arguments):
        left.pop() if left else os._exit(9)
        return function(*arguments)
    return counted

def die_in_turn(older, folders, limit):
    for after in count():
        folder = shutil.copytree(older, Path(folders) / str(after))
        if not os.fork():
            left = [None] * after
            safetensors_writer.WeightFiles.write = dying(safetensors_writer.WeightFiles.write, left)
            for name in ("flush_part", "publish_part"):
                setattr(safetensors_writer, name, dying(getattr(safetensors_writer, name), left))
            save_weights(engine.module, engine.optimizer, folder, max_shard_bytes=int(limit))
            os._exit(0)
        if os.waitstatus_to_exitcode(os.wait()[1]) == 0:
            break

engine = engine_of(2, {})
gc.freeze()  # else each child, as it ends, copies all that was imported
for job in sys.argv[1:]:
    die_in_turn(*job.split(":"))
"""


def complete_export(folder: Path) -> dict[str, Tensor] | None:
    """What a loader finds: the single file first, else what an index names."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists():
        return safetensors.torch.load_file(folder / "model.safetensors")
    if not index.exists():
        return None
    files = set(json.loads(index.read_text())["weight_map"].values())
    return {k: v for file in files for k, v in safetensors.torch.load_file(folder / file).items()}


@pytest.mark.rotates
@pytest.mark.parametrize(("limit", "moments"), [(1000, 24), pytest.param(10**9, 20, marks=pytest.mark.slow)])
def test_who_is_killed_leaves_all_of_an_export_or_none(tmp_path: Path, limit: int, moments: int) -> None:
    """Where there was no export, one in a single file, or one in several."""
    jobs: list[str] = []
    for before in (None, 10**9, 1000):
        older = tmp_path / f"older {before}"
        older.mkdir()
        if before is not None:
            engine = engine_of(0, {}, Other)
            save_weights(engine.module, engine.optimizer, older, max_shard_bytes=before)
        jobs.append(f"{older}:{tmp_path / str(before)}:{limit}")
    command = [sys.executable, "-c", KILLED, *jobs]
    done = subprocess.run(command, timeout=120, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for before in (None, 10**9, 1000):
        assert_all_or_none(tmp_path / str(before), before, moments)


def assert_all_or_none(folders: Path, before: int | None, moments: int) -> None:
    """In a folder for each moment at which somebody was killed, and one where nobody was."""
    assert len(names_in(folders)) == moments + 1
    old, new = Other().state_dict(), Zoo().state_dict()
    for folder in folders.iterdir():
        found = complete_export(folder)
        if found is None:
            assert folder.name != str(moments) and before != 10**9
            continue
        want = old if torch.equal(found["scale"], old["scale"]) and before else new
        assert found.keys() == want.keys() - {"out.weight"}
        assert_same(found, {name: want[name] for name in found})
    again = folders / str(moments - 1)
    engine = engine_of(0, {})
    save_weights(engine.module, engine.optimizer, again)
    assert names_in(again) == ["model.safetensors"]  # what was left is gone


def test_what_an_older_export_has_besides_goes(tmp_path: Path) -> None:
    engine = engine_of(0, {})
    (tmp_path / "config.json").touch()
    for limit in (10**9, 500, 1500, 10**9):
        save_weights(engine.module, engine.optimizer, tmp_path, max_shard_bytes=limit)
        files = {path.name for path in tmp_path.iterdir()} - {"config.json"}
        index = tmp_path / "model.safetensors.index.json"
        mapped = json.loads(index.read_text())["weight_map"].values() if index.exists() else []
        assert files == ({*mapped, index.name} if mapped else {"model.safetensors"})


# The format --------------------------------------------------------------------------------------


def test_files_are_filled_in_order_up_to_the_limit() -> None:
    entries = [TensorEntry(str(size), torch.int8, (size,)) for size in (3, 4, 5, 20, 0, 1)]
    dealt = [[entry.name for entry in shard] for shard in split_into_files(entries, 8)]
    assert dealt == [["3", "4"], ["5"], ["20"], ["0", "1"]]
    assert split_into_files([], 8) == [[]]


def test_numbers_are_aligned_and_without_gaps(tmp_path: Path) -> None:
    dtypes = [torch.bool, torch.bfloat16, torch.int64, torch.float32, torch.uint8, torch.float16]
    entries = [TensorEntry(f"{i}", dtype, (i, 3)) for i, dtype in enumerate(dtypes)]
    header, places = header_of(entries, {"é": '"'})
    assert len(header) % 8 == 0
    ends = sorted((places[e.name], places[e.name] + e.nbytes) for e in entries)
    assert all(places[e.name] % e.dtype.itemsize == 0 for e in entries)
    assert ends[0][0] == len(header) and all(a[1] == b[0] for a, b in pairwise(ends))
    files = WeightFiles(tmp_path / "x.safetensors", entries, 10**9)
    files.begin()
    tensors = {e.name: torch.randint(2, e.shape).to(e.dtype) for e in entries}
    for name in reversed(tensors):
        files.write(name, tensors[name].t().contiguous().t())  # not contiguous
    files.finish()
    assert_same(dict(sorted(safetensors.torch.load_file(tmp_path / "x.safetensors").items())), tensors)


# The example -------------------------------------------------------------------------------------


@pytest.mark.rotates
def test_the_example_prints_the_same_loss_twice(tmp_path: Path) -> None:
    module = ["-m", "zero_full.examples.export_and_reload"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = []
    for command in ([*launcher, *module, "--out", str(tmp_path)], [*module, "--reload", str(tmp_path)]):
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0].startswith("loss ") and printed[0] == printed[1]
