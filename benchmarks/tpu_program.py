"""What does an update cost on a TPU? Programs of LAMB and of every VR optimizer, compiled by libtpu without one.

    python -m benchmarks.tpu_program --json=rows.json             # the whole matrix: hours; goes on where it stopped
    python -m benchmarks.tpu_program --programs=ResNet-50 --chips=v5e --counts=256 --png=docs/tpu_program.png

For each program: bytes between HBM and the core, for computation and for collectives, in P, the bytes of the parameters
in float32, next to the least that the update has to move; bytes that a chip sends over the interconnect, in P; the
number of collectives; temporary memory; XLA's estimate of the cycles of its fusions; the time to compile. `tpu_aot`
has the programs and the counting. Nothing runs: what these bytes take in time, only a TPU can tell.

A train step has no least traffic, and its bytes are in MB. "VRLAMB, one reduction" is measured when asked for: the sums
of the gradients and of their squares together, whose difference cancels in float32, in place of centred deviations.
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


def export(program, optimizer, replicas):
    """`(parameters, module)` of a program with an optimizer."""
    from tpu_aot import programs

    make_optimizer = (programs.OPTIMIZERS | programs.COMPARISONS)[optimizer]
    if program in programs.MODELS:
        make_model = programs.MODELS[program]
        parameters = sum(programs.size(v.shape) for v in make_model()[0].trainable_variables)
        return parameters, programs.export_train_step(make_optimizer, make_model, replicas).stablehlo
    shapes = programs.SETS[program]()
    return sum(map(programs.size, shapes)), programs.export_update(make_optimizer, shapes, replicas).stablehlo


def in_a_process(function, *args):
    """TensorFlow keeps the memory of one case for the next."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def rows_of(program, optimizers, chips, count, known):
    """A row for each chip and optimizer, of those that are not known, by `key_of`, measured now."""

    def key(name, chip):
        return key_of({"program": program, "optimizer": name, "chip": chip, "chips": count})

    needed = [name for name in optimizers if any(key(name, chip) not in known for chip in chips)]
    exported = {name: in_a_process(export, program, name, count) for name in needed}
    for chip in chips:
        missing = [name for name in needed if key(name, chip) not in known]
        modules = [exported[name][1] for name in missing]
        compiled = dict(zip(missing, compile_programs(modules, chip, count), strict=True)) if missing else {}
        for name in optimizers:
            if name not in compiled:
                yield known[key(name, chip)]
                continue
            moved = traffic(compiled[name].hlo)
            yield {
                "program": program,
                "optimizer": name,
                "chip": chip,
                "chips": count,
                "parameters": exported[name][0],
                "hbm_bytes": moved.hbm,
                "collective_hbm_bytes": moved.collective_hbm,
                "interconnect_bytes": moved.interconnect,
                "collectives": sum(moved.collectives.values()),
                "temporary_bytes": compiled[name].temporary_bytes,
                "cycles": moved.cycles,
                "compile_s": compiled[name].seconds,
            }


def key_of(row):
    """What tells rows apart."""
    return tuple(row[name] for name in ("program", "optimizer", "chip", "chips"))


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
    """Bars of the traffic of each update, next to the least: a row for each program and number of chips."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    updates = [row for row in rows if row["program"] in UPDATES]
    lines = list(dict.fromkeys((row["program"], row["chips"]) for row in updates))
    chips = list(dict.fromkeys(row["chip"] for row in updates))
    names = list(dict.fromkeys(row["optimizer"] for row in updates))
    size = (2.6 + 2.6 * len(chips), 0.8 + 2.2 * len(lines))
    figure, axes = plt.subplots(
        len(lines), len(chips), squeeze=False, sharex="row", sharey=True, figsize=size, layout="constrained"
    )
    for (program, count), of_line in zip(lines, axes, strict=True):
        for chip, axis in zip(chips, of_line, strict=True):
            of_group = [row for row in updates if (row["program"], row["chip"], row["chips"]) == (program, chip, count)]
            for row in of_group:
                at, unit = names.index(row["optimizer"]), 4 * row["parameters"]
                hbm, collective = row["hbm_bytes"] / unit, row["collective_hbm_bytes"] / unit
                axis.barh(at, hbm, color="tab:blue", label="computation")
                axis.barh(at, collective, left=hbm, color="tab:orange", label="collectives")
                axis.plot([least[row["optimizer"]]] * 2, [at - 0.4, at + 0.4], color="black", label="least")
            axis.set_title(f"{program}, {count} {chip}", fontsize="medium")
            axis.set_yticks(range(len(names)), names)
    axes[0, 0].invert_yaxis()
    figure.supxlabel("HBM traffic of an update, as a multiple of the parameters' bytes")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique, loc="outside upper right", ncols=len(unique))
    figure.savefig(path, dpi=100)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", default=",".join([*UPDATES, *TRAIN_STEPS]), help="comma-separated")
    parser.add_argument("--optimizers", help="separated by semicolons; all by default")
    parser.add_argument("--chips", default="v4,v5e,v5p,v6e")
    parser.add_argument("--counts", default="4,256", help="numbers of chips, of 4 and 256")
    parser.add_argument("--json", help="file to keep the rows in; what it holds already is not measured again")
    parser.add_argument("--png", help="file to plot the updates to")
    arguments = parser.parse_args()
    optimizers, least = in_a_process(optimizers_and_least_words)
    if arguments.optimizers:
        optimizers = [name.strip() for name in arguments.optimizers.split(";")]
    chips, counts = arguments.chips.split(","), [int(count) for count in arguments.counts.split(",")]
    programs = arguments.programs.split(",")
    for name, given, known in (
        ("--programs", programs, {*UPDATES, *TRAIN_STEPS}),
        ("--optimizers", optimizers, set(least)),
        ("--chips and --counts", [(chip, count) for chip in chips for count in counts], set(TOPOLOGIES)),
    ):
        if not set(given) <= known:
            parser.error(f"{name}: expected of {sorted(known)}. Received: {given}")
    rows, known = [], {}
    if arguments.json and os.path.exists(arguments.json):
        with open(arguments.json) as file:
            known = {key_of(row): row for row in json.load(file)}
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for program in programs:
        for count in counts:
            for row in rows_of(program, optimizers, chips, count, known):
                rows.append(row)
                print(f"| {' | '.join(cells(row, least[row['optimizer']]))} |", flush=True)
                if arguments.json and key_of(row) not in known:
                    known[key_of(row)] = row
                    write(arguments.json, list(known.values()))
    if arguments.png:
        plot(rows, least, arguments.png)


def write(path, rows):
    """Replaces the file at once: an interruption leaves the old one."""
    with open(f"{path}.new", "w") as file:
        json.dump(rows, file, indent=1)
    os.replace(f"{path}.new", path)


def optimizers_and_least_words():
    from tpu_aot.programs import LEAST_WORDS, OPTIMIZERS

    return list(OPTIMIZERS), LEAST_WORDS


if __name__ == "__main__":
    main()
