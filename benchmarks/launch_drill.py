"""Writes what became of runs whose machines die and whose bucket fails, to benchmarks/records/launch_drill.json.

    python benchmarks/launch_drill.py [moments, default 20] [--record FILE]

A machine is a process of `gemsmith launch worker` with nothing on its disk. One run is left alone. Then machines are
killed (SIGKILL) at random moments of their work, each followed by a new one, run after run until all moments are used,
while one request in five to the bucket is answered 503 or 429 or has its connection cut. Ends with an error if any run
ends with other bytes in its adapter than the one that was left alone.
"""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from gemsmith.runs.run import host_info, start_clock
from gemsmith.system.version import __version__
from short import RECORDS, SHORT

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

from fake_cloud.bucket import BucketServer, bucket_server

ROOT = Path(__file__).parents[1]
RECORD = RECORDS / "launch_drill.json"
STAGES, STEPS = "plan,data,train,export", 6 if SHORT else 24
RECIPE = f"""\
checkpoint: {ROOT / "recipes" / "demo_base"}
data: {{train: {{task: verilog, rows: 200}}, max_length: 256}}
train: {{max_steps: {STEPS}, global_batch_size: 2, save_steps: 2, save_total_limit: 2, dtype: float32}}
"""
SEED, FAULT_SHARE = 7, 0.2
# Saved steps go to the bucket at once, and what has failed is asked again soon: the drill is about what happens, not
# about the pauses.
MACHINE = """
import sys
import tensorstore
import gemsmith.launch.sync as mirror
mirror._BETWEEN_LOOKS_S = 0.05
context = tensorstore.Context({"gcs_request_retries": {"initial_delay": "20ms", "max_delay": "200ms"}})
patient = tensorstore.KvStore.open
tensorstore.KvStore.open = lambda spec, **given: patient(spec, **({"context": context} | given))
from gemsmith.cli import main
main(sys.argv[1:])
"""


def launch(bucket: BucketServer, name: str) -> None:
    """What submit.sh leaves in a bucket."""
    bucket.objects[f"{name}/launched/recipe.yaml"] = (1, RECIPE.encode())


def start_machine(bucket: BucketServer, name: str, folder: Path) -> subprocess.Popen[bytes]:
    shutil.rmtree(folder / "disk", ignore_errors=True)
    command = [sys.executable, "-c", MACHINE, "launch", "worker", f"gs://drill/{name}"]
    command += ["--folder", str(folder / "disk"), "--stages", STAGES]
    environment = os.environ | bucket.environment | {"JAX_PLATFORMS": "cpu"}
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    if process.wait() != 0:
        lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        sys.exit("\n".join([*lines[-15:], f"error: a machine that nobody killed ended with {process.returncode}"]))


def adapter_sha256(bucket: BucketServer, name: str) -> str:
    return hashlib.sha256(bucket.objects[f"{name}/run/adapter/adapter_model.safetensors"][1]).hexdigest()


def there(bucket: BucketServer, name: str) -> str:
    """What a run has in the bucket: its records, or during training the last saved step that is whole."""
    names = list(bucket.objects)
    records = [stage for stage in STAGES.split(",") if f"{name}/run/{stage}.json" in names]
    steps = [int(Path(item).stem) for item in names if item.startswith(f"{name}/checkpoints/") and ".whole" in item]
    saved = f", step {max(steps)}" if steps and "train" not in records else ""
    return ", ".join(records) + saved or "nothing"


def run_disturbed(bucket: BucketServer, name: str, folder: Path, moments: list[float]) -> list[dict[str, Any]]:
    """Uses moments up until the run ends well; returns the kills."""
    launch(bucket, name)
    kills: list[dict[str, Any]] = []
    while True:
        process, begun = start_machine(bucket, name, folder), time.monotonic()
        moment = moments.pop() if moments else None
        while process.poll() is None and (moment is None or time.monotonic() - begun < moment):
            time.sleep(0.02)
        if process.poll() is not None:
            if moment is not None:
                moments.append(moment)
            finish(process, folder)
            return kills
        process.kill()
        process.wait()
        kills.append({"run": name, "after_s": round(moment or 0, 2), "in_the_bucket": there(bucket, name)})


def main() -> None:
    arguments = sys.argv[1:]
    file = Path(arguments[arguments.index("--record") + 1]) if "--record" in arguments else RECORD
    count = int(arguments[0]) if arguments and arguments[0].isdecimal() else 1 if SHORT else 20
    clock, draw = start_clock(), random.Random(SEED)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with bucket_server() as bucket:
            launch(bucket, "calm")
            begun = time.monotonic()
            finish(start_machine(bucket, "calm", folder), folder)
            calm_s, calm = time.monotonic() - begun, adapter_sha256(bucket, "calm")
        moments = [draw.uniform(0, calm_s) for _ in range(count)]
        kills: list[dict[str, Any]] = []
        adapters: dict[str, str] = {}
        with bucket_server(fault_share=FAULT_SHARE, seed=SEED) as bucket:
            while moments:
                name = f"run-{len(adapters)}"
                kills += run_disturbed(bucket, name, folder, moments)
                adapters[name] = adapter_sha256(bucket, name)
                print(f"{name}: {len(kills)} of {count} kills, adapter {adapters[name][:12]}", flush=True)
            requests, faults = bucket.requests, dict(sorted(bucket.faults.items()))
    same = set(adapters.values()) == {calm}
    record = {
        "schema_version": 1,
        "when": clock.started,
        "duration_s": round(clock.elapsed_s(), 1),
        "gemsmith": __version__,
        "machine": host_info().model_dump(),
        "model": "recipes/demo_base",
        "stages": STAGES,
        "undisturbed_s": round(calm_s, 1),
        "kills": len(kills),
        "killed_with_in_the_bucket": dict(Counter(kill["in_the_bucket"] for kill in kills)),
        "runs": len(adapters),
        "requests": requests,
        "faults": faults,
        "adapter_sha256": calm,
        "all_adapters_the_same": same,
        "each_kill": kills,
    }
    file.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({key: record[key] for key in ("kills", "runs", "requests", "faults", "all_adapters_the_same")}))
    if not same:
        sys.exit(f"error: the run that was left alone has the adapter {calm[:12]}, the others {adapters}")


if __name__ == "__main__":
    main()
