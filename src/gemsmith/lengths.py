"""Lengths in tokens: what a recipe leaves open is made to fit its model, and what it gives is checked against it."""

from collections.abc import Iterator

from gemsmith.errors import RecipeError
from gemsmith.recipe import Derived, Recipe, eval_tasks, longest_answer
from gemsmith.recipe_keys import with_values
from gemsmith.zoo import Variant

_FIRST_REQUEST = 128
"""What the stage `serve` asks first: a prompt of 40 tokens, a chat template's dozen, and an answer of 64."""
_PROMPT_ROOM = 64
"""With less than this left for the prompt, the default of eval.max_tokens is taken to be too much."""


def derive_lengths(recipe: Recipe, variant: Variant) -> list[Derived]:
    """The lengths that the recipe does not give and whose default there is no room for.

    Room is what the model, or a given serve.max_model_len, has. serve.max_model_len is among them wherever it is not
    given. Raises nothing: where no length would do, the checks say so.
    """
    limit = min(recipe.serve.max_model_len or variant.context, variant.context)
    of_limit = f"{variant.name}'s {limit} tokens" if limit == variant.context else f"serve.max_model_len, {limit}"
    found = [*_row(recipe, variant)]
    found += [*_cells(with_values(recipe, found), limit, of_limit), *_answer(recipe, limit, of_limit)]
    if recipe.serve.max_model_len is None:
        found.append(_served(with_values(recipe, found), variant))
    return found


def check_lengths(recipe: Recipe, variant: Variant) -> None:
    """Raises RecipeError for rows or served texts that are longer than the model reads."""
    for key, given in (
        ("data.max_length", recipe.data.max_length),
        ("serve.max_model_len", recipe.serve.max_model_len or 0),
    ):
        if given > variant.context:
            raise RecipeError(
                f"{key}: {given} was given; {variant.name} reads at most {variant.context} tokens; set "
                f"{variant.context} or less"
            )


def check_served(recipe: Recipe, variant: Variant) -> None:
    """Raises RecipeError where the first prompt that the stage serve asks has no room.

    The recipe is a resolved one, here and below.
    """
    limit, needed = _limit(recipe, variant), min(_FIRST_REQUEST, variant.context)
    if limit < needed:
        raise RecipeError(
            f"serve.max_model_len: {limit} was given; the first prompt and answer of serve need {needed}; set that or "
            "more"
        )


def check_cells(recipe: Recipe, variant: Variant) -> None:
    """Raises RecipeError where a cell of bench is longer than what is served."""
    limit, needed = _limit(recipe, variant), _longest_cell(recipe)
    if needed <= limit:
        return
    if recipe.bench.grid != "own":
        raise RecipeError(
            f"bench.grid: {recipe.bench.grid} sends and asks for {needed} tokens, more than "
            f"{_name_limit(limit, variant)}; set it to own{_or_raise(needed, variant)}"
        )
    longest, output = max(recipe.bench.input_tokens), recipe.bench.output_tokens
    name, otherwise = _name_limit(limit, variant), _or_raise(longest + output, variant)
    if output >= limit:
        raise RecipeError(f"bench.output_tokens: {output} leaves no room for a prompt in {name}; lower it{otherwise}")
    if longest >= limit:
        raise RecipeError(f"bench.input_tokens: {longest} leaves no room for an answer in {name}; lower it{otherwise}")
    raise RecipeError(
        f"bench.input_tokens: {longest} and bench.output_tokens: {output} make {longest + output} tokens, more than "
        f"{name}; "
        f"lower one of them{otherwise}"
    )


def check_answer(recipe: Recipe, variant: Variant) -> None:
    """Raises RecipeError where eval's answers leave no room for a prompt."""
    answer, limit = longest_answer(recipe), _limit(recipe, variant)
    if answer >= limit:
        given = [place for place, task in enumerate(recipe.eval.tasks) if task.max_tokens == answer]
        key = f"eval.tasks.{given[0]}.max_tokens" if given else "eval.max_tokens"
        raise RecipeError(
            f"{key}: {answer} leaves no room for a prompt in {_name_limit(limit, variant)}; "
            f"lower it{_or_raise(answer + _PROMPT_ROOM, variant)}"
        )


def _row(recipe: Recipe, variant: Variant) -> Iterator[Derived]:
    length = recipe.data.max_length
    if "max_length" not in recipe.data.model_fields_set and length > variant.context:
        yield Derived("data.max_length", variant.context, f"the default is {length}, {variant.name} reads at most this")


def _cells(recipe: Recipe, limit: int, of_limit: str) -> Iterator[Derived]:
    """Inputs are cut to what the output leaves.

    The output, where inputs are given, to what they leave, and else to half of all.
    """
    given, inputs, output = recipe.bench.model_fields_set, recipe.bench.input_tokens, recipe.bench.output_tokens
    if recipe.bench.pictures:
        longest = min(recipe.data.max_length, max(1, limit - output))
        if "input_tokens" not in given and inputs != (longest,):
            yield Derived("bench.input_tokens", (longest,), "bench.pictures: a request is a row, no longer than this")
        return
    if recipe.bench.grid != "own" or max(inputs) + output <= limit:
        return
    if "output_tokens" not in given:
        room = limit - max(inputs) if "input_tokens" in given else limit // 2
        if room < 1:
            return
        if room < output:
            yield Derived(
                "bench.output_tokens",
                room,
                f"the default is {output}, which leaves too little of {of_limit}, for prompts",
            )
        output = min(output, room)
    if "input_tokens" not in given and output < limit:
        fitting = tuple(dict.fromkeys(min(length, limit - output) for length in inputs))
        lengths = " and ".join(map(str, inputs))
        yield Derived(
            "bench.input_tokens",
            fitting,
            f"the default is {lengths}, bench.output_tokens leaves {limit - output} of {of_limit}",
        )


def _answer(recipe: Recipe, limit: int, of_limit: str) -> Iterator[Derived]:
    answer = recipe.eval.max_tokens
    if eval_tasks(recipe) and "max_tokens" not in recipe.eval.model_fields_set and limit - answer < _PROMPT_ROOM:
        yield Derived(
            "eval.max_tokens", max(1, limit // 2), f"the default is {answer}; half of {of_limit}, is left to prompts"
        )


def _served(recipe: Recipe, variant: Variant) -> Derived:
    evaluated = recipe.data.max_length + longest_answer(recipe)
    wanted = max(_FIRST_REQUEST, evaluated, _longest_cell(recipe))
    reason = f"the longest that eval and bench send and ask for, at most {variant.name}'s {variant.context}"
    return Derived("serve.max_model_len", min(wanted, variant.context), reason)


def _longest_cell(recipe: Recipe) -> int:
    """The most tokens that a request of bench sends and asks for together."""
    return max(load.input_tokens + load.output_tokens for load in recipe.bench.plan.loads)


def _limit(recipe: Recipe, variant: Variant) -> int:
    return recipe.serve.max_model_len or variant.context


def _name_limit(limit: int, variant: Variant) -> str:
    return f"the {limit} that {variant.name} reads" if limit >= variant.context else f"serve.max_model_len: {limit}"


def _or_raise(needed: int, variant: Variant) -> str:
    """The other remedy, where it is one."""
    return f", or set serve.max_model_len to {needed} or more" if needed <= variant.context else ""
