"""How much memory does an update take at its peak, beyond variables and gradients? Linux only.

    python -m benchmarks.update_memory --replicas=2

In copies of all parameters in float32, over all replicas together: the mean gradient and the variance are one each, and
each replica's share of the variance another.
"""

import argparse
import ctypes
import gc
import os

# Its allocator keeps what it has once had, so that no peak but the first would show.
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"

import numpy as np

from benchmarks import update_step


def _status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def peak_bytes(function):
    """How far the memory of this process rises during `function()`."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # The peak starts anew.
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", default="bert-small", help=f"of {', '.join(update_step.SETS)}")
    parser.add_argument("--replicas", type=int, default=2, help="number of logical CPU devices")
    parser.add_argument("--optimizers", help="of the table; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    update_step.set_devices(arguments.replicas)
    strategy = update_step.make_strategy(arguments.replicas)
    update_step.header("set", "replicas", "optimizer", "peak, copies")
    for set_name in arguments.sets.split(","):
        shapes = update_step.SETS[set_name]()
        parameters = sum(int(np.prod(shape)) for shape in shapes)
        gradients = update_step.make_gradients(strategy, shapes)
        for name, make_optimizer in (item for group in update_step.GROUPS for item in group.items()):
            if arguments.optimizers and name not in arguments.optimizers.split(","):
                continue
            update = update_step.make_update(strategy, shapes, gradients, make_optimizer)
            update()
            update()
            peak = max(peak_bytes(update) for _ in range(arguments.rounds)) / (4 * parameters)
            print(f"| {set_name} | {arguments.replicas} | {name} | {peak:.1f} |", flush=True)
            del update


if __name__ == "__main__":
    main()
