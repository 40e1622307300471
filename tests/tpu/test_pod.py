"""A pod of several hosts: the step that each of them traces, and where its variables are."""

import json
import subprocess
import sys

from tests.tpu import pod
from tpu_aot.strategy import fake_tpu_strategy


def test_pod_of_four_hosts_sends_what_one_host_with_as_many_chips_sends():
    script = [sys.executable, "-m", "tests.tpu.pod"]
    run = subprocess.run(script, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert (found["replicas"], found["hosts"]) == (16, 4)
    # Of each variable 4 components on every host, one for each of its chips.
    assert found["places"] == [[[task, 4] for task in range(4)]]
    one_host, _ = pod.described(fake_tpu_strategy(pod.MESH))
    assert (one_host["replicas"], one_host["hosts"]) == (16, 1)
    for step in ("bare", "fit"):
        assert found[step] == one_host[step]
    # The gradients and the variances of 52 numbers in 3 variables, and a scalar.
    assert (found["bare"]["sums"], found["bare"]["bytes"]) == (7, 4 * (2 * 52 + 1))
