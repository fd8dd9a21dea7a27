"""A dead rank is named: each rank tells the others once a second that it lives, and one that does not ends all.

A collective waits for every rank, and nobody would learn which one has died. So a thread of each rank counts up a note
in the store that all ranks share, and reads the others' notes. A rank that lives but hangs is not noticed here: the
collectives in which the others wait for it end by the timeout of NCCL or gloo.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from lmcore.errors import EXIT_FAILURE, UserError

PERIOD = 1.0
"""Seconds between two notes."""

SILENCE = 20.0
"""Seconds without a note after which a rank counts as dead."""

GRACE = 5.0
"""Seconds that the main thread has to end by itself, before its rank is ended inside a collective."""

AGENT_HOLDS_STORE = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
"""Whether torchrun's agent holds the store, which then outlives the ranks; else rank 0 does."""

RESUMES = "all ranks end; the same command resumes from the last checkpoint."


@dataclass(frozen=True)
class End:
    """Why all ranks end: the run's state, the exit code of all, and the sentence, which rank `by` says."""

    by: int
    state: str
    code: int
    sentence: str


class Watch:
    """The thread of one rank. `announce` before an end of one's own; `close` at the end.

    Once it is known that all ranks have to end, the main thread has `GRACE` seconds, after which `before_exit(end)` is
    called and the process exits with `end.code`.
    """

    def __init__(self, store: dist.Store, rank: int, size: int):
        self.store, self.rank, self.size, self.count = store, rank, size, 0
        self.before_exit: Callable[[End], Any] = lambda end: None
        self.notes: dict[int, dict] = {}  # the last of each rank
        self.silent: dict[int, int] = {}  # how often it was then read again: a stopped process does not count
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="lmcore-ranks", daemon=True)
        self.thread.start()

    def announce(self, state: str, code: int, sentence: str) -> None:
        """Tells the others that this rank ends, and with what they end, too."""
        with contextlib.suppress(RuntimeError):  # the store is gone: they will notice
            self.agreed(state, code, sentence)
            self._linger()

    def agreed(self, state: str, code: int, sentence: str) -> End:
        """What the first rank that noticed an end has written down: all end so."""
        end = End(self.rank, state, code, sentence)
        return End(**json.loads(self.store.compare_set("end", "", json.dumps(asdict(end)))))

    def close(self) -> None:
        """This rank is done: nobody waits for it any more."""
        self.closed.set()
        self.thread.join(2 * PERIOD)
        with contextlib.suppress(RuntimeError):
            self.store.delete_key(f"rank/{self.rank}")

    def exit(self, end: End) -> None:
        """Ends this process, whatever its main thread waits for."""
        if end.by == self.rank:
            print(f"lmcore: {end.sentence}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            self.before_exit(end)
        self._linger()
        sys.stdout.flush()
        os._exit(end.code)

    def _linger(self) -> None:
        """The rank that holds the store waits until the others have read it."""
        if self.rank == 0 and not AGENT_HOLDS_STORE:
            time.sleep(2 * PERIOD)

    def _watch(self) -> None:
        with ThreadPoolExecutor(1) as pool:  # a store whose process is stopped answers nothing, not even an error
            while True:
                try:
                    end = pool.submit(self.look).result(SILENCE)
                except (RuntimeError, TimeoutError):
                    end = self._without_store()
                if end is not None and not self.closed.wait(GRACE):
                    self.exit(end)
                if self.closed.wait(PERIOD):
                    return

    def look(self) -> End | None:
        """Counts this rank's note up and reads the others'; returns why all have to end, if they have to."""
        self.count += 1
        note = {"count": self.count, "host": socket.gethostname(), "pid": os.getpid()}
        self.store.set(f"rank/{self.rank}", json.dumps(note))
        if self.store.check(["end"]):
            return End(**json.loads(self.store.get("end")))
        for rank in range(self.size):
            if not self.store.check([f"rank/{rank}"]):
                continue  # it is still starting, or done
            note = json.loads(self.store.get(f"rank/{rank}"))
            self.silent[rank] = self.silent.get(rank, 0) + 1 if note == self.notes.get(rank) else 0
            self.notes[rank] = note
            if self.silent[rank] * PERIOD > SILENCE:
                return self.agreed("failed", EXIT_FAILURE, self._dead(rank))
        return None

    def _dead(self, rank: int) -> str:
        """The sentence about a rank that gives no sign of life."""
        note = self.notes.get(rank, {"pid": "?", "host": os.environ.get("MASTER_ADDR")})
        return f"Rank {rank} (process {note['pid']} on {note['host']}) has died or does not answer: {RESUMES}"

    def _without_store(self) -> End:
        """The end by the process that holds the store, rank 0 or torchrun's agent; a machine's last rank says so."""
        says = int(os.environ["LOCAL_RANK"]) + 1 == int(os.environ["LOCAL_WORLD_SIZE"])
        agent = f"torchrun's agent on {os.environ.get('MASTER_ADDR')} does not answer: {RESUMES}"
        sentence = agent if AGENT_HOLDS_STORE else self._dead(0)
        return End(self.rank if says else -1, "failed", EXIT_FAILURE, sentence)


def by_other_rank(error: BaseException) -> bool:
    """Whether an exception says that another rank, or the way to it, is gone."""
    if isinstance(error, UserError | torch.OutOfMemoryError):
        return False
    lost = any(word in str(error) for word in ("Connection", "gloo", "Gloo", "NCCL", "pair closure"))
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and lost)
