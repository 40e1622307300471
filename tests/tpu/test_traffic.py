"""The counter of bytes, on programs whose traffic is known: small modules, compiled by libtpu for 4 v5e chips.

What is larger than the 128 MiB of VMEM has to come from HBM each time that it is used.
"""

import pytest

from tests.tpu import needs_libtpu
from tpu_aot import compile as compiler
from tpu_aot import traffic

MB = 1 << 20
LARGE = "tensor<8192x16384xf32>"  # 512 MB
QUARTER = "tensor<2048x16384xf32>"  # of LARGE
ROWS = "tensor<256x16384xf32>"  # 16 MB
BF16 = "tensor<8192x16384xbf16>"
SMALL = "tensor<1024x1024xf32>"  # 4 MB
TABLE, CHOSEN, INDICES = "tensor<262144x512xf32>", "tensor<2048x512xf32>", "tensor<2048x1xi32>"
SENT = "tensor<4x1024x4096xf32>"  # 64 MB
SHARD = "tensor<1x1024x4096xf32>"
DONATED = " {tf.aliasing_output = 0 : i32}"
ALL = "replica_groups = dense<[[0, 1, 2, 3]]> : tensor<1x4xi64>"
PAIRS = "replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>"


def module(body, parameters, results):
    arguments = ", ".join(f"%{name}: {kind}" for name, kind in parameters.items())
    return f"""
module @m attributes {{mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 4 : i32}} {{
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
INTEGERS = "\n".join(
    f"%{name} = stablehlo.constant dense<{value}> : tensor<i32>"
    for name, value in {"n0": 0, "n1": 1, "n2": 2, "n4": 4, "n8": 8, "n9": 9, "n2048": 2048}.items()
)
ADD = """({
  ^bb0(%p: tensor<f32>, %q: tensor<f32>):
    %added = stablehlo.add %p, %q : tensor<f32>
    stablehlo.return %added : tensor<f32>
})"""


def update(name, into, part, kind, row="%n8"):
    return f"""%{name} = stablehlo.dynamic_update_slice %{into}, %{part}, {row}, %n0
      : ({LARGE}, {kind}, tensor<i32>, tensor<i32>) -> {LARGE}
    """


def loop(body, first="%n0", limit="%n9", step="%n2", compare="LT", results=LARGE):
    """A loop of which `body` makes %next from %value; it starts with %x, and runs 5 times if nothing else is said."""
    return f"""{INTEGERS}
    %loop:2 = stablehlo.while(%i = {first}, %value = %x) : tensor<i32>, {results}
    cond {{
      %more = stablehlo.compare {compare}, %i, {limit} : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %more : tensor<i1>
    }} do {{
      {body}
      %following = stablehlo.add %i, {step} : tensor<i32>
      stablehlo.return %following, %next : tensor<i32>, {results}
    }}
    return %loop#1 : {results}"""


def scatter(into):
    return f"""%y = "stablehlo.scatter"(%{into}, %i, %u) {ADD} {{
      scatter_dimension_numbers = #stablehlo.scatter<
        update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>
    }} : ({TABLE}, {INDICES}, {CHOSEN}) -> {TABLE}
    return %y : {TABLE}"""


def chain(kind):
    lines = [f"%v0 = stablehlo.sine %x : {kind}"]
    for i in range(9):
        lines.append(f"%b{i} = stablehlo.optimization_barrier %v{i} : {kind}")
        lines.append(f"%v{i + 1} = stablehlo.sine %b{i} : {kind}")
    return "\n".join([*lines, f"return %v9 : {kind}"])


# Of the branches the second moves more.
BRANCHES = f"""({{
      %part = stablehlo.slice %x [0:2048, 0:16384] : ({LARGE}) -> {QUARTER}
      %y = stablehlo.sine %part : {QUARTER}
      stablehlo.return %y : {QUARTER}
    }}, {{
      %a = stablehlo.slice %x [0:2048, 0:16384] : ({LARGE}) -> {QUARTER}
      %b = stablehlo.slice %x [4096:6144, 0:16384] : ({LARGE}) -> {QUARTER}
      %y = stablehlo.add %a, %b : {QUARTER}
      stablehlo.return %y : {QUARTER}
    }})"""


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
        pytest.param(
            f"%y = stablehlo.add %a, %b : {BF16}\n return %y : {BF16}",
            {"a": BF16, "b": BF16},
            BF16,
            512,
            256,
            id="bf16",
        ),
        pytest.param(
            f"%y = stablehlo.convert %x : ({BF16}) -> {LARGE}\n return %y : {LARGE}",
            {"x": BF16},
            LARGE,
            256,
            512,
            id="bf16 to f32",
        ),
        pytest.param(f"return %x : {LARGE}", {"x": LARGE}, LARGE, 512, 512, id="copy"),
        pytest.param(
            f"""%y = stablehlo.transpose %x, dims = [1, 0] : ({LARGE}) -> tensor<16384x8192xf32>
            return %y : tensor<16384x8192xf32>""",
            {"x": LARGE},
            "tensor<16384x8192xf32>",
            512,
            512,
            id="transpose",
        ),
        pytest.param(chain(LARGE), {"x": LARGE}, LARGE, 5120, 5120, id="chain through HBM"),
        pytest.param(chain(SMALL), {"x": SMALL}, SMALL, 4, 4, id="chain in VMEM"),
        pytest.param(
            f"{INTEGERS}{update('y', 'x', 'u', ROWS)} return %y : {LARGE}",
            {"x": LARGE + DONATED, "u": ROWS},
            LARGE,
            16,
            16,
            id="update in place",
        ),
        pytest.param(
            f"{INTEGERS}{update('y', 'x', 'u', ROWS)} return %y : {LARGE}",
            {"x": LARGE, "u": ROWS},
            LARGE,
            528,
            528,
            id="update of a copy",
        ),
        pytest.param(
            f"""{INTEGERS}
            %a = stablehlo.exponential %u : {QUARTER}
            %b = stablehlo.sine %u : {QUARTER}
            {update("y", "x1", "a", QUARTER)}
            {update("z", "x2", "b", QUARTER)}
            return %y, %z : {LARGE}, {LARGE}""",
            {"x1": LARGE + DONATED, "x2": LARGE + DONATED.replace("0 :", "1 :"), "u": QUARTER},
            f"{LARGE}, {LARGE}",
            128,
            256,
            id="two updates in one fusion",
        ),
        pytest.param(
            f"""%y = "stablehlo.gather"(%x, %i) {{
              dimension_numbers = #stablehlo.gather<
                offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>,
              slice_sizes = array<i64: 1, 512>
            }} : ({TABLE}, {INDICES}) -> {CHOSEN}
            return %y : {CHOSEN}""",
            {"x": TABLE, "i": INDICES},
            CHOSEN,
            4,
            4,
            id="gather",
        ),
        # Reads the rows of the table and what is added to them.
        pytest.param(
            scatter("x"), {"x": TABLE + DONATED, "i": INDICES, "u": CHOSEN}, TABLE, 8, 4, id="scatter in place"
        ),
        pytest.param(
            f"""%zero = stablehlo.constant dense<0.0> : {TABLE}
            {scatter("zero")}""",
            {"i": INDICES, "u": CHOSEN},
            TABLE,
            8,
            516,
            id="scatter into zeros",
        ),
        pytest.param(
            loop(f"%next = stablehlo.sine %value : {LARGE}"),
            {"x": LARGE + DONATED},
            LARGE,
            5 * 512,
            5 * 512,
            id="loop",
        ),
        pytest.param(
            loop(f"%next = stablehlo.sine %value : {LARGE}", first="%n4"),
            {"x": LARGE + DONATED},
            LARGE,
            3 * 512,
            3 * 512,
            id="loop from 4",
        ),
        pytest.param(
            loop(
                f"""%inner:2 = stablehlo.while(%k = %n0, %v = %value) : tensor<i32>, {LARGE}
                cond {{
                  %c = stablehlo.compare LT, %k, %n4 : (tensor<i32>, tensor<i32>) -> tensor<i1>
                  stablehlo.return %c : tensor<i1>
                }} do {{
                  %w = stablehlo.sine %v : {LARGE}
                  %n = stablehlo.add %k, %n1 : tensor<i32>
                  stablehlo.return %n, %w : tensor<i32>, {LARGE}
                }}
                %next = stablehlo.negate %inner#1 : {LARGE}"""
            ),
            {"x": LARGE + DONATED},
            LARGE,
            5 * 5 * 512,
            5 * 5 * 512,
            id="nested loops",
        ),
        # Each of 4 runs replaces another quarter.
        pytest.param(
            loop(
                f"""%row = stablehlo.multiply %i, %n2048 : tensor<i32>
                %part = stablehlo.dynamic_slice %value, %row, %n0, sizes = [2048, 16384]
                  : ({LARGE}, tensor<i32>, tensor<i32>) -> {QUARTER}
                %new = stablehlo.sine %part : {QUARTER}
                {update("next", "value", "new", QUARTER, "%row")}""",
                limit="%n4",
                step="%n1",
            ),
            {"x": LARGE + DONATED},
            LARGE,
            512,
            512,
            id="loop over slices",
        ),
        pytest.param(
            f"""%r = "stablehlo.case"(%i) {BRANCHES} : (tensor<i32>) -> {QUARTER}
            return %r : {QUARTER}""",
            {"x": LARGE, "i": "tensor<i32>"},
            QUARTER,
            256,
            128,
            id="case",
        ),
        pytest.param(
            f"""%r = "stablehlo.if"(%i) {BRANCHES} : (tensor<i1>) -> {QUARTER}
            return %r : {QUARTER}""",
            {"x": LARGE, "i": "tensor<i1>"},
            QUARTER,
            256,
            128,
            id="if",
        ),
        # A fusion whose last instruction has two results.
        pytest.param(
            """%n0 = stablehlo.constant dense<0> : tensor<i32>
            %zero = stablehlo.constant dense<0.0> : tensor<f32>
            %columns = stablehlo.iota dim = 1 : tensor<131072x1024xi32>
            %y:2 = "stablehlo.reduce"(%x, %columns, %zero, %n0) ({
              ^bb0(%a: tensor<f32>, %i: tensor<i32>, %b: tensor<f32>, %j: tensor<i32>):
                %c = stablehlo.compare GT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
                %most = stablehlo.select %c, %a, %b : tensor<i1>, tensor<f32>
                %where = stablehlo.select %c, %i, %j : tensor<i1>, tensor<i32>
                stablehlo.return %most, %where : tensor<f32>, tensor<i32>
            }) {dimensions = array<i64: 1>}
              : (tensor<131072x1024xf32>, tensor<131072x1024xi32>, tensor<f32>, tensor<i32>)
              -> (tensor<131072xf32>, tensor<131072xi32>)
            return %y#0, %y#1 : tensor<131072xf32>, tensor<131072xi32>""",
            {"x": "tensor<131072x1024xf32>"},
            "tensor<131072xf32>, tensor<131072xi32>",
            512,
            1,
            id="two results",
        ),
    ],
)
def test_known_computations(body, parameters, results, read, written):
    found = traffic_of(body, parameters, results)
    assert found.hbm_read == near(read)
    assert found.hbm_written == near(written)
    assert not found.collectives
    assert found.interconnect == found.collective_hbm == 0


@needs_libtpu
def test_cycles_are_xlas_estimate_and_grow_with_the_work():
    parameters = {"x": LARGE + DONATED}
    body = f"%next = stablehlo.sine %value : {LARGE}"
    once, five_times = (traffic_of(loop(body, limit=limit), parameters, LARGE).cycles for limit in ("%n1", "%n9"))
    # So long 1 GB takes at 819 GB/s and 0.94 GHz.
    assert once > 1_200_000
    assert five_times == 5 * once


@needs_libtpu
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"limit": "%limit"}, id="limit"),
        pytest.param({"first": "%limit"}, id="first"),
        pytest.param({"step": "%limit"}, id="step"),
        pytest.param({"compare": "LE"}, id="another comparison"),
    ],
)
def test_loops_of_unknown_length(how):
    body = loop(f"%next = stablehlo.sine %value : {LARGE}", **how)
    with pytest.raises(ValueError, match="loops that run a known number of times"):
        traffic_of(body, {"x": LARGE + DONATED, "limit": "tensor<i32>"}, LARGE)


def all_reduce(name, operand, kind=SENT, groups=ALL):
    return f'%{name} = "stablehlo.all_reduce"(%{operand}) {ADD} {{{groups}}} : ({kind}) -> {kind}\n'


@needs_libtpu
@pytest.mark.parametrize(
    "body, parameters, results, kind, payload, hbm, interconnect",
    [
        pytest.param(
            f"{all_reduce('y', 'x')} return %y : {SENT}", {"x": SENT}, SENT, "all-reduce", 64, 128, 96, id="all-reduce"
        ),
        pytest.param(
            f"{all_reduce('y', 'x', groups=PAIRS)} return %y : {SENT}",
            {"x": SENT},
            SENT,
            "all-reduce",
            64,
            128,
            64,
            id="all-reduce in pairs",
        ),
        pytest.param(
            f"{all_reduce('y', 'x', SMALL)} {all_reduce('z', 'w', SMALL)} return %y, %z : {SMALL}, {SMALL}",
            {"x": SMALL, "w": SMALL},
            f"{SMALL}, {SMALL}",
            "all-reduce",
            8,
            16,
            12,
            id="all-reduces that XLA combines",
        ),
        pytest.param(
            f"""%y = "stablehlo.reduce_scatter"(%x) {ADD} {{scatter_dimension = 0 : i64, {ALL}}} : ({SENT}) -> {SHARD}
            return %y : {SHARD}""",
            {"x": SENT},
            SHARD,
            "reduce-scatter",
            64,
            80,
            48,
            id="reduce-scatter",
        ),
        pytest.param(
            f"""%y = "stablehlo.all_gather"(%x) {{all_gather_dim = 0 : i64, {ALL}}} : ({SHARD}) -> {SENT}
            return %y : {SENT}""",
            {"x": SHARD},
            SENT,
            "all-gather",
            64,
            80,
            48,
            id="all-gather",
        ),
        pytest.param(
            f"""%y = "stablehlo.collective_permute"(%x) {{
              source_target_pairs = dense<[[0, 1], [1, 2], [2, 3], [3, 0]]> : tensor<4x2xi64>
            }} : ({SENT}) -> {SENT}
            return %y : {SENT}""",
            {"x": SENT},
            SENT,
            "collective-permute",
            64,
            128,
            64,
            id="permutation",
        ),
    ],
)
def test_collectives(body, parameters, results, kind, payload, hbm, interconnect):
    found = traffic_of(body, parameters, results)
    assert found.collectives == {kind: 1}
    assert found.payload[kind] == payload * MB
    # XLA may let a copy in VMEM write the result: each byte is still read and written once.
    assert found.total == near(hbm)
    assert found.interconnect == near(interconnect)


@needs_libtpu
def test_collectives_count_as_often_as_a_loop_runs():
    body = loop(all_reduce("next", "value"), results=SENT)
    found = traffic_of(body, {"x": SENT + DONATED}, SENT)
    assert found.collectives == {"all-reduce": 5}
    assert found.payload["all-reduce"] == near(5 * 64)
    assert found.interconnect == near(5 * 96)


@needs_libtpu
def test_reduce_scatter_as_a_fusion():
    # XLA pads the rows that it scatters to another number of tiles, and sends its neighbours what they lack.
    sent, shard = "tensor<4096x4096xf32>", "tensor<1024x4096xf32>"
    body = f"""%y = "stablehlo.reduce_scatter"(%x) {ADD} {{scatter_dimension = 0 : i64, {ALL}}} : ({sent}) -> {shard}
    return %y : {shard}"""
    compiled = compiler.compile_program(module(body, {"x": sent}, shard), "v5e", 4)
    assert "reduce-scatter(" not in compiled.hlo
    found = traffic.traffic(compiled.hlo)
    assert found.collectives == {"reduce-scatter": 1, "collective-permute": 1}
    assert found.payload["reduce-scatter"] == near(64)
    assert found.interconnect == near(48 + found.payload["collective-permute"] / MB)
    assert found.total == near(80)


@pytest.mark.parametrize(
    "shape, expected",
    [
        ("f32[]", [(4, 0)]),
        ("pred[]", [(1, 0)]),
        ("pred[7]{0}", [(7, 0)]),
        ("f32[]{:T(128)S(6)}", [(4, 6)]),
        ("f32[4096,128]{1,0:T(8,128)}", [(4096 * 128 * 4, 0)]),
        ("f32[3,3,8,16]{3,2,1,0:T(8,128)}", [(3 * 3 * 8 * 128 * 4, 0)]),
        # The layout names the minor-most dimension first: here the 8 are padded to 128, and the 16 stay.
        ("f32[3,3,8,16]{2,3,1,0:T(8,128)}", [(3 * 3 * 128 * 16 * 4, 0)]),
        ("bf16[64,32]{1,0:T(8,128)(2,1)S(1)}", [(64 * 128 * 2, 1)]),
        ("s32[1000]{0:T(1024)}", [(1024 * 4, 0)]),
        ("u8[5]{0}", [(5, 0)]),
        ("c64[2]{0}", [(16, 0)]),
        ("f8e4m3fn[2]{0}", [(2, 0)]),
        ("s4[6]{0}", [(3, 0)]),
        ("token[]", [(0, 0)]),
        ("(f32[2]{0}, (bf16[3]{0:S(1)}, u32[]{:S(2)}), /*index=3*/s64[])", [(8, 0), (6, 1), (4, 2), (8, 0)]),
    ],
)
def test_arrays(shape, expected):
    assert [(array.bytes, array.memory_space) for array in traffic.parse_arrays(shape)] == expected


def scheduled(entry, computations=""):
    return f"""HloModule m, is_scheduled=true, replica_count=4
{computations}
ENTRY %main (x: f32[256,1024], u: f32[8,1024]) -> f32[256,1024] {{
  %x = f32[256,1024]{{1,0:T(8,128)}} parameter(0)
  %u = f32[8,1024]{{1,0:T(8,128)}} parameter(1)
  %n0 = s32[]{{:S(6)}} constant(0)
{entry}
}}
"""


def test_what_an_update_writes_depends_on_where_it_writes():
    part = 8 * 1024 * 4
    in_place = "  ROOT %y = f32[256,1024]{1,0:T(8,128)} dynamic-update-slice(%x, %u, %n0, %n0)"
    found = traffic.traffic(scheduled(in_place))
    assert (found.hbm_read, found.hbm_written) == (part, part)

    from_vmem = f"  %v = f32[8,1024]{{1,0:T(8,128)S(1)}} copy(%u)\n{in_place.replace('%u', '%v')}"
    found = traffic.traffic(scheduled(from_vmem))
    assert (found.hbm_read, found.hbm_written) == (part, part)

    into_vmem = in_place.replace("(8,128)}", "(8,128)S(1)}")
    found = traffic.traffic(scheduled(into_vmem))
    assert (found.hbm_read, found.hbm_written) == (part, 0)

    # What is updated is made in the fusion, so that all of it is written.
    fused = """%fused (p: f32[8,1024]) -> f32[256,1024] {
  %p = f32[8,1024]{1,0:T(8,128)} parameter(0)
  %zero = f32[] constant(0)
  %n = s32[] constant(0)
  %all = f32[256,1024]{1,0:T(8,128)} broadcast(%zero), dimensions={}
  ROOT %d = f32[256,1024]{1,0:T(8,128)} dynamic-update-slice(%all, %p, %n, %n)
}"""
    found = traffic.traffic(scheduled("  ROOT %y = f32[256,1024]{1,0:T(8,128)} fusion(%u), calls=%fused", fused))
    assert (found.hbm_read, found.hbm_written) == (part, 32 * part)


@pytest.mark.parametrize(
    "instruction, read, written",
    [
        ("f32[8,1024]{1,0:T(8,128)} slice(%x), slice={[8:16], [0:1024]}", 8, 8),
        ("f32[8,1024]{1,0:T(8,128)S(1)} dynamic-slice(%x, %n0, %n0), dynamic_slice_sizes={8,1024}", 8, 0),
        ('f32[256,1024]{1,0:T(8,128)} custom-call(%x), custom_call_target="ConcatBitcast"', 0, 0),
        ('f32[256,1024]{1,0:T(8,128)} custom-call(%x, %u), custom_call_target="Other"', 264, 256),
    ],
)
def test_single_instructions(instruction, read, written):
    found = traffic.traffic(scheduled(f"  ROOT %y = {instruction}"))
    assert (found.hbm_read, found.hbm_written) == (read * 4096, written * 4096)


@pytest.mark.parametrize("carried, runs", [("%last", 6), ("%following", None)])
def test_a_limit_that_a_loop_carries(carried, runs):
    kinds = "(s32[]{:S(6)}, s32[]{:S(6)}, f32[256,1024]{1,0:T(8,128)})"
    elements = f"""
  %c = {kinds} parameter(0)
  %i = s32[]{{:S(6)}} get-tuple-element(%c), index=0
  %last = s32[]{{:S(6)}} get-tuple-element(%c), index=1"""
    computations = f"""
%condition (c: (s32[], s32[], f32[256,1024])) -> pred[] {{{elements}
  ROOT %more = pred[]{{:S(6)}} compare(%i, %last), direction=LT
}}

%body (c: (s32[], s32[], f32[256,1024])) -> (s32[], s32[], f32[256,1024]) {{{elements}
  %value = f32[256,1024]{{1,0:T(8,128)}} get-tuple-element(%c), index=2
  %next = f32[256,1024]{{1,0:T(8,128)}} negate(%value)
  %n1 = s32[]{{:S(6)}} constant(1)
  %following = s32[]{{:S(6)}} add(%n1, %i)
  ROOT %results = {kinds} tuple(%following, {carried}, %next)
}}
"""
    entry = f"""  %n6 = s32[]{{:S(6)}} constant(6)
  %initial = {kinds} tuple(%n0, %n6, %x)
  %loop = {kinds} while(%initial), condition=%condition, body=%body
  ROOT %y = f32[256,1024]{{1,0:T(8,128)}} get-tuple-element(%loop), index=2"""
    text = scheduled(entry, computations)
    if runs is None:
        with pytest.raises(ValueError, match="loops that run a known number of times"):
            traffic.traffic(text)
    else:
        assert traffic.traffic(text).hbm_read == runs * MB


@pytest.mark.parametrize("groups, size", [("{{0,1},{2,3}}", 2), ("[1,4]<=[4]", 4), ("[2,2]<=[4]", 2), ("{}", 4)])
def test_groups(groups, size):
    line = f"  ROOT %y = f32[256,1024]{{1,0:T(8,128)}} all-reduce(%x), replica_groups={groups}, to_apply=%add"
    assert traffic.traffic(scheduled(line)).interconnect == MB * 2 * (size - 1) / size


@pytest.mark.parametrize("text", ["", "HloModule m, replica_count=4\n\nENTRY %main () -> f32[] {\n}\n"])
def test_text_that_is_no_scheduled_module(text):
    with pytest.raises(ValueError, match="scheduled HLO module"):
        traffic.traffic(text)
