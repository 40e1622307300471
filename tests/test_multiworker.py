"""MultiWorkerMirroredStrategy in several processes on this machine, in a custom loop."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests import harness, reference

SHAPES = [(4, 3), (3,)]


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("localhost", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.mark.parametrize(
    "name, workers, steps", [("VRLAMB", 2, None), ("VRMomentum", 3, 2), ("VRAdam", 2, 2), ("LARS", 2, None)]
)
def test_workers_equal_the_float64_reference(name, workers, steps, rng, tmp_path):
    start = [np.float32(rng.normal(size=shape)) for shape in SHAPES]
    samples = harness.make_samples(rng, 3, workers * (steps or 1), SHAPES)
    columns = {f"g{i}": np.stack([[s[i] for s in update] for update in samples]) for i in range(len(SHAPES))}
    np.savez(tmp_path / "in.npz", **{f"w{i}": w for i, w in enumerate(start)}, **columns)
    addresses = [f"localhost:{port}" for port in free_ports(workers)]
    processes = []
    for index in range(workers):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        arguments = [str(tmp_path / "in.npz"), str(tmp_path / f"out{index}.npz"), name, str(steps or 0)]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.multiworker", *arguments],
                env=os.environ | {"TF_CONFIG": json.dumps(config)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-3000:]
    _, arguments, rule = harness.OPTIMIZERS[name]
    oracle = reference.Optimizer(values=start, **(arguments | rule))
    for update in samples:
        oracle.update(update)
    results = [np.load(tmp_path / f"out{index}.npz") for index in range(workers)]
    for result in results:
        assert result["replicas"] == workers and result["iterations"] == 3
        found = [result[f"w{i}"] for i in range(len(SHAPES))]
        harness.assert_weights_close(found, oracle.w, 1e-5)
        for i in range(len(SHAPES)):  # bit for bit the same on all workers
            np.testing.assert_array_equal(found[i], results[0][f"w{i}"])
