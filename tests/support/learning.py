"""Small models and data to learn."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpps


def tiny(seed=0, sizes=(6, 4, 3)):
    torch.manual_seed(seed)
    return dpps.models.MLP(sizes)


def toy_data(nodes, n=40, features=6, classes=3, seed=0):
    centres = torch.randn(classes, features, generator=torch.Generator().manual_seed(77))
    g = torch.Generator().manual_seed(seed)
    sets = []
    for _ in range(nodes):
        labels = torch.randint(0, classes, (n,), generator=g)
        sets.append(TensorDataset(centres[labels] + 0.3 * torch.randn(n, features, generator=g), labels))
    return sets


def batch_norm_model():
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))


ALGORITHM = {"batch_size", "lr_shared", "lr_local", "lr_step", "local_steps", "loss", "local_optimizer"}
ALGORITHM |= {"optimizer", "averaging", "task", "input_length", "pretrained"}


def make_run(privacy=None, *, shared=("layer1",), model=None, data=None, kind=dpps.PartPSP, **options):
    """A run of three nodes that has not started; options are those of the algorithm and of `Run`."""
    options = {"batch_size": 10, "topology": dpps.Ring(3)} | options
    if not {"noise", "secure_noise"} & set(options):
        options.setdefault("seed", 0)
    own = {name: options.pop(name) for name in ALGORITHM & set(options)}
    algorithm = kind(tiny() if model is None else model, shared, **own)
    return dpps.Run(algorithm, toy_data(3) if data is None else data, privacy=privacy, **options)


def train(model, shared, unit=None, nodes=4, **options):
    options = {"batch_size": 10, "seed": 5, "lr_shared": 0.3, "lr_local": 0.3} | options
    topology = options.pop("topology", None) or dpps.DOut(nodes, 2)
    epochs, data = options.pop("epochs", 3), options.pop("data", None) or toy_data(nodes)
    algorithm = dpps.PartPSP(model, shared, **{k: options.pop(k) for k in ALGORITHM & set(options)})
    test = toy_data(1, seed=9)[0]
    run = dpps.Run(algorithm, data, topology=topology, privacy=unit, test=test, **options)
    return run.fit(epochs=epochs)


def started_on_images(privacy=None, norm=lambda: nn.BatchNorm2d(4), model=None, epochs=2):
    torch.manual_seed(0)
    sets = [TensorDataset(torch.rand(8, 1, 6, 6), torch.randint(0, 3, (8,))) for _ in range(3)]
    model = model or nn.Sequential(nn.Conv2d(1, 4, 3), norm(), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    algorithm = dpps.PartPSP(model, ["0"], batch_size=4)
    return dpps.Run(algorithm, sets, topology=dpps.Ring(3), privacy=privacy, seed=1).start(epochs)
