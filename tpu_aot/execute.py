"""Runs StableHLO on CPU devices, a replica on each: the numbers of the program that a TPU would run.

    python -m tpu_aot.execute program.mlir replicas inputs.npz outputs.npz

A process of its own, because XLA takes the number of CPU devices when it starts.
"""

import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import numpy as np

from tpu_aot.compile import compile_options, parse_module


def execute(program, replicas, steps):
    """Runs a `Program` step after step, its variables carried from each to the next.

    Args:
        program: a `Program`, of `replicas` replicas.
        replicas: int.
        steps: list of the arguments of each step: arrays [replicas, ...].

    Returns:
        `(results, values)`: for each step the list of its results, arrays [replicas, ...], and for each variable of
        the program its value on each replica after the last.
    """
    inputs = {f"variable_{i}": value for i, value in enumerate(program.values())}
    inputs |= {f"step_{s}_{i}": array for s, step in enumerate(steps) for i, array in enumerate(step)}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "program.mlir").write_bytes(program.stablehlo)
        np.savez(folder / "inputs.npz", **inputs)
        command = [sys.executable, "-m", "tpu_aot.execute", folder / "program.mlir", str(replicas)]
        command += [folder / "inputs.npz", folder / "outputs.npz"]
        # Without 64 bits the counters of steps would arrive with 32, and the program crash.
        environment = os.environ | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={replicas}",
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_X64": "1",
        }
        root = pathlib.Path(__file__).parent.parent
        process = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
        if process.returncode:
            raise RuntimeError(f"The program did not run on {replicas} CPU devices:\n{process.stderr[-4000:]}")
        with np.load(folder / "outputs.npz") as outputs:
            arrays = dict(outputs)
    results = [[arrays[name] for name in sorted_by_number(arrays, f"result_{s}_")] for s in range(len(steps))]
    return results, [arrays[f"variable_{i}"] for i in range(len(program.variables))]


def main(program, replicas, inputs, outputs):
    import jax
    from jax._src import xla_bridge
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client

    replicas = int(replicas)
    backend = xla_bridge.get_backend("cpu")
    devices = backend.devices()[:replicas]
    with mlir.make_ir_context():
        module = parse_module(pathlib.Path(program).read_bytes())
        written = aliases(module)
        compiled = backend.compile_and_load(module, xla_client.DeviceList(tuple(devices)), compile_options(replicas))
    # One value for all to jax, which does not look whether they are the same.
    everywhere = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(devices), ("replica",)), jax.sharding.PartitionSpec()
    )

    def on_devices(values):
        shards = [jax.device_put(value, device) for value, device in zip(values, devices, strict=True)]
        return jax.make_array_from_single_device_arrays(values[0].shape, everywhere, shards)

    with np.load(inputs) as arrays:
        arrays = dict(arrays)
    count = sum(name.startswith("variable_") for name in arrays)
    variables = [np.stack([arrays[f"variable_{i}"]] * replicas) for i in range(count)]
    results = {}
    for step in itertools.count():
        arguments = [arrays[name] for name in sorted_by_number(arrays, f"step_{step}_")]
        if not arguments:
            break
        executed = compiled.execute_sharded([on_devices(values) for values in [*arguments, *variables]])
        for i, shards in enumerate(executed.disassemble_into_single_device_arrays()):
            value = np.stack([np.asarray(shard) for shard in shards])
            if i in written:
                variables[written[i] - len(arguments)] = value
            else:
                results[f"result_{step}_{i}"] = value
    np.savez(outputs, **results, **{f"variable_{i}": value for i, value in enumerate(variables)})


def aliases(module):
    """Dict from indices of outputs to the parameters whose memory they take: the variables that are written."""
    listed = str(module.operation.attributes["mhlo.input_output_alias"])
    pattern = r"parameter_number = (\d+)[^}]*\}, output_index = array<i64(?:: (\d+))?>"
    return {int(output or 0): int(parameter) for parameter, output in re.findall(pattern, listed)}


def sorted_by_number(names, prefix):
    """Those of `names` that are `prefix` and a number, in the order of the numbers."""
    return sorted((name for name in names if name.startswith(prefix)), key=lambda name: int(name[len(prefix) :]))


if __name__ == "__main__":
    main(*sys.argv[1:])
