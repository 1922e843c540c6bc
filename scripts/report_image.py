"""Draws docs/images/report.png: the top of the report that the demo's kept records give. Needs Chromium.

python scripts/report_image.py [chromium]
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from gemsmith import open_run
from gemsmith.report.page import report
from gemsmith.runs.records import read_record_file
from gemsmith.runs.run import inputs_sha256, write_record
from gemsmith.runs.stages import STAGES
from gemsmith.system.files import write_text

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records" / "demo"
IMAGE = ROOT / "docs" / "images" / "report.png"
SIZE = "1280,1245"


def draw_report(browser: str, folder: Path) -> Path:
    """The image of the report's first screen, light."""
    write_text(folder / "recipe.yaml", (ROOT / "recipes" / "demo.yaml").read_text(encoding="utf-8"))
    run = open_run(folder)
    for name, stage in STAGES.items():
        record = read_record_file(RECORDS / f"{name}.json", stage.record, missing="", damaged="")
        # The kept records name digests of the folder they were made in. Here they belong together all the same.
        provenance = record.provenance.model_copy(
            update={"inputs_sha256": record.provenance.inputs_sha256 | inputs_sha256(run, name)}
        )
        write_record(run, record.model_copy(update={"provenance": provenance}))
    page = report(run)
    IMAGE.parent.mkdir(exist_ok=True)
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--force-color-profile=srgb", f"--window-size={SIZE}"]
    subprocess.run([browser, *options, f"--screenshot={IMAGE}", page.as_uri()], check=True, capture_output=True)
    return IMAGE


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "demo"
        folder.mkdir()
        print(draw_report(sys.argv[1] if len(sys.argv) > 1 else "chromium", folder))
