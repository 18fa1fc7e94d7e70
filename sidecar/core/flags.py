"""Allowlist of vLLM's flags and environment variables that a profile may give, and those that the sidecar gives.

vLLM gets new flags with every release. One that moves an engine's socket, takes another GPU or loads code would make
the sidecar's knowledge of it untrue; so flags are allowed by name. The list has the flags in the help of vLLM 0.32 that
an operator may want, and a few that only older versions have. The start tells whether the installed vLLM has a flag.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

# What a flag's value must be, in words; how to tell is in _KINDS.
SWITCH = "true or false"
NUMBER = "a number"
WORD = "text that does not begin with -"
LIST = "a list of text and numbers that do not begin with -"
JSON = "a mapping"

_TABLE = {
    SWITCH: """
        async-scheduling calculate-kv-scales disable-cascade-attn
        disable-chunked-mm-input disable-custom-all-reduce disable-fastapi-docs
        disable-hybrid-kv-cache-manager disable-log-requests disable-sliding-window disable-uvicorn-access-log
        enable-auto-tool-choice enable-chunked-prefill enable-dbo enable-eplb enable-expert-parallel
        enable-force-include-usage enable-log-requests enable-lora enable-prefix-caching enable-prompt-embeds
        enable-prompt-tokens-details enable-reasoning enable-request-id-headers enable-server-load-tracking
        enforce-eager exclude-tools-when-tool-choice-none fully-sharded-loras interleave-mm-strings kv-cache-metrics
        kv-sharing-fast-prefill language-model-only return-tokens-as-token-ids skip-mm-profiling skip-tokenizer-init
        use-tqdm-on-load""",
    NUMBER: """
        block-size cpu-offload-gb kv-offloading-size long-prefill-token-threshold mamba-block-size max-cpu-loras
        max-cudagraph-capture-size max-log-len max-logprobs max-lora-rank max-loras max-num-active-seqs
        max-num-batched-tokens max-num-partial-prefills max-num-seqs max-parallel-loading-workers mm-processor-cache-gb
        num-gpu-blocks-override optimization-level renderer-num-workers seed sse-keep-alive-interval stream-interval
        swap-space video-pruning-rate""",
    WORD: """
        all2all-backend attention-backend chat-template chat-template-content-format code-revision config-format
        convert distributed-executor-backend download-dir dtype generation-config guided-decoding-backend hf-config-path
        kv-cache-dtype kv-offloading-backend linear-backend load-format logprobs-mode lora-dtype mamba-cache-dtype
        mamba-ssm-cache-dtype mm-encoder-tp-mode
        mm-processor-cache-type model-impl moe-backend performance-mode prefix-caching-hash-algo quantization
        reasoning-parser response-role revision runner safetensors-load-strategy scheduling-policy task
        tokenizer-mode tokenizer-revision tool-call-parser uvicorn-log-level""",
    LIST: """
        allowed-media-domains cudagraph-capture-sizes ignore-patterns lora-modules""",
    JSON: """
        attention-config compilation-config default-chat-template-kwargs hf-overrides kv-events-config
        kv-transfer-config limit-mm-per-prompt media-io-kwargs mm-processor-kwargs model-loader-extra-config
        override-generation-config override-pooler-config pooler-config reasoning-config rope-scaling
        speculative-config structured-outputs-config""",
}
# Flag to what its value must be.
FLAGS: Mapping[str, str] = {name: kind for kind, names in _TABLE.items() for name in names.split()}

_ADDRESS = "no such flag: the sidecar gives every engine its address, from engine_addresses"
_KEY = "no such flag: an engine's routes for sleeping ask for no key, so its address is its guard (engine_addresses)"
_GPUS = (
    "no such flag: tensor parallelism on one machine alone is supported (tensor_parallel counts its GPUs, gpus names "
    "them); more engines of a model are more profiles with one served_name"
)
_MEMORY = "no such flag: gpu_memory says it"
_ALLOCATOR = (
    "no such variable: an allocator set by hand (expandable_segments) does not go with vLLM's sleep mode, which has "
    "an allocator of its own"
)
_VENDOR = "no such variable: GPUs of NVIDIA alone are supported, not of AMD and Intel"
_NO_LIST = "no such flag: what it brings would pass by the list of flags"
OWNED: Mapping[str, str] = {
    "api-key": _KEY,
    **dict.fromkeys(("host", "port", "uds", "grpc", "grpc-port", "headless", "root-path"), _ADDRESS),
    **dict.fromkeys(("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs"), _ADDRESS),
    **dict.fromkeys(("data-parallel-size", "pipeline-parallel-size", "decode-context-parallel-size"), _GPUS),
    **dict.fromkeys(("prefill-context-parallel-size", "nnodes", "device-ids", "api-server-count"), _GPUS),
    **dict.fromkeys(("gpu-memory-utilization", "device-memory-utilization", "kv-cache-memory-bytes"), _MEMORY),
    **dict.fromkeys(("config", "middleware", "worker-cls", "worker-extension-cls", "scheduler-cls"), _NO_LIST),
    **dict.fromkeys(("tool-parser-plugin", "reasoning-parser-plugin", "io-processor-plugin"), _NO_LIST),
    **dict.fromkeys(("model", "model-path"), "no such flag: model_path says it"),
    **dict.fromkeys(("tokenizer", "tokenizer-path"), "no such flag: tokenizer_path says it"),
    **dict.fromkeys(("max-model-len", "context-length"), "no such flag: context_length says it"),
    **dict.fromkeys(("tensor-parallel-size", "tensor-parallel"), "no such flag: tensor_parallel says it"),
    **dict.fromkeys(("served-model-name", "served-name"), "no such flag: served_name says it"),
    "trust-remote-code": "no such flag: trust_remote_code says it",
    "enable-sleep-mode": "no such flag: sleep says it",
    "shutdown-timeout": "no such flag: the sidecar has an engine's calls finish before it stops the engine",
    "disable-log-stats": "no such flag: gateways read the engine's metrics",
    "hf-token": "no such flag: every user of the machine could read it; set HF_TOKEN for the sidecar",
}

# Variables an engine gets, from the sidecar's own environment or from its profile.
_VARIABLES = """
    PATH HOME USER LOGNAME LANG LANGUAGE LC_ALL LC_CTYPE TZ TMPDIR LD_LIBRARY_PATH XDG_CACHE_HOME
    HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE
    HF_HOME HF_HUB_CACHE HF_TOKEN HF_TOKEN_PATH HF_ENDPOINT HF_HUB_OFFLINE HF_HUB_ENABLE_HF_TRANSFER
    HUGGING_FACE_HUB_TOKEN TRANSFORMERS_OFFLINE
    CUDA_HOME CUDA_PATH CUDA_MODULE_LOADING TRITON_CACHE_DIR
    UCX_IB_GPU_DIRECT_RDMA UCX_LOG_LEVEL UCX_NET_DEVICES UCX_RNDV_SCHEME UCX_TLS
    TORCH_HOME TORCHINDUCTOR_CACHE_DIR TORCH_CUDA_ARCH_LIST OMP_NUM_THREADS
    NCCL_ALGO NCCL_CUMEM_ENABLE NCCL_DEBUG NCCL_IB_DISABLE NCCL_IB_HCA NCCL_NVLS_ENABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL
    NCCL_PROTO NCCL_SHM_DISABLE NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME
    VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_ATTENTION_BACKEND VLLM_AUDIO_FETCH_TIMEOUT VLLM_CACHE_ROOT VLLM_CONFIG_ROOT
    VLLM_CPU_KVCACHE_SPACE VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND VLLM_DISABLE_COMPILE_CACHE
    VLLM_DO_NOT_TRACK VLLM_ENGINE_READY_TIMEOUT_S
    VLLM_FLASH_ATTN_VERSION VLLM_IMAGE_FETCH_TIMEOUT VLLM_KV_CACHE_LAYOUT VLLM_LOGGING_LEVEL
    VLLM_NO_USAGE_STATS VLLM_RPC_TIMEOUT VLLM_SKIP_P2P_CHECK VLLM_USE_DEEP_GEMM VLLM_USE_FLASHINFER_SAMPLER
    VLLM_USE_MODELSCOPE VLLM_USE_V1 VLLM_VIDEO_FETCH_TIMEOUT VLLM_WORKER_MULTIPROC_METHOD
    WEIR_SIMULATED_GPUS WEIR_SIMULATED_SPEED"""
# The folder of simulated GPUs, which every process that shares them has from its parent: sidecar and engines.
SIMULATED_GPUS = "WEIR_SIMULATED_GPUS"
CPU_KV = "VLLM_CPU_KVCACHE_SPACE"  # GiB of KV cache on CPU, for which not every version has a flag
VARIABLES = frozenset(_VARIABLES.split())
OWNED_VARIABLES: Mapping[str, str] = {
    "VLLM_SERVER_DEV_MODE": "no such variable: the sidecar sets it for models that may sleep (sleep)",
    "VLLM_API_KEY": _KEY.replace("flag", "variable", 1),
    "CUDA_VISIBLE_DEVICES": "no such variable: the sidecar sets it from the model's GPUs (gpus)",
    **dict.fromkeys(("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ONEAPI_DEVICE_SELECTOR"), _VENDOR),
    "LMCACHE_CONFIG_FILE": "no such variable: kv_connector_extra_config of the flag kv-transfer-config says it",
    "CUDA_DEVICE_ORDER": "no such variable: the sidecar numbers GPUs as nvidia-smi does",
    **dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), _ALLOCATOR),
    **dict.fromkeys(
        ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"),
        "no such variable: the sidecar sets it for models that exchange KV caches (kv_transfer)",
    ),
    **dict.fromkeys(("VLLM_PORT", "VLLM_HOST_IP"), _ADDRESS.replace("flag", "variable", 1)),
    **dict.fromkeys(("VLLM_PLUGINS", "PYTHONPATH"), _NO_LIST.replace("flag", "variable", 1)),
}


def _word(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[^\x00-\x1f\x7f-][^\x00-\x1f\x7f]*", value) is not None


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_word(item) or _number(item) for item in value)


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    SWITCH: lambda value: isinstance(value, bool),
    NUMBER: _number,
    # `kv-cache-dtype: auto` is text; so is the 1.0 of `revision: 1.0`, which YAML does not say.
    WORD: lambda value: _word(value) or _number(value),
    LIST: _list,
    JSON: lambda value: isinstance(value, dict),
}


def owned_flag(name: str) -> str | None:
    """The field to write instead of a flag that the sidecar gives itself; the flag with dashes or underscores."""
    return OWNED.get(name.lstrip("-").replace("_", "-").removeprefix("no-"))


def fits(name: str, value: Any) -> bool:
    """Whether a value, as JSON has it, is one for the allowed flag `name`."""
    return _KINDS[FLAGS[name]](value)
