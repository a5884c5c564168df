"""Language models of transformers: decoders, encoders, mixtures of experts, encoder and decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from tests.habits.habit import SAME, SUMMED
from tests.models.model import WORDS, add, classes, named, pairs, sentences, words

DECODER = ("model.embed_tokens, model.layers[0:2]", "model.layers[2:4], model.norm, lm_head")


def decoder(
    name: str,
    prefix: str,
    expected: str = SAME,
    experts: str = "",
    loss: Callable[[Any, Any], Any] = words,
    **changed: object,
) -> None:
    make = named(transformers, f"{prefix}Config", f"{prefix}ForCausalLM", **changed)
    add(name, make, *DECODER, expected, loss=loss, experts=experts)


def balanced(output: Any, target: Any) -> Any:
    """The product of two means over the batch is not a mean over it."""
    return words(output, target) + 0.1 * output.aux_loss


for name, prefix in {
    "Llama": "Llama",
    "Mistral": "Mistral",
    "Qwen2": "Qwen2",
    "Qwen3": "Qwen3",
    "Gemma": "Gemma",
    "Gemma2": "Gemma2",
    "Phi3": "Phi3",
    "OLMo2": "Olmo2",
    "SmolLM3": "SmolLM3",
    "StableLM": "StableLm",
    "Granite": "Granite",
    "Cohere": "Cohere",
    "Starcoder2": "Starcoder2",
    "GLM": "Glm",
    "EXAONE 4": "Exaone4",
}.items():
    decoder(name, prefix)
decoder("Helium", "Helium", head_dim=8)

PATHS = "model.layers[*].mlp.experts"
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "experts": PATHS}
decoder("Mixtral", "Mixtral", experts=PATHS, num_local_experts=4)
decoder("Qwen2-MoE", "Qwen2Moe", num_experts=4, shared_expert_intermediate_size=16, **EXPERTS)
decoder("Qwen3-MoE", "Qwen3Moe", num_experts=4, head_dim=8, **EXPERTS)
ROUTED: dict[str, Any] = {"num_experts": 4, "head_dim": 8, "output_router_logits": True, **EXPERTS}
decoder("Qwen3-MoE, router logits", "Qwen3Moe", **ROUTED)
decoder("Qwen3-MoE, router logits, balance loss", "Qwen3Moe", SUMMED, loss=balanced, **ROUTED)
decoder("GPT-OSS", "GptOss", experts=PATHS, num_local_experts=4, head_dim=8, num_experts_per_tok=2)
decoder("OLMoE", "Olmoe", experts=PATHS, num_experts=4, num_experts_per_tok=2)
decoder(
    "DeepSeek-V3",
    "DeepseekV3",
    n_routed_experts=4,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    num_key_value_heads=2,
    kv_lora_rank=8,
    q_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=8,
    **EXPERTS,
)

GPT2 = {"vocab_size": WORDS, "n_positions": 32, "n_embd": 16, "n_layer": 4, "n_head": 2}
add(
    "GPT-2",
    named(transformers, "GPT2Config", "GPT2LMHeadModel", GPT2),
    "transformer.wte, transformer.wpe, transformer.h[0:2]",
    "transformer.h[2:4], transformer.ln_f, lm_head",
)
add(
    "GPT-NeoX",
    named(transformers, "GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "gpt_neox.embed_in, gpt_neox.layers[0:2]",
    "gpt_neox.layers[2:4], gpt_neox.final_layer_norm, lm_head",
)
add(
    "OPT",
    named(transformers, "OPTConfig", "OPTForCausalLM", ffn_dim=32, word_embed_proj_dim=16),
    "model.decoder.embed_tokens, model.decoder.embed_positions, model.decoder.layers[0:2]",
    "model.decoder.layers[2:4], model.decoder.final_layer_norm, lm_head",
)
add(
    "Bloom",
    named(
        transformers,
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 4, "n_head": 2},
    ),
    "transformer.word_embeddings, transformer.word_embeddings_layernorm, transformer.h[0:2]",
    "transformer.h[2:4], transformer.ln_f, lm_head",
)
add(
    "Falcon",
    named(transformers, "FalconConfig", "FalconForCausalLM"),
    "transformer.word_embeddings, transformer.h[0:2]",
    "transformer.h[2:4], transformer.ln_f, lm_head",
)
add(
    "MPT",
    named(
        transformers,
        "MptConfig",
        "MptForCausalLM",
        {"vocab_size": WORDS, "d_model": 16, "n_heads": 2, "n_layers": 4, "max_seq_len": 32},
    ),
    "transformer.wte, transformer.blocks[0:2]",
    "transformer.blocks[2:4], transformer.norm_f, lm_head",
)
add(
    "Mamba",
    named(
        transformers,
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 4, "state_size": 4},
    ),
    "backbone.embeddings, backbone.layers[0:2]",
    "backbone.layers[2:4], backbone.norm_f, lm_head",
)
for name, prefix, path, head in [
    ("BERT", "Bert", "bert", "cls"),
    ("RoBERTa", "Roberta", "roberta", "lm_head"),
    ("ELECTRA", "Electra", "electra", "generator_predictions, generator_lm_head"),
]:
    add(
        name,
        named(transformers, f"{prefix}Config", f"{prefix}ForMaskedLM"),
        f"{path}.embeddings, {path}.encoder.layer[0:2]",
        f"{path}.encoder.layer[2:4], {head}",
    )
add(
    "BERT, classification",
    named(transformers, "BertConfig", "BertForSequenceClassification", num_labels=5),
    "bert.embeddings, bert.encoder.layer[0:2]",
    "bert.encoder.layer[2:4], bert.pooler, classifier",
    batch=sentences,
    loss=classes,
)
add(
    "DistilBERT",
    named(
        transformers,
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"vocab_size": WORDS, "dim": 16, "hidden_dim": 32, "n_layers": 4, "n_heads": 2, "max_position_embeddings": 32},
    ),
    "distilbert.embeddings, distilbert.transformer.layer[0:2]",
    "distilbert.transformer.layer[2:4], vocab_transform, vocab_layer_norm, vocab_projector",
)
add(
    "ALBERT",
    named(transformers, "AlbertConfig", "AlbertForMaskedLM", embedding_size=16),
    "albert.embeddings, albert.encoder",
    "predictions",
)
add(
    "ModernBERT",
    named(transformers, "ModernBertConfig", "ModernBertForMaskedLM", cls_token_id=1, sep_token_id=2),
    "model.embeddings, model.layers[0:2]",
    "model.layers[2:4], model.final_norm, head, decoder",
)
add(
    "DeBERTa-v2",
    named(transformers, "DebertaV2Config", "DebertaV2ForMaskedLM"),
    "deberta.embeddings, deberta.encoder.layer[0:2]",
    "deberta.encoder.layer[2:4], cls",
)
T5 = {"vocab_size": WORDS, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2}
for name, prefix in {"T5": "T5", "mT5": "MT5", "UMT5": "UMT5"}.items():
    add(
        name,
        named(transformers, f"{prefix}Config", f"{prefix}ForConditionalGeneration", T5),
        "encoder",
        "decoder, lm_head",
        batch=pairs,
    )
BART = {
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 32,
}
add(
    "BART",
    named(transformers, "BartConfig", "BartForConditionalGeneration", BART),
    "model.encoder",
    "model.decoder, lm_head",
    batch=pairs,
)
add(
    "Pegasus",
    named(transformers, "PegasusConfig", "PegasusForConditionalGeneration", BART),
    "model.encoder",
    "model.decoder, lm_head",
    batch=pairs,
)
