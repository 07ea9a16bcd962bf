"""Random operations on the block table against a Python model, every invariant checked on the way."""

import random

import numpy as np
import pytest

from asynckv._core import CacheBlock, Table

SIZES = [0, 1, 10, 60, 64, 100, 700, 3000, 20_000, 32_768, 50_000]


def make_block(rng, stamp):
    size = rng.choice(SIZES)
    data = (b"%08d" % stamp * (size // 8 + 1))[:size]
    shape = rng.randrange(3)
    if shape == 0:
        return data, data
    array = np.frombuffer(data, "u1")
    if shape == 1:
        return array, data
    return CacheBlock(stamp % 100, array, array[: size // 2]), data + data[: size // 2]


def payload(block):
    if isinstance(block, CacheBlock):
        return block.key.tobytes() + block.value.tobytes()
    return bytes(block) if isinstance(block, memoryview) else block.tobytes()


class World:
    """The table, a model of what each key may read as, and a disk made of a dict."""

    def __init__(self, seed, **options):
        self.rng = random.Random(seed)
        self.table = Table(300_000, **options)
        self.model = {}
        self.disk = {}
        self.views, self.spills, self.loads, self.rooms = [], [], [], []
        self.place = 0

    def key(self):
        n = self.rng.randrange(60)
        return [n, f"key number {n}", b"%d" % n][n % 3]

    def put(self):
        key = self.key()
        block, data = make_block(self.rng, self.rng.randrange(10**8))
        if self.table.put(key, self.table.draft(block)):
            self.model[key] = data

    def put_in_turns(self):
        block, data = make_block(self.rng, self.rng.randrange(10**8))
        draft = self.table.draft(block)
        self.rooms.append((self.table.room(draft), draft, data))

    def step(self):
        if self.rooms:
            n = self.rng.randrange(len(self.rooms))
            room, draft, data = self.rooms[n]
            if room.step() == 1:
                key = self.key()
                if self.rng.random() < 0.2:
                    room.cancel()
                else:
                    self.table.fill(room, key, draft)
                    self.model[key] = data
                self.rooms.pop(n)
            elif self.rng.random() < 0.2:
                self.rooms.pop(n)[0].cancel()

    def get(self):
        key = self.key()
        view = self.table.get(key)
        if view is not None:
            assert payload(view) == self.model[key]
            if self.rng.random() < 0.3:
                self.views.append((view, self.model[key]))

    def drop_view(self):
        if self.views:
            view, data = self.views.pop(self.rng.randrange(len(self.views)))
            assert payload(view) == data

    def remove(self):
        key = self.key()
        known = self.table.state(key)
        done = self.table.remove(key)
        assert done or not known
        self.model.pop(key, None)

    def spill(self):
        self.spills += self.table.take_dirty(self.rng.choice([1, 5000, 1 << 20]), 5)

    def end_spill(self):
        if self.spills:
            spill = self.spills.pop(self.rng.randrange(len(self.spills)))
            if self.rng.random() < 0.1:
                self.table.expire_spill(spill)
                self.spills.append(spill)
                return
            self.place += 64
            slot = self.place // 6400 % 8
            self.disk[slot, self.place] = bytes(spill.view)
            self.table.finish_spill(spill, self.rng.random() < 0.8, slot, self.place, self.place)

    def load(self):
        key = self.key()
        where = self.table.where(key)
        if where is not None:
            room = self.table.room(where[2])
            if room.step() == 1:
                self.loads.append(self.table.begin_load(key, room))
            else:
                room.cancel()

    def end_load(self):
        if self.loads:
            load = self.loads.pop(self.rng.randrange(len(self.loads)))
            if self.rng.random() < 0.1:
                self.table.expire_load(load)
                self.loads.append(load)
                return
            load.view[:] = self.disk[load.slot, load.offset]
            if self.table.finish_load(load, self.rng.random() < 0.8):
                assert self.table.block(load) is not None

    def segment(self):
        slot = self.rng.randrange(8)
        choice = self.rng.randrange(4)
        if choice == 0:
            self.table.drop_segment(slot)
        elif choice == 1:
            self.table.revert_segment(slot, max(0, self.place - 640))
        else:
            for carry in self.table.segment_candidates(slot, 10_000):
                self.place += 64
                self.disk[7, self.place] = self.disk[carry.slot, carry.offset]
                self.table.finish_carry(carry, 7, self.place)

    def rare(self):
        choice = self.rng.randrange(7)
        if choice == 0:
            self.table.clear()
            self.model.clear()
        elif choice == 1:
            self.table.backed = not self.table.backed
        elif choice == 2:
            owed = self.table.take_owed()
            self.table.return_owed(owed)
        elif choice == 3:
            self.table.recovering = not self.table.recovering
        elif choice == 4:
            self.table.drop(self.key())
        elif choice == 5:
            assert self.table.requeue_unbacked() >= 0
            assert self.table.unbacked_blocks == 0

    def run(self, steps):
        often = [
            self.put,
            self.put_in_turns,
            self.step,
            self.step,
            self.get,
            self.get,
            self.get,
            self.drop_view,
            self.drop_view,
            self.remove,
            self.spill,
            self.end_spill,
            self.end_spill,
            self.load,
            self.load,
            self.end_load,
            self.end_load,
            self.segment,
        ]
        for n in range(steps):
            self.rng.choice(often)()
            if self.rng.random() < 0.01:
                self.rare()
            if n % 10 == 0:
                self.table.check()
        for key in list(self.table.keys()):
            assert key in self.model
        for room, *_ in self.rooms:
            room.cancel()
        for spill in self.spills:
            self.table.release_spill(spill)
        for load in self.loads:
            self.table.release_load(load)
        self.views.clear()
        table = self.table
        table.recovering = False
        table.check()
        assert table.pinned_blocks == table.quarantined == 0
        table.clear()
        assert table.used == table.length == table.disk_blocks == table.dirty_blocks == table.unbacked_blocks == 0
        table.check()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("options", [{}, {"policy": "fifo"}, {"hash_mask": 0}, {"max_spill": 1000}], ids=str)
def test_random_operations(seed, options):
    World(seed, backed=seed % 2 == 0, **options).run(3000)
