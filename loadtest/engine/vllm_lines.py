"""Lines that vLLM writes when a start, a wake or a group of GPUs fails, with numbers to be filled in.

Each kind of `sidecar diagnose` has the wordings of several versions. They are those of published logs; a test compares
them. Sizes are GiB.
"""

from __future__ import annotations

from collections.abc import Mapping

LINES: Mapping[str, tuple[str, ...]] = {
    "free_memory_too_low": (
        "ValueError: Free memory on device cuda:{gpu} ({free:.2f}/{total:.2f} GiB) on startup is less than desired GPU "
        "memory utilization ({utilization:g}, {desired:.2f} GiB). Decrease GPU memory utilization or reduce GPU memory "
        "used by other processes.",
        "ValueError: Free memory on device ({free:.2f}/{total:.2f} GiB) on startup is less than desired GPU memory "
        "utilization ({utilization:g}, {desired:.2f} GiB). Decrease GPU memory utilization or reduce GPU memory used "
        "by other processes.",
    ),
    "kv_too_small": (
        "ValueError: To serve at least one request with the models's max seq len ({length}), ({needed:.2f} GiB KV "
        "cache is needed, which is larger than the available KV cache memory ({available:.2f} GiB). Based on the "
        "available memory, the estimated maximum model length is {fits}. Try increasing `gpu_memory_utilization` or "
        "decreasing `max_model_len` when initializing the engine.",
        "ValueError: To serve at least one request with the model's max seq len ({length}), {needed:.2f} GiB KV cache "
        "is needed, which is larger than the available KV cache memory ({available:.2f} GiB).",
        "ValueError: The model's max seq len ({length}) is larger than the maximum number of tokens that can be stored "
        "in KV cache ({fits}). Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing "
        "the engine.",
    ),
    "no_kv": (
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
        "initializing the engine.",
    ),
    "mamba_blocks": (
        "ValueError: max_num_seqs ({sequences}) exceeds available Mamba cache blocks ({blocks}). Each decode sequence "
        "requires one Mamba cache block, so CUDA graph capture cannot proceed. Please lower max_num_seqs to at most "
        "{blocks} or increase gpu_memory_utilization.",
        "ValueError: max_num_seqs ({sequences}) exceeds available Mamba cache blocks ({blocks}).",
    ),
    "oom": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried:.2f} GiB. GPU {gpu} has a total capacity "
        "of {total:.2f} GiB of which {free:.2f} GiB is free. Including non-PyTorch memory, this process has {own:.2f} "
        "GiB memory in use.",
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try "
        "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
    ),
    "memory_changed": (
        "AssertionError: Error in memory profiling. Initial free memory {free:.2f} GiB, current free memory "
        "{current:.2f} GiB. This happens when other processes sharing the same container release GPU memory while vLLM "
        "is profiling during initialization.",
    ),
    "wake_oom": ("RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:163",),
    "nccl_hang": (
        "[rank0]:[E822 16:31:16.131931664 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=5730, OpType=BROADCAST, NumelIn=3612672, NumelOut=3612672, Timeout(ms)=600000) ran "
        "for 600009 milliseconds before timing out.",
    ),
    "disk_full": ("OSError: [Errno 28] No space left on device",),
    "auth_gated_model": ("OSError: You are trying to access a gated repo.",),
    "bad_config": (
        "ValueError: Total number of attention heads (30) must be divisible by tensor parallel size (4).",
        "ValueError: User-specified max_model_len ({asked}) is greater than the derived max_model_len "
        "(max_position_embeddings={longest} or model_max_length=None in model's config.json).",
    ),
    "port_in_use": ("OSError: [Errno 98] Address already in use",),
    "unsupported_gpu": ("RuntimeError: CUDA error: no kernel image is available for execution on the device",),
}
# Causes that are nobody's want of memory: a start of which nothing is to be learnt.
OTHER_CAUSES = ("disk_full", "auth_gated_model", "bad_config", "port_in_use", "unsupported_gpu")
# A want of the machine's memory, in torch's words; of none of the kinds above.
HOST_MEMORY = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate {bytes} bytes. Error code 12 (Cannot allocate memory)"
)
FOLLOWS = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
# What a start writes once a minute while its GPUs wait for each other: for ever, or until something is compiled.
SLOW_OR_HUNG = (
    "INFO 08-20 17:23:38 [shm_broadcast.py:705] No available shared memory broadcast block found in 60 seconds. This "
    "typically happens when some processes are hanging or doing some time-consuming work (e.g. compilation, "
    "weight/kv cache quantization)."
)


def line(kind: str, wording: int = 0, **numbers: float) -> str:
    """The line of a failure of this kind, in one of its wordings. Raises KeyError for a kind or number not known."""
    wordings = LINES[kind]
    return wordings[wording % len(wordings)].format(**numbers)
