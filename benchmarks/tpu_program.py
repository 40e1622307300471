"""What does an update cost on a TPU? Programs of LAMB and of every VR optimizer, compiled by libtpu without one.

    python -m benchmarks.tpu_program                                            # the whole matrix: hours
    python -m benchmarks.tpu_program --programs=ResNet-50 --chips=v5e --counts=256 --png=docs/tpu_program.png

For each program: bytes between HBM and the core, for computation and for collectives, in P, the bytes of the parameters
in float32, next to the least that the update has to move; bytes that a chip sends over the interconnect, in P; the
number of collectives; temporary memory; XLA's estimate of the cycles of its fusions; the time to compile. `tpu_aot`
has the programs and the counting. Nothing runs: what these bytes take in time, only a TPU can tell.

A train step has no least traffic, and its bytes are in MB.
"""

import argparse
import json
import multiprocessing
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tpu_aot.compile import TOPOLOGIES, compile_programs
from tpu_aot.traffic import traffic

UPDATES = ("small", "ResNet-50", "BERT-large")
TRAIN_STEPS = ("CNN", "transformer", "ResNet-50 at 224 x 224")


def export_all(program, optimizers, replicas):
    """`(parameters, modules)` of a program with each of the optimizers."""
    from tpu_aot import programs

    makers = [programs.OPTIMIZERS[name] for name in optimizers]
    if program in programs.MODELS:
        make = programs.MODELS[program]
        parameters = sum(programs.size(v.shape) for v in make()[0].trainable_variables)
        return parameters, [programs.export_train_step(maker, make, replicas).stablehlo for maker in makers]
    shapes = programs.SETS[program]()
    parameters = sum(programs.size(shape) for shape in shapes)
    return parameters, [programs.export_update(maker, shapes, replicas).stablehlo for maker in makers]


def in_a_process(function, *args):
    """TensorFlow keeps the memory of one case for the next."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def rows_of(program, optimizers, chips, count):
    """A row for each optimizer and chip."""
    exported = [in_a_process(export_all, program, [name], count) for name in optimizers]
    modules = [module for _, [module] in exported]
    for chip in chips:
        compiled = compile_programs(modules, chip, count)
        for name, (parameters, _), result in zip(optimizers, exported, compiled, strict=True):
            moved = traffic(result.hlo)
            yield {
                "program": program,
                "optimizer": name,
                "chip": chip,
                "chips": count,
                "parameters": parameters,
                "hbm_bytes": moved.hbm,
                "collective_hbm_bytes": moved.collective_hbm,
                "interconnect_bytes": moved.interconnect,
                "collectives": sum(moved.collectives.values()),
                "temporary_bytes": result.temporary_bytes,
                "cycles": moved.cycles,
                "compile_s": result.seconds,
            }


def cells(row, least):
    """The cells of a row of the table."""
    is_update = row["program"] in UPDATES
    unit = 4 * row["parameters"] if is_update else 1e6
    hbm, collective, sent = (row[f"{key}_bytes"] / unit for key in ("hbm", "collective_hbm", "interconnect"))
    digits = 2 if is_update else 0
    return [
        row["program"],
        f"{row['chips']} {row['chip']}",
        row["optimizer"],
        f"{least}" if is_update else "",
        *(f"{value:.{digits}f}" for value in (hbm + collective, collective, sent)),
        f"{row['collectives']}",
        f"{row['temporary_bytes'] / 1e6:.0f}",
        f"{row['cycles'] / 1e6:.2f}",
        f"{row['compile_s']:.0f}",
    ]


COLUMNS = [
    "program",
    "chips",
    "optimizer",
    "least, P",
    "HBM, P (step: MB)",
    "of it for collectives",
    "interconnect, P (step: MB)",
    "collectives",
    "temporary, MB",
    "cycles, millions",
    "compiled in, s",
]


def plot(rows, least, path):
    """Bars of the traffic of each update, next to the least, for each program and number of chips."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    updates = [row for row in rows if row["program"] in UPDATES]
    groups = sorted({(row["program"], row["chip"], row["chips"]) for row in updates}, key=str)
    figure, axes = plt.subplots(len(groups), squeeze=False, figsize=(9, 2.6 * len(groups)), layout="constrained")
    for axis, group in zip(axes.flat, groups, strict=True):
        members = [row for row in updates if (row["program"], row["chip"], row["chips"]) == group]
        names = [row["optimizer"] for row in members]
        units = [4 * row["parameters"] for row in members]
        hbm = [row["hbm_bytes"] / unit for row, unit in zip(members, units, strict=True)]
        collective = [row["collective_hbm_bytes"] / unit for row, unit in zip(members, units, strict=True)]
        axis.barh(names, hbm, color="tab:blue", label="computation")
        axis.barh(names, collective, left=hbm, color="tab:orange", label="collectives")
        for i, name in enumerate(names):
            axis.plot([least[name]] * 2, [i - 0.4, i + 0.4], color="black", label="least" if i == 0 else None)
        axis.invert_yaxis()
        axis.set(title=f"{group[0]}, {group[2]} {group[1]}", xlabel="HBM traffic of an update, bytes of the parameters")
        axis.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", default=",".join([*UPDATES, *TRAIN_STEPS]), help="comma-separated")
    parser.add_argument("--optimizers", help="separated by semicolons; all by default")
    parser.add_argument("--chips", default="v4,v5e,v5p,v6e")
    parser.add_argument("--counts", default="4,256", help="numbers of chips, of 4 and 256")
    parser.add_argument("--json", help="file to write the rows to")
    parser.add_argument("--png", help="file to plot the updates to")
    arguments = parser.parse_args()
    least = in_a_process(least_words)
    optimizers = [name.strip() for name in arguments.optimizers.split(";")] if arguments.optimizers else list(least)
    chips, counts = arguments.chips.split(","), [int(count) for count in arguments.counts.split(",")]
    programs = arguments.programs.split(",")
    for name, given, known in (
        ("--programs", programs, {*UPDATES, *TRAIN_STEPS}),
        ("--optimizers", optimizers, set(least)),
        ("--chips and --counts", [(chip, count) for chip in chips for count in counts], set(TOPOLOGIES)),
    ):
        if not set(given) <= known:
            parser.error(f"{name}: expected of {sorted(known)}. Received: {given}")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    rows = []
    for program in programs:
        for count in counts:
            for row in rows_of(program, optimizers, chips, count):
                rows.append(row)
                print(f"| {' | '.join(cells(row, least[row['optimizer']]))} |", flush=True)
                if arguments.json:
                    with open(arguments.json, "w") as file:
                        json.dump(rows, file, indent=1)
    if arguments.png:
        plot(rows, least, arguments.png)


def least_words():
    from tpu_aot.programs import LEAST_WORDS

    return LEAST_WORDS


if __name__ == "__main__":
    main()
