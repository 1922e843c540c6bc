"""`python scripts/fake_cloud ARGUMENTS`, from any folder: what gcloud would do with them."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])

from fake_cloud.gcloud import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
