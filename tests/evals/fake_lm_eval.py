"""Stands in for a Python that has lm-evaluation-harness. $FAKE_LM_EVAL says how it fails, where it does."""

import json
import os
import sys
from pathlib import Path

FAILS = os.environ.get("FAKE_LM_EVAL")

match sys.argv[1:]:
    case ["-c", _] if FAILS == "absent":
        sys.exit("Traceback\nModuleNotFoundError: No module named 'transformers'")
    case ["-c", _]:
        print("0.0.fake")
    case ["-m", "lm_eval", "run", "--config", file]:
        if FAILS == "task":
            sys.exit("ValueError: Tasks not found: my_task.")
        settings = json.loads(Path(file).read_text())
        right = 0.25 if settings["model_args"]["model"].endswith("-base") else 0.75
        found = {
            "alias": "my_task",
            "acc,none": right,
            "acc_stderr,none": 0.1,
            "em,strict": 0.0,
            "em_stderr,strict": "N/A",
        }
        results = {"results": {"my_task": found}, "n-samples": {"my_task": {"original": 8, "effective": 4}}}
        out = Path(settings["output_path"])
        out.with_name("results_2026.json").write_text(json.dumps(results))
        with Path(os.environ["FAKE_HEARD"]).open("a") as heard:
            heard.write(json.dumps([settings, os.environ["OPENAI_API_KEY"]]) + "\n")
    case unknown:
        sys.exit(f"the fake knows no {unknown}")
