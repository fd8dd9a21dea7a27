"""Other streams for work that nothing in the main one waits for: small matmuls then share the GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

LOW, HIGH = 0, -1
"""Priorities of streams: blocks of work in a stream of high priority take free multiprocessors first."""


class SideStream:
    """Work beside the current stream of a CUDA device; in turn with it elsewhere.

    The stream forks off and joins by events, as a CUDA graph that captures both records it. The caller keeps every
    tensor that the other stream still uses: memory freed too early would be given out again.
    """

    def __init__(self, device: torch.device, priority: int = LOW):
        self.stream = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Runs the block's operations on the side stream, after all that was launched before."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def record(self) -> torch.cuda.Event | None:
        """An event after the work so far, for `wait`."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self, event: torch.cuda.Event | None = None) -> None:
        """Lets the current stream wait for the side stream's work up to `event`, or for all of it."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(event or self.stream.record_event())
