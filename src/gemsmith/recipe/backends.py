"""How a training step runs: facts that the model, training, the recipe, the formulas and the plan all read. No jax.

Letters: B rows, L length, D head dim, Q queries and M keys of one block of attention.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from gemsmith.arch import Variant

Projection = Literal["q", "k", "v", "o", "gate", "up", "down"]
Saved = Literal[Projection, "attended", "lora"]
"""Results of a layer that remat can save by name: outputs of projections; attention's output, with what its backward
pass needs; and the outputs of adapters' A, which are R wide and so cost next to nothing."""
ATTENDED, LORA = "attended", "lora"
Remat = Literal["none", "layer"] | tuple[str, ...]
"""What train.remat comes to: "none" saves all, "layer" the layers' inputs; names are of results that are saved."""

Attention = Literal["blocked", "flash", "dense"]
"""`flash` is the splash kernel on TPU; `blocked` the JAX model's own, a block of queries at a time against the keys in
its reach; `dense` compares all pairs of a row."""

OptimizationSwitch = Literal["auto", "off"]

LANES = 128
"""Numbers that a TPU's vector unit works on at a time: the kernels' heads and blocks of rows are multiples of this."""
LOGIT_TOKENS = 1024  # tokens whose logits a device holds at once: 1.07 GB in fp32 with a vocabulary of 262,144
MAX_IMAGE_TOKENS = 1120  # soft tokens of one image at most: Gemma 4's image processor makes 70, 140, 280, 560 or 1120
TOKENS_OF_A_BUCKET = 32

# Scores of one block are B x H x Q x M in fp32: 0.03 GB for a row of 4096 in the 31B on CPU, where all of L x L would
# be 2.1 GB. On CPU small blocks stay in the cache and waste little on the diagonal. A layer forward and back (2 rows of
# 1024, 12 heads of 64, window 512) took 149 ms with 64, 153 with 32, 176 with 128, 243 with 256, 407 with 512.
# Elsewhere a block must be large, to fill the device.
QUERY_BLOCKS = {"cpu": 64}
OTHER_QUERY_BLOCK = 512
LOOPS = 8
"""Blocks of queries that read equally many keys share a loop. More loops read fewer in vain and compile longer."""
ANSWER_TOKENS = 64  # of an answer of train.sample_answers, at most
NAMES = "a list of results"


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What a value of train.backend can do, whatever the machine."""

    attentions: tuple[str, ...]  # of train.attention, beside auto
    remats: tuple[str, ...]  # of train.remat, beside auto; NAMES stands for a list of results
    dtypes: tuple[str, ...]
    mesh_axes: tuple[str, ...]
    chips: tuple[str, ...]  # kinds of the hardware catalog that it runs on
    lacks: Mapping[str, str]  # keys of train that stay at their defaults, each with the reason as an error gives it
    buckets: bool  # whether train.checkpoint_folder may be gs://bucket/folder
    splits_quantized: bool  # whether a quantized base may be split over several devices
    quantises_experts: bool
    adapts_all_linear: bool = False  # whether lora.targets may be all-linear


BACKENDS = {
    "tunix": Backend(
        attentions=("splash", "dense"),
        remats=("none", "layer", NAMES),
        dtypes=("bfloat16", "float32", "nf4", "int8"),
        mesh_axes=("replica", "fsdp", "sequence", "tp"),
        chips=("tpu", "gpu", "cpu"),
        lacks={"double_quant": "keeps the scales of nf4 in bfloat16"},
        buckets=True,
        splits_quantized=True,
        quantises_experts=True,
    ),
    "trl": Backend(
        attentions=("documents", "sdpa", "eager"),
        remats=("none", "layer"),
        dtypes=("bfloat16", "float32", "nf4"),
        mesh_axes=("replica", "fsdp"),
        chips=("gpu", "cpu"),
        lacks={
            "offload": "keeps all on the device",
            "compiler_options": "does not use XLA",
            "optimizations": "has none of what it turns off",
        },
        buckets=False,
        splits_quantized=False,
        quantises_experts=False,
        adapts_all_linear=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Optimizations:
    """What a step of the JAX backend does to be faster or smaller; `train.optimizations: off` does without all of it.

    Gains are of XLA's cycle estimates for TPUs (docs/log), on no TPU confirmed. They change results by rounding alone.
    """

    fuses_lora: bool = False  # a projection and its adapter are one matmul, where the result is wider than the input
    heads_kernel: bool = True
    """With splash attention, one Pallas kernel splits heads off and gives them QK-norm and RoPE."""
    chains: bool = True  # a block of layers is recomputed from its first layer's input, where `chains_layers` allows it
    in_turn: bool = True
    """A layer is recomputed no sooner than its gradient is there: an optimization barrier keeps the order."""
    isolates_matmuls: bool = True
    """Optimization barriers keep elementwise work out of the projections' matmuls and the loss's."""
    splits_vocabulary: bool = True
    """Each device makes the logits of its part of the vocabulary, where that moves fewer bytes."""


PLAIN = Optimizations(heads_kernel=False, chains=False, in_turn=False, isolates_matmuls=False, splits_vocabulary=False)
TUNED = Optimizations()


def default_optimizations(kind: str, tuned: OptimizationSwitch) -> Optimizations:
    """What a step does on devices of a kind, such as "tpu": elsewhere the fused matmul would copy the weights."""
    return PLAIN if tuned == "off" else Optimizations(fuses_lora=kind == "tpu")


def splits_vocabulary(*, tokens: int, vocabulary: int, dtype_bytes: int, shards: int, tp: int) -> bool:
    """Whether to gather hidden states and scatter their float32 gradients moves fewer bytes than the embedding matrix.

    Tokens are those of a replica. Never in float32, where the other order of sums shows: 1.2e-6 of a gradient.
    """
    if dtype_bytes == 4 or shards == 1 or vocabulary % (shards * tp):
        return False
    return tokens * (dtype_bytes + 4) < vocabulary * dtype_bytes


def query_block(kind: str) -> int:
    """Queries of one block of attention on devices of a kind, such as "cpu"."""
    return QUERY_BLOCKS.get(kind, OTHER_QUERY_BLOCK)


def attention_loops(length: int, *, block: int, window: int | None, ahead: int = 0) -> Iterator[tuple[range, int]]:
    """The numbers of the blocks of queries of each loop, and how many keys each of these blocks reads.

    The length is a whole number of blocks. A query reads keys up to its own, in a window at most, and `ahead` more.

    >>> list(attention_loops(256, block=64, window=None))
    [(range(0, 1), 64), (range(1, 2), 128), (range(2, 3), 192), (range(3, 4), 256)]
    >>> list(attention_loops(256, block=64, window=64))
    [(range(0, 1), 64), (range(1, 4), 128)]
    """
    ahead_blocks = _whole_blocks(ahead, block)
    most = length
    if window is not None:
        most = min(length, _whole_blocks(window - 1, block) + block + ahead_blocks)
    blocks, at_once, first = length // block, _whole_blocks(-(-most // LOOPS), block) // block, 0
    while first < blocks:
        keys = min((first + at_once) * block + ahead_blocks, most)
        last = blocks if keys == most else first + at_once
        yield range(first, last), keys
        first = last


def _whole_blocks(tokens: int, block: int) -> int:
    return -(-tokens // block) * block


def bucket_of(soft_tokens: int) -> int:
    """Soft tokens that an image is padded to: the next multiple of 32, up to 1,120.

    So that few programs run all steps. It adds at most 31 soft tokens' patches to an image: nothing to the 256 of a
    square one at a budget of 280, 22 to the 266 of one of 3 by 4. What smaller images and rows with fewer images leave
    empty comes on top (gemsmith.data.batches).
    """
    assert 0 < soft_tokens <= MAX_IMAGE_TOKENS, f"{soft_tokens} soft tokens"
    return -(-soft_tokens // TOKENS_OF_A_BUCKET) * TOKENS_OF_A_BUCKET


def heads_fill_lanes(variant: Variant) -> bool:
    """Whether the TPU's kernels take this model's heads, as any real Gemma 4's: they work on 128 numbers at a time."""
    return variant.head_dim % LANES == 0 and variant.global_head_dim % LANES == 0


def attention_on(kind: str, wanted: str, variant: Variant) -> Attention:
    """What train.attention = `wanted` is on devices of a kind: splash on TPU, where the kernel takes the heads."""
    return "flash" if kind == "tpu" and wanted != "dense" and heads_fill_lanes(variant) else "blocked"


def goes_row_by_row(kind: str, backend: str) -> bool:
    """Whether each device goes through its rows one after the other, whatever train.gradient_accumulation_steps says.

    How XLA rounds a row on CPU depends on how many there are, and up to 2e-5 of a gradient with it (docs/log). One
    by one they take less memory, and longer only where the model is tiny.
    """
    return kind == "cpu" and backend == "tunix"


def chains_layers(optimizations: Optimizations, variant: Variant, remat: Remat, *, dequantizes: bool) -> bool:
    """Whether the backward pass recomputes layers' inputs from what earlier layers of the block saved, without matmuls.

    The outputs of o and down are then at hand. Not where experts or per-layer inputs add to them, which take matmuls
    (on several CPUs these changed an update by 1.2e-6), or where weights are dequantized: a block would hold too many.
    """
    adds_matmuls = variant.experts or variant.per_layer_input or dequantizes
    return optimizations.chains and not isinstance(remat, str) and {"o", "down"} <= {*remat} and not adds_matmuls
