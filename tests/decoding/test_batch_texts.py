"""A batch's texts on the host are its committed tokens, whoever asks for them and whenever."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from adaspec.decoding.batch import Batch
from adaspec.decoding.cache import TokenBuffer
from adaspec.decoding.sampling import GREEDY, Sampler


@given(st.lists(st.tuples(st.lists(st.integers(1, 9), max_size=3), st.booleans(), st.booleans()), max_size=8))
def test_a_text_is_what_was_committed(rounds):
    """Rounds that are noted or not, between which somebody reads the text or nobody does."""
    sequence = TokenBuffer(1, 32)
    batch = Batch(sequence, Sampler([GREEDY]), torch.full((1, 1), -1), sequence.lengths)
    text = []
    for tokens, noted, read in rounds:
        if read:
            assert batch.text(0, len(text))[: len(text)] == text
        sequence.append(torch.tensor([tokens], dtype=torch.long).view(1, -1), torch.tensor([len(tokens)]))
        if noted:
            batch.note(0, len(text), tokens)
        text += tokens
    assert batch.text(0, len(text)) == text
