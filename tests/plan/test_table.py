import io

from gemsmith.plan import plan_only, print_plan


def test_the_table_has_a_line_for_every_machine(recipe):
    page = io.StringIO()
    print_plan(plan_only(recipe(machines=("v5p-8", "8xb200", "1xh100", "cpu"))), page)
    lines = page.getvalue().splitlines()
    for name, fits in (("v5p-8", "yes"), ("8xb200", "yes"), ("1xh100", "no"), ("cpu", "no")):
        row = next(line for line in lines if line.startswith(name))
        assert row.split()[2] == fits and "…" not in row, row


def test_the_table_shows_every_axis_that_is_used(recipe):
    page = io.StringIO()
    print_plan(plan_only(recipe(machines=("v6e-8",), rows_per_step=1)), page)
    assert "mesh is fsdp x sequence x tp" in page.getvalue() and "\nv6e-8    1x2x4" in page.getvalue()
