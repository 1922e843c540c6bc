"""What the numbers of a plan rest on, in sentences."""

from gemsmith.execution import LOGIT_TOKENS, OTHER_QUERY_BLOCK, QUERY_BLOCKS
from gemsmith.plan import time
from gemsmith.plan.cost import LOAD_BYTES_PER_S, PREEMPTION_HOURS
from gemsmith.recipe import Recipe
from gemsmith.sizing import Work


def _at_once(work: Work) -> str:
    return "all at once" if work.micro_batches == 1 else f"in {work.micro_batches} micro-batches"


def _recomputed(recipe: Recipe) -> str:
    remat = "layer" if (recipe.train.backend, recipe.train.remat) == ("trl", "auto") else recipe.train.remat
    sentences = {
        "auto": "of every layer as much is saved for the backward pass as fits",
        "none": "every activation is saved",
        "layer": "every layer is recomputed in the backward pass",
    }
    return sentences.get(str(remat), f"layers are recomputed in the backward pass, but for {', '.join(remat)}")


def assumptions_of(work: Work, recipe: Recipe) -> tuple[str, ...]:
    """What the numbers of a plan rest on, a sentence each."""
    sentences = [
        "Everything here is modelled by formula; nothing was measured on these machines, unless a machine says so.",
        f"{work.rows} row{'s' * (work.rows != 1)} of {work.length:,} tokens a step, {_at_once(work)}; "
        f"{_recomputed(recipe)}.",
        f"Attention is the splash kernel on TPU; elsewhere blocks of {OTHER_QUERY_BLOCK} queries "
        f"({QUERY_BLOCKS['cpu']} on CPU) are "
        "compared with the keys in their reach.",
        "Documents packed into a row are reckoned as one document of its length, which is an upper bound.",
        f"Each device holds the logits of {LOGIT_TOKENS:,} tokens at once.",
        "Each replica, so each slice, has all base weights and adapters, split over its devices.",
        "Adapters, their gradients and moments are float32.",
        "Low: traffic between chips hidden and matmuls at their best; high: none hidden and matmuls at their worst.",
        f"Attention reaches {100 * time.ATTENTION_SHARE:.0f} % of the share of the peak that matmuls reach.",
        f"Hours have one start in them: the checkpoint read at {LOAD_BYTES_PER_S[1] / 1e9:g} to "
        f"{LOAD_BYTES_PER_S[0] / 1e9:g} GB/s (assumed), then compilation (by train.backend tunix as long as the first "
        "step of the 31B in arXiv 2605.25645); "
        "checkpoints and waiting for a machine are left out.",
        f"Spot: never taken away, to once in {PREEMPTION_HOURS:g} hours (assumed), each time losing a start and half "
        f"of the {recipe.train.checkpoint_every} steps between checkpoints.",
        "Starting a kernel costs nothing here, so the steps of tiny models are longer than said.",
    ]
    if recipe.train.backend == "trl":
        sentences.append("train.backend trl is taken to need what the JAX backend needs with the same attention.")
    if work.dtype_bytes == 4:
        sentences.append(f"float32 matmuls run at {100 * time.FLOAT32_SHARE:.0f} % of an accelerator's bfloat16 peak.")
    if work.dequantises:
        sentences.append("A quantised base is dequantised a layer at a time, in every pass.")
    if work.variant.experts:
        sentences.append("Experts compute only the tokens sent to them, evenly spread.")
    return tuple(sentences)
