"""What each fault costs a job of local workers: noticed after, trains again after, steps made again; weights compared.

    python tests/benchmarks/faults.py --out=configs/results/faults_keras3.json
    tox -e full; tox -e full-addons

Every case is a job of real processes that trains the small recipe of tests/conformance/faults; it is compared, bit
for bit, with a job of as many workers that nothing disturbs.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import app, flags

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "conformance" / "faults")]

import fault_runs  # noqa: E402 (found through the line above)

from tf_largebatch import run_folder  # noqa: E402

FLAGS = flags.FLAGS
flags.DEFINE_string("out", None, "JSON file for the result; by default it is only shown.")
flags.DEFINE_string("only", "", "Cases whose name holds this.")

AT = 18
RESTARTS = "--max_restarts=3"
HOW = ("SIGKILL", "SIGSTOP", "raise", "SIGTERM")
# (name, workers, fault)
CASES = [
    (f"{how} in {'the chief' if rank == 0 else f'worker {rank}'} of {workers}", workers, f"{rank} {AT} {how}")
    for workers in (2, 3)
    for how in HOW
    for rank in (0, workers - 1)
]
CASES += [("worker 1 of 2 starts 20 s late", 2, "1 0 late 20")]
CASES += [("port of worker 1 of 2 taken", 2, "1 0 take_port")]


def on(workers: int) -> list[str]:
    """Flags of a job of so many workers, whose global batch they can share."""
    return [f"--local_workers={workers}", f"--set=global_batch_size={16 * workers}", "--set=epochs=5"]


def timed(workdir: Path, flags_: list[str], fault: str) -> tuple[int, list[tuple[float, str]]]:
    """Exit code of a launcher, and its lines with the times when they came."""
    with fault_runs.started(workdir, *flags_, fault=fault) as process:
        lines = [(time.time(), line.rstrip()) for line in process.stdout]
        return process.wait(timeout=30), lines


def first(lines: list[tuple[float, str]], pattern: str, after: float = 0.0) -> tuple[float, re.Match] | None:
    for at, line in lines:
        if at >= after and (found := re.search(pattern, line)):
            return at, found
    return None


def measure(folder: Path, name: str, workers: int, fault: str, undisturbed: list) -> dict:
    code, lines = timed(folder, [*on(workers), RESTARTS], fault)
    happened = first(lines, r"fault \S+ in worker \d+ at ([\d.]+)")
    at = float(happened[1][1])
    result = {"fault": name, "exit_code": code}
    noticed = first(lines, r"^worker \d+: (exit code|killed)", at)
    if noticed:
        again = first(lines, r"^\[worker 0\] Epoch \d+", noticed[0])
        resumed = first(lines, r"going on from \S*step_(\d+)", noticed[0])
        result["noticed_after_secs"] = round(noticed[0] - at, 1)
        result["trains_again_after_secs"] = round(again[0] - at, 1)
        # The fault is in the step that is not finished.
        made = AT - 1 if fault.split()[1] != "0" else 0
        result["steps_made_again"] = max(made - (int(resumed[1][1]) if resumed else 0), 0)
    result["weights_are_identical"] = code == 0 and fault_runs.same(fault_runs.weights(folder), undisturbed)
    result["processes_left"] = len(fault_runs.left_over(folder))
    return result


def main(argv: list[str]) -> None:
    results, undisturbed = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        for workers in (2, 3):
            folder = Path(scratch) / f"undisturbed_{workers}"
            code = fault_runs.run(folder, *on(workers)).code
            assert code == 0, f"the undisturbed run ended with {code}"
            undisturbed[workers] = fault_runs.weights(folder)
        for number, (name, workers, fault) in enumerate(CASES):
            if FLAGS.only in name:
                results.append(measure(Path(scratch) / f"case_{number}", name, workers, fault, undisturbed[workers]))
                print(results[-1], flush=True)
    if FLAGS.out:
        command = "python tests/benchmarks/faults.py"
        load = subprocess.run(["uptime"], capture_output=True, text=True, check=False).stdout.rpartition("load")[2]
        run_folder.write_json(
            Path(FLAGS.out),
            {
                "what": "faults in jobs of local workers, heartbeat limit 5 s, a checkpoint every 5 steps",
                "command": command,
                "load": f"load{load}".strip(),
                "results": results,
                "environment": run_folder.environment(),
            },
        )


if __name__ == "__main__":
    app.run(main)
