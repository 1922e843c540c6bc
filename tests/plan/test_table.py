import re

from gemsmith.plan.stage import plan_only
from gemsmith.report.plan_table import BAR, bar_of, plan_lines, serving_lines


def test_the_table_has_a_line_for_every_machine(recipe):
    lines = plan_lines(plan_only(recipe(machines=("v5p-8", "8xb200", "1xh100", "cpu"))))
    for name, fits in (("v5p-8", "yes"), ("8xb200", "yes"), ("1xh100", "no"), ("cpu", "no")):
        row = next(line for line in lines if line.startswith(name))
        assert row.split()[2] == fits and "…" not in row, row


def test_the_table_shows_every_axis_that_is_used(recipe):
    page = "\n".join(plan_lines(plan_only(recipe(machines=("v6e-8",), global_batch_size=1))))
    assert "mesh is fsdp x sequence x tp" in page and "\nv6e-8    1x2x4" in page


def test_the_table_is_no_wider_than_a_terminal(recipe):
    lines = plan_lines(plan_only(recipe(max_steps=90_000), "all", "usd"))
    table = lines[: lines.index("", 3)]
    assert len(table) > 24 and max(map(len, table)) <= 80


def test_a_bar_is_as_full_as_the_chip(recipe):
    machines = {machine.name: machine for machine in plan_only(recipe(), "all").machines}
    for name, machine in machines.items():
        bar, held = bar_of(machine), machine.hbm_bytes_per_chip / machine.hbm_limit_bytes_per_chip
        assert len(bar) == BAR and bar.endswith("r" if machine.fits else ">"), name
        if machine.fits:
            assert abs(BAR - 1 - bar.count(".") - BAR * held) <= 1, name
    assert bar_of(machines["1xh200"]).startswith("WWW")


def test_prices_in_doubt_are_listed_below_the_table(recipe):
    lines = plan_lines(plan_only(recipe(), "8xh200,8xb200,v5p-8,tpu7x-4"))
    assert "prices older than 90 days: 8xh200, 8xb200" in lines
    assert "prices not checked: 8xh200, 8xb200, tpu7x-4" in lines


def test_machines_that_need_their_mesh_in_the_recipe_are_listed(recipe):
    lines = plan_lines(plan_only(recipe(), "v5p-8,8xh100,8xh200,v6e-8"))
    assert "set train.mesh to what the table shows on 8xh200; auto trains with tp 1: slower, or too large" in lines


def test_spot_is_listed_below_the_table(recipe):
    record = plan_only(recipe(), "8xh200,v6e-8,v5p-8,tpu7x-4")
    (line,) = (line for line in plan_lines(record) if line.startswith("USD on spot"))
    assert re.search(r": v6e-8 [\d.]+-[\d.]+, v5p-8 [\d.]+-[\d.]+$", line), line


def test_what_does_not_fit_says_why_and_what_would(recipe):
    lines = plan_lines(plan_only(recipe(), "all", "usd"))
    told = {name: line for line in lines if "exceed the memory" in line for name in line.split(":")[0].split(", ")}
    assert (
        "saved activations exceed the memory; fits with train.gradient_accumulation_steps: 8: 70.0 GiB"
        in told["1xh100"]
    )
    assert told["1xa100-80"].endswith("no price")
    assert "frozen weights exceed the memory; no change of train.remat" in told["1xl4"]
    assert told["1xl4"] == told["cpu"], "machines with one reason share a line"


def test_serving_is_a_table_for_each_length_and_says_what_does_not_fit(recipe):
    record = plan_only(recipe(machines=("v6e-8", "1xl4")))
    lines = serving_lines(record)
    assert sum(line.startswith("machine") for line in lines) == len(recipe().bench.input_tokens)
    assert sum(line.startswith("v6e-8") for line in lines) == sum(line.startswith("1xl4: ") for line in lines) == 2
    assert max(len(line) for line in lines if not line.startswith(("1xl4", "warning"))) <= 100
    mounted = lines[lines.index("- v6e-8: a cold start with --load mount takes") + 1].replace(chr(160), " ")
    assert mounted.startswith("  ") and "warm-up 8.0–10 min" in mounted and "1xl4: a cold start" not in "".join(lines)
    told = [line for line in lines if line.startswith("warning: v6e-8: ")]
    assert len(told) == 3 and all("https://" in line for line in told), "each once, not for each length"
