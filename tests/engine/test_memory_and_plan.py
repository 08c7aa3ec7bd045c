"""Memory from the machine, its cgroups and flags; plans checked against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pagedgen.config import EngineConfig
from pagedgen.engine import memory
from pagedgen.engine.planner import padded_tokens, plan_job
from pagedgen.errors import MemoryPlanError, UsageError
from pagedgen.model.spec import ModelSpec

GIB = 2**30


def spec(**changes):
    llama2_7b = {
        "model_type": "llama", "dtype": "float16", "num_layers": 32, "num_heads": 32, "num_kv_heads": 32, "head_dim": 128,
        "hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000, "max_model_len": 4096,
        "weights_bytes": 13_476_839_424, "tied_head_bytes": 0, "max_model_len_limited_by": "x", "eos_token_ids": (2,),
    }  # fmt: skip
    settings = {**llama2_7b, **changes}
    return ModelSpec(**{"kv_cache_dtype": settings["dtype"], **settings})


def plan(lens, max_tokens, **changes):
    settings = {
        "block_size": 16, "max_model_len": 4096, "max_num_seqs": 256, "max_num_batched_tokens": 8192,
        "prompt_lens": np.array(lens), "max_tokens": np.array(max_tokens), "num_row_errors": 0,
        "device_total_bytes": 80 * GIB, "device_free_bytes": 80 * GIB, "activation_peak_bytes": GIB,
        "available_kv_bytes": 20 * GIB,
    }  # fmt: skip
    return plan_job(spec(), **{**settings, **changes})


def test_kv_sizes_of_known_models():
    """Llama-2-7B in fp16: 512 KiB a token, 8 MiB a block of 16, 20 GiB hold 2560 blocks. SmolLM2-135M bf16: 22.5 KiB."""
    assert spec().bytes_per_token == 512 * 1024
    assert spec().bytes_per_block(16) == 8 * 2**20
    assert plan([100], [10]).max_block_num == 2560
    smol = spec(dtype="bfloat16", num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64)
    assert smol.bytes_per_token == 22.5 * 1024
    assert replace(smol, dtype="float32", kv_cache_dtype="bfloat16").bytes_per_token == 22.5 * 1024


def test_int8_counts_its_scales():
    """128 codes and a scale of 4 bytes a head: 264 KiB a token instead of 512, so 20 GiB hold 4964 blocks instead of 2560."""
    llama = spec(kv_cache_dtype="int8")
    assert llama.bytes_per_token == 2 * 32 * 32 * (128 + 4) == 264 * 1024
    assert llama.bytes_per_block(16) == 16 * 264 * 1024
    assert 20 * GIB // llama.bytes_per_block(16) == 4964
    assert spec(kv_cache_dtype="int8", head_dim=5).bytes_per_token == 2 * 32 * 32 * 9


def test_padding_of_a_published_example():
    lens = np.array([128, 200, 512, 1024, 2048, 256, 64, 1024])
    assert int(lens.sum()) == 5256
    assert padded_tokens(lens, 8) == 16384
    assert round(plan(lens, [1] * 8).padding_saved, 3) == 0.679
    assert padded_tokens(lens, 1) == 5256
    assert padded_tokens(lens, 3) == 3 * 512 + 3 * 2048 + 2 * 1024


def test_blocks_are_counted_in_whole_blocks_without_the_last_token():
    one = plan([16], [1])
    assert one.peak_blocks_needed == 1  # the only generated token is never fed back
    assert plan([16], [2]).peak_blocks_needed == 2
    many = plan([16, 31, 100], [1, 1, 13], max_num_seqs=2)
    assert many.peak_blocks_needed == 7 + 2  # the two largest rows at once
    assert many.num_blocks == 9


def test_samples_share_their_prompts_full_blocks():
    """Blocks of 16: a prompt of 40 fills two and shares them; each sample adds its own from there."""
    assert plan([40], [9], samples=np.array([4])).peak_blocks_needed == 2 + 4 * 1
    assert plan([40], [25], samples=np.array([4])).peak_blocks_needed == 2 + 4 * 2
    assert plan([40, 40], [9, 9], samples=np.array([4, 4]), max_num_seqs=4).peak_blocks_needed == 6
    assert plan([40], [9], samples=np.array([4])).max_new_tokens == 36


def test_rows_that_can_not_run_are_foretold():
    planned = plan([20, 70, 40, 20, 4096], [10, 10, 100, 10, 10], block_size=4, num_gpu_blocks_override=16)
    assert (planned.num_too_long, planned.num_too_large) == (1, 2)
    assert planned.prompt_tokens == 40


def test_a_pool_for_no_row_is_refused_with_the_numbers():
    with pytest.raises(MemoryPlanError, match=r"needs 7 blocks.*3 fit into .*free .*weights .*activations"):
        plan([100], [10], available_kv_bytes=3 * 8 * 2**20)
    with pytest.raises(MemoryPlanError, match="no memory for the KV pool beside weights"):
        plan([100], [10], available_kv_bytes=-5)


@pytest.mark.parametrize(
    ("free", "utilization", "own", "pending", "want"),
    [(80, 0.9, 0, 10, 62), (80, 0.9, 15, 1, 56), (40, 0.9, 0, 10, 30), (80, 1.0, 0, 0, 80), (5, 0.5, 45, 2, -7)],
)
def test_pool_is_bounded_by_the_share_and_by_what_is_free(free, utilization, own, pending, want):
    """The share is of all memory, as vLLM means it; memory that others hold is never planned with."""
    device = memory.DeviceMemory(80 * GIB, free * GIB, "test")
    got = memory.available_kv_bytes(device, utilization=utilization, own_bytes=own * GIB, pending_bytes=pending * GIB)
    assert got == want * GIB


def fake_proc(tmp_path, cgroup):
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    return proc


def test_no_cgroup_limit_means_the_machine(tmp_path):
    got = memory.cpu_memory(fake_proc(tmp_path, "0::/\n"), tmp_path / "none")
    assert (got.total_bytes, got.free_bytes, got.source) == (16 * GIB, 8 * GIB, "host memory")


def test_cgroup_v2_limits_on_the_way_up_are_respected(tmp_path):
    root = tmp_path / "cgroup"
    job = root / "slurm" / "job_1" / "step_0"
    job.mkdir(parents=True)
    (job / "memory.max").write_text("max\n")
    (job.parent / "memory.max").write_text(str(4 * GIB))
    (job.parent / "memory.current").write_text(str(3 * GIB))
    (job.parent / "memory.stat").write_text(f"anon 1\ninactive_file {GIB}\n")
    got = memory.cpu_memory(fake_proc(tmp_path, "0::/slurm/job_1/step_0\n"), root)
    assert (got.total_bytes, got.free_bytes, got.source) == (4 * GIB, 2 * GIB, "cgroup limit")


def test_cgroup_v1_limit_is_respected_and_no_limit_is_none(tmp_path):
    root = tmp_path / "cgroup"
    job = root / "memory" / "slurm"
    job.mkdir(parents=True)
    (root / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712")
    (job / "memory.limit_in_bytes").write_text(str(2 * GIB))
    (job / "memory.usage_in_bytes").write_text(str(GIB))
    got = memory.cpu_memory(fake_proc(tmp_path, "5:cpu:/\n4:memory:/slurm\n"), root)
    assert (got.total_bytes, got.free_bytes) == (2 * GIB, GIB)


def test_this_machine_can_be_measured():
    got = memory.cpu_memory()
    assert 0 < got.free_bytes <= got.total_bytes
    memory.reset_peak()
    assert 0 < memory.resident_bytes() <= memory.peak_resident_bytes() + 2**20


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dtype": "int3"}, "--dtype int3"), ({"device": "tpu"}, "--device"), ({"block_size": 24}, "--block-size 24"),
        ({"block_size": 2}, "--block-size"), ({"max_num_seqs": 0}, "--max-num-seqs"), ({"seed": -1}, "--seed"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"), ({"gpu_memory_utilization": 0}, "utilization"),
        ({"threads": 0}, "--threads"), ({"sort": "random"}, "--sort"), ({"backend": "cuda"}, "--backend"),
        ({"num_gpu_blocks_override": -1}, "--max-block-num"), ({"max_num_seqs": 10**20}, "--max-num-seqs"),
        ({"max_num_batched_tokens": 10**20}, "--max-num-batched-tokens"), ({"threads": 10**20}, "--threads"),
    ],
)  # fmt: skip
def test_bad_settings_name_their_flag(settings, named):
    with pytest.raises(UsageError, match=named):
        EngineConfig(model="m", **settings)


def test_settings_resolve_to_something_complete():
    got = EngineConfig(model="m").resolve(
        device="cpu", dtype="float32", max_model_len=64, limited_by="its positions", threads=2
    )
    assert None not in [
        v
        for k, v in got.to_dict().items()
        if k not in ("revision", "kv_cache_memory_bytes", "num_gpu_blocks_override", "disk_swap_path")
    ]
    assert (got.backend, got.block_size, got.max_model_len) == ("cpu", 32, 64)
    on_gpu = EngineConfig(model="m").resolve(
        device="cuda", dtype="bfloat16", max_model_len=64, limited_by="its positions", threads=2
    )
    assert (on_gpu.backend, on_gpu.block_size) == ("gpu", 16)
    tight = EngineConfig(model="m", max_num_batched_tokens=7).resolve(
        device="cpu", dtype="float32", max_model_len=64, limited_by="its positions", threads=1
    )
    assert tight.max_num_seqs == 7


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_model_len": 65}, "--max-model-len 65"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "--max-num-batched-tokens 8"),
        ({"backend": "gpu"}, "--backend gpu"),
    ],
)
def test_settings_that_contradict_the_model_or_each_other(settings, named):
    with pytest.raises(UsageError, match=named):
        EngineConfig(model="m", **settings).resolve(
            device="cpu", dtype="float32", max_model_len=64, limited_by="its positions", threads=2
        )
