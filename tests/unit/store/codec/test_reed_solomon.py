import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.core.errors import InvariantBroken
from millpond.store.codec import gf256
from millpond.store.codec.backend import ShardMemory, checksums
from millpond.store.codec.isal import IsalBackend, load_isal
from millpond.store.codec.native import load_kernels
from millpond.store.codec.numba_backend import NumbaBackend
from millpond.store.codec.reed_solomon import ReedSolomon
from tests.unit.store.stripes import aligned_memory

GOLDEN = Path(__file__).with_name("golden.json")


def backends():
    found = {"numba": NumbaBackend()}
    isal = load_isal()
    if isal is not None:
        found["isal"] = IsalBackend(isal)
        if load_kernels() is not None:
            found["isal and kernels"] = IsalBackend(isal, load_kernels())
    return found


BACKENDS = backends()


def test_this_machine_has_every_backend():
    """What CI runs must be all of them; a laptop may lack ISA-L or a compiler."""
    assert set(BACKENDS) == {"numba", "isal", "isal and kernels"}


def slow_product(a: int, b: int) -> int:
    """Product in GF(256), bit by bit: the definition."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        a <<= 1
        if a & 0x100:
            a ^= 0x11D
        b >>= 1
    return product


def slow_parity(matrix, data):
    """Parity shards from [k, bytes] by the definition, in plain Python."""
    return [
        bytes(
            [
                # one output byte: sum over the data shards
                _xor(slow_product(int(c), int(byte)) for c, byte in zip(row, column, strict=True))
                for column in zip(*data, strict=True)
            ]
        )
        for row in matrix
    ]


def _xor(values):
    total = 0
    for value in values:
        total ^= value
    return total


def shards_of(num_shards, shard_bytes, seed=0, stagger=64):
    stride = shard_bytes + stagger
    memory = aligned_memory(64 + stride * num_shards)
    memory[:] = np.random.default_rng(seed).integers(0, 256, len(memory), dtype=np.uint8)
    return ShardMemory(memory, num_shards, 64, stride, shard_bytes)


def content(shards, shard):
    begin = shards.begins[shard]
    return bytes(shards.memory[begin : begin + shards.shard_bytes])


def test_products_and_inverses_of_all_elements():
    a, b = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    products = gf256.multiply(a, b)
    for x, y in itertools.product(range(256), (0, 1, 2, 3, 29, 142, 255)):
        assert products[y, x] == slow_product(x, y)
    elements = np.arange(1, 256, dtype=np.uint8)
    assert (gf256.multiply(elements, gf256.inverse(elements)) == 1).all()


@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 2), (4, 2), (10, 2), (10, 4), (20, 4)])
def test_any_k_rows_of_the_matrix_are_invertible(k, m):
    matrix = gf256.coding_matrix(k, m)
    assert (matrix[:k] == np.eye(k)).all()
    assert (matrix[k] == 1).all()
    rng = np.random.default_rng(0)
    choices = list(itertools.combinations(range(k + m), k))
    for index in rng.permutation(len(choices))[:300]:
        rows = matrix[list(choices[index])]
        product = gf256.matrix_product(rows, gf256.invert_matrix(rows))
        assert (product == np.eye(k)).all()


@pytest.mark.parametrize("name", BACKENDS)
def test_ten_plus_two_equals_the_stored_bytes(name):
    """The matrix never changes, or stored stripes could not be decoded any more."""
    golden = json.loads(GOLDEN.read_text())
    codec = ReedSolomon(10, 2, BACKENDS[name])
    assert codec.matrix[10:].tolist() == golden["parity_rows"]
    shards = ShardMemory(aligned_memory(12 * 64), 12, 0, 64, 64)
    for shard in range(10):
        shards.memory[64 * shard : 64 * (shard + 1)] = [(37 * shard + 11 * i) % 256 for i in range(64)]
    sums = codec.encode(shards, [(0, 64)])
    assert [content(shards, shard).hex() for shard in (10, 11)] == golden["parity"]
    assert [f"{value:016x}" for (value,) in sums] == golden["checksums"]


@pytest.mark.parametrize("name", BACKENDS)
def test_all_78_losses_in_any_order_of_arrival(name):
    codec = ReedSolomon(10, 2, BACKENDS[name])
    shards = shards_of(12, 320)
    codec.encode(shards, [(0, 320)])
    whole = shards.memory.copy()
    rng = np.random.default_rng(1)
    losses = [*itertools.combinations(range(12), 1), *itertools.combinations(range(12), 2)]
    assert len(losses) == 78
    for lost in losses:
        for shard in lost:
            begin = shards.begins[shard]
            shards.memory[begin : begin + 320] = 0xCD
        present = [int(shard) for shard in rng.permutation(12) if shard not in lost]
        sums = codec.decode(shards, present, lost, [(0, 320)], range(12))
        assert (shards.memory == whole).all(), lost
        assert sums == checksums(shards, [(0, 320)], range(12))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_every_backend_equals_the_definition(data):
    k, m = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    num_bytes = 64 * data.draw(st.integers(1, 3))
    begin = 64 * data.draw(st.integers(0, 2))
    seed = data.draw(st.integers(0, 1000))
    memories = []
    for backend in BACKENDS.values():
        codec = ReedSolomon(k, m, backend)
        shards = shards_of(k + m, 320, seed)
        sums = codec.encode(shards, [(begin, begin + num_bytes)])
        memories.append(shards.memory.copy())
        assert sums == checksums(shards, [(begin, begin + num_bytes)], range(k + m))
        lost = data.draw(st.permutations(range(k + m)))[:m]
        present = [shard for shard in range(k + m) if shard not in lost]
        for shard in lost:
            at = shards.begins[shard] + begin
            shards.memory[at : at + num_bytes] = 0
        codec.decode(shards, present, lost, [(begin, begin + num_bytes)])
        assert (shards.memory == memories[-1]).all()
    data_shards = [content(shards, shard)[begin : begin + num_bytes] for shard in range(k)]
    parity = [content(shards, shard)[begin : begin + num_bytes] for shard in range(k, k + m)]
    assert parity == slow_parity(codec.matrix[k:], data_shards)
    assert all((memory == memories[0]).all() for memory in memories)


@pytest.mark.parametrize("size", [64, 128, 192, 256, 320, 1024, 1088, 2048, 4096, 18_432, 36_864])
def test_native_checksums_are_xxh3(size):
    shards = shards_of(3, size, seed=size)
    codec = ReedSolomon(2, 1, BACKENDS["isal and kernels"])
    assert codec.encode(shards, [(0, size)]) == checksums(shards, [(0, size)], range(3))
    spans = [(0, size), (0, 64), (size - 64, size)] if size < 1024 else [(0, 512), (256, size)]
    assert codec.decode(shards, [0, 1], [], spans, [1, 2]) == checksums(shards, spans, [1, 2])


@pytest.mark.parametrize("name", BACKENDS)
def test_memory_at_an_odd_place_is_coded_too(name):
    codec = ReedSolomon(4, 1, BACKENDS[name])
    memory = aligned_memory(5 * 128 + 1)[1:]
    memory[:] = np.arange(len(memory)) % 251
    shards = ShardMemory(memory, 5, 0, 128, 128)
    codec.encode(shards, [(0, 128)])
    assert content(shards, 4) == slow_parity([[1] * 4], [content(shards, s) for s in range(4)])[0]


@pytest.mark.parametrize(
    ("first", "stride", "size"), [(0, 128, 192), (1, 128, 128), (0, 130, 128), (0, 128, 100), (640, 128, 128)]
)
def test_shards_outside_of_memory_or_unaligned_are_refused(first, stride, size):
    with pytest.raises(InvariantBroken):
        ShardMemory(aligned_memory(1024), 6, first, stride, size)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("begin", "size"), [(0, 384), (320, 64), (-64, 64), (32, 64), (0, 100), (0, -64)])
def test_ranges_outside_of_the_shards_never_reach_native_code(name, begin, size):
    codec = ReedSolomon(4, 2, BACKENDS[name])
    shards = shards_of(6, 320)
    before = shards.memory.copy()
    with pytest.raises(InvariantBroken):
        codec.encode(shards, [(0, 64), (begin, begin + size)])
    with pytest.raises(InvariantBroken):
        codec.decode(shards, [0, 1, 2, 3], [4], [(begin, begin + size)], [4])
    assert (shards.memory == before).all()


def test_impossible_codes_and_patterns_are_refused():
    for k, m in ((0, 2), (10, 5), (252, 4)):
        with pytest.raises(InvariantBroken):
            ReedSolomon(k, m)
    codec, shards = ReedSolomon(4, 2), shards_of(6, 64)
    with pytest.raises(InvariantBroken):
        codec.decode(shards, [0, 1, 2], [4], [(0, 64)])
    with pytest.raises(InvariantBroken):
        codec.decode(shards, [0, 1, 2, 3], [3], [(0, 64)])
    with pytest.raises(InvariantBroken):
        codec.decode(shards, [0, 1, 2, 2], [3], [(0, 64)])
