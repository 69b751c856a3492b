"""Formulas and models that people train are no alarm: what is small in them is meant, or does no harm."""

from __future__ import annotations

import pytest
import torch
from benign_formulas import FORMULAS
from torch import nn

from gradsentinel import preflight

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


# of torch: resizing an output, and transposing what is no matrix, in distributions
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_that_people_train(name):
    torch.manual_seed(0)
    report = preflight(nn.Linear(4, 4), torch.randn(6, 4), lambda m, x: FORMULAS[name](m(x)).sum())
    assert report.risks == ()
    assert report.unjudged == 0


def text(kind, config, **settings):
    def make(transformers):
        tokens = torch.randint(3, 50, (2, 8))
        mask = torch.ones_like(tokens)
        mask[0, 5:] = 0
        batch = {"input_ids": tokens, "labels": tokens, "attention_mask": mask}
        return getattr(transformers, kind)(getattr(transformers, config)(vocab_size=50, **settings)), batch

    return make


def images(kind, config, size=16, **settings):
    def make(transformers):
        batch = {"pixel_values": torch.rand(2, 3, size, size), "labels": torch.tensor([0, 1])}
        return getattr(transformers, kind)(getattr(transformers, config)(**settings)), batch

    return make


MODELS = {
    "bert": text("BertForMaskedLM", "BertConfig", **SIZES),  # its layer norms have an eps of 1e-12
    "gpt2": text("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=2, n_head=2),
    "llama": text("LlamaForCausalLM", "LlamaConfig", **SIZES),
    "mixtral": text(
        *("MixtralForCausalLM", "MixtralConfig"),
        **SIZES,
        num_key_value_heads=1,
        num_local_experts=3,
        output_router_logits=True,
    ),
    "t5": text(
        *("T5ForConditionalGeneration", "T5Config"),
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    ),
    "vit": images("ViTForImageClassification", "ViTConfig", image_size=16, patch_size=4, **SIZES),
    # the class token is 0, and so has no deviation in the first step: what comes back to it is small
    "beit": images("BeitForImageClassification", "BeitConfig", image_size=16, patch_size=4, **SIZES),
    "resnet": images(
        *("ResNetForImageClassification", "ResNetConfig", 32),
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
    ),
    "convnext": images(
        *("ConvNextForImageClassification", "ConvNextConfig", 32),
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_stages=2,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_people_train(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, batch = MODELS[name](transformers)
    report = preflight(model, batch)
    assert [risk for risk in report.risks if risk.kind != "no_gradient"] == []
    assert report.unjudged == 0


LAYERS = {
    "lstm": lambda: nn.LSTM(8, 8, 2),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)),
    "rms norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)),
    "power pooling": lambda: nn.Sequential(nn.Conv1d(6, 4, 1), nn.LPPool1d(2, 2)),
    "activations": lambda: nn.Sequential(
        nn.Linear(8, 8), nn.Mish(), nn.PReLU(), nn.Softsign(), nn.LogSigmoid()
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_torch(name):
    torch.manual_seed(0)

    def forward(model, x):
        out = model(x)
        return (out[0] if isinstance(out, tuple) else out).pow(2).mean()

    report = preflight(LAYERS[name](), torch.randn(4, 6, 8), forward)
    assert report.risks == ()
    assert report.unjudged == 0
