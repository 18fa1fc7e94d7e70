"""Publishes a CacheLog's batches as vLLM does: a ZeroMQ PUB socket, frames topic, sequence (8 bytes), batch.

The only file of the load test that needs pyzmq; it is imported where somebody asked for events. Unlike vLLM's, the
socket always listens: a fixed address is this machine's here.
"""

from __future__ import annotations

import time

import zmq

from loadtest.engine.cache_log import CacheLog

QUEUED = 10_000  # batches for one subscriber, before they are dropped


class Publisher:
    """Listens on `endpoint`, `tcp://127.0.0.1:PORT` or `ipc://PATH`. Raises OSError where it cannot.

    `log` is for the cache to write to; what it says is sent with `publish`.
    """

    def __init__(self, endpoint: str) -> None:
        self.log = CacheLog()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.sndhwm = QUEUED
        self._sequence = 0
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"cannot publish on {endpoint}: {error}") from error

    def publish(self) -> None:
        """Send what has happened since the last time, if anything has."""
        batch = self.log.batch(time.time())
        if batch is not None:
            self._socket.send_multipart((b"", self._sequence.to_bytes(8, "big"), batch), zmq.NOBLOCK)
            self._sequence += 1

    def close(self) -> None:
        self._context.destroy(linger=0)
