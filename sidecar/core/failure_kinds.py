"""Kinds of failure of an engine: what their lines say, where they are raised, and what to do.

A kind is a family of causes with one remedy. Its words are those of the family: classes of exceptions, names of tools
and of things, not whole sentences. `_ERROR` holds such words to the line of an exception. What has no such words is
known by its `place`: the file of vLLM, torch or triton that raised it. Last, an exception that only refuses something
is a setting that is refused.

Lines are as vLLM 0.5 to 0.33, torch, transformers and huggingface_hub write them.
"""

from __future__ import annotations

import re

import msgspec


class Kind(msgspec.Struct, frozen=True):
    """A kind of failure. `pattern`: what its lines hold; its named groups are the numbers. `place`: what a frame of the
    traceback holds. `weak`: its words are others' too, so places are asked before them. `starting`: only a start fails
    so; later such words are of a call. `memory`: a GPU had too little
    for what was tried, so a smaller claim or a freer GPU helps."""

    name: str
    pattern: re.Pattern[str]
    advice: str
    memory: bool = False
    place: re.Pattern[str] | None = None
    weak: bool = False
    starting: bool = False


def _kind(name: str, words: str, advice: str, *, place: str = "", **marks: bool) -> Kind:
    return Kind(name, re.compile(words), advice, place=re.compile(place) if place else None, **marks)


_GIB = r"[\d.]+) ?Gi?B"
_KV_TOO_SMALL = (
    r"max seq len \((?P<max_model_len>\d+)\)(?:"
    rf",? \(?(?P<needed_gib>{_GIB} KV cache is needed, which is larger than the available KV cache memory "
    rf"\((?P<available_gib>{_GIB}\)(?:.*?maximum model length is (?P<estimated_len>\d+))?"
    r"| is larger than the maximum number of tokens that can be stored in KV cache \((?P<available_tokens>\d+)\))"
)
_FREE_TOO_LOW = (
    rf"Free memory on device(?: \S+)? \((?P<free_gib>[\d.]+)/(?P<total_gib>{_GIB}\) on startup is less than desired "
    rf"GPU memory utilization \((?P<utilization>[\d.]+), (?P<desired_gib>{_GIB}\)"
    r"|less than desired GPU memory utilization"
)
_WAKE = r"(?i)out of memory at \S*cumem_allocator|wake_?up\b.*out of memory"
# Exact, since vLLM also gives advice about memory in plain words.
_OUT_OF_MEMORY = (
    r"(?:OutOfMemoryError|(?:CUDA|HIP|XPU|NPU)(?: [Ee]rror:)? out of memory|[Oo]ut of memory\. Tried to allocate"
    r"|(?:CUDA_|hip|cuda)\w*(?:OUT_OF_MEMORY|OutOfMemory|MemoryAllocation)|CUBLAS_STATUS_ALLOC_FAILED)"
    rf"(?:.*?Tried to allocate (?P<tried>[\d.]+ [KMGT]iB))?(?:.*?total capacity of (?P<total_gib>{_GIB})?"
    rf"(?:.*? of which (?P<free>[\d.]+ [KMGT]iB) is free)?"
    rf"(?:.*?this process has (?P<own>[\d.]+ [KMGT]iB))?(?:.*?\bwith (?P<seqs>\d+) dummy requests)?"
)
# The words of the line of an exception: `ValueError: ...`, `triton.runtime.errors.OutOfResources: ...`, pydantic's
# `Value error, ...`.
_ERROR = r"^(?:[\w.]*(?:Error|Exception)\b|(?:[a-z_]\w*\.)+[A-Z]\w+:|Value error,|Assertion failed,)[^\n]*?"
# In the order of their rank: an error of a later kind often follows from one of an earlier kind.
KINDS = (
    _kind(
        "kv_too_small",
        _KV_TOO_SMALL,
        "The KV cache holds no request of the full context. Give the profile a smaller `context_length`, or more "
        "`gpu_memory`.",
    ),
    _kind(
        "mamba_blocks",
        r"max_num_seqs \((?P<seqs>\d+)\) exceeds available Mamba cache blocks \((?P<blocks>\d+)\)",
        "A hybrid model keeps a state per sequence. Give the profile the flag `max-num-seqs` of at most that many "
        "blocks, or more `gpu_memory`.",
    ),
    _kind(
        "no_kv",
        r"No available memory for the cache blocks",
        "Weights and activations leave nothing of the share for the KV cache. Give the profile more `gpu_memory`.",
        memory=True,
    ),
    _kind(
        "free_memory_too_low",
        _FREE_TOO_LOW,
        "Another process holds memory of the GPU, or the share is too large. See who with nvidia-smi.",
        memory=True,
    ),
    _kind(
        "memory_changed",
        rf"Error in memory profiling\.(?: Initial free memory (?P<free_gib>{_GIB}, current free memory "
        rf"(?P<current_gib>{_GIB})?",
        "Another process gave memory back while vLLM measured. Start it again; nothing is wrong with the profile.",
    ),
    _kind(
        "wake_oom",
        _WAKE,
        "The GPU has no room for an engine that wakes. Another process holds its memory.",
        memory=True,
    ),
    _kind(
        "oom",
        _OUT_OF_MEMORY,
        "The GPU ran out of memory. Give the profile less `gpu_memory`, so that more is left beside the share, or a "
        "smaller flag `max-num-seqs` or `max-num-batched-tokens`.",
        memory=True,
    ),
    _kind(
        "kernel_resources",
        r"OutOfResources|out of resources?: |exceeds? (?:the )?(?:maximum )?shared memory",
        "A kernel wants more of the GPU's shared memory or registers than this GPU has. Use another attention backend, "
        "`dtype` or quantization, a newer vLLM, or another GPU; more GPU memory does not help.",
    ),
    _kind(
        "host_memory",
        r"DefaultCPUAllocator|less than desired CPU memory|Cannot allocate memory|std::bad_alloc|\bMemoryError\b"
        r"|\bBus error\b|SIGBUS|OOM.?[Kk]illed|^Killed$|exit ?code:? -(?:9|7)\b|insufficient shared memory"
        r"|unable to (?:mmap|open shared memory)",
        "The machine, or the container, has too little memory of its own, or too small a /dev/shm. Give it more, or "
        "load less beside it.",
    ),
    _kind(
        "disk_full",
        r"No space left on device|Disk quota exceeded|[Nn]ot enough (?:free )?disk space",
        "A disk is full, or the container's /dev/shm is too small. Free some space, or move HF_HOME.",
    ),
    _kind(
        "process_limit",
        r"[Tt]oo many open files|\bE[MN]FILE\b|[Cc]an't start new thread|[Tt]hread creation failed|(?:pthread_create"
        r"|[Ff]ork|clone)\b.*Resource temporarily unavailable|^BlockingIOError: \[Errno 11\]",
        "The engine may open no more files, or start no more processes and threads. Raise LimitNOFILE and TasksMax of "
        "the sidecar's service, or the container's ulimits and pids limit: its engines have the same.",
    ),
    _kind(
        "no_permission",
        r"PermissionError|Permission denied|Read-only file system|Operation not permitted|writable director",
        "The engine's user may not read or write there. Mend the owner of the folder, or move HF_HOME, "
        "VLLM_CACHE_ROOT and TRITON_CACHE_DIR to one that is the user's.",
    ),
    _kind(
        "auth_gated_model",
        r"gated repo|GatedRepoError|is restricted\. You must|must be authenticated to access|RepositoryNotFoundError"
        r"|\b40[13] Client Error|is not a valid model identifier|[Ii]nvalid user token"
        r"|[Ii]nvalid username or password",
        "The hub wants a token, or the model's terms accepted, or knows no such model. Set HF_TOKEN in the profile's "
        "`environment`.",
    ),
    _kind(
        "download_failed",
        r"OfflineModeIsEnabled|LocalEntryNotFoundError|Max retries exceeded|couldn't connect to|name resolution"
        r"|Name or service not known|CERTIFICATE_VERIFY_FAILED|\b(?:429|5\d\d) (?:Client|Server) Error"
        rf"|{_ERROR}(?:HTTPS?Connection|huggingface\.co|[Ff]ailed to download|[Dd]ownload\w* fail)|^(?:requests|httpx"
        r"|httpcore|urllib3|aiohttp)\.",
        "The model could not be downloaded. See the network, a proxy and HF_HUB_OFFLINE, or get it with `hf download`.",
        place=r"/huggingface_hub/",
        starting=True,
    ),
    _kind(
        "model_not_found",
        r"HFValidationError|Invalid repository ID|Repo id must|does not appear to have a file named"
        r"|config\.json\b.*(?:not found|No such)|Cannot find (?:the )?config|No supported config format"
        r"|Can't load the configuration",
        "There is no model at that path, or of that name. See `model_path`, and that the engine's machine has it.",
        starting=True,
    ),
    _kind(
        "driver_mismatch",
        r"NVIDIA driver on your system is too old(?: \(found version (?P<driver>\d+)\))?"
        r"|driver version is insufficient|[Dd]river/library version mismatch|Found no NVIDIA driver"
        r"|libcuda\.so\S*: cannot|unsupported display driver|forward compatibility was attempted"
        r"|unsupported toolchain|CUDA error: system not yet initialized",
        "The GPU's driver does not fit this vLLM's CUDA. Install a newer driver, or a vLLM for the CUDA you have.",
    ),
    _kind(
        "no_gpu",
        r"No (?:CUDA|HIP|XPU) GPUs are available|infer device type|no CUDA-capable device|invalid device ordinal"
        rf"|CUDA unknown error|{_ERROR}(?:\bNVML|has no GPU|[Nn]o GPUs?\b|without GPU|\bnot visible|VISIBLE_DEVICES="
        r"|number of (?:visible|available) \w+)",
        "The engine sees no GPU, or not as many as it is to use. See nvidia-smi, CUDA_VISIBLE_DEVICES, and the "
        "container's GPUs.",
    ),
    _kind(
        "unsupported_gpu",
        r"no kernel image is available|device kernel image is invalid|not compatible with the current PyTorch"
        rf"|{_ERROR}(?:(?:[Cc]ompute|[Mm]inimum|device) capability|not supported in this architecture|GPU arch"
        r"|GCN arch|\b(?:sm_?\d{2,3}|SM\d{2,3}|gfx\d{3,4})\b|not supported (?:on|for|by) (?:this|your"
        r"|the current) (?:GPU|device|platform|hardware))",
        "This GPU is too old or too new for the kernels. Use another `dtype`, quantization or vLLM, or another GPU.",
    ),
    _kind(
        "unsupported_arch",
        r"Transformers does not recognize this architecture|Model architectures? .*(?:not supported|failed to be)"
        r"|has no vLLM implementation|Unrecognized model in |does not support (?:this|the) (?:model )?architecture"
        r"|No model architectures are specified",
        "This vLLM, or its transformers, does not know the model. Use a newer one.",
    ),
    _kind(
        "bad_flag",
        r"error: (?:unrecognized arguments?|argument |ambiguous option|the following arguments are|invalid choice)"
        r"|got an unexpected keyword argument|[Nn]o such option|[Uu]nknown (?:command.line )?(?:option|flag"
        r"|argument)\b",
        "This vLLM does not know a flag of the profile, or not with that value. See its --help. One without `--uds` "
        "needs ports in `engine_addresses`.",
    ),
    _kind(
        "port_in_use",
        r"[Aa]ddress already in use|EADDRINUSE|while attempting to bind on address",
        "Another process listens there. Give the sidecar other `engine_addresses`.",
    ),
    _kind(
        "gpu_fault",
        r"illegal memory access|illegal instruction|misaligned address|device-side assert|unspecified launch failure"
        rf"|(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_|cudaError[A-Z]|AcceleratorError|\bXid\b|{_ERROR}(?:(?:CUDA"
        r"|HIP)(?: driver)? error\b|\w*(?:cublas|cudnn|cutlass)\w* (?:\w+ )?fail)",
        "A kernel failed on the GPU. It is vLLM's, or the GPU's (see dmesg for Xid). Try the flag `enforce-eager`, "
        "another attention backend or vLLM.",
    ),
    _kind(
        "jit_failed",
        r"sh: .*\b(?:nvcc|ninja|[gn]?cc|g\+\+|clang): (?:command )?not found|^(?:nvcc|ptxas|ninja|ld"
        r"|collect2)\b.*(?:fatal|error|cannot find)|fatal error: \S+: No such file|InductorError|CompilationError"
        rf"|CompilerFailed|{_ERROR}(?:\b(?:nvcc|[Nn]inja|ptxas|gcc|g\+\+|CUDA_HOME|cpp_extension)\b|compiler\b"
        r"|CUDA arch|cubin)|Error building extension",
        "What is compiled at the start could not be: a C compiler, nvcc, ninja or headers are missing, or do not fit "
        "the GPU. Install gcc and the CUDA toolkit of torch's version, or use vLLM's image.",
        place=r"/jit/|/_inductor/|/triton/(?:compiler|runtime/build|backends)|/cpp_extension\.py|/tvm_ffi/",
    ),
    _kind(
        "bad_lora",
        rf"{_ERROR}(?:(?<![a-zA-Z])(?i:loras?)(?![a-z])|\b[Aa]dapters?\b|target modules)",
        "A LoRA adapter does not fit the model or the flags. See its rank and `max-lora-rank`, and its modules.",
        place=r"/vllm/lora/|/peft/",
        starting=True,
    ),
    _kind(
        "bad_tokenizer",
        rf"{_ERROR}(?:[Tt]okenizer|tiktoken|sentencepiece|chat.template)",
        "The tokenizer cannot be made. See the model's tokenizer files, the flags `tokenizer` and `tokenizer-mode`, "
        "and the version of transformers.",
        place=r"token[iz]+er",
        starting=True,
    ),
    _kind(
        "bad_install",
        r"^(?:ImportError|ModuleNotFoundError)\b|undefined symbol|cannot open shared object file|Failed to import"
        rf"|\bvllm: (?:command )?not found|No module named '?vllm\b|{_ERROR}(?:\binstall(?:ed)?\b|(?:Config"
        r"|dict)' object has no attribute|\bmodule '[\w.]+' has no attribute|\bplugin\b|\bvllm\._\w+|extension)",
        "A package is missing, or its version does not fit vLLM's. Install vLLM anew in an environment of its own; for "
        "a config without an attribute, the transformers that it asks for.",
        starting=True,
    ),
    _kind(
        "nccl_hang",
        r"NCCL operations have failed or timed out|collective operation timeout|NCCL (?:error|timeout)\b"
        r"|nccl(?:System|Internal|Remote|UnhandledCuda|InvalidUsage)Error|DistBackendError|ProcessGroupNCCL.*terminat"
        r"|\bNCCL WARN .*\b[Ff]ail|RPC call to \w+ timed out",
        "The GPUs of one engine do not reach each other. Try the environment variables NCCL_DEBUG=INFO, then "
        "NCCL_P2P_DISABLE=1; see the container's /dev/shm and IPC settings.",
        place=r"/pynccl",
    ),
    _kind(
        "start_timeout",
        rf"^[\w.]*TimeoutError\b|DistStoreError|{_ERROR}(?:\b[Tt]imed? ?out\b|did not become ready)|Timed out waiting",
        "Processes of the engine waited too long for each other. A slow disk or a long compilation: raise "
        "VLLM_ENGINE_READY_TIMEOUT_S; else see the log of the one that was waited for.",
        starting=True,
    ),
    _kind(
        "weights_unreadable",
        rf"SafetensorError|HeaderTooLarge|PytorchStreamReader|UnpicklingError|{_ERROR}(?:[Cc]annot find any .*weights"
        r"|[Nn]o .*weights? (?:files? )?found|corrupt|truncated|unexpected EOF|No such file .*\.(?:safetensors|bin"
        r"|gguf|pth?)\b|not a valid JSON file)",
        "Files of the model are absent, incomplete or damaged. Get them again: `hf download`.",
        starting=True,
    ),
    _kind(
        "no_attention_backend",
        rf"{_ERROR}(?:(?i:attention|attn)[ _]?(?i:backend)|[Bb]ackend \S+ is not valid for|backend found|(?i:attention"
        r"|attn|flashmla)\w*\b.* (?:not support|(?:only )?supports?|not available|not built|not implemented)"
        r"|(?:supported|implemented) (?:in|for|by|with) \S*(?i:attention|attn|mla))",
        "No attention backend does all that the model and the flags want on this GPU. The line says what: leave "
        "`attention-backend` and `kv-cache-dtype` to vLLM, or use another `dtype` or vLLM.",
        place=r"/attention/|/flash_attn/|/flashinfer/",
        weak=True,
        starting=True,
    ),
    _kind(
        "bad_quantization",
        rf"{_ERROR}(?:[Qq]uant(?!ity)|min_thread_[nk]|\b(?:NV|MX)FP\d|\bW\d+A\d+|AWQ|GPTQ|[Mm]arlin|ModelOpt"
        r"|bitsandbytes|per[ _]partition|group[ _]size)",
        "The model's quantization does not work with this vLLM, these flags or so many GPUs. Leave `quantization` to "
        "vLLM, try less `tensor_parallel`, or another build of the model.",
        place=r"/quantization/",
        weak=True,
        starting=True,
    ),
    _kind(
        "weights_mismatch",
        r"KeyError: '(?:\w+\.)+\w+'|no module or parameter named|size mismatch for|loaded_weight"
        rf"|{_ERROR}(?:(?i:weight|\bparam|checkpoint)\w*\b.*(?:shape|[Ss]ize|mismatch|missing|not found|initialized)"
        r"|(?:[Mm]issing|[Uu]nexpected) (?:\d+ )?(?:parameter|key|weight)|KeyError: '\w+\.\w+')",
        "The weights are not those that the model's class expects: of another version, quantised in another way, or "
        "saved with an adapter. Use a newer vLLM, or the model as published.",
        place=r"in \w*(?:load_weights|weight_loader)",
        weak=True,
        starting=True,
    ),
    _kind(
        "bad_config",
        r"must be divisible by|is not divisible by|validation errors? for \w*(?:Config|Args)\b"
        r"|(?:User-specified max_model_len.*?)?is greater than the derived max_model_len"
        r"(?: \(\w*=?(?P<derived_len>\d+))?",
        "The model and the profile's settings do not fit each other: read the line, and mend the profile's flags.",
        place=r"/vllm/config(?:/|\.py)|/arg_utils\.py|/transformers_utils/",
        weak=True,
        starting=True,
    ),
)
# An exception that refuses what is asked, in nobody's words.
REFUSES = KINDS[-1]
REFUSED = re.compile(
    r"^[\w.]*(?:ValueError|NotImplementedError|ValidationError|TypeError|RuntimeError|AssertionError): .*(?:"
    r"\b(?:must|should|cannot|can only|requires?|needs?|expects?|exceeds|(?:larger|smaller|greater|less) than|without"
    r"|incompatible|exclusive|only|[Uu]nsupported|[Uu]nknown|[Ii]nvalid|[Ss]upport(?:s|ed)|[Vv]alid"
    r"|specified|conflicting|out of range)\b"
    r"|\bnot (?:be )?(?:an? )?(?:supported|support|valid|allowed)|[ `]--\w|\b[A-Z]+_[A-Z_]+\b)"
)
