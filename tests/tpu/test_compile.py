"""libtpu compiles the programs for every kind of chip, and they move no more than they should. The whole matrix is in
benchmarks/tpu_program.py."""

import pytest

from tests.tpu import needs_libtpu
from tpu_aot import compile as compiler
from tpu_aot import programs, traffic

# What a program that asks the host, or another one, would hold.
HOST = ("infeed", "outfeed", " send(", " recv(", "host_transfer", 'custom_call_target="Sharding"')


def bytes_of(shapes):
    return 4 * sum(programs.size(shape) for shape in shapes)


@pytest.fixture(scope="module")
def small_programs():
    shapes = programs.SETS["small"]()
    return [programs.export_update(make, shapes, 4).stablehlo for make in programs.OPTIMIZERS.values()]


@needs_libtpu
@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e"])
def test_update_compiles_for_each_chip_and_reads_a_gradient_twice_at_most(small_programs, chip):
    shapes = programs.SETS["small"]()
    sent = {}
    for name, compiled in zip(programs.OPTIMIZERS, compiler.compile_programs(small_programs, chip, 4), strict=True):
        moved = traffic.traffic(compiled.hlo)
        # The gradient is read for the check that all is finite, and again for the update. On v5p the sums lie in HBM.
        more = 1 if chip != "v5p" else 6 if name.startswith("VR") else 2
        assert moved.hbm <= (programs.LEAST_WORDS[name] + more + 0.02) * bytes_of(shapes), name
        # The scalar of that check, the gradients, and their variances.
        assert dict(moved.collectives) == {"all-reduce": 3 if name.startswith("VR") else 2}, name
        assert not any(word in compiled.hlo for word in HOST), name
        sent[name] = moved.interconnect
    assert sent["VRLAMB"] == pytest.approx(2 * sent["LAMB"], rel=0.001)
    assert sent["VRLAMB, bfloat16 variance"] == pytest.approx(1.5 * sent["LAMB"], rel=0.001)


@needs_libtpu
def test_update_of_resnet50_on_256_chips():
    """No pass over HBM for collectives, no resharding, no copy of all gradients."""
    shapes = programs.SETS["ResNet-50"]()
    program = programs.export_update(programs.OPTIMIZERS["VRLAMB"], shapes, 256)
    compiled = compiler.compile_program(program.stablehlo, "v5e", 256)
    moved = traffic.traffic(compiled.hlo)
    assert moved.total <= 9.7 * bytes_of(shapes)
    assert moved.payload == {"all-reduce": pytest.approx(2 * bytes_of(shapes), rel=0.01)}
    assert moved.collectives["all-reduce"] <= 30
    assert compiled.temporary_bytes <= bytes_of(shapes)


@needs_libtpu
def test_train_step_compiles():
    """Model, loss, metric and update in one program: VRLAMB adds one sum for the variances to LAMB's step."""
    steps = [
        programs.export_train_step(programs.OPTIMIZERS[name], programs.MODELS["CNN"], 4).stablehlo
        for name in ("LAMB", "VRLAMB")
    ]
    lamb, vrlamb = (compiled.hlo for compiled in compiler.compile_programs(steps, "v5e", 4))
    assert not any(word in vrlamb for word in HOST)
    lamb, vrlamb = traffic.traffic(lamb), traffic.traffic(vrlamb)
    assert sum(vrlamb.collectives.values()) == sum(lamb.collectives.values()) + 1
    assert vrlamb.interconnect <= 2 * lamb.interconnect


def test_unknown_topology():
    with pytest.raises(ValueError, match=r"Expected one of .*v5e.* Received: .*v5e.*, 8"):
        compiler.compile_programs([], "v5e", 8)


@needs_libtpu
def test_program_that_does_not_compile():
    with pytest.raises(RuntimeError, match="did not compile a program for 4 v5e"):
        compiler.compile_program(b"not a program", "v5e", 4)
