"""The directory of what hosts keep, against a dict: whoever lives is named for what it published first."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from millpond.core.units import SECOND_NS
from millpond.store.dram_arena import SlotRef
from millpond.store.metadata.directory import (
    BLOCKS,
    SILENCE_S,
    STATES,
    HostDirectory,
    pack_entries,
    unpack_places,
)
from millpond.store.net.messages import (
    DirectoryDrop,
    DirectoryFind,
    DirectoryFound,
    DirectoryJoin,
    DirectoryLeave,
    DirectoryPublish,
    Done,
    Failed,
)

NAMES = [bytes([index]) * 16 for index in range(6)]
KINDS = st.sampled_from([BLOCKS, STATES])
HOSTS = st.sampled_from(["a", "b", "c"])
EPOCHS = st.integers(1, 3)
SOME = st.sets(st.integers(0, len(NAMES) - 1), max_size=4)


class Model(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = HostDirectory()
        self.now_s = 0
        self.lives: dict[tuple[str, str], tuple[int, int]] = {}
        """(kind, host) -> (epoch, when it was heard)."""
        self.places: dict[tuple[str, bytes], tuple[str, int, int]] = {}
        """(kind, name) -> (host, epoch, slot)."""

    def end(self, kind: str, host: str) -> None:
        self.lives.pop((kind, host), None)
        self.places = {
            key: place for key, place in self.places.items() if not (key[0] == kind and place[0] == host)
        }

    @rule(kind=KINDS, host=HOSTS, epoch=EPOCHS)
    def join(self, kind: str, host: str, epoch: int) -> None:
        answer, _ = self.directory.handle(
            DirectoryJoin(kind, host, f"{host}:1", epoch), b"", self.now_s * SECOND_NS
        )
        is_new = self.lives.get((kind, host), (0, 0))[0] != epoch
        assert answer == Done(int(is_new))
        if is_new:
            self.end(kind, host)
        self.lives[kind, host] = (epoch, self.now_s)

    @rule(kind=KINDS, host=HOSTS, epoch=EPOCHS)
    def leave(self, kind: str, host: str, epoch: int) -> None:
        answer, _ = self.directory.handle(DirectoryLeave(kind, host, epoch), b"", 0)
        is_it = self.lives.get((kind, host), (0, 0))[0] == epoch
        assert answer == Done(int(is_it))
        if is_it:
            self.end(kind, host)

    @rule(kind=KINDS, host=HOSTS, epoch=EPOCHS, some=SOME, slot=st.integers(0, 9))
    def publish(self, kind: str, host: str, epoch: int, some: set[int], slot: int) -> None:
        payload = pack_entries([(NAMES[index], SlotRef(slot, 1)) for index in sorted(some)])
        answer, _ = self.directory.handle(DirectoryPublish(kind, host, epoch), payload, 0)
        if self.lives.get((kind, host), (0, 0))[0] != epoch:
            assert isinstance(answer, Failed)
            return
        mine = [index for index in some if self.places.get((kind, NAMES[index]), (host,))[0] == host]
        assert answer == Done(len(mine))
        self.places |= {(kind, NAMES[index]): (host, epoch, slot) for index in mine}

    @rule(kind=KINDS, host=HOSTS, epoch=EPOCHS, some=SOME)
    def drop(self, kind: str, host: str, epoch: int, some: set[int]) -> None:
        names = [NAMES[index] for index in sorted(some)]
        answer, _ = self.directory.handle(DirectoryDrop(kind, host, epoch), b"".join(names), 0)
        mine = [name for name in names if self.places.get((kind, name), ("", 0))[:2] == (host, epoch)]
        assert answer == Done(len(mine))
        for name in mine:
            del self.places[kind, name]

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds
        self.directory.tick(self.now_s * SECOND_NS)
        for (kind, host), (_, heard_s) in list(self.lives.items()):
            if self.now_s - heard_s > SILENCE_S:
                self.end(kind, host)

    @invariant()
    def finds_what_the_model_has(self) -> None:
        for kind in (BLOCKS, STATES):
            answer, payload = self.directory.handle(DirectoryFind(kind), b"".join(NAMES), 0)
            assert isinstance(answer, DirectoryFound)
            found = [
                (place.host, place.epoch, place.ref.slot) if place is not None else None
                for place in unpack_places(answer, payload)
            ]
            assert found == [self.places.get((kind, name)) for name in NAMES]
        assert self.directory.hosts == tuple(sorted({host for _, host in self.lives}))


TestHostDirectory = Model.TestCase
TestHostDirectory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
