"""Files of torch.save are read without executing what they say, and damaged ones are noticed."""

import io
import os
import pickle
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from zero_full.checkpoint.deepspeed.saved_source import with_values
from zero_full.checkpoint.torch_file import SavedTensor, TorchArchive
from zero_full.checkpoint.unpickle import ADMITTED, SavedObject, load_saved
from zero_full.errors import CheckpointError

SCALER = b"cdeepspeed.runtime.fp16.loss_scaler\nDynamicLossScaler\n)\x81"


def saved_pickle(path: Path, content: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    """A file as torch.save writes it, with this pickle, and a storage named 0."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/data/0", bytes(range(16)))
    return path


# Pickles that do something ---------------------------------------------------------------------------


class Reduced:
    """Whatever unpickles it makes this call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def payloads(marker: Path) -> Iterator[tuple[str, bytes]]:
    """What each is refused for, and pickles that create a file if their instructions are followed."""
    line = f"touch {marker}"
    code = f"open({str(marker)!r}, 'w')"
    system = Reduced(os.system, line)
    for protocol in (0, 2, 4):
        yield "posix.system", pickle.dumps(system, protocol)
        yield "builtins.eval", pickle.dumps(Reduced(eval, code), protocol)
        yield "builtins.exec", pickle.dumps({"module": OrderedDict(a=[(1, Reduced(exec, code))])}, protocol)
        # After what is harmless, as an argument of what is admitted.
        yield (
            "posix.system",
            pickle.dumps([torch.Size((2, 3)), Reduced(OrderedDict, [("a", system)])], protocol),
        )
    yield "posix.system", b"(S'" + line.encode() + b"'\niposix\nsystem\n."
    yield "posix.system", b"(cposix\nsystem\nS'" + line.encode() + b"'\no."
    yield (
        "builtins.getattr",
        (
            b"c__builtin__\ngetattr\nc__builtin__\n__import__\nS'os'\n\x85RS'system'\n\x86RS'"
            + line.encode()
            + b"'\n\x85R."
        ),
    )
    yield "posix.system", SCALER + b"}S'cur_scale'\ncposix\nsystem\nS'" + line.encode() + b"'\n\x85Rsb."
    yield "posix.system", b"cposix\nsystem\nS'" + line.encode() + b"'\n\x85RQ."  # while a storage is named
    dotted = b"\x80\x04\x8c\x27deepspeed.runtime.fp16.loss_scaler\x8c"
    name = b"LossScaler.__init__.__globals__"
    yield (
        "loss_scaler.LossScaler.__init__",
        dotted.replace(b"\x27", b"\x22") + bytes([len(name)]) + name + b"\x93.",
    )
    for module, attribute in (("subprocess", "Popen"), ("functools", "partial"), ("operator", "attrgetter")):
        yield f"{module}.{attribute}", f"c{module}\n{attribute}\n.".encode()
    for module, attribute in (
        ("torch", "load"),
        ("torch.hub", "load"),
        ("numpy", "load"),
        ("builtins", "open"),
    ):
        yield f"{module}.{attribute}", f"c{module}\n{attribute}\n(S'{marker}'\ntR.".encode()
    yield "torch.jit._script.RecursiveScriptModule", b"ctorch.jit._script\nRecursiveScriptModule\n."
    yield "torch._utils._rebuild_wrapper_subclass", b"ctorch._utils\n_rebuild_wrapper_subclass\n."


def test_no_instruction_of_a_pickle_is_followed(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for number, (name, content) in enumerate(payloads(marker)):
        path = saved_pickle(tmp_path / f"{number}.pt", content)
        with pytest.raises(CheckpointError) as caught:
            load_saved(path)
        assert str(path) in str(caught.value) and name in str(caught.value), (number, name)
        assert not marker.exists(), name


class Trusting(pickle.Unpickler):
    """Loads everything."""

    def persistent_load(self, pid: Any) -> Any:
        """The identifier itself."""
        return pid


def test_the_payloads_are_real(tmp_path: Path) -> None:
    """Else the test above could not fail."""
    marker, real = tmp_path / "marker", 0
    for name, content in payloads(marker):
        if name in ("posix.system", "builtins.eval", "builtins.exec", "builtins.getattr"):
            stand_in = content.replace(SCALER, b"ccollections\nOrderedDict\n)R")
            Trusting(io.BytesIO(stand_in)).load()
            assert marker.exists(), name
            marker.unlink()
            real += 1
    assert real > 12


@pytest.mark.parametrize("name", sorted(ADMITTED))
def test_what_a_pickle_may_name_cannot_be_changed_by_it(name: str, tmp_path: Path) -> None:
    value = ADMITTED[name]
    before = dir(value), getattr(value, "__new__", None)
    named = f"c{name.rpartition('.')[0]}\n{name.rpartition('.')[2]}\n".encode()
    for state in (b"}S'changed'\nK\x01s", b"N}S'__new__'\nK\x01s\x86", b"N}S'changed'\nK\x01s\x86"):
        path = saved_pickle(tmp_path / "changed.pt", b"\x80\x02" + named + state + b"b.")
        with pytest.raises(CheckpointError, match="damaged"):
            load_saved(path)
    assert (dir(value), getattr(value, "__new__", None)) == before


@pytest.mark.parametrize(
    "arguments",
    [
        b"K\x00(K\x04tK\x01\x85\x89N",  # fits
        b"K\x01(K\x04tK\x01\x85\x89N",  # ends behind the storage
        b"K\x00(K\x05tK\x01\x85\x89N",
        b"J\xff\xff\xff\xff(K\x04tK\x01\x85\x89N",  # begins before it
        b"K\x00(J\xff\xff\xff\xfftK\x01\x85\x89N",
        b"K\x00(K\x02K\x02tJ\x00\x00\x00\x7fK\x01\x86\x89N",
        b"K\x00(K\x04tK\x01K\x01\x86\x89N",  # more strides than sizes
        b"K\x00(G\x3f\xf0\x00\x00\x00\x00\x00\x00tK\x01\x85\x89N",  # a size of 1.0
        b"K\x00(K\x04tK\x01\x85\x89NS'conj'\n",  # with more than is known
    ],
)
def test_a_tensor_lies_within_its_storage(arguments: bytes, tmp_path: Path) -> None:
    storage = b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nK\x04tQ"
    content = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + arguments + b"tR."
    path = saved_pickle(tmp_path / "tensor.pt", content)
    if arguments.startswith(b"K\x00(K\x04tK\x01\x85\x89N") and not arguments.endswith(b"\n"):
        expected = torch.frombuffer(bytearray(range(16)), dtype=torch.float32)
        assert torch.equal(load_saved(path).whole(), expected)
    else:
        with pytest.raises(CheckpointError, match="damaged"):
            load_saved(path)


@pytest.mark.parametrize(
    "storage",
    [
        b"(S'storage'\nctorch\nFloatStorage\nS'1'\nS'cpu'\nK\x04tQ.",  # is not in the file
        b"(S'storage'\nctorch\nFloatStorage\nS'../data.pkl'\nS'cpu'\nK\x04tQ.",
        b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nK\x05tQ.",  # is shorter
        b"(S'module'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nK\x04tQ.",
        b"(S'storage'\nS'float'\nS'0'\nS'cpu'\nK\x04tQ.",
        b"(S'storage'\nctorch\nFloatStorage\nK\x00S'cpu'\nK\x04tQ.",
    ],
)
def test_a_storage_is_in_the_file(storage: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"storage\.pt"):
        load_saved(saved_pickle(tmp_path / "storage.pt", b"\x80\x02" + storage))


# What is harmless ------------------------------------------------------------------------------------

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.bool, torch.complex64, torch.uint16, torch.uint64, torch.float8_e4m3fn),
]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Windows into storages: scalars, empty ones, transposed, with steps, expanded, parameters."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    numel = torch.Size(shape).numel()
    values = (
        torch.arange(numel + 3, dtype=torch.float32).to(dtype)[draw(st.integers(0, 3)) :][:numel].view(shape)
    )
    way = draw(st.sampled_from(["plain", "transposed", "steps", "expanded", "parameter"]))
    if way == "transposed" and len(shape) > 1:
        return values.transpose(0, -1)
    if way == "steps" and shape:
        return values[::2]
    if way == "expanded":
        return values.unsqueeze(0).expand(2, *shape)
    return nn.Parameter(values) if way == "parameter" and dtype.is_floating_point else values


plain = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    *(
        st.binary(max_size=5),
        st.sampled_from(DTYPES),
        st.just(torch.Size((2, 3))),
        st.just(torch.device("cpu")),
    ),
    *(st.sets(st.integers(), max_size=3), st.frozensets(st.text(max_size=2)), st.just(Counter("aab"))),
)
nests = st.recursive(
    plain | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=6,
)


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, Tensor):
        if not (isinstance(ours, Tensor) and ours.dtype == theirs.dtype and ours.shape == theirs.shape):
            return False
        copies = [each.detach().clone(memory_format=torch.contiguous_format) for each in (ours, theirs)]
        return list(copies[0].untyped_storage()) == list(copies[1].untyped_storage())
    if isinstance(theirs, torch.Size):
        return type(ours) is tuple and ours == tuple(theirs)
    if type(ours) is not type(theirs):
        return False
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, dict):
        return [*ours] == [*theirs] and all(same(ours[key], theirs[key]) for key in theirs)
    return bool(ours == theirs)


@settings(deadline=None)
@given(nests)
def test_what_was_saved_is_what_is_read(tmp_path_factory: pytest.TempPathFactory, nest: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "nest.pt"
    torch.save(nest, path)
    assert same(with_values(load_saved(path)), nest)


@settings(deadline=None)
@given(tensors(), st.data())
def test_any_range_of_a_tensor_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, tensor: Tensor, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "range.pt"
    torch.save(tensor, path)
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    assert same(load_saved(path).read(start, stop), tensor.detach().reshape(-1)[start:stop])


def test_tensors_with_attributes_are_read(tmp_path: Path) -> None:
    """DeepSpeed's masters have some."""
    parameter = nn.Parameter(torch.arange(3.0))
    parameter.ds_id = "7"  # type: ignore[attr-defined]
    torch.save([parameter, parameter.detach()[1:]], tmp_path / "a.pt")
    found = load_saved(tmp_path / "a.pt")
    assert found[0].whole().tolist() == [0, 1, 2] and found[1].whole().tolist() == [1, 2]
    assert found[0].member == found[1].member


def test_numbers_of_numpy_become_numbers(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    kinds = ("float64", "float32", "float16", "int64", "uint8", "bool_")
    torch.save([getattr(numpy, kind)(1) for kind in kinds], tmp_path / "numbers.pt")
    found = load_saved(tmp_path / "numbers.pt")
    assert found == [1] * len(kinds) and [type(number) for number in found[2:5]] == [float, int, int]


def test_an_object_of_deepspeed_is_its_attributes(tmp_path: Path) -> None:
    content = b"\x80\x02" + SCALER + b"}S'cur_scale'\nG\x40\x00\x00\x00\x00\x00\x00\x00sb."
    found = load_saved(saved_pickle(tmp_path / "scaler.pt", content))
    assert isinstance(found, SavedObject) and found.attributes == {"cur_scale": 2.0}


# Only what is asked for, and only what was written ---------------------------------------------------


def test_only_the_bytes_that_are_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.arange(1000.0), "b": torch.arange(1000)}, tmp_path / "a.pt")
    found, asked = load_saved(tmp_path / "a.pt"), list[tuple[str, int]]()
    read = TorchArchive.read

    def counted(archive: TorchArchive, member: str, start: int, stop: int) -> bytearray:
        asked.append((member, stop - start))
        return read(archive, member, start, stop)

    monkeypatch.setattr(TorchArchive, "read", counted)
    assert found["a"].read(500, 503).tolist() == [500, 501, 502]
    assert found["b"].read(999, 1000).tolist() == [999]
    assert [size for _, size in asked] == [3 * 4, 8]


def test_a_file_of_which_anything_is_missing_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(100.0)}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    for size in range(0, len(whole), 7):
        path = tmp_path / "cut.pt"
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut\.pt"):
            load_saved(path)


def test_a_flipped_byte_is_noticed_or_changes_nothing(tmp_path: Path) -> None:
    values = torch.arange(100.0)
    torch.save({"a": values}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    noticed = 0
    for place in range(0, len(whole), 5):
        path = tmp_path / "flipped.pt"
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        try:
            found = load_saved(path)["a"]
            found.check()
            assert torch.equal(found.whole(), values), place
        except CheckpointError as error:
            assert "flipped.pt" in str(error)
            noticed += 1
    assert noticed > values.nbytes // 5


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.arange(3.0), tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    found = load_saved(tmp_path / "a.pt")
    found.check()
    assert found.whole().tolist() == [0, 1, 2]


def test_a_file_that_becomes_shorter_is_an_error(tmp_path: Path) -> None:
    torch.save(torch.arange(1000.0), tmp_path / "a.pt")
    found: SavedTensor = load_saved(tmp_path / "a.pt")
    with (tmp_path / "a.pt").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match=r"a\.pt cannot be read"):
        found.read(900, 1000)
    (tmp_path / "a.pt").unlink()
    with pytest.raises(CheckpointError, match=r"a\.pt cannot be read"):
        found.read(0, 1)


def test_other_files_are_refused(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    saved_pickle(tmp_path / "compressed.pt", b"N" * 100 + b".", zipfile.ZIP_DEFLATED)
    saved_pickle(tmp_path / "big.pt", b"N.")
    with zipfile.ZipFile(tmp_path / "big.pt", "a") as archive:
        archive.writestr("archive/byteorder", "big")
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("text", "text")
    (tmp_path / "folder.pt").mkdir()
    reasons = {
        "old.pt": "not a file of torch.save",
        "compressed.pt": "damaged",
        "big.pt": "byte order",
        "other.pt": "not one of torch.save",
        "folder.pt": "not a file of torch.save",
        "absent.pt": "does not exist",
    }
    for name, reason in reasons.items():
        with pytest.raises(CheckpointError, match=f"{name}.*{reason}"):
            load_saved(tmp_path / name)
