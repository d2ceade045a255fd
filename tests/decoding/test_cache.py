"""TokenBuffer and KVCache against plain lists."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from adaspec.decoding.cache import KVCache, TokenBuffer

ROWS, CAPACITY = 3, 12


@st.composite
def edits(draw):
    """A sequence of appends (tokens and counts per row) and truncations (tokens to forget per row)."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        width = draw(st.integers(1, 4))
        tokens = draw(st.lists(st.lists(st.integers(0, 99), min_size=width, max_size=width), min_size=3, max_size=3))
        counts = draw(st.lists(st.integers(0, width), min_size=3, max_size=3))
        found.append((tokens, counts, draw(st.lists(st.integers(0, 5), min_size=3, max_size=3))))
    return found


@given(edits())
def test_a_token_buffer_is_a_list_per_row(steps):
    buffer, rows = TokenBuffer(ROWS, CAPACITY), [[] for _ in range(ROWS)]
    for tokens, counts, forget in steps:
        counts = [min(count, CAPACITY - len(row)) for count, row in zip(counts, rows, strict=True)]
        buffer.append(torch.tensor(tokens), torch.tensor(counts))
        rows = [row + new[:count] for row, new, count in zip(rows, tokens, counts, strict=True)]
        assert [buffer.row(index) for index in range(ROWS)] == rows
        assert buffer.lengths.tolist() == [len(row) for row in rows]
        rows = [row[: max(0, len(row) - drop)] for row, drop in zip(rows, forget, strict=True)]
        buffer.truncate(torch.tensor([len(row) for row in rows]))
    for index, row in enumerate(rows):
        assert buffer.row(index) == row
        assert buffer.row(index, 2) == row[2:]


@given(edits(), st.lists(st.integers(0, CAPACITY), min_size=3, max_size=3), st.integers(0, 5))
def test_a_slice_reads_from_each_rows_own_position(steps, first, count):
    buffer = TokenBuffer(ROWS, 30)
    for tokens, counts, _ in steps:
        buffer.append(torch.tensor(tokens), torch.tensor(counts))
    part = buffer.slice(torch.tensor(first), count)
    assert part.shape == (ROWS, count)
    for index in range(ROWS):
        want = buffer.row(index)[first[index] : first[index] + count]
        assert part[index, : len(want)].tolist() == want


@st.composite
def passes(draw):
    """Passes over a cache: the first slot of each row and the number of slots; some rows reach past the end."""
    return [
        (draw(st.lists(st.integers(0, CAPACITY), min_size=3, max_size=3)), draw(st.integers(1, 4)))
        for _ in range(draw(st.integers(1, 6)))
    ]


@given(passes(), st.booleans())
def test_a_key_value_cache_keeps_the_last_write_of_every_slot(steps, together):
    cache, kept = KVCache(ROWS, CAPACITY), {}
    for turn, (first, width) in enumerate(steps):
        first = first[:1] * ROWS if together else first
        slots = torch.tensor(first)[:, None] + torch.arange(width)
        filled = min(int(slots.max()) + 1, CAPACITY + 1)
        cache.begin(slots, filled)
        for layer in range(2):
            new = torch.arange(ROWS * 2 * width * 2).view(ROWS, 2, width, 2) + 1000.0 * (turn + 1) + 0.5 * layer
            keys, values = cache.write(layer, new, -new)
            assert keys.shape == (ROWS, 2, filled, 2)
            for row in range(ROWS):
                for step in range(width):
                    if first[row] + step < CAPACITY:
                        kept[layer, row, first[row] + step] = new[row, :, step]
            for (at, row, slot), want in kept.items():
                if at == layer and slot < filled:
                    assert torch.equal(keys[row, :, slot], want)
                    assert torch.equal(values[row, :, slot], -want)


def test_a_write_returns_a_view_not_a_copy():
    cache = KVCache(1, 8)
    cache.begin(torch.tensor([[0, 1]]), 2)
    first, _ = cache.write(0, torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1))
    cache.begin(torch.tensor([[1, 2]]), 3)
    second, _ = cache.write(0, torch.full((1, 1, 2, 1), 2.0), torch.ones(1, 1, 2, 1))
    assert first.data_ptr() == second.data_ptr()
    assert second.flatten().tolist() == [1, 2, 2]
