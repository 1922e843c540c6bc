"""Whatever a file holds, its reader reads it, or says in one line why not: within seconds and a bounded memory.

`make test-slow` tries a fixed set of inputs, `make fuzz FUZZ_SECONDS=600` new ones for as long.
"""

import json
import os
import resource
import shutil
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from gemsmith.arch import find_variant, read_variant, text_tensors
from gemsmith.checkpoints.folder import name_variant, patching_of, read_config
from gemsmith.checkpoints.peft_config import read_peft_config
from gemsmith.checkpoints.safetensors import check_digest, fingerprint, read_header, write_tensors
from gemsmith.checkpoints.steps import ORBAX, add_checksum, checkpoint_steps, read_step_metadata
from gemsmith.data.dataset import read_dataset
from gemsmith.errors import USERS_ERRNOS, GemsmithError
from gemsmith.export.adapters import restore_trained
from gemsmith.images.check import ImageInfo, patchify, validate_image
from gemsmith.images.decode import InvalidImageError
from gemsmith.images.patches import PatchConfig
from gemsmith.recipe.load import dump_recipe, load_recipe
from gemsmith.recipe.schema import Data
from gemsmith.runs.records import read_record_file
from gemsmith.runs.stages import STAGES
from support.damage import damaged_bytes, json_of
from support.images import image_bytes, usable_images
from tiny_checkpoints import make_config, text_config, with_vision

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Generating overly large repr")]
ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
LONGEST_S, MOST_BYTES = 20, 6 * 2**30
MODULE = "model.language_model.layers.1.self_attn.q_proj"


class Reader(NamedTuple):
    """What is damaged, how it is read in a folder, and how many inputs the slow tests try."""

    inputs: st.SearchStrategy[Any]
    read: Callable[[Path, Any], object]
    examples: int = 300


READERS: dict[str, Reader] = {}


def of(inputs: st.SearchStrategy[Any], examples: int = 300) -> Callable[..., Any]:
    def add(read: Callable[[Path, Any], object]) -> Callable[[Path, Any], object]:
        READERS[read.__name__] = Reader(inputs, read, examples)
        return read

    return add


def written(folder: Path, name: str, data: bytes) -> Path:
    file = folder / name
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_bytes(data)
    return file


RECIPES = [
    file.read_bytes()
    for name in ("demo", "demo_images", "own", "pets_31b", "verilog_31b", "paper/verilog_31b")
    if (file := ROOT / "recipes" / f"{name}.yaml")
]
WHOLE_RECIPE = {"checkpoint": "c", "data": {"train": [{"path": "a.jsonl", "weight": 2}], "columns": {"prompt": "q"}}}
EVERY_KEY = yaml.safe_load(dump_recipe(load_recipe(ROOT / "recipes" / "demo.yaml")))


@of(st.sampled_from(RECIPES).flatmap(damaged_bytes) | st.sampled_from([EVERY_KEY, WHOLE_RECIPE]).flatmap(json_of))
def recipe(folder: Path, data: bytes) -> None:
    found = load_recipe(written(folder, "recipe.yaml", data))
    again = written(folder, "again.yaml", dump_recipe(found).encode())
    assert load_recipe(again) == found, "what was dumped loads to another recipe"


CALL = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Add"}, {"type": "image", "image": "i.png"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning": "Hm."},
    {"role": "tool", "content": "2", "tool_call_id": "1"},
    {"role": "assistant", "content": "It is 2."},
]
ROWS = [
    {"messages": TALK, "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]},
    {"prompt": "1 and 1?", "response": "2", "images": ["i.png"]},
    {"prompt": TALK[:2], "completion": TALK[4:]},
    {"instruction": "Add", "input": "1 and 1", "output": "2", "system": "Be brief."},
    {"conversations": [{"from": "human", "value": "1 and 1?"}, {"from": "gpt", "value": "2"}], "system": "Be brief."},
    {"question": "1 and 1?", "answer": "2", "label": 3},
    {"text": "Once upon a time."},
]
ONE_ROW = st.sampled_from(ROWS).flatmap(json_of)
SOME_ROWS = st.lists(ONE_ROW, min_size=1, max_size=3).map(b"\n".join) | st.sampled_from(ROWS).flatmap(
    lambda row: json_of([row, row])
)
CSV = st.sampled_from([b'prompt,response\n"1, 1?",2\n3,4\n', b"instruction\toutput\nadd\t2\n"]).flatmap(damaged_bytes)


@of(
    st.tuples(
        SOME_ROWS | CSV,
        st.sampled_from(["jsonl", "jsonl", "jsonl", "json", "csv", "tsv"]),
        st.sampled_from(["error", "drop"]),
        st.sampled_from(["error", "drop", "text"]),
    ),
    examples=500,
)
def rows(folder: Path, given_: tuple[bytes, str, str, str]) -> None:
    data, suffix, on_bad_row, control = given_
    written(folder, "i.png", image_bytes())
    file = str(written(folder, f"rows.{suffix}", data))
    read_dataset(file, data=Data(train=file, on_bad_row=on_bad_row, control_tokens=control))


def _tables() -> Iterator[tuple[str, bytes]]:
    import io

    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([ROWS[1] | {"n": number, "d": b"\0\1"} for number in range(3)])
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink)
    yield "a.parquet", sink.getvalue()
    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    yield "a.arrow", sink.getvalue()
    for name in ("gzip", "zstd"):
        text = json.dumps(ROWS[1]).encode() * 2
        yield "a.jsonl" + {"gzip": ".gz", "zstd": ".zst"}[name], pyarrow.compress(text, codec=name, asbytes=True)


@of(st.sampled_from([*_tables()]).flatmap(lambda table: damaged_bytes(table[1]).map(lambda data: (table[0], data))))
def tables(folder: Path, table: tuple[str, bytes]) -> None:
    name, data = table
    written(folder, "i.png", image_bytes())
    file = written(folder, name, data)
    if name.endswith(".arrow"):
        file = written(folder, "state.json", json.dumps({"_data_files": [{"filename": name}]}).encode()).parent
    read_dataset(str(file))


@of(st.builds(dict, state=json_of({"_data_files": [{"filename": "a.arrow"}]}), splits=json_of({"splits": ["train"]})))
def saved_dataset(folder: Path, files: dict[str, bytes]) -> None:
    written(folder, "train/state.json", files["state"])
    written(folder, "train/a.arrow", dict(_tables())["a.arrow"])
    written(folder, "train/i.png", image_bytes())
    written(folder, "dataset_dict.json", files["splits"])
    with pytest.raises(GemsmithError, match=r"is not a JSON object|name one of them"):
        read_dataset(str(folder))
    read_dataset(str(folder / "train"))


CONFIGS = [
    json.loads(json.dumps(make_config(variant)))
    for name in ("tiny-31b", "tiny-e2b", "tiny-12b", "tiny-26b-a4b")
    for variant in (find_variant(name), with_vision(find_variant(name)))
]


@of(st.sampled_from(CONFIGS).flatmap(json_of), examples=600)
def config(folder: Path, data: bytes) -> None:
    written(folder, "config.json", data)
    variant = name_variant(read_variant(read_config(folder)))
    assert variant.layers and [*text_tensors(variant, optional=True)]
    assert variant.scan_blocks and text_config(variant)
    if variant.vision:
        assert patching_of(folder, 280).dimension > 0


ADAPTER_CONFIG = json.loads((ROOT / "tests" / "importers" / "settings" / "adapter_config.json").read_text()) | {
    "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"layers.1.self_attn.q_proj": 4.5}, "layers_to_transform": [1, 2],
    "exclude_modules": "lm_head", "use_rslora": True, "lora_dropout": 0.1,
}  # fmt: skip


@of(json_of(ADAPTER_CONFIG) | json_of(ADAPTER_CONFIG | {"target_modules": ".*q_proj"}))
def adapter_config(folder: Path, data: bytes) -> None:
    written(folder, "adapter_config.json", data)
    found = read_peft_config(folder)
    assert found.scale_of(MODULE) and found.rank_of(MODULE) and found.targets(MODULE) in {True, False, None}


RECORDS = {
    name: json.loads(file.read_text())
    for name in STAGES
    if (file := ROOT / "benchmarks" / "records" / "demo_images" / f"{name}.json").is_file()
}


@of(st.sampled_from([*RECORDS]).flatmap(lambda name: json_of(RECORDS[name]).map(lambda data: (name, data))))
def records(folder: Path, given_: tuple[str, bytes]) -> None:
    name, data = given_
    kind = STAGES[name].record
    found = read_record_file(written(folder, f"{name}.json", data), kind, missing="", damaged="make it again")
    assert kind.stage == name and found.model_dump_json()


def _safetensors() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        shapes = {"a": (3, 2), "b": (0, 4), "c.weight": (5,)}
        write_tensors(Path(folder) / "f", shapes, lambda name: np.ones(shapes[name], np.float32), {"format": "pt"})
        return (Path(folder) / "f").read_bytes()


SAFETENSORS = _safetensors()
HEADER_BYTES = 8 + struct.unpack("<Q", SAFETENSORS[:8])[0]
HEADER = json.loads(SAFETENSORS[8:HEADER_BYTES])


@of(
    damaged_bytes(SAFETENSORS)
    | damaged_bytes(SAFETENSORS[:HEADER_BYTES]).map(lambda data: data + SAFETENSORS[HEADER_BYTES:])
    | json_of(HEADER).map(lambda text: struct.pack("<Q", len(text)) + text + SAFETENSORS[HEADER_BYTES:])
)
def safetensors(folder: Path, data: bytes) -> None:
    places, metadata = read_header(written(folder, "model.safetensors", data))
    assert fingerprint(places) and isinstance(metadata, dict)
    check_digest(places, metadata, "model.safetensors")
    for place in places.values():
        assert place.read().shape == place.shape == place.copy().shape


STEP = {
    "commit_timestamp_nsecs": 5,
    "item_handlers": {},
    "custom_metadata": add_checksum({"step": 2}, {"a": {"b": "c"}}),
}


# Of another program's step the metadata has no checksum: whatever it holds is read.
UNSEALED = {key: value for key, value in STEP.items() if key != "custom_metadata"} | {"custom_metadata": {"step": 2}}


@of(
    st.sampled_from([STEP, UNSEALED]).flatmap(json_of).map(lambda data: (f"2/{ORBAX}", data))
    | json_of(STEP["custom_metadata"]).map(lambda data: ("3/training.json", data))
)
def step_metadata(folder: Path, file: tuple[str, bytes]) -> None:
    written(folder, *file)
    for step in checkpoint_steps(folder):
        assert read_step_metadata(folder / str(step)).keys() is not None


@pytest.fixture(scope="module")
def orbax_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What Orbax writes of a model's adapter, by the names of its files."""
    import orbax.checkpoint as ocp

    folder = tmp_path_factory.mktemp("orbax") / "model_params"
    tree = {"layers": {"0": {"q": {"w_lora_a": np.ones((8, 4), np.float32), "w_lora_b": np.ones((4, 6), np.float32)}}}}
    ocp.PyTreeCheckpointer().save(folder, tree)
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_reads_or_says_why_not_in_one_line(name, tmp_path, capsys):
    told = hold(READERS[name], tmp_path)
    with capsys.disabled():
        print(f"\n{name}: {told['read'] + told['told']:,} inputs, {told['read']:,} read, {told['told']:,} told")
    assert told["read"] and told["told"]


def test_a_damaged_step_of_orbax_is_read_or_told(orbax_files, tmp_path, capsys):
    def read(folder: Path, given_: tuple[str, bytes]) -> None:
        for name, data in (orbax_files | dict([given_])).items():
            written(folder, name, data)
        assert all(value.dtype == np.float32 for _, value in restore_trained(folder))

    def damage(name: str) -> st.SearchStrategy[tuple[str, bytes]]:
        whole = orbax_files[name]
        as_json = [json_of(json.loads(whole))] if whole.startswith(b"{") else []
        return st.one_of(damaged_bytes(whole), *as_json).map(lambda data: (name, data))

    hold(Reader(st.sampled_from(sorted(orbax_files)).flatmap(damage), read, 60), tmp_path)


def hold(reader: Reader, folder: Path) -> dict[str, int]:
    """Counts of the inputs that were read, and of those of which one line said why not; fails for any other end."""
    counts, share = {"read": 0, "told": 0}, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) / (len(READERS) + 1)
    end_s, numbers = time.monotonic() + SECONDS * share, iter(range(10**9))

    def check(value: Any) -> None:
        place = folder / str(next(numbers))
        place.mkdir()
        with bounded():
            try:
                reader.read(place, value)
                counts["read"] += 1
            except (GemsmithError, InvalidImageError, OSError) as error:
                lines = [error.line] if isinstance(error, InvalidImageError) else [str(error)]
                if isinstance(error, GemsmithError):
                    lines = [*map(str, error.problems)]
                # Of these, such as a name that is too long, the command line makes one line.
                known = not isinstance(error, OSError) or error.errno in USERS_ERRNOS
                one_line = all(line and "\n" not in line for line in lines)
                assert known and lines and one_line, f"no line of a person: {lines!r:.500}"
                counts["told"] += 1
        shutil.rmtree(place)

    while True:
        examples = min(reader.examples, 100) if SECONDS else reader.examples
        rules = settings(
            max_examples=examples, database=None, deadline=None, print_blob=True, derandomize=not SECONDS,
            suppress_health_check=[*HealthCheck],
        )  # fmt: skip
        run = rules(given(reader.inputs)(check))
        (seed(time.time_ns())(run) if SECONDS else run)()
        if time.monotonic() >= end_s:
            return counts


@contextmanager
def bounded() -> Iterator[None]:
    """Raises AssertionError in what takes too long, and MemoryError where it asks for too much."""

    def late(*_: object) -> None:
        raise AssertionError(f"takes longer than {LONGEST_S} s")

    before, limits = signal.signal(signal.SIGALRM, late), resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MOST_BYTES, limits[1]))
    signal.alarm(LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, before)


IMAGES = [data for data, _ in usable_images().values()] + [
    image_bytes(kind=kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "AVIF", "JPEG2000", "PPM")
]


@of(st.sampled_from(IMAGES).flatmap(damaged_bytes), examples=600)
def images(folder: Path, data: bytes) -> None:
    patching = PatchConfig(budget=70, positions=10_240)
    found = validate_image(str(written(folder, "image", data)), patching)
    assert isinstance(found, ImageInfo) and patchify(found, patching).size
