"""One of two workers is killed in the middle of training: the other ends with an error, and both can resume."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.test_multiworker import free_ports

# Checkpoints at 3, 6, 9, 12, the first three in the midst of an accumulation of 4; the fault comes after step 7.
STEPS, EVERY, HOLD = 12, 3, 7
START_SECONDS = 120
# A connection that breaks ends the other worker in a second or two; heartbeats that stay away do in about ten.
END_SECONDS = 60


@contextlib.contextmanager
def running(directory, holds=(None, None)):
    """Two workers, whose output goes to directory/log<index>; none of them is left when the context ends."""
    addresses = [f"localhost:{port}" for port in free_ports(2)]
    with contextlib.ExitStack() as stack:
        processes = []
        for index, hold in enumerate(holds):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            arguments = [str(directory), str(STEPS), str(EVERY), *([] if hold is None else [str(hold)])]
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.worker_fault", *arguments],
                env=os.environ | {"TF_CONFIG": json.dumps(config)},
                stdout=stack.enter_context(open(directory / f"log{index}", "w")),
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def log(directory, index):
    return (directory / f"log{index}").read_text()


def wait_for_line(line, process, directory, index):
    deadline = time.monotonic() + START_SECONDS
    while line not in log(directory, index).splitlines():
        assert process.poll() is None and time.monotonic() < deadline, log(directory, index)[-3000:]
        time.sleep(0.05)


def train(directory, resumes_at):
    """Trains to the end, and returns the weights and slots of both workers."""
    with running(directory) as processes:
        for index, process in enumerate(processes):
            code = process.wait(START_SECONDS)
            assert code == 0, log(directory, index)[-3000:]
            assert f"resumed at {resumes_at}" in log(directory, index).splitlines()
    results = []
    for index in range(2):
        with np.load(directory / f"out{index}.npz") as archive:
            results.append(dict(archive))
    return results


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return train(tmp_path_factory.mktemp("uninterrupted"), resumes_at=0)


@pytest.mark.parametrize("victim", [0, 1], ids=["chief", "other"])
def test_worker_is_killed_and_both_resume(victim, uninterrupted, tmp_path):
    survivor = 1 - victim
    with running(tmp_path, [HOLD if index == victim else None for index in range(2)]) as processes:
        wait_for_line(f"step {HOLD}", processes[victim], tmp_path, victim)
        processes[victim].send_signal(signal.SIGKILL)
        code = processes[survivor].wait(END_SECONDS)
    assert code != 0
    assert "errors_impl.UnavailableError" in log(tmp_path, survivor), log(tmp_path, survivor)[-3000:]
    assert f"step {HOLD + 1}" not in log(tmp_path, survivor).splitlines()
    assert not list(tmp_path.glob("out*.npz"))
    # From the last checkpoint: step 7 is repeated.
    resumed = train(tmp_path, resumes_at=HOLD - HOLD % EVERY)
    for found in resumed:
        assert found.keys() == uninterrupted[0].keys()
        for expected in uninterrupted:
            for name, value in expected.items():
                np.testing.assert_array_equal(found[name], value, err_msg=name)
