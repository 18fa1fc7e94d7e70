from collections.abc import Callable

class Pump:
    source: int  # descriptor of the engine's socket
    sink: int  # descriptor of the client's socket
    reads: int  # chunks passed on
    heard_at: float  # seconds of the monotonic clock of the last read; 0 before the first

    def __init__(self, source: int, sink: int) -> None: ...
    def step(self, returned: Callable[[bytes, int], None], /) -> None: ...
