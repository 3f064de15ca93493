"""ZeRO in short files, one idea each: the answer key of the lessons.

Read `tiny_zero` first: three stages on one screen. Then in this order: `comm`, `ledger`, `adam` and `stage0`
(step 0), `ring` (step 1/2), `stage1`, `stage2`, `stage3` and `prefetch`, `precision`, `offload`, then
`compression`, `one_bit_adam` and `zero_one_adam` (step 6). `muon`, `tensor_parallel`,
`pipeline`, `activations` and `allocator` are bonuses.
"""

from zero_min.activations import Meter, OffloadActivations, checkpoint, in_segments
from zero_min.adam import Adam, AdamW
from zero_min.comm import Comm, WorldError
from zero_min.dist_comm import DistComm
from zero_min.ledger import Ledger
from zero_min.muon import Stage2Muon
from zero_min.offload import Stage2Disk, Stage2Offload
from zero_min.one_bit_adam import OneBitAdam
from zero_min.pipeline import Pipeline
from zero_min.precision import DynamicScale, MixedPrecision, StaticScale
from zero_min.prefetch import Stage3Prefetch
from zero_min.stage0 import Stage0
from zero_min.stage1 import Stage1
from zero_min.stage2 import Stage2
from zero_min.stage3 import Stage3
from zero_min.tensor_parallel import TensorParallel
from zero_min.thread_comm import ThreadComm, run_world
from zero_min.zero_one_adam import ZeroOneAdam

STAGES = {0: Stage0, 1: Stage1, 2: Stage2, 3: Stage3}

__all__ = [
    "STAGES",
    "Adam",
    "AdamW",
    "Comm",
    "DistComm",
    "DynamicScale",
    "Ledger",
    "Meter",
    "MixedPrecision",
    "OffloadActivations",
    "OneBitAdam",
    "Pipeline",
    "Stage0",
    "Stage1",
    "Stage2",
    "Stage2Disk",
    "Stage2Muon",
    "Stage2Offload",
    "Stage3",
    "Stage3Prefetch",
    "StaticScale",
    "TensorParallel",
    "ThreadComm",
    "WorldError",
    "ZeroOneAdam",
    "checkpoint",
    "in_segments",
    "run_world",
]
