"""Recognize the files of a DeepSpeed checkpoint by their names, and open them."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from zero_full.checkpoint.deepspeed.model import ModelStates
from zero_full.checkpoint.deepspeed.stage0 import Stage0Source
from zero_full.checkpoint.deepspeed.universal import UniversalSource
from zero_full.checkpoint.deepspeed.zero import RankStates, ZeroSource
from zero_full.checkpoint.disk import is_file_name
from zero_full.checkpoint.source import Source
from zero_full.errors import CheckpointError
from zero_full.formatting import listed, ranks_listed, shown

MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
MODEL_PART = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
OPTIMIZER_PART = re.compile(r"(bf16_|fp16_|)zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
EXPERTS = re.compile(
    r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt"
)
PIPELINE = re.compile(r"layer_\d+-model_\d+.*model_states\.pt")
INTERRUPTED = "the save was interrupted, or a node's files were not copied. Copy them, or load an older tag"


@dataclass
class TagFolder:
    """The files of one DeepSpeed checkpoint."""

    path: Path
    model: Path | None = None  # model state file of stages 0 to 2
    model_parts: dict[int, Path] = field(default_factory=dict)  # model state files of stage 3, by rank
    optimizer_parts: dict[int, Path] = field(default_factory=dict)  # optimizer state files, by rank
    problems: list[str] = field(default_factory=list)  # reasons why it cannot be read

    def __post_init__(self) -> None:
        for path in sorted(self.path.iterdir()):
            self._add(path)
        zero = self.path / "zero"
        self.is_universal = (zero / "optimizer_state.pt").is_file() or any(zero.glob("*/fp32.pt"))

    @property
    def is_deepspeeds(self) -> bool:
        """Whether any file was written by DeepSpeed."""
        files = self.model or self.model_parts or self.optimizer_parts or self.problems
        return bool(files or self.is_universal)

    def _add(self, path: Path) -> None:
        name = path.name
        if found := MODEL.fullmatch(name):
            self.model = path
            self._check_rank(found[1], name)
        elif found := MODEL_PART.fullmatch(name):
            self.model_parts[int(found[1])] = path
            self._check_rank(found[2], name)
        elif found := OPTIMIZER_PART.fullmatch(name):
            other = self.optimizer_parts.setdefault(int(found[2]), path)
            self._check_rank(found[3], name)
            if other is not path:
                self.problems.append(
                    f"{other.name} and {name} are both present, but are of different runs. Move one away"
                )
        elif EXPERTS.fullmatch(name):
            self.problems.append(f"{name} has experts, which are not supported")
        elif PIPELINE.fullmatch(name):
            self.problems.append(f"{name} is of pipeline parallelism, which is not supported")
        elif name == "offloaded_tensors":
            self.problems.append(
                "the optimizer state was on NVMe, and its swap files in offloaded_tensors are not supported. "
                "Load it with DeepSpeed, and save it again with offload_optimizer on the CPU"
            )

    def _check_rank(self, model_parallel_rank: str, name: str) -> None:
        if int(model_parallel_rank):
            self.problems.append(f"{name} is of tensor or pipeline parallelism, which is not supported")

    def open(self) -> Source:
        """Open the checkpoint. Raises CheckpointError if files are missing or of different saves."""
        if self.problems:
            raise CheckpointError(f"{self.path}: {listed(self.problems, 3)}")
        if self.is_universal:
            return UniversalSource(self.path, self._models()).completed()
        if not self.optimizer_parts:
            model = self._models()[0]
            if model.trained is None:
                return Stage0Source(self.path, model).completed()
            raise CheckpointError(f"{self.path} has no optimizer state files: {INTERRUPTED}")
        return self._open_zero()

    def _open_zero(self) -> Source:
        ranks = [RankStates(path) for _, path in sorted(self.optimizer_parts.items())]
        world = max(rank.world for rank in ranks)
        self._check_complete("optimizer states", self.optimizer_parts, world)
        if {rank.world for rank in ranks} != {world} or len(ranks) != world:
            raise CheckpointError(
                f"{self.path} has optimizer states of {len(ranks)} ranks, saved at world sizes "
                f"{' and '.join(map(str, sorted({rank.world for rank in ranks})))}: a run with fewer ranks "
                "has saved under the same tag. Load another tag, or move the older files away"
            )
        if ranks[0].stage < 3 and self.model is None:
            raise CheckpointError(f"{self.path / 'mp_rank_00_model_states.pt'} does not exist: {INTERRUPTED}")
        if ranks[0].stage == 3:
            self.model = None
        else:
            self.model_parts = {}
        return ZeroSource(self.path, self._models(world), ranks).completed()

    def _models(self, world: int | None = None) -> list[ModelStates]:
        """Read the required model state files: at stage 3 with frozen parameters those of all ranks."""
        if self.model is not None:
            return [ModelStates(self.model)]
        if 0 not in self.model_parts:
            raise CheckpointError(f"{self.path} lacks the model states of rank 0: {INTERRUPTED}")
        first = ModelStates(self.model_parts[0])
        if not first.fragments:
            return [first]
        count = world or first.world
        self._check_complete("model states", self.model_parts, count)
        return [first, *(ModelStates(self.model_parts[rank]) for rank in range(1, count))]

    def _check_complete(self, what: str, parts: dict[int, Path], world: int) -> None:
        missing = [rank for rank in range(world) if rank not in parts]
        if missing:
            raise CheckpointError(f"{self.path} lacks the {what} of {ranks_listed(missing)}: {INTERRUPTED}")


def is_deepspeeds(folder: Path) -> bool:
    """Return whether the folder has a DeepSpeed checkpoint that can be opened without a tag."""
    return folder.is_dir() and ((folder / "latest_universal").is_file() or TagFolder(folder).is_deepspeeds)


def open_deepspeed(folder: Path | str, tag: str | None = None) -> Source | None:
    """Open the DeepSpeed checkpoint in a folder; None if the folder has none.

    Without a tag, the file `latest` names the checkpoint, or else `latest_universal`. `folder` may also be
    the checkpoint's own folder.
    """
    folder = Path(folder)
    place = _place(folder, tag)
    if place is None or not place.is_dir():
        return None
    found = TagFolder(place)
    if not found.is_deepspeeds:
        return None
    try:
        return found.open()
    except CheckpointError:
        raise
    except Exception as error:  # unexpected contents can cause any exception
        raise CheckpointError(
            f"{place}: the files differ from those of DeepSpeed up to 0.19.8: {error!r}. Load another "
            "tag, or convert this one with the DeepSpeed that wrote it (ds_to_universal)"
        ) from error


def _place(folder: Path, tag: str | None) -> Path | None:
    if tag is not None:
        return folder / tag
    if not folder.is_dir() or TagFolder(folder).is_deepspeeds:
        return folder
    for name in ("latest", "latest_universal"):
        if (folder / name).is_file():
            return _named(folder, folder / name)
    return None


def _named(folder: Path, latest: Path) -> Path | None:
    """Return the folder of the tag in the file `latest`; None if `folder` has no checkpoint of DeepSpeed.

    The tag must name a folder in `folder`, because the file's text is not trusted.
    """
    tag = latest.read_text(errors="replace").strip()
    if is_file_name(tag) and (folder / tag).is_dir():
        return folder / tag
    others = sorted(path.name for path in folder.iterdir() if path.is_dir() and TagFolder(path).is_deepspeeds)
    if not others:
        return None
    raise CheckpointError(
        f"{latest} names {shown(tag)}, which is not a folder in {folder}. Pass one of these tags: "
        f"{listed(others)}"
    )
