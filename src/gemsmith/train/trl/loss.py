"""The training loss and its gradient in PyTorch, without ever holding the logits of a whole row."""

from typing import Any

import torch

from gemsmith.execution import LOGIT_TOKENS


def token_nll(
    hidden: torch.Tensor, embedding: torch.Tensor, tokens: torch.Tensor, loss_mask: torch.Tensor, softcap: float
) -> torch.Tensor:
    """The float32 sum of -log p(target | what is before it), of hidden (B, L, E) and the embedding matrix (V, E).

        tokens     2 105  7   9 106        hidden at 7 predicts 9, at 9 predicts 106
        loss_mask  0   0  0   1   1        2 targets

    Only what predicts a target meets the embedding matrix, which itself gets no gradient.
    """
    places = loss_mask[:, 1:].flatten().nonzero()[:, 0]
    # Place k of the rows without their first column lies k // (L - 1) further in the rows with it.
    length = tokens.shape[1]
    predicting = places + places // (length - 1)
    return _Nll.apply(
        hidden.reshape(-1, hidden.shape[-1]), embedding, predicting, tokens.flatten()[predicting + 1], softcap or 0.0
    )


class _Nll(torch.autograd.Function):
    """The sum of the nll, with its gradient made in the forward pass.

    The sum is linear in what it is multiplied by, so its gradient is made from logits that are at hand.
    """

    @staticmethod
    def forward(
        context: Any,
        hidden: torch.Tensor,
        embedding: torch.Tensor,
        predicting: torch.Tensor,
        targets: torch.Tensor,
        softcap: float,
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradient = torch.zeros_like(hidden)
        for places, some in zip(predicting.split(LOGIT_TOKENS), targets.split(LOGIT_TOKENS), strict=True):
            logits = _logits(hidden[places].to(embedding.dtype), embedding)
            slope = torch.tanh_(logits.div_(softcap)) if softcap else None
            if slope is not None:
                logits = slope * softcap
            log_total = torch.logsumexp(logits, dim=-1)
            total += (log_total - logits.gather(1, some[:, None])[:, 0]).sum()
            surplus = logits.sub_(log_total[:, None]).exp_()
            surplus[torch.arange(len(some), device=some.device), some] -= 1.0
            if slope is not None:
                surplus.mul_(slope.square_().neg_().add_(1.0))
            gradient.index_copy_(0, places, (surplus.to(embedding.dtype) @ embedding).to(hidden.dtype))
        context.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(context: Any, *above: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (gradient,) = context.saved_tensors
        return gradient * above[0].to(gradient.dtype), None, None, None, None


def _logits(hidden: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    """Float32, as in the JAX backend: bfloat16 numbers of 20 are 0.125 apart.

    Only torch's CUDA kernels sum bfloat16 into float32.
    """
    if embedding.is_cuda and embedding.dtype != torch.float32:
        return torch.mm(hidden, embedding.T, out_dtype=torch.float32)
    with torch.autocast(embedding.device.type, enabled=False):
        return hidden.float() @ embedding.float().T
