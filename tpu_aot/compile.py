"""Compiles StableHLO for TPUs with libtpu, on a machine without one.

    python -m tpu_aot.compile v5e 256 folder

compiles each `.mlir` in the folder, and writes the scheduled HLO and the compiler's figures beside it. libtpu takes one
topology in a process, so that `compile_programs` starts one for each. Needs the extra `tpu-aot`, which pins jax and
libtpu together: other pairs crash.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import typing

# For 4 and 256 chips: the name of the topology, and arguments of get_topology_desc.
TOPOLOGIES = {
    ("v4", 4): ("v4:2x2x1", {"chip_config_name": "megacore"}),
    ("v4", 256): ("v4:4x8x8", {"chip_config_name": "megacore"}),
    ("v5e", 4): ("v5e:2x2", {}),
    ("v5e", 256): ("v5e:16x16", {}),
    ("v5p", 4): ("v5p:2x2x1", {}),
    ("v5p", 256): ("v5p:4x8x8", {}),
    ("v6e", 4): ("v6e:2x2", {}),
    ("v6e", 256): ("v6e:16x16", {}),
}
_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


class Compiled(typing.NamedTuple):
    hlo: str  # the scheduled module
    seconds: float
    temporary_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # of the output that take the place of an argument


def compile_program(stablehlo, chip, chips, flags=()):
    """The `Compiled` of one program; see `compile_programs`."""
    return compile_programs([stablehlo], chip, chips, flags)[0]


def compile_programs(programs, chip, chips, flags=()):
    """The list of `Compiled` of programs for `chips` chips of a kind, one of `TOPOLOGIES`.

    Args:
        programs: list of bytes, modules as `export` gives them, written for as many replicas as there are chips.
        chip: str, "v4", "v5e", "v5p" or "v6e".
        chips: int, 4 or 256.
        flags: sequence of str, of LIBTPU_INIT_ARGS.

    Raises:
        ValueError: if the topology is unknown.
        RuntimeError: if libtpu does not compile a program; with its words.
    """
    if (chip, chips) not in TOPOLOGIES:
        raise ValueError(f"Expected one of {sorted(TOPOLOGIES)}. Received: {(chip, chips)}")
    with tempfile.TemporaryDirectory() as folder:
        paths = [pathlib.Path(folder) / f"{i:04}.mlir" for i in range(len(programs))]
        for path, program in zip(paths, programs, strict=True):
            path.write_bytes(program)
        command = [sys.executable, "-m", "tpu_aot.compile", chip, str(chips), folder]
        environment = os.environ | _ENVIRONMENT | {"LIBTPU_INIT_ARGS": " ".join(flags)}
        root = pathlib.Path(__file__).parent.parent
        process = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
        if process.returncode:
            raise RuntimeError(f"libtpu did not compile a program for {chips} {chip}:\n{process.stderr[-4000:]}")
        return [
            Compiled(hlo=path.with_suffix(".hlo").read_text(), **json.loads(path.with_suffix(".json").read_text()))
            for path in paths
        ]


def parse_module(stablehlo):
    """The module in MLIR, to be called in a context of `mlir.make_ir_context`."""
    from jax._src.lib.mlir import ir

    module = ir.Module.parse(stablehlo)
    # TensorFlow wraps variables that are written in an operation that PJRT does not know, and that changes nothing.
    copies = []

    def collect(operation):
        if operation.name == "mhlo.copy":
            copies.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(collect)
    for copy in copies:
        copy.results[0].replace_all_uses_with(copy.operands[0])
        copy.erase()
    return module


def compile_options(replicas):
    """Of a program that runs on `replicas` devices, one replica on each."""
    import numpy as np
    from jax._src.lib import xla_client

    options = xla_client.CompileOptions()
    options.num_replicas = replicas
    options.num_partitions = 1
    build = options.executable_build_options
    build.num_replicas = replicas
    build.num_partitions = 1
    build.device_assignment = xla_client.DeviceAssignment.create(np.arange(replicas).reshape(replicas, 1))
    return options


def main(chip, chips, folder):
    from jax.experimental import topologies

    name, arguments = TOPOLOGIES[chip, int(chips)]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **arguments).devices
    if len(devices) != int(chips):
        raise ValueError(f"Expected a topology of {chips} devices. Received: {name}, of {len(devices)}")
    for path in sorted(pathlib.Path(folder).glob("*.mlir")):
        _compile(path, devices)


def _compile(path, devices):
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client

    with mlir.make_ir_context():
        module, options = parse_module(path.read_bytes()), compile_options(len(devices))
        start = time.perf_counter()
        compiled = devices[0].client.compile(module, xla_client.DeviceList(tuple(devices)), options)
        seconds = time.perf_counter() - start
    memory = compiled.get_compiled_memory_stats()
    figures = {
        "seconds": seconds,
        "temporary_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
    }
    path.with_suffix(".hlo").write_text(compiled.hlo_modules()[0].to_string())
    path.with_suffix(".json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
