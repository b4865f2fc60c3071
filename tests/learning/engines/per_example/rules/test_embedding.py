"""Tables that are looked up."""

import pytest
import torch

from dpps.learning.engines.per_example.rules.embedding import Embedding
from tests.learning.engines.per_example.rules.samples import by_rule, check_rule, make_call, randn

TABLE = {("weight", -1)}
WORDS = torch.tensor([[1, 4, 1, 0], [2, 2, 2, 2], [0, 5, 3, 1]])


@pytest.mark.parametrize("words", [WORDS, WORDS[:, 0]], ids=["repeated words", "one word"])
@pytest.mark.parametrize("padding", [-1, 2])
def test_rows_of_a_table(words, padding):
    check_rule(Embedding(), torch.embedding, [randn(6, 4), words, padding], TABLE, {"indices": 0})


def test_padding_learns_nothing():
    call = make_call(Embedding(), torch.embedding, [randn(6, 4), WORDS, 2], TABLE, {"indices": 0})
    assert not by_rule(Embedding(), call)["weight", -1].explicit()[:, 2].any()


def test_gradients_divided_by_how_often_a_batch_has_a_word_mix_examples():
    call = make_call(Embedding(), torch.embedding, [randn(6, 4), WORDS, -1, True], TABLE, {"indices": 0})
    assert not Embedding().suits(call)
