"""Attention over packed rows in PyTorch: three ways to keep documents apart, chosen by train.attention.

`documents` asks torch's scaled_dot_product_attention block by block, so that nothing outside a document, or a layer's
window, is ever computed and torch may take its flash kernel wherever that can work. `sdpa` and `eager` are
transformers' own, on whole rows under a mask.

In sliding layers of some variants the soft tokens of an image see each other in both directions. What says so are
`images`, of shape (B, L): from 1 the number of the image that a token is of, 0: text; None: all look back alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

FULL, SLIDING = "full_attention", "sliding_attention"

# Short documents share a block, under a mask: a kernel for each would cost more to start than to run.
_BLOCK = 512
# The widest head of torch's flash kernel, which takes no float32; else torch's kernel cannot share keys among heads.
_FLASH_HEAD_DIM = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionBlock:
    """Queries [begin, end) of a row, which look at keys [first, end) under the mask, or causally without one."""

    begin: int
    end: int
    first: int
    mask: torch.Tensor | None


Blocks = list[list[AttentionBlock]]  # the blocks of each row, in order; positions after the last one are padding


def attention_inputs(
    how: str, segments: np.ndarray, images: np.ndarray | None, window: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """What the model takes as attention_mask for rows with these segments (B, L), by type of layer."""
    kinds = {FULL: (segments.shape[1], None), SLIDING: (window, images)}
    if how == "documents":

        def blocks(reach: int, seen: np.ndarray | None) -> Blocks:
            rows = zip(segments, np.zeros_like(segments) if seen is None else seen, strict=True)
            return [list(_blocks_of(*row, reach, device)) for row in rows]

        return {kind: blocks(reach, seen) for kind, (reach, seen) in kinds.items()}
    masks = {
        kind: torch.from_numpy(dense_mask(segments, seen, reach))[:, None].to(device)
        for kind, (reach, seen) in kinds.items()
    }
    if how == "sdpa":
        return masks
    low = torch.finfo(dtype).min
    return {kind: torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, low) for kind, mask in masks.items()}


def dense_mask(segments: np.ndarray, images: np.ndarray | None, window: int) -> np.ndarray:
    """Where a query may look, (B, L, L), of segments (B, L).

    At itself and what is before it in its document, at most window - 1 away, and at what is after it in its image,
    however far. Padding, which has segment 0, is a document of its own: a row of False only would be NaN.
    """
    places = np.arange(segments.shape[1])
    distance = places[:, None] - places
    seen = distance >= 0
    if images is not None:
        seen = seen | ((images[:, :, None] == images[:, None]) & (images[:, None] > 0))
    return (segments[:, :, None] == segments[:, None]) & seen & (distance < window)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # blocks differ from step to step, and would be compiled anew
def attend_documents(
    module: Any,  # noqa: ARG001 - transformers' signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Blocks,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Queries (B, H, L, D), keys and values (B, K, L, D) -> (B, L, H, D), zeros after a row's last block."""
    rows = []
    for blocks, *row in zip(attention_mask, query.unbind(), key.unbind(), value.unbind(), strict=True):
        own, seen = [(block.begin, block.end) for block in blocks], [(block.first, block.end) for block in blocks]
        cut = zip(blocks, *(_cut(x, spans) for x, spans in zip(row, (own, seen, seen), strict=True)), strict=True)
        parts = [_attend(some, keys, values, block.mask, dropout, scaling) for block, some, keys, values in cut]
        end = blocks[-1].end if blocks else 0
        parts.append(query.new_zeros(query.shape[1], query.shape[2] - end, query.shape[3]))
        rows.append(torch.cat(parts, dim=1))
    return torch.stack(rows).transpose(1, 2), None


def kernels(
    how: str, heads: Mapping[str, tuple[int, int, int]], device: torch.device, dtype: torch.dtype
) -> dict[str, str]:
    """What computes attention on this device, by type of layer.

    `heads` gives number of heads, of kv heads, and head_dim. Of `documents` it is torch's choice for a block that is
    one document; short ones that share a block go under a mask.
    """
    if how == "eager":
        return dict.fromkeys(heads, "eager: matmul and softmax")
    chosen = {}
    for kind, (queries, keys, width) in heads.items():
        query, key = (
            torch.zeros(1, count, 128, width, device=device, dtype=dtype, requires_grad=True)
            for count in (queries, keys)
        )
        mask = None if how == "documents" else torch.ones(1, 1, 128, 128, dtype=torch.bool, device=device)
        share = mask is None and _shares_keys(query)
        if not share:
            key = key.repeat_interleave(queries // keys, dim=1)
        number = torch._fused_sdp_choice(query, key, key, mask, 0.0, mask is None, scale=1.0, enable_gqa=share)
        chosen[kind] = f"{how}: torch's {SDPBackend(number).name.lower()} kernel, head_dim {width}"
    return chosen


def _cut(x: torch.Tensor, spans: Sequence[tuple[int, int]]) -> Sequence[torch.Tensor]:
    """The parts of x (H, L, D) at these spans: where they touch by one split, whose gradient is one copy."""
    borders = [0, *(end for _, end in spans), x.shape[1]]
    if [begin for begin, _ in spans] == borders[: len(spans)]:
        return x.split([end - begin for begin, end in pairwise(borders)], dim=1)[: len(spans)]
    return [x[:, begin:end] for begin, end in spans]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    groups = query.shape[0] // key.shape[0]
    share = mask is None and _shares_keys(query)
    if groups > 1 and not share:
        key, value = (x[:, None].expand(-1, groups, -1, -1).flatten(0, 1) for x in (key, value))
    # With a leading axis of one: without it, torch has no fused kernel.
    query, key, value = (x[None] for x in (query, key, value))
    return scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal=mask is None, scale=scaling, enable_gqa=groups > 1 and share
    )[0]


def _shares_keys(query: torch.Tensor) -> bool:
    return query.is_cuda and query.dtype != torch.float32 and query.shape[-1] <= _FLASH_HEAD_DIM


def _blocks_of(segments: np.ndarray, images: np.ndarray, window: int, device: torch.device) -> Iterator[AttentionBlock]:
    """[1 1 1 2 2 3 3 0 0], blocks of up to 4 -> [0, 3) causal, [3, 7) under a mask.

    A row of padding has its first position, so that every matrix gets a gradient, which FSDP adds up.
    """
    borders = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
    spans = [(begin, end) for begin, end in pairwise(borders) if segments[begin]] or [(0, 1)]
    shared: list[tuple[int, int]] = []
    for begin, end in spans:
        if shared and end - shared[0][0] > _BLOCK:
            yield _shared_block(shared, segments, images, window, device)
            shared = []
        if end - begin > _BLOCK:
            yield from _split(begin, end, images, window, device)
        else:
            shared.append((begin, end))
    if shared:
        yield _shared_block(shared, segments, images, window, device)


def _shared_block(
    spans: Sequence[tuple[int, int]], segments: np.ndarray, images: np.ndarray, window: int, device: torch.device
) -> AttentionBlock:
    begin, end = spans[0][0], spans[-1][1]
    if len(spans) == 1 and end - begin <= window and not images[begin:end].any():
        return AttentionBlock(begin=begin, end=end, first=begin, mask=None)
    mask = torch.from_numpy(dense_mask(segments[None, begin:end], images[None, begin:end], window)[0]).to(device)
    return AttentionBlock(begin=begin, end=end, first=begin, mask=mask)


def _split(begin: int, end: int, images: np.ndarray, window: int, device: torch.device) -> Iterator[AttentionBlock]:
    """The blocks of a long document.

    One where its layer sees all of it, else blocks of a window's length, each with the keys in its reach. No border is
    in an image: what is after a token in it would be in no block of the token's.
    """
    size, start = max(window, _BLOCK), begin
    while start < end:
        stop, first = min(start + size, end), max(begin, start - window + 1)
        while stop < end and images[stop] and images[stop] == images[stop - 1]:
            stop += 1
        if first == start and stop - start <= window and not images[start:stop].any():
            yield AttentionBlock(begin=start, end=stop, first=start, mask=None)
        else:
            queries, keys = (torch.arange(place, stop, device=device) for place in (start, first))
            distance = queries[:, None] - keys
            seen = distance >= 0
            if images[start:stop].any():
                own = torch.from_numpy(images[first:stop]).to(device)
                seen |= (own[start - first :, None] == own) & (own > 0)
            yield AttentionBlock(begin=start, end=stop, first=first, mask=seen & (distance < window))
        start = stop
