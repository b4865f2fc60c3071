"""Models of `transformers` built from configurations, and low-rank adapters of `peft`, against plain autograd in float64."""

import pytest
import torch
import torch.nn.functional as F

from dpps.errors import UsageError
from dpps.learning import BookKeeping, ModelLoss, OneByOne, Partition, per_example, pick

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

NODES, BATCH, LENGTH = 2, 3, 5
SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def bert(dropout=0.0):
    config = transformers.BertConfig(
        vocab_size=20,
        max_position_embeddings=8,
        num_labels=3,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=0.0,
        **SMALL,
    )
    return transformers.BertForSequenceClassification(config)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=20,
        n_positions=8,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=20, max_position_embeddings=8, num_key_value_heads=1, **SMALL
    )
    return transformers.LlamaForCausalLM(config)


def vit():
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **SMALL,
    )
    return transformers.ViTForImageClassification(config)


def lora(model, target):
    return peft.get_peft_model(model, peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=target))


def next_token(logits, target):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def ids():
    return torch.randint(0, 20, (NODES, BATCH, LENGTH))


def classes():
    return torch.randint(0, 3, (NODES, BATCH))


def masked():
    mask = torch.ones(NODES, BATCH, LENGTH, dtype=torch.int64)
    mask[:, 1, 3:] = 0
    return {"input_ids": ids(), "attention_mask": mask}


def compare(model, x, target, loss):
    partition = Partition(model, "all")
    s, l = partition.initial()
    y = s + 0.05 * torch.randn(NODES, len(s))
    l = l.repeat(NODES, 1)
    mask = torch.ones(NODES, BATCH, dtype=torch.bool)
    way = per_example(partition, loss, 0.5, pick(x, (0, 0)), BATCH)
    assert isinstance(way, BookKeeping)
    found = way.sums(y, l, x, target, mask)
    for a, b in zip(found, OneByOne(partition, loss, 0.5, BATCH).sums(y, l, x, target, mask), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    assert float(found[1].norm()) > 1e-4


@pytest.mark.parametrize(
    ("make", "inputs", "targets", "loss"),
    [
        (bert, ids, classes, F.cross_entropy),
        (bert, masked, classes, F.cross_entropy),
        (gpt2, ids, ids, next_token),
        (llama, ids, ids, next_token),
        (vit, lambda: torch.randn(NODES, BATCH, 1, 8, 8), classes, F.cross_entropy),
        (lambda: lora(bert(), ["query", "value"]), masked, classes, F.cross_entropy),
        (lambda: lora(llama(), ["q_proj", "v_proj", "down_proj"]), ids, ids, next_token),
        (lambda: lora(gpt2(), ["c_attn"]), ids, ids, next_token),
    ],
    ids=["BERT", "BERT by names", "GPT-2", "Llama", "ViT", "LoRA on BERT", "LoRA on Llama", "LoRA on GPT-2"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_clipped_sums_are_those_of_plain_autograd(make, inputs, targets, loss, caplog):
    compare(make(), inputs(), targets(), loss)
    assert not [r for r in caplog.records if r.name.startswith("dpps")], "no notice of a slower way"


def test_a_loss_of_its_own_that_calls_the_model(caplog):
    def loss(model, batch):
        x, target = batch
        return next_token(model(input_ids=x).logits, target)

    compare(gpt2(), ids(), ids(), ModelLoss(loss))
    assert not [r for r in caplog.records if r.name.startswith("dpps")], "no notice of a slower way"


def test_a_loss_that_the_model_averages_over_the_batch_is_still_taken_per_example(caplog):
    def loss(model, batch):
        return model(input_ids=batch[0], labels=batch[1]).loss

    target = ids()
    target[:, 0, :3] = -100  # ignored: the mean over the batch is no mean of the examples' losses
    compare(gpt2(), ids(), target, ModelLoss(loss))
    assert "logits" in caplog.text


def test_dropout_of_a_configuration_is_refused():
    with pytest.raises(UsageError, match=r"bert\.embeddings\.dropout.* 0 "):
        per_example(
            Partition(bert(dropout=0.1), "all"), F.cross_entropy, 1.0, torch.zeros(LENGTH, dtype=torch.int64)
        )
