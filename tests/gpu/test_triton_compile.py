"""Ahead-of-time compilation for GPUs that are not here: what the PTX must and must not hold.

The backend's own functions are called with meta tensors, their kernels replaced by a recorder. So each kernel is
compiled with the arguments, constants and alignment hints that a launch would give it; without the hints other code
would come out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter replaces the compiler", allow_module_level=True)

import triton
from pagedgen.kernels.api import SharedPrefixes
from pagedgen.kernels.gpu import attention
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}
TYPES |= {torch.int16: "i16"}
# What one program may have: sm_80 163 KB, sm_90 227 KB; sm_86 and sm_89 run sm_80's code in 99 KB.
SHARED_LIMIT_BYTES = 99 * 1024


class Recorder:
    """Stands in for a kernel: keeps what it is launched with."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.launch = None

    def __getitem__(self, grid):
        def record(*args, **kwargs):
            self.launch = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs

        return record


def compile_launch(recorder, capability):
    """Compile the recorded launch for `capability`, with the specialization the launcher would choose."""
    kernel, launch = recorder.kernel, dict(recorder.launch)
    signature, constexprs, hints = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = launch.pop(param.name)
        aligned = False
        if param.is_constexpr or value is None or (type(value) is int and value == 1 and not param.do_not_specialize):
            signature[param.name] = "constexpr"
            constexprs[param.name] = value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = "*" + TYPES[value.dtype]
            aligned = not param.do_not_specialize_on_alignment
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0 and not param.do_not_specialize
        if aligned:
            hints[(i,)] = [["tt.divisibility", 16]]
    assert launch.keys() <= {"num_warps", "num_stages", "enable_fp_fusion"}, "not an argument of the kernel"
    source = ASTSource(kernel, signature, constexprs, hints)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch)


@pytest.fixture
def record(monkeypatch, tmp_path):
    """Run a function of the backend on meta tensors and return {kernel name: recorder} of what it launched."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    recorders = {}
    for name in (
        "prefill_kernel",
        "prefix_split_kernel",
        "decode_split_kernel",
        "merge_splits_kernel",
        "write_kv_kernel",
        "copy_blocks_kernel",
    ):
        recorders[name] = Recorder(getattr(attention, name))
        monkeypatch.setattr(attention, name, recorders[name])

    def run(function, *args, **kwargs):
        function(*args, **kwargs)
        return {name: recorder for name, recorder in recorders.items() if recorder.launch is not None}

    return run


def meta_inputs(dtype, head_dim, max_context=4096):
    """Return (query, key_cache, value_cache, block_tables, cu_seqlens_q, seq_lens_kv, out) of 32 heads, 8 KV heads."""
    query = torch.empty((4000, 32, head_dim), dtype=dtype, device="meta")
    kv = torch.empty((9000, 32, 2, 8, 16, head_dim), dtype=dtype, device="meta")
    tables = torch.empty((250, max_context // 16), dtype=torch.int32, device="meta")
    cu_seqlens_q = torch.empty(251, dtype=torch.int32, device="meta")
    return query, kv[:, 5, 0], kv[:, 5, 1], tables, cu_seqlens_q, cu_seqlens_q[1:], torch.empty_like(query)


def launch_prefill(record, dtype, head_dim, **options):
    args = meta_inputs(dtype, head_dim)
    return record(attention.paged_prefill, *args, scale=0.1, max_seqlen_q=4000, **options)["prefill_kernel"]


def launch_decode(record, dtype, head_dim, max_context=4096, **options):
    query, key_cache, value_cache, tables, _, lengths, out = meta_inputs(dtype, head_dim, max_context=max_context)
    args = (query[:250], key_cache, value_cache, tables, lengths, out[:250])
    return record(attention.paged_decode, *args, scale=0.1, **options)


def launch_shared_decode(record, dtype, head_dim, **options):
    bounds = torch.empty(41, dtype=torch.int32, device="meta")
    shared = SharedPrefixes(bounds, bounds[1:], num_rows=250, max_shared_blocks=100)
    return launch_decode(record, dtype, head_dim, shared=shared, **options)


def resource_usage(compiled, tmp_path):
    """Return what the assembled kernel takes: {"REG": 128, "STACK": 0, ...}. Spilled registers live on the stack."""
    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    program = str(bundled) if bundled.exists() else shutil.which("cuobjdump")
    if program is None:
        pytest.skip("no cuobjdump")
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [program, "-res-usage", str(cubin)]
    report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}


def assert_good_code(compiled, tmp_path):
    """No scalar access to 16-bit elements, 64-bit offsets into the pool, shared memory and registers within limits."""
    ptx = compiled.asm["ptx"]
    assert not re.search(r"\b(ld|st)\.global[\w.:]*\.[bu](8|16)\b", ptx), "16-bit elements are accessed one by one"
    offsets = re.findall(r"tt\.addptr .*tensor<\w+x!tt\.ptr<\w*16>>, tensor<\w+x(i\d+)>", compiled.asm["ttir"])
    assert "i64" in offsets, "offsets into the pool are 32-bit"
    assert compiled.metadata.shared <= SHARED_LIMIT_BYTES
    usage = resource_usage(compiled, tmp_path)
    assert usage["STACK"] == usage["LOCAL"] == 0, "registers are spilled"


CAPABILITIES = pytest.mark.parametrize("capability", [80, 90])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
OPTIONS = {"sliding_window": 1000, "softcap": 30.0, "sinks": torch.empty(32, device="meta")}


@CAPABILITIES
@DTYPES
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prefill_code(record, tmp_path, capability, dtype, head_dim):
    """sm_90 multiplies with `wgmma` alone, sm_80 with `mma.sync`; K and V arrive by `cp.async`."""
    compiled = compile_launch(launch_prefill(record, dtype, head_dim), capability)
    assert_good_code(compiled, tmp_path)
    ptx = compiled.asm["ptx"]
    assert ("wgmma.mma_async" in ptx) == (capability == 90)
    assert ("mma.sync" in ptx) == (capability == 80)
    assert ptx.count("cp.async.cg.shared.global") > 0


@CAPABILITIES
@DTYPES
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_decode_code(record, tmp_path, capability, dtype, head_dim):
    """A group of queries is too few rows for `wgmma`; the products still run on tensor cores."""
    launched = launch_decode(record, dtype, head_dim)
    compiled = compile_launch(launched["decode_split_kernel"], capability)
    assert_good_code(compiled, tmp_path)
    assert "mma.sync" in compiled.asm["ptx"]
    assert compiled.asm["ptx"].count("cp.async.cg.shared.global") > 0
    merge = compile_launch(launched["merge_splits_kernel"], capability)
    assert "ld.global" in merge.asm["ptx"]
    assert not any(resource_usage(merge, tmp_path)[name] for name in ("STACK", "LOCAL"))


@CAPABILITIES
@DTYPES
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_shared_decode_code(record, tmp_path, capability, dtype, head_dim):
    """Many rows fill the product over their shared blocks as a prompt's queries do: `wgmma` on sm_90."""
    launched = launch_shared_decode(record, dtype, head_dim)
    compiled = compile_launch(launched["prefix_split_kernel"], capability)
    assert_good_code(compiled, tmp_path)
    ptx = compiled.asm["ptx"]
    assert ("wgmma.mma_async" in ptx) == (capability == 90)
    assert ("mma.sync" in ptx) == (capability == 80)
    assert ptx.count("cp.async.cg.shared.global") > 0
    own = compile_launch(launched["decode_split_kernel"], capability)
    assert_good_code(own, tmp_path)
    assert own.asm["ptx"].count("cp.async.cg.shared.global") > 0
    merge = compile_launch(launched["merge_splits_kernel"], capability)
    assert not any(resource_usage(merge, tmp_path)[name] for name in ("STACK", "LOCAL"))


def test_a_layer_with_a_window_takes_no_prefix_kernel(record):
    assert "prefix_split_kernel" not in launch_shared_decode(record, torch.bfloat16, 64, sliding_window=100)


@CAPABILITIES
def test_code_with_window_softcap_and_sinks(record, tmp_path, capability):
    for launch in (
        launch_prefill(record, torch.bfloat16, 128, **OPTIONS),
        launch_decode(record, torch.bfloat16, 128, **OPTIONS)["decode_split_kernel"],
        launch_shared_decode(record, torch.bfloat16, 128, softcap=30.0, sinks=OPTIONS["sinks"])["prefix_split_kernel"],
    ):
        compiled = compile_launch(launch, capability)
        assert_good_code(compiled, tmp_path)
        assert compiled.asm["ptx"].count("cp.async.cg.shared.global") > 0


@pytest.mark.parametrize("head_dim", [80, 96, 100, 160])
def test_code_with_a_padded_head_dim(record, tmp_path, head_dim):
    """Rows of 100 elements are aligned to 8 bytes only: still no load of single elements."""
    for launch in (
        launch_prefill(record, torch.bfloat16, head_dim),
        launch_decode(record, torch.bfloat16, head_dim)["decode_split_kernel"],
        launch_shared_decode(record, torch.bfloat16, head_dim)["prefix_split_kernel"],
    ):
        compiled = compile_launch(launch, 90)
        assert_good_code(compiled, tmp_path)
        assert re.search(r"cp\.async\.c[ag]\.shared\.global", compiled.asm["ptx"])


def test_a_narrow_batch_decodes_in_one_kernel(record, tmp_path):
    launched = launch_decode(record, torch.bfloat16, 128, max_context=512)
    assert list(launched) == ["decode_split_kernel"]
    assert_good_code(compile_launch(launched["decode_split_kernel"], 90), tmp_path)


@CAPABILITIES
def test_fp32_code_multiplies_in_fp32(record, capability):
    """Neither TF32 nor any tensor core: fp32 is what the other types are checked against."""
    for launch in (
        launch_prefill(record, torch.float32, 64),
        launch_decode(record, torch.float32, 64)["decode_split_kernel"],
        launch_shared_decode(record, torch.float32, 64)["prefix_split_kernel"],
    ):
        compiled = compile_launch(launch, capability)
        assert not re.search(r"tf32|mma", compiled.asm["ptx"])
        assert compiled.metadata.shared <= SHARED_LIMIT_BYTES


@CAPABILITIES
def test_write_and_copy_code(record, tmp_path, capability):
    """Both move 16 bytes at a time."""
    _, key_cache, value_cache, *_ = meta_inputs(torch.bfloat16, 128)
    new = torch.empty((4000, 8, 128), dtype=torch.bfloat16, device="meta")
    slots = torch.empty(4000, dtype=torch.int64, device="meta")
    write = record(attention.write_kv, new, new, key_cache, value_cache, slots)["write_kv_kernel"]
    kv = torch.empty((9000, 32, 2, 8, 16, 128), dtype=torch.bfloat16, device="meta")
    copy = record(attention.copy_blocks, kv, slots, slots)["copy_blocks_kernel"]
    for launch in (write, copy):
        compiled = compile_launch(launch, capability)
        assert_good_code(compiled, tmp_path)
        assert re.search(r"ld\.global[\w.:]*\.v4\.b32", compiled.asm["ptx"])
        assert re.search(r"st\.global[\w.:]*\.v4\.b32", compiled.asm["ptx"])
