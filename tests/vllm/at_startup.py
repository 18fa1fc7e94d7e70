"""Patches that every Python of vLLM's environment runs as it starts: `make vllm` installs them there.

AMX: Linux lets a process use its tiles once it has asked: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA). vLLM 0.32 does
not, and its worker dies by SIGILL at the first request where the processor has AMX. Elsewhere the call fails, and is
harmless.

sched_yield: on CPU vLLM always runs a worker process, and for a second after each message both ends of their queue wait
in a loop around it. Where there are as many cores as spinning processes this starves everything else on them: on two
cores and Linux 6.18, a process that only slept 10 ms at a time was kept from running for up to 5.8 s while one stream
was generated, gateway and test included. A sleep of 0.1 ms costs a step about as much and starves nobody.

fork: on CPU each of vLLM's three processes imports all of vLLM, one after the other. A start takes 38 s of processor
time so, and 17 s where they are forked, as vLLM does by default elsewhere. The OpenMP of a forked worker has read its
settings by then: they are given here, one thread, as vLLM itself decides on two cores.
"""

import ctypes
import functools
import multiprocessing
import os
import time

_get_context = multiprocessing.get_context


def _forking(method: str | None = None) -> multiprocessing.context.BaseContext:
    return _get_context("fork" if method == "spawn" else method)


ctypes.CDLL(None).syscall(158, 0x1023, 18)
os.sched_yield = functools.partial(time.sleep, 0.0001)
os.environ.setdefault("OMP_NUM_THREADS", "1")
multiprocessing.get_context = _forking
