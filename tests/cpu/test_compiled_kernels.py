"""Quantized kernels compiled for Hopper, without a GPU.

The tests compile code that Triton's interpreter takes but the compiler may refuse. They look at the instructions, and
at the layout that decides a norm's order of addition.
"""

import ast
import inspect
import re
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import mangle_type

from preheat.backends.cuda.attention import hopper as attention_hopper
from preheat.backends.cuda.attention import hopper_decode as attention_hopper_decode
from preheat.backends.cuda.attention import paged as paged_attention
from preheat.backends.cuda.attention.paged import _decode, _prefill
from preheat.backends.cuda.device.card import CARDS
from preheat.backends.cuda.device.hopper import descriptor
from preheat.backends.cuda.device.launch import widened
from preheat.backends.cuda.matmul import products
from preheat.backends.cuda.matmul.config import ExpertsShape, LinearShape, Tile, Wide
from preheat.backends.cuda.matmul.gemm import apart, gemm, looped
from preheat.backends.cuda.matmul.hopper import large_m as linear_hopper
from preheat.backends.cuda.matmul.hopper import large_m_fp8 as linear_hopper_fp8
from preheat.backends.cuda.matmul.hopper import small_m as linear_hopper_small_m
from preheat.backends.cuda.matmul.kernels import rule
from preheat.backends.cuda.matmul.lora.expand import Expansion, _expand
from preheat.backends.cuda.matmul.lora.routed import _expand_experts, _expand_tokens, _shrink_experts, _shrink_slots
from preheat.backends.cuda.matmul.lora.shrink import Shrinking, ShrinkSizes, _shrink
from preheat.backends.cuda.matmul.lora.slots import _add_roots, _gather
from preheat.backends.cuda.matmul.maps import Cut, Routed, RoutedForm, all_rows, all_rows_masked, by_expert
from preheat.backends.cuda.matmul.products import Codes, CodesForm, Float8, Float8Form
from preheat.backends.cuda.matmul.rules import experts_rule
from preheat.backends.cuda.pointwise.norm import _norm
from preheat.backends.cuda.pointwise.quantize import _greatest, _quantize
from preheat.backends.cuda.ranks.collective import _add_ranks
from preheat.backends.cuda.ranks.peer_kernels import BESIDE, EACH, GATHER, SHARES, exchange
from preheat.backends.cuda.ranks.peer_landed import _add, _add_and_norm
from preheat.backends.cuda.ranks.peer_norm import _share_and_norm, _sum_and_norm
from preheat.ops.kinds import Scheme

HOPPER = GPUTarget("cuda", 90, 32)
SHARED = 232_448
"""Bytes of shared memory that a program may have."""
FP8, NUMBERS = "*fp8e4nv", ("rows", "outputs", "inputs", "columns", "groups", "row_bytes", "X_GROUPS", "size")
NUMBERS += ("expert_scales", "stride")
TYPES = {
    **dict.fromkeys(("scales", "x_scales", "row_scales", "static"), "*fp32"), "zeros": "*fp32", "index": "*i32",
    **dict.fromkeys(("x", "y", "weight", "residual", "out"), "*bf16"), "share": "fp32", "eps": "fp32", "codes": FP8,
}  # fmt: skip
PLACES = {"experts": "*i32", "starts": "*i32", "counts": "*i32", "tokens": "*i32"}


def compiled(kernel, warps, stages, types=(), fused=True, **constants):
    """Compile a kernel.

    ``constants`` are arguments with a value, ``types`` replace the usual types of others. ``fused``: the compiler may
    fuse products and sums.
    """
    known = TYPES | PLACES | dict.fromkeys(NUMBERS, "i32") | dict(types)
    names = kernel.arg_names
    constants["overlap"] = True
    signature = {name: "constexpr" if name in constants else known[name] for name in names}
    whole = [(names.index(name),) for name in names if name not in constants | {"rows": 0} and known[name] != "fp32"]
    values = {(names.index(name),): value for name, value in constants.items()}
    for at, name in enumerate(names):  # each member of a tuple is an argument of its own
        if name not in constants and isinstance(known[name], tuple):
            missing = [member for member, kind in enumerate(known[name]) if kind is None]
            values |= {(at, member): None for member in missing}
            signature[name] = type(known[name])(*(kind or "constexpr" for kind in known[name]))
            whole += [(at, member) for member in range(len(known[name])) if member not in missing]
    source = ASTSource(
        kernel, signature, values,
        {path: [["tt.divisibility", 16]] for path in whole},
    )  # fmt: skip
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fused}
    found = triton.compile(source, target=HOPPER, options=options)
    assert found.metadata.shared <= SHARED
    return found


GLUON = TYPES | {"bias": "*bf16", "steps": "i32"} | dict.fromkeys(NUMBERS, "i32")


def of_gluon(kernel, given, constants, types=GLUON, **options):
    """Compile a Gluon kernel.

    ``given`` are descriptors, ``types`` replace the usual types of other arguments.
    """
    types = types | {name: mangle_type(value) for name, value in given.items()}
    source = GluonASTSource(
        kernel, {name: types.get(name) for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr"),
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )  # fmt: skip
    return triton.compile(source, target=HOPPER, options={"num_warps": 4, "num_stages": 1, **options})


def instructions(found):
    return set(re.findall(r"wgmma\.mma_async\S*|mma\.sync\S*", found.asm["ptx"]))


W8A8 = Float8(FP8, "*fp32", "*fp32", "i32", "i32")
EXPERTS = {"K": 8, "EXPERTS": 128}
ROUTED = Routed(*["*i32"] * 4, "i32")


def stored(kind="*u8", zeros="*fp32", index=None):
    """Weights as codes of the type ``kind``."""
    return Codes(kind, "*fp32", zeros, index, *["i32"] * 4)


def multiplied(warps, stages, weight, form, sizes, *, y="*bf16", gated=False, experts=None, asked=0, narrow=None):
    """The kernel of products of a ``weight`` in tiles of ``sizes``, compiled; ``experts`` say how they are routed."""
    float8 = isinstance(weight, Float8)
    given = {"x": FP8 if float8 else "*bf16", "w": weight, "y": y} | ({} if experts is None else {"groups": ROUTED})
    dense, more = all_rows if float8 else all_rows_masked, dict.fromkeys(("bias", "x_tiles", "w_tiles", "ACTIVATION"))
    return compiled(
        gemm, warps, stages, given, **more, **({"groups": None} if experts is None else {}),
        MAP=by_expert if experts else dense, PRODUCT=products.float8 if float8 else products.codes,
        SUM=apart if experts else looped, FORM=form, GROUPS=experts, CUT=Cut(*sizes), gated=gated, ASKED=asked,
        NARROW=narrow,
    )  # fmt: skip


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("outputs", "rows", "inputs", "gated"), [(64, 16, 512, False), (64, 16, 256, True), (128, 128, 128, False)]
)
def test_float8_is_multiplied_by_the_matrix_unit(outputs, rows, inputs, gated, grouped):
    form = Float8Form(grouped, grouped, grouped, even=True)
    found = multiplied(8 if rows == 128 else 4, 3, W8A8, form, (outputs, rows, inputs, 1), gated=gated)
    assert instructions(found) == {f"wgmma.mma_async.sync.aligned.m64n{rows}k32.f32.e4m3.e4m3"}


@pytest.mark.parametrize("code", ["fp8", "int4"])
def test_k_splits_use_the_instructions_of_whole_layers(code):
    """K splits use the instructions of whole layers, in the same order, in a loop over the splits."""
    quantized: Scheme = Scheme(code=code, scales="channel", activations="token" if code == "fp8" else None)
    tile = rule(LinearShape(4096, 4096, scheme=quantized, splits=4), 64)
    assert isinstance(tile, Tile)
    weight, form = stored("*u8", None), CodesForm(four=True, group=0, even=True)
    if code == "fp8":
        weight, form = W8A8, Float8Form(grouped=False, x_grouped=False, w_grouped=False, even=True)
    whole, split = (
        multiplied(tile.warps, tile.stages, weight, form, (tile.outputs, tile.rows, tile.inputs, n), y="*fp32")
        for n in (1, 4)
    )
    assert instructions(whole) == instructions(split) and len(instructions(split)) == 1
    assert whole.asm["ptx"].count("wgmma.mma_async") == split.asm["ptx"].count("wgmma.mma_async")
    assert widths(whole) == widths(split)


def test_parts_of_rows_are_quantized_by_maxima_of_all_ranks():
    types = {"maxima": "*fp32", "places": "*i32"}
    for places in ({}, {"places": None}):
        sizes = {"SIZE": 1024, "WIDTH": 1024, **places}
        assert "div.full" not in compiled(_greatest, 2, 1, types, **sizes).asm["ptx"]
        found = compiled(_quantize, 2, 1, types, out=None, static=None, KIND="token", WORLD=4, **sizes)
        assert "e4m3x2" in found.asm["ptx"] and "div.full" not in found.asm["ptx"]


ADAPTERS = {
    "given": Shrinking("*bf16", "*bf16", "*fp32", "*i32", "*fp32", "*i32"),
    "adapters": Expansion("*fp32", "*bf16", *["*i32"] * 4, "*fp32", *["*i32"] * 4), "z": "*bf16", "shrunk": "*fp32",
    **dict.fromkeys(("adapter_slots", "members"), "*i32"), "slots": "i32", "size": "i32",
}  # fmt: skip


@pytest.mark.parametrize(("k_splits", "rows", "together"), [(1, 16, 1), (4, 16, 1), (1, 32, 3)])
def test_adapters_shrink_by_the_matrix_unit(k_splits, rows, together):
    """Adapters shrink by one instruction, for few rows and for many.

    With many rows, one product has all parts of a layer.
    """
    sizes = ShrinkSizes(4096, 3, 2, k_splits).constants
    found = compiled(
        _shrink, 4, 3, ADAPTERS, **sizes, TOGETHER=together, ROWS=rows, ACROSS=triton.next_power_of_2(together * 16),
        adds=rows == 32, scaled=k_splits == 1, beside=True,
    )  # fmt: skip
    assert instructions(found) == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [16, 32])
def test_adapters_expand_without_rounding_one_number_at_a_time(rows, gated):
    sizes = {"TILES": 2, "RANKS": 16, "COLUMNS": 128, "ROWS": rows, "WORLD": 1, "PARTS": 2, "WHOLE": True}
    sizes |= {"K_SPLITS": 1, "SPLITS": 8 if rows == 16 else 0}
    found = compiled(_expand, 4, 2, ADAPTERS, **sizes, gated=gated, chosen=False)
    assert "F2FP.BF16.F32.PACK_AB" in found.asm["sass"] and "F2F.BF16" not in found.asm["sass"]


@pytest.mark.parametrize("tiles", [1, 2])
def test_expanded_terms_are_added_behind_the_matrix_unit(tiles):
    """The matrix unit begins with zero, even for one product.

    The layer's output is added behind it.
    """
    sizes = {"TILES": tiles, "RANKS": 16, "COLUMNS": 128, "ROWS": 16, "WORLD": 1, "PARTS": 3, "WHOLE": True}
    sizes |= {"K_SPLITS": 1, "SPLITS": 8}
    found = compiled(_expand, 4, 2, ADAPTERS, **sizes, gated=False, chosen=False)
    begins = re.search(r"tt\.dot %\w+, %\w+, (%\w+)", found.asm["ttir"])
    assert begins and re.search(rf"{begins[1]} = arith\.constant dense<0\.0+e\+00>", found.asm["ttir"])
    assert "add.rn.f32" in found.asm["ptx"]


def many_rows(choice, gated, adapters):
    """Compile the kernel for many rows on Hopper, of a layer of two parts."""
    sides = 2 if gated else 1
    x, weight, y = (torch.empty(*size, dtype=torch.bfloat16) for size in ((2048, 512), (1024, 512), (2048, 1024)))
    given = {
        "x": descriptor(x, choice.rows // 2, 64),
        "y": descriptor(y[:, : 1024 // sides], choice.rows // 2, choice.outputs // 2),
        "weight": descriptor(weight.view(sides, -1, 512), sides, choice.outputs // sides, 64),
    }  # fmt: skip
    constants = dict.fromkeys(("bias", "experts", "starts", *(() if adapters else ("adapters",))))
    constants |= {"gated": gated, "EXPERTS": 1, "STAGES": choice.stages, "overlap": True}
    constants |= {"TILES": 1, "WORLD": 1, "PARTS": 2, "SPLITS": 1}
    types = GLUON | {"adapters": ADAPTERS["adapters"], "slots": "i32"}
    return of_gluon(linear_hopper._wide, given, constants, types, maxnreg=168)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("choice", [Wide(256, 128, 4), Wide(128, 128, 6), Wide(64, 128, 6)])
def test_adapters_leave_products_of_many_rows_asynchronous(choice, gated):
    """With adapters, as many products wait for the one before as without.

    The compiler makes all products wait if the code behind them does not suit it.
    """
    waits = [many_rows(choice, gated, each).asm["sass"].count("WARPGROUP.DEPBAR.LE") for each in (False, True)]
    assert waits[0] == waits[1] > 0


@pytest.mark.parametrize("one", [{}, {"stride": 1}], ids=["", "of single numbers"])
def test_the_sum_over_ranks_compiles(one):
    """Triton makes an argument of 1 a constant, and a constant has no ``to``."""
    types = {"parts": "*fp32", "bias": "*bf16", "stride": "i32"}
    found = compiled(_add_ranks, 4, 1, types, WORLD=4, BLOCK=1024, **one)
    assert ".target sm_90a" in found.asm["ptx"] and "atom" not in found.asm["ptx"]


@pytest.mark.parametrize("one", [{}, {"stride": 1}], ids=["", "of single numbers"])
def test_the_kernel_that_sums_shrunk_rows_of_ranks_compiles(one):
    types = {"adapter_slots": "*i32", "tiles": "*i32", "stride": "i32", "slots": "i32"}
    types |= dict.fromkeys(("parts", "shrunk", "scales"), "*fp32")
    found = compiled(_add_roots, 1, 1, types, WORLD=4, ROWS=16, RANKS=16, **one)
    assert ".target sm_90a" in found.asm["ptx"] and "atom" not in found.asm["ptx"]


def test_adapters_of_embeddings_compile():
    integers = dict.fromkeys(("sequences", "last_token", "own", "adapter_slots", "members", "tiles"), "*i32")
    types = {"a": "*bf16", "shrunk": "*fp32", "scales": "*fp32", "slots": "i32", "vocab": "i32", **integers}
    found = compiled(_gather, 1, 1, types, TILES=2, ROWS=16, RANKS=16)
    assert ".target sm_90a" in found.asm["ptx"] and "st.global" in found.asm["ptx"]


@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize("blocked", [1, 32])
def test_adapters_of_experts_compile(blocked, dtype):
    floats = {"x": dtype, "y": dtype, "a": dtype, "b": dtype, "shrunk": "*fp32", "scales": "*fp32", "most": "i32"}
    types = floats | dict.fromkeys(("tiles", "slots", "adapter_slots"), "*i32") | {"height": "i32"}
    sizes = {**EXPERTS, "BLOCKED": blocked, "PARTS": 2, "TILES": 2, "TABLE": 512, "ROWS": 16, "RANKS": 16}
    more = {"WIDTH": 512, "CHUNK": 128, "EVEN": True, "gathered": dtype == "*bf16"}
    shrink = compiled(_shrink_experts, 4, 3, types, **sizes, **more)
    expand = compiled(_expand_experts, 4, 2, types, **sizes, COLUMNS=128)
    if dtype == "*bf16":
        assert instructions(shrink) == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}
        assert len(instructions(expand)) == 1


@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize(("blocked", "k_splits", "world"), [(1, 4, 1), (32, 2, 2), (32, 1, 4)])
def test_adapters_of_experts_that_ranks_share_compile(blocked, k_splits, world, dtype):
    floats = {"x": dtype, "y": dtype, "a": dtype, "b": dtype} | dict.fromkeys(("shrunk", "parts", "weights"), "*fp32")
    types = (
        floats
        | dict.fromkeys(("tiles", "rows_of", "members", "adapter_slots"), "*i32")
        | {"size": "i32", "stride": "i32"}
    )
    types["scales"] = "*fp32"
    sizes = {**EXPERTS, "BLOCKED": blocked, "TILES": 2, "TABLE": 512, "ROWS": 16, "RANKS": 16}
    shrink = compiled(_shrink_slots, 4, 3, types, **sizes, K_SPLITS=k_splits, WIDTH=256, CHUNK=128)
    expand = compiled(_expand_tokens, 4, 2, types, **sizes, WORLD=world, COLUMNS=128)
    if dtype == "*bf16":
        assert instructions(shrink) == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}
        assert len(instructions(expand)) == 1


@pytest.mark.parametrize(("gated", "gathered", "arranged", "k_splits"), [
    (False, False, False, 1), (True, True, True, 1), (False, True, True, 1), (False, False, True, 4),
])  # fmt: skip
def test_experts_compile(gated, gathered, arranged, k_splits):
    """Expert kernels compile.

    The first layer gathers rows, and beside adapters it is not gated.
    """
    routed, sizes = RoutedForm(128, 8, gathered, arranged), (64, 16, 128, k_splits)
    whole = Float8Form(grouped=False, x_grouped=False, w_grouped=False, even=True)
    found = multiplied(4, 4, W8A8, whole, sizes, gated=gated, experts=routed)
    assert instructions(found) == {"wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3"}
    for four, dtype in ((True, "*u8"), (False, "*i8")):
        form = CodesForm(four, group=128, even=True)
        found = multiplied(4, 4, stored(dtype), form, sizes, gated=gated, experts=routed)
        assert instructions(found) == {"wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16"}


def test_weights_are_asked_for_before_the_kernel_ahead_has_ended():
    form = CodesForm(four=True, group=32, even=False, e2m1=True, powers=True)
    weight = stored(zeros=None)._replace(scales="*i32")
    routed = RoutedForm(128, 8, gathered=False, arranged=False)
    text = multiplied(2, 4, weight, form, (32, 16, 128, 1), experts=routed, asked=512).asm["ptx"]
    asked = [found.start() for found in re.finditer(r"prefetch\.global\.L2", text)]
    assert len(asked) * 64 >= 32 * 512 // 64  # by 64 threads, 64 bytes of an output each time
    assert max(asked) < text.index("griddepcontrol.wait") < text.index("cp.async")


def test_few_rows_of_an_expert_take_a_narrow_instruction():
    form = CodesForm(four=True, group=32, even=False, e2m1=True, powers=True, whole=True)
    routed = RoutedForm(32, 4, gathered=True, arranged=True)
    weight, narrow = stored(zeros=None)._replace(scales="*i32"), Cut(64, 16, 128, 1)
    found = multiplied(4, 3, weight, form, (64, 32, 128, 1), experts=routed, narrow=narrow)
    assert instructions(found) == {f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16" for rows in (16, 32)}


@pytest.mark.parametrize("tokens", [1, 600])
def test_experts_of_small_groups_fit_into_shared_memory(tokens):
    """Guessed tiles of small groups fit into shared memory.

    Each weight of a small group brings a scale and a zero point of its own.
    """
    scheme = Scheme(code="int4", scales="group", group=32, zeros=True)
    tile = experts_rule(ExpertsShape(8, 256, 256, 2, torch.bfloat16, scheme), tokens).gate_up
    assert isinstance(tile, Tile)
    sizes, routed = (tile.outputs, tile.rows, tile.inputs, 1), RoutedForm(128, 8, gathered=True, arranged=True)
    form = CodesForm(four=True, group=32, even=False)
    multiplied(tile.warps, tile.stages, stored(), form, sizes, gated=True, experts=routed)


@pytest.mark.parametrize(("weight", "form"), [
    (stored(), CodesForm(four=True, group=128, even=True)),
    (stored(index="*i32"), CodesForm(four=True, group=32, even=False)),
    (stored("*u8", None), CodesForm(four=True, group=32, even=False, e2m1=True)),
    (stored("*i8", None), CodesForm(four=False, group=0, even=True)),
    (stored(FP8, None), CodesForm(four=False, group=0, even=True)),
])  # fmt: skip
def test_codes_become_operands_of_the_matrix_unit(weight, form):
    for outputs, instruction in ((64, "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16"), (32, "mma.sync")):
        made = multiplied(outputs // 16, 3, weight, form, (outputs, 16, 128, 1), gated=outputs == 64)
        found = instructions(made)
        assert len(found) == 1 and found.pop().startswith(instruction)
        assert widths(made) == {2}


def widths(found):
    """Return how many neighboring inputs of a product a thread holds, for each operand in registers.

    The order in which inputs are added up follows from it.
    """
    return {int(width) for width in re.findall(r"#ttg\.dot_op<\{[^}]*kWidth = (\d+)\}>", found.asm["ttgir"])}


ATTENDED = {
    **dict.fromkeys(("q", "out"), "*bf16"), **dict.fromkeys(("parts", "tops", "totals", "sinks"), "*fp32"),
    **dict.fromkeys(("table", "slots", "positions", "arrived", "claims"), "*i32"),
    **dict.fromkeys(("work", "num_work", "tiles", "num_tiles"), "*i32"),
    **dict.fromkeys(("scale", "value_scale"), "fp32"), "cache": FP8, "max_blocks": "i32",
    **{f"{name}_stride": "i32" for name in ("q", "head", "block", "value", "kv")},
}  # fmt: skip
ATTENTION: dict[str, Any] = {
    "HEADS": 32, "KV_HEADS": 8, "DIM": 128, "WIDTH": 128, "ROWS": 16, "BLOCK": 64, "SPLIT": 256, "TILE": 64,
    "WINDOW": 0, "alibi": None,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [FP8, "*fp8e5"])
def test_keys_and_values_of_eight_bits_keep_the_order_of_others(dtype):
    given = {"QUERIES": 1, "VERIFY": False, "sinks": None, **ATTENTION}
    found = compiled(_decode, 4, 2, ATTENDED | {"cache": dtype}, **given)
    assert widths(found) == {2}
    assert "cvt.bf16.f16" not in found.asm["ptx"]  # F2F, for each number
    wide = compiled(_decode, 4, 2, ATTENDED | {"cache": "*bf16"}, **given | {"value_scale": None})
    assert found.metadata.shared <= wide.metadata.shared  # keys and values are widened in turn


@pytest.mark.parametrize("fused", [False, True])
def test_decoding_and_prompts_round_a_sink_alike(fused):
    """The product of a sink is rounded. Control: left to itself, the compiler fuses it in one kernel alone."""
    given, prompts = {"QUERIES": 1, "VERIFY": False, **ATTENTION}, {"GROUP_ROWS": 4, "SIDES": False, **ATTENTION}
    kernels = compiled(_decode, 4, 2, ATTENDED, fused, **given), compiled(_prefill, 4, 2, ATTENDED, fused, **prompts)
    log2e = r"fma\.rn\.f32\s+\S+ \S+ 0f3FB8AA3B"
    assert [bool(re.search(log2e, each.asm["ptx"])) for each in kernels] == [False, fused]


def test_attention_is_compiled_without_fusion():
    for module in (paged_attention, attention_hopper, attention_hopper_decode):
        calls = [each for each in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(each, ast.Call)]
        launches = [call for call in calls if isinstance(call.func, ast.Subscript)]
        options = [{word.arg: ast.unparse(word.value) for word in call.keywords} for call in launches]
        assert options and all(each["enable_fp_fusion"] == "False" for each in options)


@triton.jit
def product(x, codes, y, WIDENED: tl.constexpr, overlap: tl.constexpr):
    at, inputs = tl.arange(0, 16), tl.arange(0, 64)
    numbers = tl.load(codes + at[:, None] * 64 + inputs[None, :])
    numbers = widened(numbers, tl.bfloat16) if WIDENED else numbers.to(tl.bfloat16)
    found = tl.dot(numbers, tl.load(x + at[None, :] * 64 + inputs[:, None]))
    tl.store(y + at[:, None] * 16 + at[None, :], found.to(tl.bfloat16))


def test_the_compiler_deals_out_narrow_numbers_in_another_order_if_it_sees_them():
    assert widths(compiled(product, 4, 1, {"codes": "*i8"}, WIDENED=True)) == {2}
    assert widths(compiled(product, 4, 1, {"codes": "*i8"}, WIDENED=False)) == {4}


def sums(found):
    """Return the layouts of one-dimensional rows that are reduced."""
    text = found.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<(.*)>", text, re.M))
    return [(size, layouts[name]) for size, name in re.findall(r"\}\) : \(tensor<(\d+)xf32, (#\w+)>\)", text)]


@pytest.mark.parametrize(("size", "warps"), [(2048, 4), (4096, 8), (5120, 16)])
def test_a_norm_adds_up_its_row_in_the_same_order_whether_it_gives_codes_or_not(size, warps):
    """A store of eight bits changes no thread's part of the row.

    So it changes no order of the sum.
    """
    row = {"bias": None, "KIND": "rms", "SIZE": size, "WIDTH": triton.next_power_of_2(size)}
    none = dict.fromkeys(("static", "codes", "row_scales", "SCALES"))
    usual = sums(compiled(_norm, warps, 1, **row, **none))
    assert len(usual) == 1
    for more in ({"SCALES": "token", "static": None}, {"SCALES": "block", "static": None, "out": None},
                 {"SCALES": "static", "out": None}):  # fmt: skip
        assert sums(compiled(_norm, warps, 1, **row, **more)) == usual


class OfRanks(NamedTuple):
    """One argument of a kernel for each of two ranks."""

    first: str
    second: str


PEERS = {"parts": OfRanks("*fp32", "*fp32"), "flags": OfRanks("*i64", "*i64"), "results": OfRanks("*bf16", "*bf16")}
PEERS |= {"landed": OfRanks("*fp32", "*fp32"), "returned": OfRanks("*bf16", "*bf16"), "room": "i32", "share": "i32"}
PEERS |= {"mine": "*fp32", "epochs": "*i64", "silent": "*i64", "rows": "i32", "patience": "i64"}
LANDED = {"RANK": 1, "WORLD": 2}
TWO = LANDED | {"STRIDE": 8192, "PROGRAMS": 128}


@pytest.mark.parametrize(("size", "warps"), [(1024, 2), (2560, 8), (8192, 16)])
@pytest.mark.parametrize("codes", [False, True])
def test_a_norm_in_the_launch_of_an_exchange_adds_up_its_row_in_the_same_order(size, warps, codes):
    """The sum of ranks is in fp32, and the row that a norm reads is not: the layout follows the residual."""
    row = {"bias": None, "KIND": "rms", "SIZE": size, "WIDTH": triton.next_power_of_2(size)}
    none = dict.fromkeys(("static", "codes", "row_scales", "SCALES"))
    given = {"static": None, "SCALES": "token"} if codes else none
    alone = compiled(_norm, warps, 1, **row, **given)
    found = compiled(_sum_and_norm, warps, 1, {**PEERS, "share": "fp32"}, **row, **given, **TWO, addend=None)
    shares = compiled(_share_and_norm, warps, 1, {**PEERS, "share": "fp32"}, **row, **given, **TWO, addend=None)
    landed = compiled(_add_and_norm, warps, 1, {**PEERS, "part": "fp32"}, **row, **given, **LANDED, addend=None)
    fused = alone.asm["ptx"].count("fma.rn.f32")
    for each, times in ((found, 1), (shares, 2), (landed, 2)):  # rows of this rank, and rows of the other one
        assert set(sums(each)) == set(sums(alone)) != set()
        assert each.asm["ptx"].count("fma.rn.f32") == times * fused > 0, "fused in one kernel alone"
        assert "ld.local" not in each.asm["ptx"]


def test_landed_sums_are_sent_in_words_of_sixteen_bytes():
    """Flags are raised behind all writes, and read before all reads, as the other GPU sees them."""
    kinds = PEERS | {"out": "*bf16"} | dict.fromkeys(("size", "outputs"), "i32")
    found = compiled(_add, 8, 1, kinds, **LANDED, bias=None, BLOCK=4096).asm["ptx"]
    assert found.count("st.global.v4.b32") >= 4 and found.count("atom.global.sys.release.max.s64") >= 2
    assert "sys.acquire" in found and "multimem" not in found


@pytest.mark.parametrize("form", [EACH, SHARES, GATHER, BESIDE])
def test_an_exchange_writes_to_its_peer_in_words_of_sixteen_bytes(form):
    """Its flag is raised behind all writes, and read before all reads, as the other GPU sees them."""
    kinds = PEERS | {"out": "*bf16"} | dict.fromkeys(("size", "outputs", "columns"), "i32")
    found = compiled(exchange, 8, 1, kinds, **TWO, bias=None, FORM=form.value, BLOCK=4096).asm["ptx"]
    assert found.count("st.global.v4.b32") >= 4 and "atom.global.sys.release.max.s64" in found
    assert "sys.acquire" in found and "multimem" not in found


@pytest.mark.parametrize("kind", ["token", "block"])
def test_rows_are_quantized_in_registers(kind):
    """Rows are quantized in registers, also an activation's rows kept beside their codes."""
    row = {"SIZE": 14336, "WIDTH": 16384, "KIND": kind, "WORLD": 1, **dict.fromkeys(("static", "places", "maxima"))}
    found = compiled(_quantize, 32, 1, out=None, **row), compiled(_quantize, 8, 1, **row)
    assert not any("ld.local" in each.asm["ptx"] for each in found)


@pytest.mark.parametrize(
    ("outputs", "stages", "gated", "splits"),
    [(256, 4, False, 1), (256, 4, True, 1), (128, 6, True, 1), (128, 6, False, 2)],
)
def test_float8_of_many_rows_sums_128_products_from_zero(outputs, stages, gated, splits):
    """The first of four instructions takes no sum, and the sum of the four is added in fp32."""
    x, weight = (torch.empty(512, 1024, dtype=torch.float8_e4m3fn) for _ in range(2))
    y, halves = torch.empty(512, 512, dtype=torch.bfloat16 if splits == 1 else torch.float32), 2 if gated else 1
    given = {
        "weight": descriptor(weight.view(halves, -1, 1024), halves, outputs // halves, 128),
        "x": descriptor(x, 64, 128),
        "y": descriptor(y, 64, outputs // 2),
    }  # fmt: skip
    constants = {"gated": gated, "STAGES": stages, "SPLITS": splits, "overlap": True}
    found = of_gluon(linear_hopper_fp8._wide, given, constants, maxnreg=168, enable_fp_fusion=False)
    assert found.metadata.shared <= SHARED
    assert instructions(found) == {f"wgmma.mma_async.sync.aligned.m64n{outputs // 2}k32.f32.e4m3.e4m3"}
    ptx = found.asm["ptx"]
    # two groups, two halves of the outputs, four times 32 inputs
    assert ptx.count("wgmma.mma_async") == 16 * splits
    assert "fma.rn.f32" not in ptx.partition("wgmma.mma_async")[2].rpartition("wgmma.wait_group")[0]


def test_a_split_of_experts_is_a_part_of_each_row_of_their_weights():
    """Hopper's kernel reads the second half of the inputs of each expert, and its fp32 tiles fit beside the stages."""
    weight, x = torch.empty(8, 512, 768, dtype=torch.bfloat16), torch.empty(1024, 768, dtype=torch.bfloat16)
    tile = experts_rule(ExpertsShape(8, 512, 768, 2, torch.bfloat16, splits=2), 8192, card=CARDS[9, 0]).down
    assert isinstance(tile, Wide)
    given = {
        "x": descriptor(x[:, 384:], tile.rows // 2, 64), "weight": descriptor(weight[..., 384:], 1, tile.outputs, 64),
        "y": descriptor(torch.empty(1024, 512), tile.rows // 2, tile.outputs // 2),
    }  # fmt: skip
    assert given["weight"].strides == (512 * 768, 768, 1) and list(given["x"].shape) == [1024, 384]
    constants = {"gated": False, "EXPERTS": 8, "STAGES": tile.stages, "SPLITS": 1, "overlap": True, "bias": None}
    constants |= {"TILES": 0, "WORLD": 1, "PARTS": 1, "adapters": None}
    types = {"experts": "*i32", "starts": "*i32", "slots": "i32"}
    found = of_gluon(linear_hopper._wide, given, constants, types, maxnreg=168)
    assert found.metadata.shared <= SHARED
    assert instructions(found) == {"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"}


@pytest.mark.parametrize(("rows", "gated"), [(8, False), (64, True)])
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float32], ids=str)
def test_few_rows_multiply_codes_in_registers(rows, gated, scales):
    """Products go one after the other into one sum, and nothing is spilled to shared memory between them."""
    kernel = linear_hopper_small_m._small_m_codes
    x, groups = torch.empty(1, 1024, dtype=torch.bfloat16), torch.empty(8, 512)
    given = {
        "x": linear_hopper_small_m._chunks(x, 4, rows),
        "codes": linear_hopper_small_m._rows(torch.empty(512, 512, dtype=torch.uint8), gated, 128),
        "scales": linear_hopper_small_m._pairs(groups.to(scales), gated, (2, 4, 2, 8)),
        "zeros": linear_hopper_small_m._pairs(groups, gated, (2, 4, 2, 8)),
    }  # fmt: skip
    constants = {"gated": gated, "GROUP": 128, "STAGES": 3, "overlap": True}
    found = of_gluon(kernel, given, constants, maxnreg=80)
    assert found.metadata.shared <= SHARED
    products = re.findall(r"^\s*(?:wgmma\.mma_async|mma)\.sync\S*", found.asm["ptx"], re.M)
    assert len(products) == 16 and {each.split(".")[0].strip() for each in products} == {
        "mma" if rows < 32 else "wgmma"
    }
    steps = found.asm["ptx"].partition("wgmma.mma_async" if rows >= 32 else "mma.sync")[2]
    assert "st.shared" not in steps.rpartition("wgmma.mma_async" if rows >= 32 else "mma.sync")[0]


@pytest.mark.parametrize(("gated", "splits"), [(False, 1), (True, 1), (False, 2)])
def test_few_rows_of_float8_sum_128_products_from_zero(gated, splits):
    x, weight = (torch.empty(rows, 1024, dtype=torch.float8_e4m3fn) for rows in (1, 512))
    given = {
        "x": descriptor(x.view(1, -1, 128).transpose(0, 1), 1, 8, 128),
        "codes": linear_hopper_small_m._rows(weight, gated, 128),
    }
    constants = {"gated": gated, "SPLITS": splits, "STAGES": 4, "overlap": True}
    found = of_gluon(linear_hopper_small_m._small_m_float8, given, constants, maxnreg=64, enable_fp_fusion=False)
    assert instructions(found) == {"wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3"}
    assert "fma.rn.f32" not in found.asm["ptx"].partition("wgmma.mma_async")[2].rpartition("wgmma.wait_group")[0]


@pytest.mark.parametrize(("stored", "dim"), [(torch.float8_e4m3fn, 128), (torch.float8_e5m2, 64)])
def test_prompts_multiply_keys_and_values_of_eight_bits_as_others(stored, dim):
    kernel = attention_hopper._prefill_narrow
    queries = torch.empty(512, 8, dim, dtype=torch.bfloat16)
    cache = torch.empty(4, 2, 2, 64, dim, dtype=torch.bfloat16).to(stored)
    given = {"q": descriptor(queries, 16, 4, dim), "cache": descriptor(cache, 1, 1, 1, 64, dim)}
    constants = {
        "HEADS": 8, "KV_HEADS": 2, "BLOCK": 64, "SPLIT": 256, "WINDOW": 0, "STAGES": attention_hopper.STAGES,
        "overlap": True,
    }  # fmt: skip
    types = dict.fromkeys(kernel.arg_names, "*i32") | dict.fromkeys(("scale", "value_scale"), "fp32")
    types |= {"out": "*bf16", "max_blocks": "i32"}
    found = of_gluon(kernel, given, constants, types, maxnreg=128)
    assert found.metadata.shared <= SHARED
    expected = {f"wgmma.mma_async.sync.aligned.m64n{size}k16.f32.bf16.bf16" for size in (64, dim)}
    assert {each for each in instructions(found) if each.startswith("wgmma")} == expected
    assert "cvt.bf16.f16" not in found.asm["ptx"]


@pytest.mark.parametrize(("stored", "code"), [(torch.float8_e4m3fn, "e4m3x2"), (torch.float8_e5m2, "e5m2x2")])
def test_decoding_rows_widen_codes_between_shared_memory_and_the_matrix_unit(stored, code):
    kernel = attention_hopper_decode._decode
    cache = torch.empty(4, 2, 2, 64, 128, dtype=torch.bfloat16).to(stored).view(torch.int16)
    constants = {
        "HEADS": 8, "KV_HEADS": 2, "DIM": 128, "BLOCK": 64, "SPLIT": 256, "WINDOW": 0, "E5": code == "e5m2x2",
        "STAGES": attention_hopper_decode.STAGES, "overlap": True,
    }  # fmt: skip
    floats = dict.fromkeys(("parts", "tops", "totals", "sinks"), "*fp32")
    types = dict.fromkeys(kernel.arg_names, "*i32") | dict.fromkeys(("scale", "value_scale"), "fp32") | floats
    types |= dict.fromkeys(("q", "out"), "*bf16") | dict.fromkeys(("q_stride", "head_stride", "max_blocks"), "i32")
    found = of_gluon(
        kernel, {"cache": descriptor(cache, 1, 1, 1, 64, 64)}, constants, types,
        num_warps=attention_hopper_decode.WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    assert found.metadata.shared * attention_hopper_decode.PROGRAMS <= SHARED
    assert instructions(found) == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}
    lanes = 32 * attention_hopper_decode.WARPS
    widened = len(re.findall(rf"cvt\.rn\.f16x2\.{code}", found.asm["ptx"]))
    assert widened * 2 * lanes == 2 * 64 * 128  # each code of a tile of keys and of values once
