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


def run(path, name, workers, start, samples, arguments, sparse=False, initial_scale=None):
    """The results of all workers, after an update for each of `samples`."""
    columns = {f"g{i}": np.stack([[s[i] for s in update] for update in samples]) for i in range(len(SHAPES))}
    np.savez(path / "in.npz", **{f"w{i}": w for i, w in enumerate(start)}, **columns)
    settings = json.dumps({"arguments": arguments, "sparse": sparse, "initial_scale": initial_scale})
    addresses = [f"localhost:{port}" for port in free_ports(workers)]
    processes = []
    for index in range(workers):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        files = [str(path / "in.npz"), str(path / f"out{index}.npz")]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.multiworker", *files, name, settings],
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
    results = [np.load(path / f"out{index}.npz") for index in range(workers)]
    for result in results:
        assert result["replicas"] == workers and result["iterations"] == len(samples)
        for key in result.files:  # bit for bit the same on all workers
            np.testing.assert_array_equal(result[key], results[0][key], err_msg=key)
    return results[0]


def assert_close(result, oracle):
    harness.assert_weights_close([result[f"w{i}"] for i in range(len(SHAPES))], oracle.w, 1e-5)


@pytest.mark.parametrize(
    "name, workers, steps", [("VRLAMB", 2, None), ("VRMomentum", 3, 2), ("VRAdam", 2, 2), ("LARS", 2, None)]
)
def test_workers_equal_the_float64_reference(name, workers, steps, rng, tmp_path):
    start = [np.float32(rng.normal(size=shape)) for shape in SHAPES]
    samples = harness.make_samples(rng, 3, workers * (steps or 1), SHAPES)
    result = run(tmp_path, name, workers, start, samples, {"gradient_accumulation_steps": steps})
    _, arguments, rule = harness.OPTIMIZERS[name]
    oracle = reference.Optimizer(values=start, **(arguments | rule))
    for update in samples:
        oracle.update(update)
    assert_close(result, oracle)


def test_everything_at_once_on_two_workers(rng, tmp_path):
    """Sparse gradients, accumulation, clipping, averages that overwrite, loss scale, and a NaN on one worker."""
    start = [np.float32(rng.normal(size=shape)) for shape in SHAPES]
    samples = harness.make_samples(rng, 3, 4, SHAPES)
    features = dict(global_clipnorm=0.5, use_ema=True, ema_momentum=0.6, ema_overwrite_frequency=3)
    scaled = [
        [[scale * gradient for gradient in sample] for sample in update]
        for update, scale in zip(samples, (256.0, 256.0, 128.0), strict=True)
    ]
    scaled[1][3][0][1, 2] = np.nan  # the second step of the second worker
    result = run(
        tmp_path,
        "VRLAMB",
        2,
        start,
        scaled,
        features | {"gradient_accumulation_steps": 2},
        sparse=True,
        initial_scale=256.0,
    )
    _, arguments, rule = harness.OPTIMIZERS["VRLAMB"]
    oracle = reference.Optimizer(values=start, **(arguments | rule | features))
    oracle.update(samples[0])
    oracle.skipped += 1
    oracle.update(samples[2])
    assert_close(result, oracle)
    assert result["skipped"] == 1 and result["scale"] == 128
