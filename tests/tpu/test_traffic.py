"""The counter of bytes, on programs whose traffic is known: small modules, compiled by libtpu for 4 v5e chips.

What is larger than the 128 MiB of VMEM has to come from HBM each time that it is used.
"""

import pytest

from tests.tpu import needs_libtpu
from tpu_aot import compile as compiler
from tpu_aot import traffic

MB = 1 << 20
LARGE = "tensor<8192x16384xf32>"  # 512 MB
ALL = "replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>"


def module(body, parameters, results, attributes=""):
    arguments = ", ".join(f"%{name}: {kind}" for name, kind in parameters.items())
    return f"""
module @m attributes {{mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 4 : i32 {attributes}}} {{
  func.func public @main({arguments}) -> ({results}) {{
    {body}
  }}
}}
""".encode()


def traffic_of(*args, **kwargs):
    return traffic.traffic(compiler.compile_program(module(*args, **kwargs), "v5e", 4).hlo)


def near(megabytes):
    """Scalars and rounding up to tiles take a little more."""
    return pytest.approx(megabytes * MB, rel=0.01, abs=MB / 16)


SUM = f"""
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %sum = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0, 1]
      : ({LARGE}, tensor<f32>) -> tensor<f32>
"""


@needs_libtpu
@pytest.mark.parametrize(
    "body, parameters, results, read, written",
    [
        pytest.param(
            f"%y = stablehlo.add %a, %b : {LARGE}\n return %y : {LARGE}",
            {"a": LARGE, "b": LARGE},
            LARGE,
            1024,
            512,
            id="addition",
        ),
        pytest.param(f"{SUM} return %sum : tensor<f32>", {"x": LARGE}, "tensor<f32>", 512, 0, id="sum"),
        pytest.param(
            f"""{SUM}
            %all = stablehlo.broadcast_in_dim %sum, dims = [] : (tensor<f32>) -> {LARGE}
            %y = stablehlo.divide %x, %all : {LARGE}
            return %y : {LARGE}""",
            {"x": LARGE},
            LARGE,
            1024,
            512,
            id="two passes",
        ),
        pytest.param(
            f"""%part = stablehlo.slice %x [128:256, 0:16384] : ({LARGE}) -> tensor<128x16384xf32>
            %y = stablehlo.multiply %part, %part : tensor<128x16384xf32>
            return %y : tensor<128x16384xf32>""",
            {"x": LARGE},
            "tensor<128x16384xf32>",
            8,
            8,
            id="slice",
        ),
    ],
)
def test_known_computations(body, parameters, results, read, written):
    found = traffic_of(body, parameters, results)
    assert found.hbm_read == near(read)
    assert found.hbm_written == near(written)
    assert not found.collectives
    assert found.cycles > 0
