import json


def test_a_plan_without_a_run_directory_writes_nothing(gemsmith, recipe, tmp_path):
    before = set(tmp_path.iterdir())
    code, out, _ = gemsmith("plan", recipe, "--json")
    assert code == 0
    assert {machine["name"] for machine in json.loads(out)["machines"]} == {"v5p-8", "v6e-8", "2xh100"}
    assert set(tmp_path.iterdir()) == before


def test_a_plan_for_other_machines_leaves_the_runs_own_as_it_is(gemsmith, recipe, tmp_path):
    gemsmith("plan", recipe, "--run", "out")
    before = (tmp_path / "out" / "plan.json").read_bytes()
    code, out, _ = gemsmith("plan", "out", "--machine", "h200,v5p-8", "--sort", "hours", "--json")
    machines = json.loads(out)["machines"]
    assert code == 0 and {machine["name"] for machine in machines} == {"1xh200", "v5p-8"}
    assert {"parts", "hours", "usd", "usd_per_million_tokens", "fix"} <= machines[0].keys()
    assert (tmp_path / "out" / "plan.json").read_bytes() == before
    code, _, err = gemsmith("plan", recipe, "--machine", "all", "--run", "out")
    assert code == 2 and "error: --run: does not go with --machine" in err


def test_a_plan_of_a_run_takes_real_tokens_from_its_data(gemsmith, recipe):
    data = json.loads(gemsmith("data", recipe, "--json", "--run", "out")[1])
    plan = json.loads(gemsmith("plan", "out", "--machine", "cpu", "--json")[1])
    assert plan["real_tokens_per_step"] == plan["tokens_per_step"] * data["packing_efficiency"]
    assert plan["steps"] == data["steps"]


def test_a_fix_is_written_for_one_machine_and_never_over_a_file(gemsmith, recipe, tmp_path):
    options = ("--machine", "cpu", "--set", "train.mesh={fsdp: 2}", "--fix", "fixed.yaml")
    assert gemsmith("plan", recipe, *options)[0] == 0
    before = (tmp_path / "fixed.yaml").read_bytes()
    code, _, err = gemsmith("plan", recipe, *options)
    assert code == 2 and "--fix fixed.yaml: already exists" in err
    assert (tmp_path / "fixed.yaml").read_bytes() == before
    assert gemsmith("plan", "fixed.yaml", "--json")[0] == 0


def test_calibration_takes_runs_and_nothing_else(gemsmith, recipe, tmp_path):
    for options, message in (
        (("runs/none", "--calibrate", "--machine", "cpu"), "--machine: does not go with --calibrate"),
        (("runs/none", "--calibrate"), "runs/none"),
        ((recipe, recipe), "SOURCE: 2 were given; plan takes one"),
        ((recipe, "--catalog", "own.yaml"), "--catalog: goes with --calibrate"),
    ):
        code, _, err = gemsmith("plan", *options)
        assert code == 2 and message in err and "Traceback" not in err
    assert not list(tmp_path.glob("**/*.yaml"))[1:], "only the recipe is there"


def test_serving_is_printed_instead_and_is_in_the_record_either_way(gemsmith, recipe):
    code, out, _ = gemsmith("plan", recipe, "--serve")
    assert code == 0 and "served by vLLM" in out and "USD/M out" in out
    assert json.loads(gemsmith("plan", recipe, "--json")[1])["serving"]


def test_a_page_is_written_beside_the_table(gemsmith, recipe, tmp_path):
    code, out, err = gemsmith("plan", recipe, "--html", "plan.html")
    assert code == 0 and "machine" in out and "plan.html written" in err
    assert "Gemsmith plan" in (tmp_path / "plan.html").read_text()


def test_a_sweeps_page_is_written_beside_its_csv(gemsmith, recipe, tmp_path):
    sweep = ("--sweep", "lora.rank=4,8", "--machine", "v5p-8")
    code, out, err = gemsmith("plan", recipe, *sweep, "--csv", "--html", "sweep.html")
    assert code == 0 and out.startswith("lora.rank,machine,fits") and "sweep.html written" in err
    assert "Gemsmith sweep" in (tmp_path / "sweep.html").read_text()
    code, _, err = gemsmith("plan", recipe, *sweep, "--serve")
    assert code == 2 and "--serve: does not go with --sweep" in err
