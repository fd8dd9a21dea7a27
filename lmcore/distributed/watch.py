"""Who keeps the others waiting: each rank tells the others that it lives, and where it is; one that does not ends all.

A collective waits for every rank, and a rank that has died cannot say so: NCCL would wait for minutes, and nobody would
learn for whom. Here a thread of each rank notes its step and its place in the program, once a second, in the store that
all ranks share, and reads what the others noted.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist

from lmcore.errors import EXIT_FAILURE

PERIOD = 1.0
"""Seconds between two notes."""

SILENCE = 20.0
"""Seconds without a note after which a rank counts as dead, or as stopped."""

PATIENCE = 45.0
"""Seconds that a step may take while another rank waits for it, or `SLOWER` times as long as the longest before it.
First steps, saves and evaluations take their time."""

SLOWER = 5

GRACE = 5.0
"""Seconds that the main thread has to end by itself, before its rank is ended inside a collective."""

AGENT_HOLDS_STORE = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
"""Whether torchrun's agent holds the store, which then outlives the ranks; else rank 0 does."""

WAITING = (
    os.path.join("torch", "distributed"),
    os.path.join("lmcore", "distributed"),
    os.path.join("autograd", "graph"),
)
"""Where a main thread that waits for other ranks is: in a collective, or in a backward pass with its collectives."""


@dataclass(frozen=True)
class End:
    """Why a rank ends all: the run's state, the exit code of all ranks, and the sentence."""

    rank: int
    state: str
    code: int
    sentence: str
    said: bool = True
    """Whether that rank says the sentence itself."""
    everywhere: bool = False
    """Whether no other machine may have heard of it: then a rank of each says it."""


class Watch:
    """The threads of one rank. `beat` at every step; `announce` before an end of one's own; `close` at the end.

    `ended` is why all ranks have to end, once that is known: the main thread then has `GRACE` seconds, after which
    `before_exit(end)` is called and the process exits with `ended.code`.
    """

    def __init__(self, store: dist.Store, rank: int, size: int):
        self.store, self.rank, self.size = store, rank, size
        self.step, self.since, self.patient, self.count = 0, time.monotonic(), True, 0
        self.longest = 0.0  # step so far
        self.main = threading.get_ident()
        self.ended: End | None = None
        self.known, self.closed, self.leaving = threading.Event(), threading.Event(), threading.Lock()
        self.before_exit: Callable[[End], Any] = lambda end: None
        self.heard: dict[int, tuple[dict, float]] = {}
        self._note()
        self.talked = time.monotonic()
        for work in (self._talk, self._watch):
            threading.Thread(target=work, name="lmcore-ranks", daemon=True).start()

    def meet(self) -> None:
        """Learns who the other ranks are, once all are there."""
        self._look()

    def beat(self, step: int, patient: bool = False) -> None:
        """The main thread has begun another step, which may take long if the others are to be `patient`."""
        now = time.monotonic()
        if not self.patient:
            self.longest = max(self.longest, now - self.since)
        self.step, self.since, self.patient = step, now, patient

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """A block that may take long on one rank while the others wait."""
        before, self.patient = self.patient, True
        try:
            yield
        finally:
            self.patient, self.since = before, time.monotonic()

    def announce(self, state: str, code: int, sentence: str) -> None:
        """Tells the others that this rank ends, and with what they end, too."""
        with contextlib.suppress(RuntimeError):  # the store is gone: they will notice
            self._agreed(End(self.rank, state, code, sentence))
            self.linger()

    def _agreed(self, end: End) -> End:
        """What the first rank that noticed an end has written down: all say the same."""
        return End(**json.loads(self.store.compare_set("end", "", json.dumps(asdict(end)))))

    def linger(self) -> None:
        """The rank that holds the store waits until the others have read it."""
        if self.rank == 0 and not AGENT_HOLDS_STORE:
            time.sleep(2 * PERIOD)

    def explanation(self) -> End | None:
        """Why a collective has failed: waits until it is known which rank has ended."""
        self.known.wait(SILENCE + 2 * GRACE)
        return self.ended

    def close(self) -> None:
        """This rank is done: nobody waits for it any more."""
        self.closed.set()
        with contextlib.suppress(RuntimeError):
            self.store.set(f"beat/{self.rank}", json.dumps({"done": True}))

    def speaks(self, end: End) -> bool:
        """Whether this rank says the sentence: the first of those that are left, if the one that ended cannot."""
        others = set(range(self.size)) - {end.rank}
        if end.everywhere:
            others = {rank for rank in others if rank == self.rank or self._host(rank) == socket.gethostname()}
        return not end.said and self.rank == min(others)

    def _host(self, rank: int) -> str | None:
        return self.heard[rank][0].get("host") if rank in self.heard else None

    def _talk(self) -> None:
        """Notes and reads until it is known that all have to end; a store that is stopped would keep it waiting."""
        while not self.closed.wait(PERIOD) and self.ended is None:
            try:
                self._note()
                found = self._look()
                self.ended = None if found is None else self._agreed(found)
                self.talked = time.monotonic()
            except RuntimeError:
                self.ended = self._without_store("has died")

    def _watch(self) -> None:
        turn = time.monotonic()
        while not self.closed.wait(PERIOD / 4):
            now, before = time.monotonic(), turn
            turn = now
            if now - before > SILENCE / 2:  # this process was stopped: it cannot know what the others did meanwhile
                self.talked, self.heard = now, {rank: (note, now) for rank, (note, _) in self.heard.items()}
            silent = now - self.talked
            if self.ended is None and silent > SILENCE:
                self.ended = self._without_store(f"has given no sign of life for {silent:.0f} seconds")
            if self.ended is not None:
                self.known.set()
                if not self.closed.wait(GRACE):
                    self.exit(self.ended)
                return

    def _without_store(self, how: str) -> End:
        """The store does not answer: rank 0 held it, or torchrun's agent."""
        if AGENT_HOLDS_STORE:
            sentence = f"torchrun's agent on {os.environ.get('MASTER_ADDR')} is gone, and with it the ranks' store."
            return End(-1, "failed", EXIT_FAILURE, sentence, said=False, everywhere=True)
        note = self.heard.get(0, ({"pid": "?", "host": os.environ.get("MASTER_ADDR"), "step": 0}, 0.0))[0]
        return End(0, "failed", EXIT_FAILURE, self.sentence(0, note, how), said=False, everywhere=True)

    def exit(self, end: End) -> None:
        """Ends this process, whatever its main thread waits for."""
        if not self.leaving.acquire(blocking=False):
            time.sleep(2 * GRACE)  # the other thread does it
        if self.speaks(end):
            print(f"lmcore: {end.sentence}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            self.before_exit(end)
        if end.rank != 0:
            self.linger()
        sys.stdout.flush()
        os._exit(end.code)

    def _note(self) -> None:
        self.count += 1
        waits, where = place_of(self.main)
        still = time.monotonic() - self.since
        note = {"count": self.count, "step": self.step, "still": still, "patient": self.patient, "waits": waits}
        note["limit"] = max(PATIENCE, SLOWER * self.longest)
        note |= {"where": where, "host": socket.gethostname(), "pid": os.getpid(), "space": process_space()}
        self.store.set(f"beat/{self.rank}", json.dumps(note))

    def _look(self) -> End | None:
        """Reads what the ranks noted; returns why all have to end, if they have to."""
        now = time.monotonic()
        if self.store.check(["end"]):
            return End(**json.loads(self.store.get("end")))
        for rank in range(self.size):
            if not self.store.check([f"beat/{rank}"]):
                continue  # it is still starting
            note = json.loads(self.store.get(f"beat/{rank}"))
            if rank not in self.heard or self.heard[rank][0] != note:
                self.heard[rank] = note, now
        notes = {rank: note for rank, (note, _) in self.heard.items() if "done" not in note}
        for rank, note in notes.items():
            silent, gone = now - self.heard[rank][1], False
            if note["host"] == socket.gethostname() and note["space"] == process_space():
                gone = not runs(note["pid"])
            if gone or silent > SILENCE:
                how = "has died" if gone else f"has given no sign of life for {silent:.0f} seconds"
                return End(rank, "failed", EXIT_FAILURE, self.sentence(rank, note, how), said=False)
        late = {rank: note for rank, note in notes.items() if note["still"] > note["limit"]}
        working = [rank for rank, note in late.items() if not note["waits"] and not note["patient"]]
        waited_for = any(note["waits"] for note in late.values()) or len({note["step"] for note in late.values()}) > 1
        if working and waited_for:
            rank = min(working, key=lambda rank: late[rank]["step"])
            how = f"has been hanging in {late[rank]['where']} for {late[rank]['still']:.0f} seconds"
            return End(rank, "failed", EXIT_FAILURE, self.sentence(rank, late[rank], how), said=False)
        return None

    def sentence(self, rank: int, note: dict, how: str) -> str:
        """What to say of a rank that keeps the others waiting."""
        who = f"Rank {rank} (process {note['pid']} on {note['host']})"
        rest = "all ranks end; the same command resumes from the last checkpoint."
        return f"{who} {how}, last seen in step {note['step'] + 1}: {rest}"


def place_of(thread: int) -> tuple[bool, str]:
    """Whether a thread is in a collective, and the place in the program, in words."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return False, "nowhere"
    path, name = os.path.splitext(frame.f_code.co_filename)[0], frame.f_code.co_name
    reads = name == "read" and path.endswith(os.path.join("lmcore", "train"))  # a loss that comes after a collective
    waits = reads or any(part in path for part in WAITING)
    return waits, f"{name} ({os.path.basename(path)}.py, line {frame.f_lineno})"


def process_space() -> str:
    """What process ids belong to: equal on ranks that see each other's processes."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def runs(pid: int) -> bool:
    """Whether a process of this machine is there and has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True


def by_other_rank(error: BaseException) -> bool:
    """Whether an exception says that another rank, or the way to it, is gone."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("Connection", "gloo", "Gloo", "NCCL"))
        and not isinstance(error, torch.OutOfMemoryError)
    )  # fmt: skip
