"""Models of `transformers` built from configurations, and low-rank adapters of `peft`, against plain autograd in float64."""

import pytest
import torch
import torch.nn.functional as F

from dpps.errors import UsageError
from dpps.learning import Batched, ModelLoss, OneByOne, Partition, choose_per_example, pick
from dpps.learning.gradients.layers.recording import Plan

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


def compare(model, x, target, loss, *, by_rules=True):
    partition = Partition(model, "all")
    s, l = partition.initial()
    y = s + 0.05 * torch.randn(NODES, len(s))
    l = l.repeat(NODES, 1)
    mask = torch.ones(NODES, BATCH, dtype=torch.bool)
    example = pick(x, (0, 0)), pick(target, (0, 0))
    way = choose_per_example(partition, loss, example, clip=0.5, batch=BATCH)
    assert isinstance(way, Batched)
    assert isinstance(way.plan(example, y, l), Plan) == by_rules
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


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: next_token(model(input_ids=batch[0]).logits, batch[1]),
        lambda model, batch: model(input_ids=batch[0], labels=batch[1]).loss,
    ],
    ids=["of its logits", "the model's own, averaged over the batch"],
)
def test_a_loss_that_calls_the_model_is_taken_per_example(loss):
    target = ids()
    target[:, 0, :3] = -100  # ignored: the mean over the batch is no mean of the examples' losses
    compare(gpt2(), ids(), target, ModelLoss(loss), by_rules=False)


def test_dropout_of_a_configuration_is_refused():
    example = torch.zeros(LENGTH, dtype=torch.int64), torch.tensor(0)
    with pytest.raises(UsageError, match=r"bert\.embeddings\.dropout.* 0 "):
        choose_per_example(Partition(bert(dropout=0.1), "all"), F.cross_entropy, example, clip=1.0)
