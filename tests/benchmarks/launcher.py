"""What the launcher adds to two workers: seconds until they have met, and its own share of a core.

    python tests/benchmarks/launcher.py --out=configs/results/launcher.json

Bare processes and launched ones take turns; the time is from the start of the first process of either to the moment
when the last worker has its strategy.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import app, flags

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from conftest import child_environment, launcher, tf_configs  # noqa: E402 (found through the line above)

FLAGS = flags.FLAGS
flags.DEFINE_string("out", None, "JSON file for the result; by default it is only shown.")
flags.DEFINE_integer("rounds", 7, "Starts of each kind.")
flags.DEFINE_float("watched_secs", 30.0, "How long the launcher's use of the processor is watched.")

PROGRAM = """
import sys, time
import tf_largebatch
tf_largebatch.strategy()
print(f"met at {time.time()}", flush=True)
time.sleep(float(sys.argv[1]))
"""


def met_after(processes: list[subprocess.Popen], began: float) -> float:
    output = "".join(process.communicate(timeout=300)[0] for process in processes)
    times = [float(text) for text in re.findall(r"met at ([\d.]+)", output)]
    assert len(times) == 2, output
    return max(times) - began


def start(command: list[str], folder: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        env=child_environment(**environment),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def bare(program: str, folder: str) -> float:
    began = time.time()
    return met_after(
        [start([sys.executable, program, "0"], folder, TF_CONFIG=tf_config) for tf_config in tf_configs(2)], began
    )


def launched(program: str, folder: str) -> float:
    began = time.time()
    return met_after([start(own_command(program, "0"), folder)], began)


def own_command(program: str, seconds: str) -> list[str]:
    return [sys.executable, launcher("gpu_cluster"), "--local_workers=2", "--tee=all", "--", program, seconds]


def share_of_a_core(program: str, folder: str) -> float:
    """Of the launcher alone, while its workers do nothing."""
    process = start(own_command(program, str(FLAGS.watched_secs + 60)), folder)
    try:
        shown = ""
        while shown.count("met at") < 2:
            shown += process.stdout.readline()
        before, began = processor_secs(process.pid), time.monotonic()
        time.sleep(FLAGS.watched_secs)
        return (processor_secs(process.pid) - before) / (time.monotonic() - began)
    finally:
        process.kill()
        process.wait(timeout=30)


def processor_secs(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main(argv: list[str]) -> None:
    from tf_largebatch import run_folder

    times: dict[str, list[float]] = {"bare": [], "launched": []}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(PROGRAM)
        for _ in range(FLAGS.rounds):
            times["bare"].append(bare(str(program), folder))
            times["launched"].append(launched(str(program), folder))
        share = share_of_a_core(str(program), folder)
    medians = {name: round(statistics.median(values), 2) for name, values in times.items()}
    result = {
        "what": "two local workers: seconds until both have their strategy; the launcher's share of a core",
        "command": "python tests/benchmarks/launcher.py",
        "seconds": {name: [round(value, 2) for value in values] for name, values in times.items()},
        "median_seconds": medians,
        "added_seconds": round(medians["launched"] - medians["bare"], 2),
        "share_of_a_core": round(share, 4),
        "environment": run_folder.environment(),
    }
    print(result)
    if FLAGS.out:
        run_folder.write_json(Path(FLAGS.out), result)


if __name__ == "__main__":
    app.run(main)
