"""Programs of Hugging Face's users that cannot work with zero_full by DeepSpeed's name, and how they end.

    torchrun ... -m zero_full as-deepspeed -m tests.hf.refusals --out FILE --folder FOLDER

Every rank catches each error; the texts of all ranks are written to the file.
"""

import argparse
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import transformers as hf
from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState

from tests.hf.cases import Place, llama_model, rows

ACTS: dict[str, tuple[Callable[[Place], Any], str]] = {}  # with what every rank's error says


def ends(text: str) -> Callable[[Callable[[Place], Any]], Callable[[Place], Any]]:
    """Add an act, and the text of its error."""

    def add(act: Callable[[Place], Any]) -> Callable[[Place], Any]:
        ACTS[act.__name__] = act, text
        return act

    return add


def trainer(place: Place, model: Any = None, config: Any = None, **given: Any) -> Any:
    arguments = place.arguments(config=config, max_steps=2, ddp_timeout=60, **given)
    return hf.Trainer(model or llama_model(), arguments, train_dataset=rows())


@ends("this LlamaForCausalLM has an engine already")
def second_engine(place: Place) -> None:
    model = llama_model()
    trainer(place, model).train()
    trainer(place, model).train()


@ends("zero_optimizatoin")
def unknown_key(place: Place) -> None:
    trainer(place, config={**place.config(), "zero_optimizatoin": {}}).train()


@ends("`optimizer.params.amsgrad` not found")
def auto_without_default(place: Place) -> None:
    adam = {"type": "AdamW", "params": {"lr": "auto", "amsgrad": "auto"}}
    trainer(place, config=place.config(optimizer=adam)).train()


@ends("deepspeed.tp_model_init does not exist here")
def tensor_parallel(place: Place) -> None:
    trainer(place, config={**place.config(), "tensor_parallel": {"autotp_size": 2}}).train()


@ends("there is no sequence parallelism")
def sequence_parallel(place: Place) -> None:
    trainer(place, parallelism_config=ParallelismConfig(sp_size=2, sp_backend="deepspeed")).train()


@ends("accelerate ignores the DeepSpeed plugin")
def plugin_on_cpu_by_request(place: Place) -> None:
    """Warns; here the warning is raised."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("zero_full")
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    try:
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    finally:
        log.removeHandler(handler)
    told: list[Any] = [None] * place.ranks
    dist.all_gather_object(told, said)  # rank 0 warns alone
    raise UserWarning(str(told[0]))


@ends("models, optimizers or arguments differ between ranks")
def other_models(place: Place) -> None:
    model = llama_model()
    if place.rank == 1:
        model.model.layers = model.model.layers[:-1]
    trainer(place, model).train()


@ends("the ranks make different collectives")
def other_forward(place: Place) -> None:
    """Rank 1 leaves out a layer. The last act: the ranks are apart afterwards."""
    model = llama_model()
    if place.rank == 1:
        model.model.layers[1].forward = lambda hidden, *inputs, **named: hidden
    trainer(place, model).train()


def main() -> int:
    """Commit all acts, and write the errors of all ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    logging.getLogger("zero_full").setLevel(logging.ERROR)
    place, said = Place(3, options.folder), {}
    for name, (act, _) in ACTS.items():
        try:
            act(place)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    options.out.with_suffix(f".{place.rank}").write_text(json.dumps(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
