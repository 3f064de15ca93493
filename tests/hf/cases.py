"""Programs of Hugging Face's users that know nothing of zero_full, as cases; each returns numbers to compare.

    python -m tests.hf.cases --out FILE NAME...                          plain, in one process
    torchrun ... -m zero_full as-deepspeed -m tests.hf.cases --stage 3 --out FILE NAME...

The same programs run in both. Without --stage nothing of DeepSpeed is asked for. `matrix.py` compares them.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers as hf
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.hf.families import FAMILIES, VOCABULARY, adapted

ROWS, LENGTH, STEPS, BATCH = 64, 10, 6, 4  # BATCH: rows of a micro-batch, on all ranks together
Numbers = dict[str, list[float]]
Case = Callable[["Place"], Numbers]
CASES: dict[str, Case] = {}


class Place:
    """Where a case runs: the stage (None: plain, in one process), the number of ranks, and a folder.

    resume  the folder with a checkpoint of another run; None: this run's own
    """

    def __init__(self, stage: int | None, folder: Path, resume: Path | None = None) -> None:
        self.stage, self.folder, self.resume, self.numbers = stage, folder, resume, count()
        self.ranks, self.rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))

    def config(self, **more: Any) -> dict[str, Any]:
        """A configuration as transformers' documentation has it, with "auto" wherever that may be."""
        zero = {
            "stage": self.stage,
            **dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), "auto"),
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
            **more.pop("zero", {}),
        }
        auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        return {**dict.fromkeys((*auto, "gradient_clipping"), "auto"), "zero_optimization": zero, **more}

    def wait(self) -> None:
        """Wait for the other ranks."""
        if dist.is_initialized():
            dist.barrier()

    def arguments(self, kind: type = hf.TrainingArguments, config: Any = None, **given: Any) -> Any:
        """Arguments of a Trainer; with a stage, `deepspeed=` is one of them."""
        if self.stage is not None:
            given["deepspeed"] = self.config() if config is None else config
        usual = {
            "output_dir": str(self.folder / f"out{next(self.numbers)}"),  # the same on all ranks
            "max_steps": STEPS,
            "per_device_train_batch_size": BATCH // self.ranks,
            "per_device_eval_batch_size": BATCH // self.ranks,
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 0.5,
            "learning_rate": 1e-2,
            "adam_epsilon": 1e-3,  # so that Adam takes no steps of the rounding of small gradients
            "lr_scheduler_type": "linear",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "seed": 0,
            "dataloader_pin_memory": False,
            "bf16": False,  # which is TRL's default
        }
        return kind(**{**usual, **given})


def case(name: str) -> Callable[[Case], Case]:
    """Add a case under this name."""

    def add(function: Case) -> Case:
        CASES[name] = function
        return function

    return add


# Data and numbers --------------------------------------------------------------------------------


def rows(count: int = ROWS) -> list[dict[str, Tensor]]:
    """Sequences with their labels."""
    generator = torch.Generator().manual_seed(1)
    found = [torch.randint(3, VOCABULARY, (LENGTH,), generator=generator) for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in found]


def llama_model() -> Any:
    """The same model in every case."""
    return FAMILIES["Llama"].make()


def history(trainer: Any) -> Numbers:
    """Losses, norms and learning rates of all steps, as the Trainer has logged them."""
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return {
        key: [line[key] for line in lines if key in line] for key in ("loss", "grad_norm", "learning_rate")
    }


def summary(model: nn.Module) -> list[float]:
    """A number for each parameter, and their count."""
    sums = [float(p.detach().double().abs().sum()) for p in model.parameters()]
    return [*sums, float(len(sums))]


@contextmanager
def made(trainer: Any) -> Iterator[Any]:
    """A trainer whose engine ends with the block, so that the next one finds an empty process."""
    yield trainer
    trainer.accelerator.free_memory()
    unset_hf_deepspeed_config()  # else from_pretrained on rank 0 would wait for the others at stage 3


def trained(place: Place, model: nn.Module, config: Any = None, **given: Any) -> Numbers:
    """Train, evaluate and save; the numbers of all three."""
    arguments = place.arguments(config=config, **given)
    with made(hf.Trainer(model, arguments, train_dataset=rows(), eval_dataset=rows(16))) as trainer:
        trainer.train()
        found = history(trainer)
        found["eval_loss"] = [trainer.evaluate()["eval_loss"]]
        trainer.save_model(arguments.output_dir)
    if place.rank == 0:
        found["saved"] = summary(type(model).from_pretrained(arguments.output_dir))
    return found


# The Trainer -------------------------------------------------------------------------------------


@case("Trainer: accumulation, clipping, schedule, evaluation, saved weights")
def trainer(place: Place) -> Numbers:
    return trained(place, llama_model())


@case("Trainer: use_cpu=True")
def use_cpu(place: Place) -> Numbers:
    return trained(place, llama_model(), use_cpu=True)


@case("Trainer: gradient checkpointing")
def checkpointing(place: Place) -> Numbers:
    return trained(place, llama_model(), gradient_checkpointing=True)


@case("Trainer: torch_compile (backend eager)")
def compiled(place: Place) -> Numbers:
    return trained(place, llama_model(), torch_compile=True, torch_compile_backend="eager")


@case("Trainer: last accumulation of an epoch is short")
def short(place: Place) -> Numbers:
    arguments = place.arguments(gradient_accumulation_steps=3, max_steps=-1, num_train_epochs=2)
    with made(hf.Trainer(llama_model(), arguments, train_dataset=rows(8 * BATCH))) as trainer:
        trainer.train()
        return history(trainer)


@case("Trainer: optimizer and parameters offloaded to the host")
def offloaded(place: Place) -> Numbers:
    zero: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
    if place.stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    return trained(place, llama_model(), config=place.config(zero=zero))


@case("Trainer: bf16")
def bf16(place: Place) -> Numbers:
    return trained(
        place, llama_model(), config=place.config(bf16={"enabled": "auto"}), bf16=True, use_cpu=True
    )


@case("Trainer: optimizer and schedule from the file, all auto")
def from_file(place: Place) -> Numbers:
    adam = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    warmup = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    config = place.config(
        optimizer={"type": "AdamW", "params": adam},
        scheduler={"type": "WarmupDecayLR", "params": {**warmup, "warmup_type": "linear"}},
    )
    return trained(place, llama_model(), config=config, warmup_steps=2)


@case("Trainer: a second one for the same model, after free_memory")
def second_trainer(place: Place) -> Numbers:
    model, found = llama_model(), {}
    for name in ("first", "second"):
        with made(hf.Trainer(model, place.arguments(max_steps=2), train_dataset=rows())) as trainer:
            trainer.train()
            found |= {f"{key}, {name}": values for key, values in history(trainer).items()}
    return found


@case("Trainer: best model loaded at the end")
def best(place: Place) -> Numbers:
    arguments = place.arguments(
        load_best_model_at_end=True, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2
    )
    with made(hf.Trainer(llama_model(), arguments, train_dataset=rows(), eval_dataset=rows(16))) as trainer:
        trainer.train()
        found = history(trainer)
        found["eval_loss"] = [trainer.evaluate()["eval_loss"]]
    return found


def with_checkpoint(place: Place, folder: Path, resume: str | None) -> Numbers:
    arguments = place.arguments(output_dir=str(folder), save_strategy="steps", save_steps=3)
    with made(hf.Trainer(llama_model(), arguments, train_dataset=rows())) as trainer:
        trainer.train(resume_from_checkpoint=resume)
        return history(trainer)


@case("Trainer: checkpoint at step 3")
def interrupted(place: Place) -> Numbers:
    return with_checkpoint(place, place.folder / "resumable", None)


@case("Trainer: resumed from the checkpoint")
def resumed(place: Place) -> Numbers:
    checkpoint = str((place.resume or place.folder / "resumable") / "checkpoint-3")
    return with_checkpoint(place, place.folder / "resumed", checkpoint)


@case("Trainer: weights that are tied are saved once")
def tied(place: Place) -> Numbers:
    model = FAMILIES["GPT-2"].make()
    arguments = place.arguments()
    with made(hf.Trainer(model, arguments, train_dataset=rows())) as trainer:
        trainer.train()
        trainer.save_model(arguments.output_dir)
    if place.rank:
        return {}
    from safetensors import safe_open

    with safe_open(f"{arguments.output_dir}/model.safetensors", "pt") as file:
        names = list(file.keys())
    read, found = hf.GPT2LMHeadModel.from_pretrained(arguments.output_dir, output_loading_info=True)
    problems = [name for kind in found.values() for name in kind]
    return {"names": [len(names), "lm_head.weight" in names, len(problems)], "saved": summary(read)}


@case("Trainer: from_pretrained, more tokens, then training")
def pretrained(place: Place) -> Numbers:
    folder = place.folder / "pretrained"
    whole = llama_model()
    arguments = place.arguments()  # before from_pretrained: so transformers knows that stage 3 is coming
    if place.rank == 0:
        whole.save_pretrained(folder)
    place.wait()
    model = hf.LlamaForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
    with made(hf.Trainer(model, arguments, train_dataset=rows(), eval_dataset=rows(16))) as trainer:
        trainer.train()
        losses = history(trainer)
        trainer.save_model(arguments.output_dir)
    sizes = []
    if place.rank == 0:
        sizes = list(hf.LlamaForCausalLM.from_pretrained(arguments.output_dir).lm_head.weight.shape)
    return {**losses, "sizes": sizes}


@case("Seq2SeqTrainer: evaluation generates")
def generating(place: Place) -> Numbers:
    arguments = place.arguments(
        hf.Seq2SeqTrainingArguments,
        predict_with_generate=True,
        generation_max_length=8,
        max_steps=2,
        average_tokens_across_devices=False,  # with it transformers multiplies T5's loss by the ranks
    )
    with made(
        hf.Seq2SeqTrainer(FAMILIES["T5"].make(), arguments, train_dataset=rows(), eval_dataset=rows(8))
    ) as trainer:
        trainer.train()
        tokens = trainer.predict(rows(8)).predictions
    return {**history(trainer), "tokens": tokens.reshape(-1).tolist()}


@case("Trainer: stage3_gather_16bit_weights_on_model_save false")
def not_gathered(place: Place) -> Numbers:
    config = place.config(zero={"stage3_gather_16bit_weights_on_model_save": False})
    arguments = place.arguments(config=config, max_steps=2)
    with made(hf.Trainer(llama_model(), arguments, train_dataset=rows())) as trainer:
        trainer.train()
        trainer.save_model(arguments.output_dir)
    kept = sorted(path.name for path in Path(arguments.output_dir).iterdir())
    return {"whole weights": ["model.safetensors" in kept], "checkpoint": ["global_step2" in kept]}


# PEFT --------------------------------------------------------------------------------------------


def adapters(place: Place, model: Any, **given: Any) -> Numbers:
    arguments = place.arguments(**given)
    with made(hf.Trainer(model, arguments, train_dataset=rows())) as trainer:
        trainer.train()
        trainer.save_model(arguments.output_dir)
    found = history(trainer)
    if place.rank == 0:
        saved = sorted(peft.utils.load_peft_weights(arguments.output_dir, device="cpu").items())
        found["saved"] = [float(value.double().abs().sum()) for _, value in saved]
        assert saved and all(value.dtype == torch.float32 for _, value in saved)
    return found


@case("LoRA")
def lora(place: Place) -> Numbers:
    return adapters(place, adapted(llama_model()))


@case("LoRA on a bf16 model, bf16: adapters are fp32")
def lora_on_bf16(place: Place) -> Numbers:
    config = place.config(bf16={"enabled": "auto"})
    return adapters(place, FAMILIES["LoRA on bf16"].make(), config=config, bf16=True, use_cpu=True)


@case("AdaLoRA (without moving ranks between matrices)")
def adalora(place: Place) -> Numbers:
    settings = peft.AdaLoraConfig(
        target_modules=["q_proj", "v_proj"],
        init_r=4,
        target_r=2,
        tinit=1,
        tfinal=1,
        deltaT=1,
        total_step=STEPS,
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(llama_model(), settings)
    arguments = place.arguments()
    with made(hf.Trainer(model, arguments, train_dataset=rows())) as trainer:
        trainer.train()
    return history(trainer)


# TRL ---------------------------------------------------------------------------------------------


def tokenizer() -> Any:
    """One token for each word "wN"."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{n}": n for n in range(3, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def texts(*columns: str) -> Any:
    """A data set whose rows have different words in each column."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(2)

    def text() -> str:
        return " ".join(f"w{n}" for n in torch.randint(3, VOCABULARY, (6,), generator=generator).tolist())

    return Dataset.from_list([{column: text() for column in columns} for _ in range(ROWS)])


@case("TRL: SFT")
def sft(place: Place) -> Numbers:
    import trl

    arguments = place.arguments(trl.SFTConfig, max_length=16)
    with made(
        trl.SFTTrainer(llama_model(), arguments, train_dataset=texts("text"), processing_class=tokenizer())
    ) as trainer:
        trainer.train()
        return history(trainer)


@case("TRL: DPO with a reference model")
def dpo(place: Place) -> Numbers:
    import trl

    arguments = place.arguments(trl.DPOConfig, max_length=16)
    with made(
        trl.DPOTrainer(
            llama_model(),
            ref_model=llama_model(),
            args=arguments,
            train_dataset=texts("prompt", "chosen", "rejected"),
            processing_class=tokenizer(),
        )
    ) as trainer:
        trainer.train()
        return history(trainer)


@case("TRL: DPO with LoRA, whose base is the reference")
def dpo_with_adapters(place: Place) -> Numbers:
    import trl

    arguments = place.arguments(trl.DPOConfig, max_length=16)
    with made(
        trl.DPOTrainer(
            adapted(llama_model()),
            args=arguments,
            train_dataset=texts("prompt", "chosen", "rejected"),
            processing_class=tokenizer(),
        )
    ) as trainer:
        trainer.train()
        return history(trainer)


@case("TRL: GRPO")
def grpo(place: Place) -> Numbers:
    import trl

    def lengths(completions: list[str], **others: Any) -> list[float]:
        """The rewards of texts."""
        return [float(len(set(each))) for each in completions]

    arguments = place.arguments(
        trl.GRPOConfig,
        max_steps=2,
        num_generations=4,
        generation_batch_size=8,
        max_completion_length=6,
        beta=0.0,  # else a reference model is read from the hub
        use_vllm=False,
    )
    with made(
        trl.GRPOTrainer(
            llama_model(), lengths, arguments, train_dataset=texts("prompt"), processing_class=tokenizer()
        )
    ) as trainer:
        trainer.train()
        return history(trainer)


# A loop of the user's own ------------------------------------------------------------------------


@case("Accelerate: own loop with a DeepSpeedPlugin")
def own_loop(place: Place) -> Numbers:
    from accelerate import Accelerator, DeepSpeedPlugin

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    plugin = None
    if place.stage is not None:
        plugin = DeepSpeedPlugin(
            zero_stage=place.stage,
            gradient_accumulation_steps=2,
            gradient_clipping=0.5,
            zero3_save_16bit_model=True,
        )
    # By default accelerate moves a schedule once for each rank.
    ours = Accelerator(
        deepspeed_plugin=plugin, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False
    )
    model = llama_model()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 / (1 + step))
    batches = torch.utils.data.DataLoader(rows(), batch_size=BATCH // place.ranks)  # type: ignore[arg-type]
    model, adam, batches, schedule = ours.prepare(model, adam, batches, schedule)
    found: Numbers = {"loss": [], "grad_norm": [], "learning_rate": []}
    for batch in batches:
        with ours.accumulate(model):
            loss = model(**batch).loss
            ours.backward(loss)
            if ours.sync_gradients:
                norm = ours.clip_grad_norm_(model.parameters(), 0.5)
                found["grad_norm"].append(float(norm))
                found["learning_rate"].append(schedule.get_last_lr()[0])
            adam.step()
            if ours.sync_gradients:
                schedule.step()
            adam.zero_grad()
        found["loss"].append(float(ours.gather(loss.detach()).mean()))
    weights = ours.get_state_dict(model)
    if place.rank == 0:
        names = sorted(weights)
        found["saved"] = [float(weights[name].double().abs().sum()) for name in names]
    ours.save_state(place.folder / "state")
    ours.load_state(place.folder / "state")
    found["loss"].append(float(ours.gather(model(**batch).loss.detach()).mean()))
    ours.free_memory()
    return found


# -------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases one after the other; rank 0 writes what they have found, or why they have failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args(arguments)
    logging.getLogger("zero_full").setLevel(logging.ERROR)
    place, found = Place(options.stage, options.folder, options.resume), {}
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or CASES:
        try:
            found[name] = CASES[name](place)
        except Exception as error:
            raise RuntimeError(f"case {name!r} failed") from error
    if place.rank == 0:
        options.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
