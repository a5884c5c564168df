"""Ways to train models of transformers: adapters, checkpointing, precisions, padding, and losses of the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
import torch.nn.functional as f
import transformers
from torch import nn

from tests.models.model import CLASSES, LENGTH, SAMPLES, WORDS, add, classes, named, sentences
from tests.models.text import DECODER, GPT2

llama = named(transformers, "LlamaConfig", "LlamaForCausalLM")


def _inside(prefix: str, paths: tuple[str, str]) -> tuple[str, str]:
    first, last = (", ".join(f"{prefix}.{path}" for path in one.split(", ")) for one in paths)
    return first, last


def adapted(make: Callable[[], nn.Module], **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        made: nn.Module = peft.get_peft_model(make(), peft.LoraConfig(r=4, lora_alpha=8, **options))  # type: ignore[arg-type]
        return made

    return build


PEFT = _inside("base_model.model", DECODER)
add("Llama, LoRA", adapted(llama, target_modules=["q_proj", "v_proj"]), *PEFT)
add("Llama, LoRA with dropout", adapted(llama, target_modules="all-linear", lora_dropout=0.1), *PEFT)
add("Llama, DoRA", adapted(llama, target_modules=["q_proj", "down_proj"], use_dora=True), *PEFT)
add(
    "GPT-2, LoRA",
    adapted(named(transformers, "GPT2Config", "GPT2LMHeadModel", GPT2), target_modules=["c_attn"], fan_in_fan_out=True),
    *_inside(
        "base_model.model",
        ("transformer.wte, transformer.wpe, transformer.h[0:2]", "transformer.h[2:4], transformer.ln_f, lm_head"),
    ),
)
add(
    "BERT, LoRA and a trained head",
    adapted(
        named(transformers, "BertConfig", "BertForSequenceClassification", num_labels=CLASSES),
        target_modules=["query", "value"],
        modules_to_save=["classifier"],
    ),
    *_inside(
        "base_model.model",
        ("bert.embeddings, bert.encoder.layer[0:2]", "bert.encoder.layer[2:4], bert.pooler, classifier"),
    ),
    batch=sentences,
    loss=classes,
)


def checkpointed(**options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        made = llama()
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        return made  # type: ignore[no-any-return]

    return build


add("Llama, checkpointing", checkpointed(use_reentrant=False), *DECODER)
add("Llama, reentrant checkpointing", checkpointed(use_reentrant=True), *DECODER)


class Mixed(nn.Module):
    """Computes in bfloat16, with weights in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, ids: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(ids)


add("Llama, autocast", Mixed, *_inside("inner", DECODER), limit=5e-2)
add("Llama, bfloat16", lambda: llama().to(torch.bfloat16), *DECODER, limit=5e-2)


def padded(step: int) -> tuple[Any, Any]:
    """Texts of different lengths, with the labels among the inputs, as a collator of transformers makes them."""
    ids = torch.randint(3, WORDS, (SAMPLES, LENGTH))
    mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (SAMPLES, 1))
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}, ids


def of_model(output: Any, target: torch.Tensor) -> torch.Tensor:
    return output.loss  # type: ignore[no-any-return]


def several(output: Any, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """Terms with different denominators."""
    logits = output.logits.flatten(0, -2)
    kept = target.flatten().masked_fill(target.flatten() % 7 == 0, -100)
    return {
        "words": f.cross_entropy(logits, kept, label_smoothing=0.1),
        "z": 1e-2 * logits.logsumexp(-1).square().mean(),
        "masked": 1e-2 * (logits.square().mean(-1) * (kept >= 0)).sum() / (kept >= 0).sum(),
    }


add("Llama, padding and its own loss", llama, *DECODER, batch=padded, loss=of_model)
add("Llama, several losses", llama, *DECODER, loss=several)
add(
    "BERT, padding and its own loss",
    named(transformers, "BertConfig", "BertForMaskedLM"),
    "bert.embeddings, bert.encoder.layer[0:2]",
    "bert.encoder.layer[2:4], cls",
    batch=padded,
    loss=of_model,
)
