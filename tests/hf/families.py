"""Small random models of Hugging Face's architectures, made from configs, and batches for them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import peft
import torch
import transformers as hf
from torch import nn

VOCABULARY, LENGTH, ROWS, CLASSES = 99, 10, 2, 5
WIDTH, HEADS = 32, 4
Batch = dict[str, Any]
hf.logging.set_verbosity_error()  # it has advice for every generation
hf.logging.disable_progress_bar()


@dataclass(frozen=True)
class Family:
    """An architecture."""

    name: str
    construct: Callable[[], nn.Module]
    inputs: str  # "causal", "masked", "translated" or "image"

    def make(self) -> nn.Module:
        """The same model on every rank and in every run."""
        torch.manual_seed(0)
        return self.construct()

    def batch(self, *place: int) -> Batch:
        """Inputs with labels; every place (step, micro-batch, rank) has its own, of its own length."""
        seed = sum(number * 10**power for power, number in enumerate(place))
        generator = torch.Generator().manual_seed(seed)
        if self.inputs == "image":
            labels = torch.randint(CLASSES, (ROWS,), generator=generator)
            return {"pixel_values": torch.randn(ROWS, 3, 16, 16, generator=generator), "labels": labels}
        length = LENGTH - seed % 3
        tokens = torch.randint(3, VOCABULARY, (ROWS, length), generator=generator)
        mask = torch.ones_like(tokens)
        mask[0, : 2 if self.inputs == "causal" else 0] = 0  # generation wants these on the left
        mask[0, length if self.inputs == "causal" else -2 :] = 0
        labels = tokens.clone()
        if self.inputs == "translated":
            labels = torch.randint(3, VOCABULARY, (ROWS, length - 2), generator=generator)
        elif self.inputs == "masked":
            labels[:, ::2] = -100
        else:
            labels[mask == 0] = -100
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def _decoder(config: type, model: type, **more: Any) -> nn.Module:
    return model(
        config(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=3,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS // 2,
            max_position_embeddings=8192,
            attention_dropout=0.0,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
            **more,
        )
    )


def _gpt2() -> nn.Module:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    sizes = {"n_embd": WIDTH, "n_layer": 3, "n_head": HEADS, "n_positions": 64}
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, **sizes, **dropout, **special))


def _t5() -> nn.Module:
    sizes = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 2 * WIDTH, "num_layers": 2, "num_heads": HEADS}
    special = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": None}
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, tie_word_embeddings=True, **sizes, **special)
    )


def _bart() -> nn.Module:
    layers = {f"{part}_layers": 2 for part in ("encoder", "decoder")}
    heads = {f"{part}_attention_heads": HEADS for part in ("encoder", "decoder")}
    widths = {f"{part}_ffn_dim": 2 * WIDTH for part in ("encoder", "decoder")}
    special = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 2, "eos_token_id": None}
    return hf.BartForConditionalGeneration(
        hf.BartConfig(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            max_position_embeddings=64,
            dropout=0.0,
            forced_eos_token_id=None,
            **layers,
            **heads,
            **widths,
            **special,
        )
    )


def _bert() -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": HEADS}
    return hf.BertForMaskedLM(
        hf.BertConfig(vocab_size=VOCABULARY, intermediate_size=2 * WIDTH, **sizes, **dropout)
    )


def _vit() -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": HEADS}
    image = {"image_size": 16, "patch_size": 4, "num_labels": CLASSES}
    return hf.ViTForImageClassification(
        hf.ViTConfig(intermediate_size=2 * WIDTH, **sizes, **image, **dropout)
    )


llama = partial(_decoder, hf.LlamaConfig, hf.LlamaForCausalLM)
_qwen3 = partial(_decoder, hf.Qwen3Config, hf.Qwen3ForCausalLM, head_dim=8, tie_word_embeddings=True)
_mixtral = partial(
    _decoder,
    hf.MixtralConfig,
    hf.MixtralForCausalLM,
    num_local_experts=4,
    num_experts_per_tok=2,
    output_router_logits=True,
)


def adapted(model: nn.Module) -> nn.Module:
    """With fp32 adapters by LoRA, which do not start at zero: else half of them would get no gradients."""
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, settings)


def _lora() -> nn.Module:
    return adapted(llama())


def _lora_on_bf16() -> nn.Module:
    base = llama()
    for p in base.parameters():
        p.data = p.data.bfloat16()
    return adapted(base)


FAMILIES = {
    family.name: family
    for family in (
        Family("GPT-2", _gpt2, "causal"),
        Family("Llama", llama, "causal"),
        Family("Qwen3", _qwen3, "causal"),
        Family("Mixtral", _mixtral, "causal"),
        Family("T5", _t5, "translated"),
        Family("BART", _bart, "translated"),
        Family("BERT", _bert, "masked"),
        Family("ViT", _vit, "image"),
        Family("LoRA", _lora, "causal"),
        Family("LoRA on bf16", _lora_on_bf16, "causal"),
    )
}
