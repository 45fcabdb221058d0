# SPDX-License-Identifier: BSD-3-Clause
"""Kill workers of a real run again and again, and watch the memory of its server.

The model has 19 MB. Every worker but worker 0 kills itself after a few updates, and the launcher
restarts it.

Examples:
  python bench/soak.py                 40 deaths
  python bench/soak.py --deaths 200
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).with_name("dying.py")


def main() -> int:
    """Run the script; return the exit code of the run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deaths", type=int, default=40)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--policy", default="backup:1")
    options = parser.parse_args()
    print("deaths  updates   memory of the server", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        command = [sys.executable, "-m", "paceline", "run", "--out", f"{folder}/run"]
        command += ["-w", str(options.workers), "--policy", options.policy]
        command += ["--checkpoint-every", "20", str(SCRIPT), folder, str(options.deaths)]
        log = Path(folder, "errors")
        with log.open("w") as errors:
            run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            assert run.stdout is not None
            for line in run.stdout:
                if line.startswith("worker 0") and " MB" in line:
                    print(line.split("| ", 1)[1], end="", flush=True)
            code = run.wait()
        if code:
            print(log.read_text(), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
