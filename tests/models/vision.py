"""Vision, audio and two-tower models of transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.habits.habit import EITHER, REFUSED, SAMPLES, SUMMED
from tests.models.model import CLASSES, LENGTH, PIXELS, WORDS, add, classes, named, pictures

VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": PIXELS,
    "patch_size": 16,
    "num_labels": CLASSES,
}
for name, prefix, path, layers, last in [
    ("ViT", "ViT", "vit", "layers", "vit.layernorm, classifier"),
    ("DeiT", "DeiT", "deit", "layers", "deit.layernorm, classifier"),
    ("DINOv2", "Dinov2", "dinov2", "encoder.layer", "dinov2.layernorm, classifier"),
    ("BEiT", "Beit", "beit", "layers", "beit.pooler, classifier"),
]:
    add(
        name,
        named(transformers, f"{prefix}Config", f"{prefix}ForImageClassification", VISION),
        f"{path}.embeddings, {path}.{layers}[0:2]",
        f"{path}.{layers}[2:4], {last}",
        batch=pictures,
        loss=classes,
    )
CONV = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": CLASSES, "image_size": PIXELS}
for name, prefix, path in [("ConvNeXt", "ConvNext", "convnext"), ("ConvNeXt V2", "ConvNextV2", "convnextv2")]:
    add(
        name,
        named(transformers, f"{prefix}Config", f"{prefix}ForImageClassification", CONV),
        f"{path}.embeddings, {path}.encoder.stages[0:2]",
        f"{path}.encoder.stages[2:4], {path}.layernorm, classifier",
        batch=pictures,
        loss=classes,
    )
add(
    "Swin",
    named(
        transformers,
        "SwinConfig",
        "SwinForImageClassification",
        {
            "image_size": PIXELS,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
            "num_labels": CLASSES,
        },
    ),
    "swin.embeddings, swin.encoder.layers[0:1]",
    "swin.encoder.layers[1:2], swin.layernorm, classifier",
    batch=pictures,
    loss=classes,
)
add(
    "ResNet (BatchNorm)",
    named(
        transformers,
        "ResNetConfig",
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_labels": CLASSES},
    ),
    "resnet.embedder, resnet.encoder.stages[0:2]",
    "resnet.encoder.stages[2:4], classifier",
    batch=pictures,
    loss=classes,
    expected=SUMMED,
    limit=1e-3,  # eager PyTorch in float32 is as far from float64
)
add(
    "SegFormer",
    named(
        transformers,
        "SegformerConfig",
        "SegformerForImageClassification",
        {
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "num_labels": CLASSES,
        },
    ),
    "segformer",
    "classifier",
    batch=pictures,
    loss=classes,
)


def captions(step: int) -> tuple[Any, Any]:
    ids = torch.randint(3, WORDS - 1, (SAMPLES, LENGTH))
    return {"input_ids": ids, "pixel_values": torch.randn(SAMPLES, 3, PIXELS, PIXELS)}, torch.arange(SAMPLES)


def contrastive(output: Any, target: torch.Tensor) -> torch.Tensor:
    return (classes_of(output.logits_per_text, target) + classes_of(output.logits_per_image, target)) / 2


classes_of = torch.nn.functional.cross_entropy
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
add(
    "CLIP",
    named(
        transformers,
        "CLIPConfig",
        "CLIPModel",
        {
            "text_config": {**SMALL, "vocab_size": WORDS, "max_position_embeddings": 32, "eos_token_id": WORDS - 1},
            "vision_config": {**SMALL, "image_size": PIXELS, "patch_size": 16},
            "projection_dim": 8,
        },
    ),
    "text_model, text_projection",
    "vision_model, visual_projection",
    batch=captions,
    loss=contrastive,
    expected=EITHER,
    note="the loss compares all samples of the batch",
)


def speech(step: int) -> tuple[Any, Any]:
    ids = torch.randint(3, WORDS, (SAMPLES, LENGTH))
    return {"input_features": torch.randn(SAMPLES, 80, 64), "decoder_input_ids": ids}, torch.randint(
        3, WORDS, (SAMPLES, LENGTH)
    )


add(
    "Whisper",
    named(
        transformers,
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            "vocab_size": WORDS,
            "d_model": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "max_source_positions": 32,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
    "model.encoder",
    "model.decoder, proj_out",
    batch=speech,
)
add(
    "Wav2Vec2",
    named(
        transformers,
        "Wav2Vec2Config",
        "Wav2Vec2ForSequenceClassification",
        {
            **SMALL,
            "num_labels": CLASSES,
            "conv_dim": [8, 8],
            "conv_stride": [4, 4],
            "conv_kernel": [8, 8],
            "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2,
            "classifier_proj_size": 8,
        },
    ),
    "wav2vec2.feature_extractor, wav2vec2.feature_projection",
    "wav2vec2.encoder, projector, classifier",
    batch=lambda step: (torch.randn(SAMPLES, 1600), torch.randint(CLASSES, (SAMPLES,))),
    loss=classes,
    expected=REFUSED,
)
