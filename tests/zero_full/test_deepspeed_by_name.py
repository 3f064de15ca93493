"""`install` puts a module `deepspeed` into a process: names, metadata, what it refuses, and the command.

Tests run in processes of their own, forked from one that has torch, because `install` changes a process.
"""

import copy
import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import zero_full

EXPECTED = {  # what transformers, accelerate, peft, trl and Lightning import
    "deepspeed": [
        "__version__",
        "initialize",
        "DeepSpeedEngine",
        "init_distributed",
        "zero",
        "comm",
        "utils",
    ],
    "deepspeed.accelerator": ["get_accelerator"],
    "deepspeed.checkpoint.utils": ["clone_tensors_for_torch_save"],
    "deepspeed.checkpointing": ["configure"],
    "deepspeed.comm": ["init_distributed", "is_initialized", "get_rank", "all_reduce", "barrier"],
    "deepspeed.launcher.runner": ["DEEPSPEED_ENVIRONMENT_NAME"],
    "deepspeed.ops.adagrad": ["DeepSpeedCPUAdagrad"],
    "deepspeed.ops.adam": ["DeepSpeedCPUAdam", "FusedAdam"],
    "deepspeed.ops.lion": ["DeepSpeedCPULion"],
    "deepspeed.runtime.base_optimizer": ["DeepSpeedOptimizer"],
    "deepspeed.runtime.engine": ["DeepSpeedEngine"],
    "deepspeed.runtime.lr_schedules": ["VALID_LR_SCHEDULES", "WarmupLR"],
    "deepspeed.runtime.zero.partition_parameters": [
        *(
            "ZeroParamStatus",
            "zero_wrapper_for_fp_tensor_constructor",
            "_orig_torch_arange",
            "get_accelerator",
        ),
    ],
    "deepspeed.utils": ["logger", "set_z3_leaf_modules", "safe_get_full_grad", "is_initialized"],
    "deepspeed.utils.logging": ["logger"],
    "deepspeed.zero": ["Init", "GatheredParameters", "register_external_parameter"],
}
MISSING = {  # a statement -> what its error says
    "import deepspeed; deepspeed.tp_model_init": "split layers yourself",
    "import deepspeed; deepspeed.nothing_of_this_name": "deepspeed.nothing_of_this_name does not exist here",
    "from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF": "no sequence parallel",
    "from deepspeed.utils import groups": "deepspeed.utils.groups does not exist here",
    "from deepspeed.runtime import nothing": "zero_full stands in for DeepSpeed 0.19.6",
    "import deepspeed.pipe": "zero_full.PipelineModule",
}


def fresh(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function in a new process, and return its result."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.imported"])
    with context.Pool(1) as pool:
        return pool.apply(function, arguments)


def installed() -> ModuleType:
    """The module, installed twice."""
    from zero_full.integrations.deepspeed import install

    install()
    install()
    import deepspeed  # type: ignore[import-not-found]

    return deepspeed  # type: ignore[no-any-return]


# Names -------------------------------------------------------------------------------------------


def all_that_is_seen() -> dict[str, Any]:
    from importlib import import_module, metadata, util

    installed()
    lacking = [
        f"{module}.{name}"
        for module, names in EXPECTED.items()
        for name in names
        if not hasattr(import_module(module), name)
    ]
    said = {}
    for statement in MISSING:
        try:
            exec(statement)
        except (ImportError, AttributeError) as error:
            said[statement] = str(error)
    distribution = metadata.distribution("deepspeed")
    return {
        "lacking": lacking,
        "said": said,
        "version": (metadata.version("deepspeed"), distribution.metadata["Name"]),
        "found": util.find_spec("deepspeed") is not None,
        "top": metadata.packages_distributions()["deepspeed"],
        "others": metadata.version("torch"),
        "finders": sum(type(finder).__name__ == "Finder" for finder in sys.meta_path),
    }


def test_every_name_that_libraries_import_is_there_and_others_say_who_stands_in() -> None:
    seen = fresh(all_that_is_seen)
    assert seen["lacking"] == []
    assert {s: text for s, text in seen["said"].items() if MISSING[s] not in text} == {}
    assert seen["said"].keys() == MISSING.keys()
    assert seen["version"] == ("0.19.6", "deepspeed") and seen["found"] and seen["top"] == ["deepspeed"]
    assert seen["others"].startswith(torch.__version__.split("+")[0]) and seen["finders"] == 1


def test_a_process_that_does_not_ask_has_no_such_module() -> None:
    assert fresh(imports_of_zero_full) == []


def imports_of_zero_full() -> list[str]:
    import zero_full

    zero_full.initialize, zero_full.Init  # noqa: B018 (imports them)
    return [name for name in sys.modules if name.startswith(("deepspeed", "zero_full.integrations"))]


# What is refused ---------------------------------------------------------------------------------


REFUSED = {  # what a process has -> what `install` says; "": nothing
    "imported": "deepspeed is imported already. Call",
    "installed": "DeepSpeed 0.17.0 is installed. Uninstall it",
    "copied": "deepspeed/__init__.py) is installed",
    "accelerate first": "accelerate was imported before and has found no DeepSpeed",
    "a folder of configurations": "",
}


def why_not(kind: str, folder: Path) -> str:
    package, info = folder / "deepspeed", folder / "deepspeed-0.17.0.dist-info"
    package.mkdir(parents=True)
    before = dict(sys.modules)
    if kind == "imported":
        sys.modules["deepspeed"] = ModuleType("deepspeed")
    elif kind == "accelerate first":
        sys.modules["accelerate"] = ModuleType("accelerate")
    elif kind != "a folder of configurations":
        (package / "__init__.py").write_text("")
        if kind == "installed":
            info.mkdir()
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.17.0\n")
    sys.path.insert(0, str(folder))
    try:
        installed()
    except ImportError as error:
        return str(error)
    finally:
        sys.path.remove(str(folder))
        for name in {"deepspeed", "accelerate"} - before.keys():
            sys.modules.pop(name, None)
    return ""


def all_reasons(folder: Path) -> dict[str, str]:
    return {kind: why_not(kind, folder / kind) for kind in REFUSED}


def test_where_deepspeed_is_or_was_missed_installing_is_refused(tmp_path: Path) -> None:
    for kind, said in fresh(all_reasons, tmp_path).items():
        assert REFUSED[kind] in said and bool(REFUSED[kind]) == bool(said), (kind, said)


# The engine --------------------------------------------------------------------------------------


def of_an_engine(folder: Path) -> dict[str, Any]:
    deepspeed = installed()
    from deepspeed.checkpoint.utils import clone_tensors_for_torch_save  # type: ignore[import-not-found]

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    file = folder / "ds.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}))
    adam = deepspeed.ops.adam.DeepSpeedCPUAdam(model[1].parameters(), adamw_mode=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1.0)
    engine, optimizer, _, _ = deepspeed.initialize(None, model, adam, [], None, schedule, config=str(file))
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    tied = torch.ones(6)
    first, second = clone_tensors_for_torch_save([tied[:3], {"same": tied[:3]}])
    seen = {
        "kinds": [isinstance(engine, nn.Module), isinstance(engine, deepspeed.DeepSpeedEngine)],
        "adam": [type(adam) is zero_full.FusedAdam, optimizer.overflow],
        "config": engine.config.get("zero_optimization").get("stage"),
        "module": [engine.module is model, len(list(engine.parameters())), engine.global_steps],
        "weights": sorted(engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)),
        "status": model[1].weight.ds_status.name,
        "others": hasattr(nn.Linear(1, 1).weight, "ds_status"),
        "clone": [first is second["same"], first.untyped_storage().nbytes() == 12],
        "rank": [deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()],
    }
    engine.lr_scheduler = None  # as Lightning does
    model.temperature, engine.temperature = 1, 2
    seen["written"] = model.temperature
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    seen["schedule"] = schedule.last_epoch
    try:
        deepspeed.initialize(model=model, config=str(file))
    except ValueError as error:
        seen["second"] = str(error)
    engine.destroy()
    again, _, _, _ = deepspeed.initialize(model=model, config=str(file))
    again.destroy(gather=True)
    _, lower, _, _ = deepspeed.initialize(
        model=nn.Linear(1, 1), config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    )
    seen["hooks"] = [optimizer.parameter_offload.forward_hooks, hasattr(lower, "parameter_offload")]
    seen["again"] = [again.module is model, copy.deepcopy(nn.ModuleDict({"a": model})) is not None]
    return seen


def test_the_engine_is_a_module_with_a_mapping_as_configuration(tmp_path: Path) -> None:
    seen = fresh(of_an_engine, tmp_path)
    assert "has an engine already, and two would train the same parameters" in seen.pop("second")
    assert seen == {
        "kinds": [True, True],
        "adam": [True, False],
        "config": 3,
        "module": [True, 4, 1],
        "weights": ["1.bias", "1.weight"],
        "status": "AVAILABLE",
        "others": False,
        "clone": [True, True],
        "rank": [0, 1],
        "schedule": 1,
        "written": 2,
        "hooks": [[], False],
        "again": [True, True],
    }


def test_auto_takes_a_default_where_there_is_one_and_keys_with_dots_are_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from zero_full.integrations.deepspeed.engine import filled

    zero = {"stage": 2, "reduce_bucket_size": "auto", "offload_optimizer": {"device": "cpu", "ratio": "auto"}}
    given = {
        "zero_optimization": zero,
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "optimizer": {"type": "Adam", "params": {"lr": "auto"}},
        "zero_optimization.reduce_bucket_size": 3.5,
    }
    with caplog.at_level("INFO", "zero_full"):
        assert filled(given) == {
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "train_batch_size": "auto",  # no default: refused later
            "optimizer": {"type": "Adam", "params": {"lr": "auto"}},
        }
    assert "zero_optimization.reduce_bucket_size" in caplog.text and "gradient_clipping" in caplog.text


def test_versions_that_were_not_tested_are_told_with_those_that_were(monkeypatch: pytest.MonkeyPatch) -> None:
    from zero_full.integrations.deepspeed import accelerate

    installed = {"transformers": "5.23.1", "accelerate": "1.14.0.dev0", "peft": "0.30", "trl": "2.0.0"}
    monkeypatch.setattr(accelerate, "version", installed.__getitem__)
    assert accelerate.untested() == [
        "accelerate 1.14.0.dev0 (tested: from 1.15 to before 2)",
        "trl 2.0.0 (tested: from 1.16 to before 2)",
    ]


# The command -------------------------------------------------------------------------------------


def commanded(several: list[list[str]]) -> list[Any]:
    from zero_full.__main__ import main

    ends: list[Any] = []
    for arguments in several:
        try:
            ends.append(main(["as-deepspeed", *arguments]))
        except SystemExit as end:
            ends.append(f"exit {end.code}")
        except ZeroDivisionError as error:
            ends.append(f"{type(error).__name__} with {bool(error.__traceback__)} traceback")
    return ends


def test_the_command_runs_a_script_as_python_would(tmp_path: Path) -> None:
    script, out = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(
        "import deepspeed, json, os, sys, beside\n"
        "if __name__ == '__main__':\n"
        "    about = [deepspeed.__version__, sys.argv[1:], sys.argv[0], os.environ['WORLD_SIZE']]\n"
        "    open(sys.argv[1], 'w').write(json.dumps(about))\n"
        "    sys.exit(int(sys.argv[3])) if sys.argv[3] != '0' else 1 / 0\n"
    )
    (tmp_path / "beside.py").write_text("")
    fails, exits = [str(script), str(out), "x", "0"], [str(script), str(out), "-m", "3"]
    ends = fresh(commanded, [[str(tmp_path / "absent.py")], [], fails, exits])
    assert ends == ["exit 2", "exit 2", "ZeroDivisionError with True traceback", "exit 3"]
    assert json.loads(out.read_text()) == ["0.19.6", [str(out), "-m", "3"], str(script), "1"]
