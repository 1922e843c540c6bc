"""The plan stage: memory, step time, hours and dollars of the recipe on each of its machines."""

from pathlib import Path

from gemsmith.execution import LOGIT_TOKENS, OTHER_QUERY_BLOCK, QUERY_BLOCKS
from gemsmith.files import sha256_file
from gemsmith.hardware import Catalogue, Machine, find_machine, load_catalogue
from gemsmith.plan import time
from gemsmith.plan.mesh import Choice, choose_mesh
from gemsmith.plan.steps import PRICED_STEPS, StepCount, count_steps
from gemsmith.provenance import start_clock
from gemsmith.recipe import Recipe
from gemsmith.records import DataRecord, MachinePlan, Origin, PlanRecord
from gemsmith.resolve import recipe_variant
from gemsmith.run import Run, is_complete, make_origin, read_record, write_record
from gemsmith.sizing import Work, on_chips, work_of
from gemsmith.zoo import Variant


def plan(run: Run) -> PlanRecord:
    """The run's plan, also written to plan.json. Uses the data stage's record where there is one."""
    data: DataRecord | None = read_record(run, DataRecord) if is_complete(run, "data") else None
    record = _plan(
        run, count_steps(run.recipe, data), {} if data is None else {"data.json": sha256_file(run.record_file("data"))}
    )
    write_record(run, record)
    return record


def plan_only(recipe: Recipe) -> PlanRecord:
    """The plan of a resolved recipe that has no run directory. Nothing is written."""
    return _plan(Run(path=Path(), recipe=recipe), count_steps(recipe), {})


def plan_recipe(
    recipe: Recipe, variant: Variant, *, steps: StepCount, origin: Origin, catalogue: Catalogue | None = None
) -> PlanRecord:
    """The plan as a pure function of the recipe, model, number of steps and catalogue (default: the recipe's own).

    Raises RecipeError for a machine that the catalogue does not have, or LoRA targets that do not exist.
    """
    catalogue = catalogue or load_catalogue(recipe.hardware.catalogue)
    work = work_of(recipe, variant)
    priced_steps = steps.steps or PRICED_STEPS
    machines = [find_machine(catalogue, name) for name in recipe.hardware.machines]
    return PlanRecord(
        origin=origin,
        model=variant.name,
        parameters=work.parameters,
        trained_parameters=work.trained_parameters,
        steps=steps.steps,
        priced_steps=priced_steps,
        tokens_per_step=work.tokens,
        machines=tuple(_plan_machine(work, machine, recipe, priced_steps) for machine in machines),
        assumptions=(steps.reason, *_assumptions(work, recipe)),
    )


def _plan(run: Run, steps: StepCount, sources: dict[str, str]) -> PlanRecord:
    clock = start_clock()
    catalogue = load_catalogue(run.recipe.hardware.catalogue)
    if run.recipe.hardware.catalogue is not None:
        sources = {**sources, "catalogue": sha256_file(Path(run.recipe.hardware.catalogue))}
    origin = make_origin(run, "plan", clock, sources=sources)
    record = plan_recipe(run.recipe, recipe_variant(run.recipe), steps=steps, origin=origin, catalogue=catalogue)
    return record.model_copy(update={"origin": origin.model_copy(update={"duration_s": round(clock.elapsed_s(), 3)})})


def _plan_machine(work: Work, machine: Machine, recipe: Recipe, steps: int) -> MachinePlan:
    work = on_chips(work, machine.chip.kind, recipe)
    choice = choose_mesh(work, machine, recipe.train.mesh, remat=recipe.train.remat, backend=recipe.train.backend)
    fits = not choice.problems
    step_s = (_rounded(choice.time.low_s), _rounded(choice.time.high_s))
    hours = (_rounded(steps * step_s[0] / 3600), _rounded(steps * step_s[1] / 3600)) if fits else None
    rate = machine.prices[0].usd_per_hour if machine.prices else None
    return MachinePlan(
        name=machine.name,
        chips=machine.chips,
        fits=fits,
        hbm_bytes_per_chip=choice.hbm_bytes_per_chip,
        hbm_limit_bytes_per_chip=machine.chip.hbm_bytes,
        step_s=step_s,
        hours=hours,
        usd=None if hours is None or rate is None else (_rounded(hours[0] * rate), _rounded(hours[1] * rate)),
        mesh=choice.mesh.model_dump(),
        notes=(
            *choice.problems,
            *_rows_note(work),
            *_remat_note(choice, recipe),
            *_mesh_note(choice, recipe),
            _price_note(machine),
            _speed_note(machine),
        ),
    )


def _rows_note(work: Work) -> tuple[str, ...]:
    return (
        ("rows are trained one after the other there, with or without train.micro_batches",)
        if work.one_by_one and work.rows > 1
        else ()
    )


def _remat_note(choice: Choice, recipe: Recipe) -> tuple[str, ...]:
    """What training saves there, where the recipe leaves it to the machine."""
    if recipe.train.remat != "auto" or choice.problems:
        return ()
    saved = {"none": "everything", "layer": "only the layers' inputs"}.get(str(choice.remat), ", ".join(choice.remat))
    return (f"train.remat auto: {saved} saved for the backward pass",)


def _mesh_note(choice: Choice, recipe: Recipe) -> tuple[str, ...]:
    """What to write into the recipe, where training's own choice, which never takes tp, is slower or does not fit."""
    if recipe.train.mesh != "auto" or choice.mesh.tp == 1 or choice.problems:
        return ()
    sizes = ", ".join(f"{axis}: {size}" for axis, size in choice.mesh.model_dump().items() if size > 1)
    return (f"set train.mesh to {{{sizes}}} to get this; auto trains with tp 1: slower, or too large",)


def _price_note(machine: Machine) -> str:
    """What the dollars were reckoned with, and the cheapest spot price, whichever region has it."""
    spot = min(
        (price for price in machine.prices if price.usd_per_hour_spot),
        key=lambda price: price.usd_per_hour_spot or 0,
        default=None,
    )
    also = f"; spot from {spot.usd_per_hour_spot:.2f} in {spot.region}" if spot else ""
    price = machine.prices[0] if machine.prices else None
    if price is None or price.usd_per_hour is None:
        return f"the catalogue has no on-demand price{also}; add one in hardware.catalogue"
    unchecked = "" if price.checked else ", not checked"
    return (
        f"{price.usd_per_hour:.2f} USD/h on demand, {price.provider} {price.region} ({price.source}, "
        f"{price.date}{unchecked}){also}"
    )


def _speed_note(machine: Machine) -> str:
    chip = machine.chip
    peak = (
        f"{chip.flops_per_s / 1e12:,.3g} TFLOP/s a chip ({chip.source}, "
        f"{chip.date}{'' if chip.checked else ', not checked'})"
    )
    if chip.kind == "cpu":
        peak += "; Python and its libraries hold about 1.4 GiB more than is counted"
    return (
        f"matmuls at {100 * chip.efficiency_low:.0f} to {100 * chip.efficiency_high:.0f} % of {peak}; "
        f"{chip.efficiency_source}"
    )


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


def _assumptions(work: Work, recipe: Recipe) -> tuple[str, ...]:
    sentences = [
        "Everything here is modelled by formula; nothing was measured on these machines.",
        f"{work.rows} row{'s' * (work.rows != 1)} of {work.length:,} tokens a step, {_at_once(work)}; "
        f"{_recomputed(recipe)}.",
        f"Attention is the splash kernel on TPU; elsewhere blocks of {OTHER_QUERY_BLOCK} queries "
        f"({QUERY_BLOCKS['cpu']} on CPU) are "
        "compared with the keys in their reach.",
        "Documents packed into a row are reckoned as one document of its length, which is an upper bound.",
        f"Each device holds the logits of {LOGIT_TOKENS:,} tokens at once.",
        "Base weights and adapters are split over all devices.",
        "Adapters, their gradients and moments are float32.",
        "Low: traffic between chips hidden and matmuls at their best; high: none hidden and matmuls at their worst.",
        f"Attention reaches {100 * time.ATTENTION_SHARE:.0f} % of the share of the peak that matmuls reach.",
        "Hours leave out compilation, reading the weights, checkpoints and waiting for a machine.",
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


def _rounded(value: float) -> float:
    """Four digits: a formula knows no more."""
    return float(f"{value:.4g}")
