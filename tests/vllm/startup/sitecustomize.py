"""Patch for vLLM's waits, imported by every Python it starts from its PYTHONPATH: waiting gives the processor away.

On CPU vLLM always runs a worker process, and for a second after each message both ends of their queue wait in a loop
around `os.sched_yield()`. Where there are as many cores as spinning processes this starves everything else on them: on
two cores and Linux 6.18, a process that only slept 10 ms at a time was kept from running for up to 5.8 s while one
stream was generated, gateway and test included. A sleep of 0.1 ms costs a step about as much and starves nobody.
"""

import os
import time


def _yield() -> None:
    time.sleep(0.0001)


os.sched_yield = _yield
