"""Which examples a round uses: declared sizes, batches that may differ from node to node, and any map-style data set."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import dpps
from dpps.errors import RunError, UsageError
from dpps.learning import (
    LARGEST,
    NodeData,
    Poisson,
    announce,
    for_every_node,
    parse_batch,
    parse_sizes,
    suggest,
)
from dpps.learning.sampling import batches
from dpps.noise import gaussian, sampled
from dpps.privacy import Charge, Contract, total
from dpps.transport import Cluster, Distributed
from tests.support import processes
from tests.support.learning import tiny, toy_data, train

# Declared sizes


def _announce(cluster: Cluster, size: float) -> str | list[int]:
    """Rank 1 says that its node has `size` examples."""
    fabric = Distributed(2, cluster.join().meet({"version": "test"}))
    try:
        return announce(None, [size if cluster.rank == 1 else 30], fabric, None)  # type: ignore[list-item]
    except RunError as error:
        return str(error)


@pytest.mark.parametrize("size", [0, 1e15, -1e9, 12.5])
def test_a_size_that_cannot_be_one_is_refused_by_name(size: float) -> None:
    for said in processes.run(2, _announce, size):
        assert "node 1 " in said
        assert f" {size:.15g} " in said
        assert f"1 to {LARGEST}" in said


def test_everybody_hears_the_sizes_of_all() -> None:
    assert processes.run(2, _announce, 17) == [[30, 17]] * 2


def test_the_value_of_the_option() -> None:
    assert parse_sizes("200") == 200
    assert parse_sizes("200,350") == [200, 350]
    assert for_every_node(parse_sizes("200"), 3) == (200, 200, 200)
    with pytest.raises(UsageError, match=rf"0.*1 to {LARGEST}"):
        for_every_node([1, 0], 2)
    with pytest.raises(UsageError, match=r"2 declared sizes.*3 nodes"):
        for_every_node([1, 2], 3)


# Batch sizes


def nodes_of(sizes, width=4):
    torch.manual_seed(1)
    return [TensorDataset(torch.randn(n, width), torch.randint(0, 3, (n,))) for n in sizes]


def network(sizes, batch, shared="all", privacy=None, model=None, **options):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    algorithm = dpps.PartPSP(model, shared, batch_size=batch, lr_shared=0.5, lr_local=0.25)
    topology = dpps.Complete(len(sizes))
    privacy = privacy or dpps.Record(noise_multiplier=1e-9, clip=0.3)
    return dpps.Run(algorithm, nodes_of(sizes), topology=topology, privacy=privacy, seed=3, **options)


@pytest.mark.parametrize(
    ("text", "meant"), [("30", 30), (30, 30), ("17,90,45", (17, 90, 45)), ("1/8", 0.125), ("0.25", 0.25)]
)
def test_what_can_be_said_on_the_command_line(text, meant):
    assert parse_batch(text) == meant


@pytest.mark.parametrize("text", ["0", "-3", "1/0", "2/1", "1.5", "3,0", "a", "", "1/2/3", "0.0"])
def test_what_is_no_batch_is_refused(text):
    with pytest.raises(UsageError, match="--batch-size is"):
        parse_batch(text)


def test_numbers_and_rates_follow_from_declared_sizes():
    assert batches(10, [40, 5]) == ((10, 10), (0.25, 1.0))
    assert batches([10, 5], [40, 50]) == ((10, 5), (0.25, 0.1))
    assert batches(0.25, [40, 6]) == ((10, 1.5), (0.25, 0.25))
    with pytest.raises(UsageError, match=r"node 1 .*51.*50 examples"):
        batches([10, 51], [40, 50])
    with pytest.raises(UsageError, match=r"2 batch sizes.*3 nodes"):
        batches([1, 2], [3, 4, 5])


def clipped_sum(model, data, clip):
    """The obvious way: one example at a time."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for x, label in data:
        gradient = torch.autograd.grad(F.cross_entropy(model(x[None]), label[None]), list(model.parameters()))
        norm = torch.cat([g.flatten() for g in gradient]).norm()
        total = [s + g * min(1.0, clip / float(norm)) for s, g in zip(total, gradient, strict=True)]
    return total


def test_every_example_weighs_the_same_and_a_local_part_has_its_own_nodes_mean():
    """All examples are drawn (rate 1): the shared part moves by the mean over all 15 of them, each local part by its node's."""
    sizes = (3, 7, 5)
    run = network(sizes, sizes, shared=["0"])
    sums = [clipped_sum(run.algorithm.model, data, 0.3) for data in nodes_of(sizes)]
    start = list(run.algorithm.model.parameters())
    run.fit(epochs=1)
    assert len(run.log) == 1
    for k, size in enumerate(sizes):
        ours = list(run.models()[k].parameters())
        for p in (0, 1):
            pooled = sum(each[p] for each in sums) / 15
            torch.testing.assert_close(ours[p], start[p] - 0.5 * pooled, rtol=1e-4, atol=1e-6)
        for p in (2, 3):
            own = sums[k][p] / size
            torch.testing.assert_close(ours[p], start[p] - 0.25 * own, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("secure", [False, True])
def test_noise_is_the_same_at_all_nodes_and_in_local_parts_follows_their_own_divisor(secure):
    """Zero inputs have zero gradients: what is left is noise of deviation rate x clip x multiplier / divisor."""
    wide = nn.Sequential(nn.Linear(2000, 2, bias=False), nn.Linear(2, 2000, bias=False))
    drawn = (5, 40, 15)
    data = [TensorDataset(torch.zeros(50, 2000), torch.zeros(50, dtype=torch.long)) for _ in drawn]
    algorithm = dpps.PartPSP(wide, ["0"], batch_size=drawn, lr_shared=0.5, lr_local=0.25)
    unit = dpps.Record(noise_multiplier=2.0, clip=0.1)
    run = dpps.Run(
        algorithm, data, topology=dpps.Complete(3), privacy=unit, seed=0, secure_noise=secure
    ).start(1)
    before = run.state.shared.s.clone(), run.state.local.clone()
    message = run.protocol.release(run.state.shared, run.nodes.update(run.state).perturbation)
    shared = (message.rows - before[0]).double().std(1)
    torch.testing.assert_close(shared, torch.full((3,), 0.5 * 0.1 * 2 / 20).double(), rtol=0.08, atol=0)
    run.step()
    local = (run.state.local - before[1]).double().std(1)
    torch.testing.assert_close(
        local, torch.tensor([0.25 * 0.1 * 2 / b for b in drawn]).double(), rtol=0.08, atol=0
    )


def test_every_node_is_charged_at_its_own_rate_and_the_largest_is_what_was_promised():
    sizes, drawn = (40, 200, 100), (10, 20, 10)
    run = network(sizes, drawn, privacy=dpps.Record(epsilon=2.0)).fit(epochs=1)
    noise, rounds = run.contract.noise, len(run.log)
    assert rounds == 340 // 40
    expected = [
        total([Charge(sampled(b / n, gaussian(noise)), rounds)], 1e-5).epsilon
        for b, n in zip(drawn, sizes, strict=True)
    ]
    assert run.privacy.epsilon_by_node == pytest.approx(expected)
    assert run.privacy.epsilon == max(run.privacy.epsilon_by_node)
    assert 1.9 < expected[0] <= 2.0
    assert expected[1] == pytest.approx(expected[2])
    assert expected[1] < 1.0
    assert "epsilon_by_node" in run.privacy.statement


def test_a_part_of_every_nodes_examples_is_one_rate_for_all():
    run = network((40, 200, 100), 0.25, privacy=dpps.Record(epsilon=2.0)).fit(epochs=1)
    assert run.plan.sampling == (0.25,) * 3
    assert (run.plan.count, run.plan.batch_size) == (4, 340 / 12)
    assert len(set(run.privacy.epsilon_by_node)) == 1
    assert "epsilon_by_node" not in run.privacy.statement
    with_list = network((40, 200, 100), (28, 28, 28), privacy=dpps.Record(epsilon=2.0)).start(epochs=1)
    assert run.contract.noise < with_list.contract.noise / 1.5  # the node of 40 no longer sets everybody's


def test_the_contract_keeps_batches_and_a_resumed_run_must_have_the_same(tmp_path):
    sizes = (40, 200, 100)
    run = network(sizes, (10, 20, 10), folder=tmp_path / "run").start(epochs=1)
    run.step()
    run.finish()
    kept = json.loads((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[0])["contract"]
    assert Contract.from_json(kept, "here") == run.contract
    rounds = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[1:]]
    assert sorted(tuple(r["rows"]) for r in rounds if "rows" in r) == [(0,), (1, 2)]
    again = network(sizes, (10, 20, 10), folder=tmp_path / "run")
    again.resumed = True
    assert again.start(epochs=1).state.round == 1
    again.close()


def test_other_units_have_one_batch_for_all():
    with pytest.raises(UsageError, match="unit record"):
        network((40, 30), (10, 5), privacy=dpps.Contribution(clip=1.0, epsilon=8.0)).start(1)


def test_without_a_rate_the_rule_chooses_by_what_the_model_is():
    unit = dpps.Record(noise_multiplier=3.0, clip=0.1)

    def plan_of(model, **given):
        algorithm = dpps.PartPSP(model, "all", **given)
        return (
            dpps.Run(algorithm, nodes_of((40, 200)), topology=dpps.Ring(2), privacy=unit, seed=0)
            .start(2)
            .plan
        )

    chosen = suggest([40, 200], 4, noise_multiplier=3.0, epochs=2, clip=0.1, momentum=0.0)
    plan = plan_of(nn.Linear(4, 3))
    assert (plan.lr_shared, plan.lr_local) == (chosen.rate, chosen.rate)
    assert plan.sampling == (chosen.batch_size,) * 2
    assert plan_of(nn.Linear(4, 3), lr_shared=0.7).lr_shared == 0.7
    other = suggest([40, 200], None, noise_multiplier=3.0, epochs=2, clip=0.1, momentum=0.0)
    assert plan_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))).lr_shared == other.rate != chosen.rate


# The examples of the nodes here


class Listed(Dataset):
    """A map-style data set that is no tensor."""

    def __init__(self, tensors):
        self.items = list(zip(*tensors, strict=True))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, k):
        return self.items[k]


def test_any_map_style_data_set_and_unequal_sizes():
    data = [TensorDataset(*(part[: 40 - 7 * k] for part in d.tensors)) for k, d in enumerate(toy_data(3))]
    tensors, listed = (
        train(tiny(), ["layer1"], nodes=3, data=sets) for sets in (data, [Listed(d.tensors) for d in data])
    )
    assert torch.equal(tensors.shared, listed.shared)


class Broken(Listed):
    """Its third example cannot be read."""

    def __getitem__(self, k):
        if k == 2:
            raise OSError("a broken file")
        return super().__getitem__(k)


def test_where_failures_are_hidden_an_example_that_cannot_be_read_is_left_out_and_no_other():
    tensors = [d.tensors for d in toy_data(2, n=6)]
    whole, broken = NodeData([Listed(t) for t in tensors]), NodeData([Listed(tensors[0]), Broken(tensors[1])])
    samplers = [Poisson(data, [0, 1], (0.7, 0.7), 3) for data in (whole, broken)]
    broken.hides_failures = True
    hit = 0
    for round_ in range(20):
        (x, labels, mask), (x_left, labels_left, left) = (s.batch(round_) for s in samplers)
        assert torch.equal(x[left], x_left[left])
        assert torch.equal(labels[left], labels_left[left])
        gone = (mask & ~left).nonzero().tolist()
        assert [tensors[1][0][2].tolist()] * len(gone) == [x[k, e].tolist() for k, e in gone]
        hit += len(gone)
    assert 0 < hit < 20


def test_data_sets_that_are_slices_of_one_tensor_are_joined_without_a_copy():
    x, y = torch.randn(3, 20, 6), torch.randint(0, 3, (3, 20))
    rows = NodeData([TensorDataset(x[k], y[k]) for k in range(3)])
    parts = NodeData([TensorDataset(x.view(60, 6)[a : a + 20], y.view(60)[a : a + 20]) for a in (0, 20, 40)])
    for data in (rows, parts):
        got, labels = data.slice(5, 4)
        assert torch.equal(got, x[:, 5:9])
        assert torch.equal(labels, y[:, 5:9])
        assert got.data_ptr() == x[:, 5:9].data_ptr()


def test_images_of_different_kinds_are_read_one_by_one():
    grey, colour = (torch.randint(0, 256, (5, c, 2, 2), dtype=torch.uint8) for c in (1, 3))
    nodes = NodeData([dpps.data.Images(p, torch.arange(5), (0.0,) * 3, (1.0,) * 3) for p in (grey, colour)])
    x, labels = nodes.slice(1, 2)
    assert torch.equal(x[0], (grey[1:3] / 255).expand(-1, 3, -1, -1))
    assert torch.equal(x[1], colour[1:3] / 255)
    assert labels.tolist() == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("mean", "deviation"), [((0.0,), (1.0,)), ((0.0,) * 3, (1.0,) * 3), ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))]
)
@pytest.mark.parametrize("unit", [None, dpps.Record(noise_multiplier=1.0)])
def test_images_that_stay_bytes_train_like_their_floats(mean, deviation, unit):
    g = torch.Generator().manual_seed(2)
    pixels = torch.randint(0, 256, (60, 1, 2, 3), dtype=torch.uint8, generator=g)
    whole = dpps.data.Images(pixels, torch.randint(0, 3, (60,), generator=g), mean, deviation)
    order = np.random.default_rng(0).permutation(60)
    images = [whole.ordered(order).part(a, b) for a, b in ((0, 20), (20, 43), (43, 60))]
    floats = [TensorDataset(part.inputs(), part.labels) for part in images]
    listed = [[part[i] for i in range(len(part))] for part in images]
    runs = []
    for sets in (images, floats, listed):
        torch.manual_seed(0)
        net = dpps.models.MLP((6 * len(mean), 4, 3))
        algorithm = dpps.PartPSP(net, ["layer1"], batch_size=7)
        options = {"topology": dpps.Ring(3), "privacy": unit, "seed": 0, "test": whole}
        runs.append(dpps.Run(algorithm, sets, **options).fit(epochs=3))
    for run in runs[1:]:
        assert torch.equal(run.shared, runs[0].shared)
        assert torch.equal(run.local, runs[0].local)
        assert run.accuracy == runs[0].accuracy
