"""Tables that are looked up."""

import pytest
import torch

from dpps.learning import Embedding, EmbeddingBag, IrregularModel
from tests.support.rules import by_rule, check_rule, make_call, randn

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


def bags(offsets, *more):
    """Twelve words in three bags."""
    call = [randn(6, 4), WORDS.flatten(), torch.tensor(offsets), *more]
    return make_call(
        EmbeddingBag(), torch.embedding_bag, call, TABLE, {"indices": 0, "offsets": 0}, (0, 0, 0, 0)
    )


@pytest.mark.parametrize("mode", [0, 1])
def test_every_row_of_a_bag_gets_what_came_back_to_the_bag(mode):
    call, back = bags([0, 4, 8], False, mode), randn(3, 4)
    assert EmbeddingBag().suits(call)
    found = EmbeddingBag().gradients(call, [back])["weight", -1].explicit()
    table = call["weight"].requires_grad_()
    each = table[WORDS].mean(1) if mode else table[WORDS].sum(1)
    for k in range(3):
        (expected,) = torch.autograd.grad(each[k], table, back[k], retain_graph=True)
        torch.testing.assert_close(found[k], expected)


def test_bags_of_another_kind_or_of_different_length_are_left_to_the_general_way():
    assert not EmbeddingBag().suits(bags([0, 4, 8], False, 2))  # the largest
    assert not EmbeddingBag().suits(bags([0, 4, 8], True, 0))
    with pytest.raises(IrregularModel, match="embedding_bag"):
        EmbeddingBag().gradients(bags([0, 3, 8], False, 0), [randn(3, 4)])
