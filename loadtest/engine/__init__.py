"""A simulated vLLM: real scheduling and cache accounting, invented tokens, modelled step times.

Calls only go down: `__main__` > `server` > `routes` > `*_api` (one per API) > `generate` > `http`; and below the
server `engine` > `scheduler` > `blocks` > `sequence`. `engine.py` and everything below it is pure, without clock or
I/O: the same engine runs behind real sockets here and in virtual time elsewhere. Nothing in this folder imports the
gateway or the sidecar.

On simulated GPUs, a folder that processes share, an engine also takes memory, and time to start, sleep and wake:
`sleeping` and `engine_memory` do it, `memory_stages` has the numbers, `gpu_memory` is the folder.

Known to be simpler than vLLM: stop strings and logprobs are ignored, there is no speculative decoding, a
LoRA adapter is a name that costs nothing, no images beyond their count of tokens, and no limit on the queue.
"""
