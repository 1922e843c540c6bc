"""What the site has beside docs/: pages and tables made from the code and the records. A hook of mkdocs.

mkdocs build --strict -d build/site
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from gemsmith.analysis.published import read_published, reanalyze
from gemsmith.plan import stage as plan_stage
from gemsmith.recipe.keys import KEYS, recipe_schema
from gemsmith.report import tables
from gemsmith.runs.stages import STAGES, reads
from readme_table import make_table

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files of the repository's root -> pages of the site."""


def recipe_page() -> str:
    """The reference of the recipe: every key with its type, default and description, a table a section."""
    schema = recipe_schema()
    lines = ["# The recipe's keys", "", "Made from `src/gemsmith/recipe/schema.py` when this site is built.", ""]
    lines += [
        "A recipe is a YAML mapping. `checkpoint` and `data.train` must be given; all else has a default. "
        "An unknown key is an error, and so is a key given twice. `recipes/recipe.schema.json` lets an editor complete "
        "and check a recipe; `gemsmith schema` prints it.",
        "",
    ]
    top = {key: value for key, value in schema["properties"].items() if "$ref" not in _whole(value)}
    lines += _table("Top level", "", top)
    for key, value in schema["properties"].items():
        if "$ref" in _whole(value):
            lines += _section(key, _definition(value, schema), schema)
    return "\n".join(lines)


def _section(name: str, section: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    yield from _table(f"`{name}`", f"{name}.", section["properties"])
    for key, value in section["properties"].items():
        if nested := [kind for kind in value.get("anyOf", []) if "$ref" in kind]:
            inner = _definition(nested[0], schema)
            yield from _table(f"`{name}.{key}` as a mapping", f"{name}.{key}.", inner["properties"])


def _table(title: str, prefix: str, properties: Mapping[str, Any]) -> list[str]:
    lines = [f"## {title}", "", "| key | type | default | what it is |", "|---|---|---|---|"]
    for key, value in properties.items():
        name = f"{prefix}{key}"
        default = f"`{json.dumps(value['default'])}`" if "default" in value else "must be given"
        text = value.get("description")
        if not text:
            raise ValueError(f"{name}: has no description; add one in src/gemsmith/recipe/schema.py")
        lines.append(f"| `{name}` | {say_type(value)} | {default} | {text} |".replace("\n", " "))
    return [*lines, ""]


def say_type(value: Mapping[str, Any]) -> str:
    """What a key's value may be, in words.

    >>> say_type({"type": "integer", "exclusiveMinimum": 0})
    'whole number above 0'
    >>> say_type({"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]})
    '`a`, `b` or null'
    """
    kinds = value.get("anyOf", [value])
    said = [part for kind in kinds for part in _say_kinds(kind)]
    return said[0] if len(said) == 1 else f"{', '.join(said[:-1])} or {said[-1]}"


def _say_kinds(kind: Mapping[str, Any]) -> list[str]:
    if "$ref" in kind:
        return ["a mapping (below)"]
    if "const" in kind:
        return [f"`{kind['const']}`"]
    if "enum" in kind:
        return [f"`{item}`" for item in kind["enum"]]
    if kind.get("type") == "array":
        return [f"list of: {say_type(kind['items'])}"]
    if kind.get("type") == "object":
        return [f"mapping of names to: {say_type(kind['additionalProperties'])}"]
    words = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}
    bounds = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}
    said = " and ".join(f"{word} {kind[key]:,.16g}" for key, word in bounds.items() if key in kind)
    return [f"{words.get(kind['type'], kind['type'])} {said}".strip()]


def _whole(value: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: item for inner in (value, *value.get("allOf", [])) for key, item in inner.items()}


def _definition(value: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = schema["$defs"][_whole(value)["$ref"].rpartition("/")[2]]
    return found


def stage_table() -> str:
    """Which keys of the recipe and which earlier records each stage reads, from gemsmith.runs.stages."""
    lines = ["| stage | keys of the recipe it reads | records it reads | module |", "|---|---|---|---|"]
    for name, stage in STAGES.items():
        keys = ", ".join(f"`{key}`" for key in _read_by(name)) or "none"
        upstream = ", ".join(f"`{other}.json`" for other in stage.upstream) or "none"
        lines.append(f"| {name} | {keys} | {upstream} | `{stage.function.partition(':')[0]}` |")
    return "\n".join(lines)


def _read_by(stage: str) -> list[str]:
    """The keys that a stage reads, a section's name where it reads all of them."""
    read = [key for key in KEYS if reads(stage, key)]
    whole = {name.partition(".")[0] for name in read}
    whole = {part for part in whole if all(key in read for key in KEYS if key.partition(".")[0] == part)}
    return list(dict.fromkeys(section if (section := name.partition(".")[0]) in whole else name for name in read))


def performance_table() -> str:
    """What was measured and estimated: each number read from its record, with the command that makes it."""
    lines = ["| what | number | how known | command, and its record |", "|---|--:|---|---|"]
    for what, number, known, file, command in _performance():
        lines.append(f"| {what} | {number} | {known} | [`{command}`](../benchmarks/records/{file}) |")
    return "\n".join(lines)


def _performance() -> Iterator[tuple[str, str, str, str, str]]:
    data, merge = _record("data_throughput.json"), _record("merge.json")
    cpu, throughput, start = _record("train_cpu.json"), _record("train_throughput_cpu.json"), _record("cli_start.json")
    command = "python benchmarks/data_throughput.py"
    for side in ("gemsmith", "trl"):
        found = data["sides"][side]
        rates = [found["tokens"] / found["seconds"][key] for key in ("median", "high", "low")]
        what = f"Data preparation, {_SIDES[side]}"
        yield what, _spread(*rates, unit=" tokens/s", digits=0), _measured(data), "data_throughput.json", command
    cold, size = merge["small"]["cold"], merge["small"]["bytes"] / 1e9
    for side in ("cp", "gemsmith", "peft"):
        key = "wall_with_sync_s" if side == "cp" else "wall_s"
        each = [run[key] for run in cold["runs"][side]]
        what = f"Merge of {size:.2f} GB from the disk, {_SIDES[side]}"
        number = _spread(cold["medians"][side][key], min(each), max(each), unit=" s", digits=1)
        yield what, number, _measured(merge), "merge.json", "python benchmarks/merge.py"
    for side in ("gemsmith", "peft-sdpa"):
        wall_s = cpu["threads"]["2"]["sides"][side]["wall_s"]
        what = f"A training step of an 84 M model on two CPU cores, {_SIDES[side]}"
        yield (
            what,
            _spread(*wall_s.values(), unit=" s"),
            _measured(cpu),
            "train_cpu.json",
            "python benchmarks/train_cpu.py 2",
        )
    for side in ("gemsmith-tunix", "gemsmith-trl", "trl"):
        rates = throughput["sides"][side]["real_tokens_per_s"].values()
        what, command = f"Training the same model, {_SIDES[side]}", "python benchmarks/train_throughput.py 2"
        number = _spread(*rates, unit=" real tokens/s", digits=0)
        yield what, number, _measured(throughput), "train_throughput_cpu.json", command
    cpu_s = start["commands"]["gemsmith plan recipes/verilog_31b.yaml"]["cpu_s"]
    number, command = _spread(*cpu_s.values(), unit=" CPU-s"), "python benchmarks/cli_start.py"
    yield "`gemsmith plan`, whole", number, _measured(start), "cli_start.json", command
    for case, what in _CASES.items():
        compiled = _record(f"tpu_compile/{case}.json")
        rate = f"{compiled['real_tokens_per_s']['as_scheduled']:,} real tokens/s"
        command = f"python benchmarks/tpu_compile.py --case {case}"
        yield what, rate, "estimated", f"tpu_compile/{case}.json", command


def _spread(median: float, low: float, high: float, *, unit: str, digits: int = 2) -> str:
    """The median of the runs in a record, and their least and most: `4.72 (4.57 to 4.83) s`."""
    return f"{median:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f}){unit}"


def _measured(record: Mapping[str, Any]) -> str:
    """On which day, and on which processor."""
    day = (record.get("when") or record["started"])[:10]
    return f"measured on {day}, {record['machine']['cores']} cores of {record['machine']['processor']}"


_SIDES = {
    "gemsmith": "Gemsmith",
    "trl": "TRL as documented",
    "cp": "`cp` and sync",
    "peft": "PEFT",
    "peft-sdpa": "transformers and PEFT",
    "gemsmith-tunix": "Gemsmith, JAX backend",
    "gemsmith-trl": "Gemsmith, TRL backend",
}
_CASES = {
    "31b-v5p": "31B on v5p:2x2x1, four rows of 4096",
    "31b-v6e": "31B on v6e:2x4, eight rows of 4096",
    "26b-a4b-v6e-32": "26B-A4B on v6e:2x4, 32 rows of 4096",
    "e4b-v6e": "E4B on v6e:2x4",
    "31b-32k": "31B on v5p, rows of 32 K",
    "31b-128k": "31B on v5p, rows of 128 K",
}


def _record(name: str) -> Any:
    return json.loads((RECORDS / name).read_text(encoding="utf-8"))


def demo_images_table() -> str:
    """The README's table, of the demo with images."""
    return make_table(RECORDS / "demo_images").replace("](benchmarks/", "](../../benchmarks/")


def paper_comparison() -> str:
    """The published comparison as `gemsmith report --paper --md` prints it, its heading left to the page."""
    redrawn = reanalyze(read_published())
    return tables.markdown_of(redrawn.comparison, redrawn).partition("\n")[2].strip()


def statements() -> list[dict[str, Any]]:
    """What the two published runs say, each with the run that says it, in the order of docs/published.yaml."""
    runs = yaml.safe_load((ROOT / "docs" / "published.yaml").read_text(encoding="utf-8"))["runs"]
    return [{"run": run["run"], **statement} for run in runs for statement in run["statements"]]


def statement_tables() -> str:
    """The statements with what Gemsmith has of each, a table a run, after how many there are of each verdict."""
    found = statements()
    counts = Counter(each["verdict"] for each in found)
    lines = [
        f"Of {len(found)} statements: {', '.join(f'{verdict} {count}' for verdict, count in counts.most_common())}."
    ]
    for run in dict.fromkeys(each["run"] for each in found):
        lines += ["", f"### {run}", "", "| | says | where | Gemsmith | |", "|--:|---|---|---|---|"]
        lines += [
            f"| {each['n']} | {each['says']} | {each['from']} | {each['here']} | {each['verdict']} |"
            for each in found
            if each["run"] == run
        ]
    return "\n".join(lines)


def plan_jobs_table() -> str:
    """The two published times of whole jobs beside what a plan says of their start and their steps."""
    lines = [
        "| job | published, h | start and steps by the plan, h | answers in the rest | a step by the plan, s | most |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, job in _record("plan_accuracy.json")["published_jobs"].items():
        spans = [f"{low} to {high}" for low, high in (job["plan_hours"], job["plan_step_s"])]
        numbers = (f"{job['hours']:.2f}", spans[0], f"{job['answers']:,}", spans[1], f"{job['most_step_s']}")
        lines.append(f"| {name}: {job['steps']} steps | {' | '.join(numbers)} |")
    return "\n".join(lines)


def plan_memory_table() -> str:
    """The plan's memory and step beside XLA's, of every compiled step."""
    lines = [
        "| compiled step | plan, GiB a chip | XLA | difference | plan, s a step | by XLA's program |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, case in _record("plan_accuracy.json")["compiled"].items():
        spans = (" to ".join(f"{second:.2f}" for second in case[key]) for key in ("step_s", "hlo_step_s"))
        sizes = f"{case['memory_gib']:.1f} | {case['xla_gib']:.1f} | {100 * case['memory_error']:+.1f} %"
        lines.append(f"| {name} | {sizes} | {' | '.join(spans)} |")
    return "\n".join(lines)


def plan_time_table() -> str:
    """The plan's share of the peak beside published runs, each predicted from the others."""
    lines = [
        "| published run | share of the peak | in the plan's range | predicted from the others |",
        "|---|--:|---|--:|",
    ]
    for name, run in _record("plan_accuracy.json")["published"].items():
        inside = "yes" if run["within_range"] else "no"
        lines.append(
            f"| {name}: {run['source']} | {100 * run['share_of_peak']:.1f} % | {inside} | "
            f"{100 * run['left_out_error']:+.0f} % |"
        )
    return "\n".join(lines)


def plan_serving_table() -> str:
    """Published load tests of the 31B beside the plan's range."""
    lines = [
        "| machine | tokens in / out | what | published | plan | middle / published |",
        "|---|---|---|--:|--:|--:|",
    ]
    for each in _record("plan_accuracy.json")["published_serving"]:
        low, high = (f"{end:,.4g}" if end < 100 else f"{end:,.0f}" for end in each["range"])
        cells = (each["machine"], each["tokens"], each["what"], f"{each['measured']:,}", f"{low} to {high}")
        lines.append(f"| {' | '.join(cells)} | {each['middle_over_measured']:.2f} |")
    return "\n".join(lines)


def cpu_memory_table() -> str:
    """What training held on a CPU beside what is counted of its step."""
    lines = ["| model | backend | rows x length, dtype | step, GiB | measured |", "|---|---|---|--:|--:|"]
    for case in _record("cpu_memory.json")["cases"]:
        step = f"{case['rows']} x {case['length']}, {case['dtype']}"
        sizes = " | ".join(f"{case[key]:.2f}" for key in ("step_gib", "measured_gib"))
        lines.append(f"| {case['model']} | {case['backend']} | {step} | {sizes} |")
    return "\n".join(lines)


def plan_calibration_table() -> str:
    """What a plan calibrated on one model says of others, beside what was measured."""
    record = _record("plan_calibration.json")
    lines = ["| model | measured, s | plan before | plan calibrated | predicted / measured |", "|---|--:|--:|--:|--:|"]
    for name, model in record["models"].items():
        spans = (" to ".join(f"{second:.2f}" for second in model[f"{key}_s"]) for key in ("uncalibrated", "calibrated"))
        of = " (calibrated on)" if name == record["calibrated_on"] else ""
        lines.append(
            f"| {name}{of} | {model['measured_s']:.2f} | {' | '.join(spans)} | {model['predicted_over_measured']:.2f} |"
        )
    pairs = record["predicted_over_measured"]
    lines += ["", f"| predicted / measured, calibrated on | {' | '.join(pairs)} |", "|---|" + "--:|" * len(pairs)]
    lines += [f"| {one} | {' | '.join(f'{ratio:.2f}' for ratio in found.values())} |" for one, found in pairs.items()]
    return "\n".join(lines)


def serving_calibration_table() -> str:
    """How many loads lie in the range of plans that were calibrated on others, and how far from its middle."""
    record = _record("serving_calibration.json")
    lines = ["| calibrated on | asked for | loads in the range | middle / measured |", "|---|---|--:|--:|"]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in record["predictions"]:
        found.setdefault((each["calibrated_on"], each["model"]), []).append(each)
    for (on, model), loads in found.items():
        inside = sum(load["within"] for load in loads)
        middles = [load["middle_over_measured"] for load in loads]
        lines.append(f"| {on} | {model} | {inside} of {len(loads)} | {min(middles):.2f} to {max(middles):.2f} |")
    return "\n".join(lines)


def sweep_table() -> str:
    """What `gemsmith plan --sweep` prints of the paper's recipe."""
    axes = [plan_stage.read_axis(text) for text in ("model=all", "data.max_length=4096..131072")]
    found = list(plan_stage.sweep(ROOT / "recipes" / "verilog_31b.yaml", axes, machine="v5p-8,2xh100"))
    return "\n".join(tables.sweep_table([key for key, _ in axes], found).to_markdown()).strip()


def faults_tables() -> str:
    """What can go wrong, a table a kind: what happens then, what to do, and how often the last runs tried it."""
    kinds = yaml.safe_load((ROOT / "tests" / "faults" / "faults.yaml").read_text(encoding="utf-8"))
    record, lines = _record("faults.json"), []
    for kind, rows in kinds.items():
        lines += ["", f"## {kind}", "", "| what goes wrong | what happens | what you do | tried | survived | told |"]
        lines += ["|---|---|---|--:|--:|--:|"]
        for row in rows:
            found = [half["faults"].get(row["fault"], {}) for half in _halves(record)]
            counts = [str(sum(each.get(name, 0) for each in found)) for name in ("tried", "survived", "told")]
            lines.append(f"| {row['fault']} | {row['then']} | {row['do']} | {' | '.join(counts)} |")
    return "\n".join(lines)


def faults_summary() -> str:
    """How many faults the last runs tried, and what came of them."""
    record = _record("faults.json")
    total = Counter[str]()
    for half in _halves(record):
        total.update(half["total"])
    names = ("survived", "told", "lost", "silent", "skipped")
    days = sorted({half["when"][:10] for half in _halves(record)})
    broken = sum(guard["failed"] for guard in record["guards"])
    return (
        f"{total['tried']} tries on {' and '.join(days)}: {', '.join(f'{total[name]} {name}' for name in names)}. "
        f"Of {len(record['guards'])} guards that were broken on purpose, {broken} made a test fail."
    )


def guards_table() -> str:
    """The guards that were broken on purpose, each with the test that then failed."""
    lines = ["| guard | in | test that fails without it |", "|---|---|---|"]
    for guard in _record("faults.json")["guards"]:
        file, _, name = guard["test"].partition("::")
        lines.append(
            f"| {guard['guard']} | `{guard['file']}` | `{file}`: {name.removeprefix('test_').replace('_', ' ')} |"
        )
    return "\n".join(lines)


def _halves(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [record[name] for name in ("faults", "faults_long") if name in record]


TABLES: dict[str, Callable[[], str]] = {
    "demo_images": demo_images_table,
    "faults": faults_tables,
    "faults_summary": faults_summary,
    "guards": guards_table,
    "paper": paper_comparison,
    "plan_calibration": plan_calibration_table,
    "cpu_memory": cpu_memory_table,
    "plan_jobs": plan_jobs_table,
    "plan_memory": plan_memory_table,
    "plan_serving": plan_serving_table,
    "plan_time": plan_time_table,
    "serving_calibration": serving_calibration_table,
    "stages": stage_table,
    "statements": statement_tables,
    "sweep": sweep_table,
    "performance": performance_table,
}
"""What stands where a page says `<!-- made: NAME -->`."""


def fill_in(text: str) -> str:
    """A page with its tables. Raises KeyError for a table that does not exist."""
    return re.sub(r"<!-- made: (\w+) -->", lambda found: TABLES[found[1]](), text)


def on_files(files: Any, config: Any) -> Any:
    """Adds the made pages, those in the repository's root, and the records and notebooks that pages link to."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "recipe.md", content=recipe_page()))
    for file, page in ROOT_PAGES.items():
        text = (ROOT / file).read_text(encoding="utf-8").replace("](docs/", "](")
        text = re.sub(r"\]\((\w+\.md)", lambda link: f"]({ROOT_PAGES.get(link[1], link[1])}", text)
        files.append(File.generated(config, page, content=text))
    for linked in (*sorted(RECORDS.rglob("*.json")), *sorted((ROOT / "examples").glob("*.ipynb"))):
        path = linked.relative_to(ROOT).as_posix()
        files.append(File.generated(config, path, abs_src_path=str(linked)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fills in the tables. Links to records go up one folder less: the site has them beside its pages."""
    return re.sub(r"\]\(\.\./((?:\.\./)*benchmarks/records/)", r"](\1", fill_in(markdown))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Raises ValueError where a page would fetch something from elsewhere."""
    fetched = re.findall(r"""<(?:script|link|img|iframe)\b[^>]*(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""", output)
    if outside := [address for address in fetched if "rel=canonical" not in address]:
        raise ValueError(f"{page.file.src_uri}: fetches {', '.join(outside)}; the site must need no network")
    return output
