"""The loss in PyTorch, and its gradient."""

import pytest
import torch

from gemsmith.train.torch.model import token_nll


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_the_loss_in_chunks_has_the_value_and_gradient_of_the_loss_on_logits(monkeypatch, softcap):
    monkeypatch.setattr("gemsmith.train.torch.model.LOGIT_TOKENS", 7)
    torch.manual_seed(0)
    hidden = torch.randn(3, 20, 8, dtype=torch.float32, requires_grad=True)
    words, tokens, mask = torch.randn(50, 8), torch.randint(50, (3, 20)), torch.rand(3, 20) < 0.5
    tokens[:, 1:9] = (hidden @ words.T)[:, :8].argmax(-1)  # what it would say itself
    mask[:, 0] = True  # a row's first token is never predicted
    loss, correct = token_nll(hidden, words, tokens, mask, softcap)
    logits = (hidden @ words.T)[:, :-1]
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    expected = torch.nn.functional.cross_entropy(logits[mask[:, 1:]], tokens[:, 1:][mask[:, 1:]], reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert correct == (logits.argmax(-1) == tokens[:, 1:])[mask[:, 1:]].sum()
    (ours,), (theirs,) = (torch.autograd.grad(value * 0.5, hidden) for value in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_logits_are_float32_whatever_the_base_is():
    torch.manual_seed(0)
    words, tokens = torch.randn(4096, 64).bfloat16(), torch.randint(4096, (1, 200))
    hidden = (torch.randn(1, 200, 64) + 0.3 * words[tokens.roll(-1)].float()).bfloat16()
    mask = torch.ones(1, 200, dtype=torch.bool)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = token_nll(hidden, words, tokens, mask, 30.0)
    # With bfloat16 logits it was 7.6e-5 off.
    expected, _ = token_nll(hidden.float(), words.float(), tokens, mask, 30.0)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def test_rows_with_nothing_to_train_on_have_no_loss():
    hidden = torch.randn(1, 5, 4, requires_grad=True)
    loss, correct = token_nll(
        hidden, torch.randn(9, 4), torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 5, dtype=torch.bool), 0.0
    )
    loss.backward()
    assert loss == correct == 0 and not hidden.grad.any()
