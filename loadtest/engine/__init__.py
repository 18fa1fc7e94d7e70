"""A simulated vLLM: real scheduling and cache accounting, invented tokens, modelled step times.

Calls only go down: `__main__` > `server` > `routes` > `openai_api`, `responses_api`, `anthropic_api`, `pooling_api` >
`http`, `engine` > `scheduler` > `blocks` > `sequence`. `engine.py` and everything below it is pure, without clock or
I/O: the same engine runs behind real sockets here and in virtual time elsewhere. Nothing in this folder imports the
gateway.
"""
