"""Reshard stored tensors to this rank's ranges: torch.distributed.checkpoint computes the overlaps.

Every rank plans alone (`no_dist`), so the cost does not concentrate on one rank at large world sizes.
"""

import io
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from zero_full.checkpoint.source import Source
from zero_full.errors import CheckpointError
from zero_full.shard.contents.state import Chunk


class SourceReader(StorageReader):
    """Storage reader for any `Source`: `dcp.load(state, storage_reader=SourceReader(source))`.

    It presents every tensor as one-dimensional.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Do nothing, as a reader serves one source."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the tensors of the source and their stored ranges."""
        told: dict[str, Any] = {}
        for key, tensor in self.source.tensors.items():
            pieces = [
                ChunkStorageMetadata(torch.Size((start,)), torch.Size((stop - start,)))
                for start, stop in tensor.pieces
            ]
            size = torch.Size((tensor.numel,))
            told[key] = TensorStorageMetadata(TensorProperties(tensor.dtype), size, pieces)
        return Metadata(told)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: the source is open already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the planned ranges, one at a time."""
        for item in plan.items:
            offset = item.storage_index.offset
            assert offset is not None
            start = offset[0] + item.storage_offsets[0]
            target = planner.resolve_tensor(item).detach()
            self.source.read_into(item.storage_index.fqn, start, target)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Return False: a source is passed as an object, not found by an id."""
        return False


class ChunkPlanner(LoadPlanner):
    """Load planner for the chunks of one rank."""

    def __init__(self, chunks: Mapping[str, Chunk]) -> None:
        self.chunks = chunks
        self.metadata: Metadata | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep the metadata of the stored tensors."""
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Return the stored ranges to read for each chunk."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for chunk in self.chunks.values():
            stored = self.metadata.state_dict_metadata[chunk.key]
            assert isinstance(stored, TensorStorageMetadata)
            mine = ChunkStorageMetadata(torch.Size((chunk.start,)), torch.Size((chunk.values.numel(),)))
            items += create_read_items_for_chunk_list(chunk.key, stored, [mine])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raise, as a source holds tensors only."""
        raise AssertionError(read_item)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the part of a chunk that an item is read into."""
        chunk = self.chunks[read_item.dest_index.fqn]
        return chunk.values.narrow(0, read_item.dest_offsets[0], read_item.lengths[0])

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the data were read directly into the chunk."""


def fill(source: Source, chunks: Sequence[Chunk]) -> None:
    """Read every chunk, converted to its dtype. Several chunks may be of the same tensor."""
    wanted, others = dict[str, Chunk](), list[Chunk]()
    for chunk in chunks:
        if chunk.values.numel():
            others.append(chunk) if chunk.key in wanted else wanted.update({chunk.key: chunk})
    if not wanted:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            load(
                dict.fromkeys(wanted),
                storage_reader=SourceReader(source),
                planner=ChunkPlanner(wanted),
                no_dist=True,
            )
        except CheckpointException as error:  # a BaseException, but no Exception
            reason, _ = next(iter(error.failures.values()))
            raise CheckpointError(str(reason) or type(reason).__name__) from error
    fill(source, others)
