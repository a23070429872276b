"""The programs and commands of docs/guides/machines.md run with gloo on this host, which stands for every host.

`srun` and `scontrol` are replaced: SLURM is not here. They start the tasks and set the variables that SLURM sets.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from regard.lab.runs.run import METRICS, STATE, read_metrics

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "machines.md").read_text()
LAST_LINE = re.search(r"^(\[\d+, \d+\])\n```", GUIDE, re.M).group(1)
SRUN = """#!/bin/bash
tasks=$((SLURM_NNODES * SLURM_NTASKS_PER_NODE)) status=0
for ((task = 0; task < tasks; task++)); do
  SLURM_PROCID=$task SLURM_NTASKS=$tasks SLURM_LOCALID=$((task % SLURM_NTASKS_PER_NODE)) \\
    SLURM_NODEID=$((task / SLURM_NTASKS_PER_NODE)) "$@" &
done
for job in $(jobs -p); do wait $job || status=1; done
exit $status
"""
#: A training of seconds, in place of that of the guide.
SHORT = ["data.corpus=reverse", "data.size=29", "data.valid=4", "data.test=4", "tokenizer.kind=words", "model.width=8"]
SHORT += ["training.steps=4", "validation.steps=4", "validation.sentences=4", "training.accelerator=cpu"]


def blocks(language, word):
    """The blocks of the guide in this language that contain a word."""
    found = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", GUIDE, re.M | re.S)
    return [block for name, block in found if name == language and word in block]


def on_one_host(command):
    """The command of the guide for two hosts of eight GPUs, as one for two hosts of one CPU, both of which are here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        command = command.replace("29500", str(free.getsockname()[1])).replace("first.machine", "127.0.0.1")
    command = re.sub(r"(nproc-per-node |ntasks-per-node=|training\.devices=)8", r"\g<1>1", command)
    return re.sub(r"--data \S+", "", command).replace("training.accelerator=gpu", " ".join(SHORT))


@pytest.fixture
def started(tmp_path, commands):
    """Start a command in a folder with far.py, with `srun` and `scontrol` on the path."""
    (program,) = blocks("python", "init_process_group")
    (tmp_path / "far.py").write_text(program)
    for name, script in (("srun", SRUN), ("scontrol", "#!/bin/bash\necho 127.0.0.1\n")):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    unset = ("RANK", "WORLD_SIZE", "LOCAL_", "SLURM_", "MASTER_", "TORCHELASTIC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    path = f"{tmp_path}:{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment |= {"PATH": path, "PYTHON_EXEC": str(commands / "python"), "OMP_NUM_THREADS": "1"}
    running = []

    def start(command, **variables):
        running.append(
            subprocess.Popen(
                ["bash", "-c", command], cwd=tmp_path, env=environment | variables, text=True, stdout=-1, stderr=-2
            )
        )
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()


def finished(*processes):
    """What the processes print; all must succeed."""
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(printed)
    return "".join(printed).strip()


def submitted(start, script):
    """What a batch script prints, with the variables that sbatch sets."""
    nodes, tasks = (re.search(rf"#SBATCH --{name}=(\d+)", script).group(1) for name in ("nodes", "ntasks-per-node"))
    given = {"SLURM_NNODES": nodes, "SLURM_NTASKS_PER_NODE": tasks, "SLURM_JOB_NODELIST": "127.0.0.1"}
    return finished(start(script, SLURM_JOB_ID="7", SLURM_JOB_NAME="far", SLURM_NTASKS="2", **given))


def trained_together(folder):
    """The number of processes whose random states the run saved, and its last step."""
    run = folder / "runs" / "far"
    with safe_open(run / STATE, "pt") as state:
        return state.get_slice("random.cpu").get_shape()[0], int(read_metrics(run / METRICS)[-1]["step"])


@pytest.mark.slow
def test_static_rendezvous(started):
    (block,) = blocks("", "# host 1")
    hosts = on_one_host(block).strip().splitlines()
    assert len(hosts) == 2 and all("127.0.0.1" in host for host in hosts)
    assert LAST_LINE in finished(*map(started, hosts)).splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("script", blocks("bash", "far.py"), ids=("torchrun on each host", "srun alone"))
def test_slurm(started, script):
    # After the last line torchrun may warn that the other host closed the rendezvous first.
    assert LAST_LINE in submitted(started, on_one_host(script)).splitlines()


@pytest.mark.slow
def test_training_with_static_rendezvous(started, tmp_path):
    (block,) = blocks("", "-m regard train")
    first = on_one_host(block)
    finished(started(first), started(first.replace("--node-rank 0", "--node-rank 1")))
    assert trained_together(tmp_path) == (2, 4)


@pytest.mark.slow
def test_training_with_slurm(started, tmp_path):
    (script,) = blocks("bash", "regard train")
    submitted(started, on_one_host(script))
    assert trained_together(tmp_path) == (2, 4)
