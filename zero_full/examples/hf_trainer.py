"""A program of Hugging Face's Trainer that does not import zero_full.

    python -m zero_full.examples.hf_trainer
    torchrun --standalone --nproc-per-node 2 -m zero_full as-deepspeed \\
        -m zero_full.examples.hf_trainer --deepspeed zero_full/examples/hf_ds_config.json

The first command trains in one process, the second at stage 3 on two ranks. Both print the same losses.
"""

import argparse
import os
import sys
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

WORDS, ROWS, BATCH, STEPS = 50, 64, 8, 8  # BATCH: rows of a step, on all ranks together


def sentences() -> list[dict[str, torch.Tensor]]:
    """Return sequences in which each word follows from the one before."""
    rows = []
    for row in range(ROWS):
        words = [row % WORDS]
        for _ in range(15):
            words.append((7 * words[-1] + 3) % WORDS)
        rows.append({"input_ids": torch.tensor(words), "labels": torch.tensor(words)})
    return rows


def main() -> int:
    """Train a small model from its configuration, and print the losses on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", help="DeepSpeed's configuration, a JSON file")
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes))
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH // int(os.environ.get("WORLD_SIZE", "1")),
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            deepspeed=options.deepspeed,
        )
        trainer = Trainer(model, arguments, train_dataset=sentences())
        trainer.train()
        if trainer.is_world_process_zero():
            losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
            print("losses", *(f"{loss:.4f}" for loss in losses))
    return 0


if __name__ == "__main__":
    sys.exit(main())
