"""Help text of `gateway calibrate`."""

from __future__ import annotations

DESCRIPTION = """\
Fit a latency profile to a live engine, and write it to a file.

It sends requests for about a minute, looks at when tokens come, and finds the constants of

    step = base + prefill x prompt tokens + decode x sequences + context x KV tokens they read
           + attention x pairs of prompt tokens

with which the simulated engine behaves as this one. Calibrate one engine, itself, idle, alone on its machine; who
calibrates should not take the processor from it."""

EXAMPLES = """\
examples:
  gateway calibrate --target http://10.0.0.5:8000 --out mine.yaml
  gateway simulate --profile mine.yaml --engines 2,4,8 --trace last-week.csv       and then: how many of them are needed
  gateway bench --engines sim:4:mine.yaml                                          four of them, simulated, in real time
  gateway serve --engine sim:2:mine.yaml
  gateway calibrate --target http://10.0.0.5:8000 --out mine.yaml --force --max-num-seqs 256 --budget 3m

Read from the engine are the size of its KV cache (/metrics) and max_model_len (/v1/models). max_num_seqs and
max_num_batched_tokens are found by sending more than that; flags say better what cannot be seen. The engine must know
vLLM's ignore_eos and stream_options.include_usage.

Exit status: 0; 2: a mistake, or an engine that cannot be calibrated; 130: Ctrl-C."""

LIMITS = {  # flags, and what they say
    "max-num-seqs": "sequences in a batch (left out: found)",
    "max-num-batched-tokens": "tokens in a step (left out: found)",
    "max-model-len": "tokens of prompt and answer (left out: read)",
    "num-gpu-blocks": "KV blocks of 16 tokens (left out: read)",
}
