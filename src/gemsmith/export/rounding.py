"""What rounding to the base's dtype leaves of an adapter.

A weak one is lost in merged weights that base + adapter still has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gemsmith.export.merge import DTYPES

# Rounding that moves logits by more than this share of what the adapter does to them has made another model.
_LARGE_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """What an adapter does, and what rounding did to that.

    `away`: the share of its changes of weights that is lost, by norm; 0 to 1.

    `effect`: the most that base + adapter differs from the base in logits; `moved`: the most that merged differs from
    base + adapter. None where logits were not compared, as with `away`, where no weight was.
    """

    dtypes: Sequence[str] = ()
    away: float | None = None
    effect: float | None = None
    moved: float | None = None


def rounding_notices(rounding: Rounding) -> tuple[str, ...]:
    """What a reader must know where rounding took much of the adapter.

    Decided by logits, and by weights only without them.

    In a mixture of experts a rounding can turn a token to another expert, so that a few logits move far more than the
    others.
    """
    kinds = " and ".join(sorted(DTYPES[dtype] for dtype in rounding.dtypes))
    away = (
        ""
        if rounding.away is None
        else f"{100 * rounding.away:.0f} % of its changes of weights, by norm, are rounded away"
    )
    if rounding.effect is not None and rounding.moved is not None:
        if rounding.moved <= _LARGE_SHARE * rounding.effect:
            return ()
        found = f"the adapter moves logits by {rounding.effect:.2g}, the rounding by {rounding.moved:.2g}" + (
            f"; {away}" if away else ""
        )
    elif rounding.away is not None and rounding.away > _LARGE_SHARE:
        found = f"{away}; logits were not compared"
    else:
        return ()
    return (
        f"Rounding to {kinds} took much of the adapter out of the merged weights: {found}. Serve the base with "
        "adapter/ instead "
        "(vLLM: --enable-lora), or train a stronger adapter: more steps, a higher optimizer.learning_rate or "
        "lora.alpha.",
    )
