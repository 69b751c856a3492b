"""The character GPT: shapes, causality, the loss, and the overflow that the demonstration needs."""

from dataclasses import replace

import pytest
import torch

from gradsentinel.demo.config import DemoConfig
from gradsentinel.demo.model import CharGPT, build

VOCAB = 13


@pytest.fixture
def model():
    return CharGPT(vocab=VOCAB, width=16, heads=2, layers=2, context=8)


@pytest.fixture
def tokens():
    return torch.randint(VOCAB, (3, 8))


def autocast():
    return torch.autocast("cpu", dtype=torch.float16)


def test_shapes_and_the_loss_of_blind_guessing(model, tokens):
    output = model(tokens, tokens.roll(-1, dims=1))
    assert output.logits.shape == (3, 8, VOCAB)
    assert output.logits.dtype == torch.float32
    assert output.loss.item() == pytest.approx(torch.tensor(float(VOCAB)).log().item(), abs=0.1)
    assert model(tokens).loss is None


def test_a_batch_can_be_passed_as_it_is(model, tokens):
    batch = {"tokens": tokens, "targets": tokens, "weight": torch.ones(3), "id": torch.arange(3)}
    assert model(**batch).loss.item() == pytest.approx(model(tokens, tokens).loss.item())


def test_no_position_sees_what_comes_after_it(model, tokens):
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % VOCAB
    before, after = model(tokens).logits, model(changed).logits
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_every_position_sees_all_before_it(model, tokens):
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % VOCAB
    differs = (model(tokens).logits != model(changed).logits).any(dim=-1)
    assert differs.all()


def test_shorter_records_are_welcome_and_longer_ones_are_not(model, tokens):
    torch.testing.assert_close(model(tokens[:, :5]).logits, model(tokens).logits[:, :5])
    with pytest.raises(ValueError, match="9 characters, but the context of the model is 8"):
        model(torch.zeros(1, 9, dtype=torch.long))


def test_the_width_must_suit_the_heads():
    with pytest.raises(ValueError, match="16 is no multiple of 3"):
        CharGPT(vocab=VOCAB, width=16, heads=3, layers=1, context=8)


def test_the_loss_is_weighted_by_record(model, tokens):
    alone = model(tokens[:1], tokens[:1]).loss
    weighted = model(tokens, tokens, torch.tensor([2.0, 0.0, 0.0])).loss
    torch.testing.assert_close(weighted, alone)


def test_one_poisoned_weight_poisons_every_gradient(model, tokens):
    model(tokens, tokens, torch.tensor([1.0, torch.nan, 1.0])).loss.backward()
    assert all(parameter.grad.isnan().any() for parameter in model.parameters())


def test_module_names_read_well(model):
    names = dict(model.named_modules())
    assert {"blocks.1.attn.query", "blocks.1.attn.key", "blocks.0.mlp.expand", "blocks.0.attn_norm"} <= set(
        names
    )


def test_it_learns_a_line_by_heart():
    text = torch.tensor([[1, 2, 3, 1, 2, 4, 1, 2, 5, 6, 0, 3]])
    model = CharGPT(vocab=7, width=32, heads=2, layers=2, context=11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = model(text[:, :-1], text[:, 1:]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    assert torch.equal(model(text[:, :-1]).logits.argmax(dim=-1), text[:, 1:])


def test_the_same_seed_gives_the_same_model_and_draws_no_global_random_numbers():
    config = DemoConfig(width=16, heads=2, layers=1, context=8)
    state = torch.get_rng_state()
    one, same = build(config, VOCAB), build(config, VOCAB)
    other = build(replace(config, seed=2), VOCAB)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.head.weight, other.head.weight)


def test_training_is_deterministic():
    def losses():
        torch.manual_seed(3)
        model = build(DemoConfig(width=16, heads=2, layers=1, context=8), VOCAB)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seen = []
        for _ in range(4):
            tokens = torch.randint(VOCAB, (2, 8))
            with autocast():
                loss = model(tokens, tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    assert losses() == losses()


def test_under_autocast_only_the_scores_are_in_low_precision(model, tokens):
    dtypes = {}
    for name in ("blocks.0.attn.query", "blocks.0.mlp", "head"):
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: dtypes.update({name: output.dtype})
        )
    exact = model(tokens).logits
    with autocast():
        rounded = model(tokens).logits
    assert set(dtypes.values()) == {torch.float32}
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, atol=1e-3, rtol=1e-2)


def test_large_queries_overflow_in_float16_and_only_there(model, tokens):
    with torch.no_grad():
        model.blocks[1].attn.query.weight.mul_(1e8)
        model.blocks[1].attn.key.weight.mul_(10)
    assert model(tokens, tokens).loss.isfinite()
    with autocast():
        assert model(tokens, tokens).loss.isnan()
        with torch.autocast("cpu", enabled=False):
            assert model(tokens, tokens).loss.isfinite()


def test_the_learning_rate_rises_and_falls():
    config = DemoConfig(steps=100, warmup_steps=10, final_learning_rate=0.1)
    scales = [config.learning_rate_scale(step) for step in range(101)]
    assert scales[0] == pytest.approx(0.1)
    assert max(scales) == scales[10] == 1.0
    assert scales[100] == pytest.approx(0.1)
    assert scales[10:] == sorted(scales[10:], reverse=True)


def test_a_run_shorter_than_the_warm_up_is_no_problem():
    config = DemoConfig(steps=5)
    assert all(0 < config.learning_rate_scale(step) <= 1 for step in range(50))
