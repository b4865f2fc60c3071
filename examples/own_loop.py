"""Your own training loop, dpps as its communication step: the way in for Lightning, transformers or a plain loop.

Each node is an ordinary PyTorch model with an ordinary optimizer. Once a round the nodes hand over how far they moved; DPPS clips that,
adds noise, gossips, and hands back where they are now.

    python examples/own_loop.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import dpps

NODES, ROUNDS, STEP = 8, 60, 0.05


def main() -> None:
    """Eight nodes learn a function of two numbers."""
    torch.manual_seed(0)
    data = [torch.rand(400, 2) * 2 - 1 for _ in range(NODES)]
    targets = [(x[:, 0] * x[:, 1] > 0).long() for x in data]
    models = [nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)) for _ in range(NODES)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())  # a common, public start
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02) for m in models]

    # a round's update is clipped to an L2 norm of STEP; two updates differ by at most twice that
    protocol = dpps.DPPS(
        dpps.Exponential(NODES),
        dpps.Gaussian(noise_multiplier=0.02),
        dpps.Bounded(distance=2 * STEP, clip=STEP),
        noise=dpps.Seeded(0),
    )
    state = protocol.start(torch.stack([parameters_to_vector(m.parameters()).detach() for m in models]))
    for _ in range(ROUNDS):
        moved = []
        for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for _ in range(4):  # whatever your loop does between two messages
                batch = torch.randint(0, 400, (64,))
                loss = F.cross_entropy(model(data[k][batch]), targets[k][batch])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            moved.append(parameters_to_vector(model.parameters()).detach() - state.y[k])
        protocol.step(state, torch.stack(moved))
        for model, row in zip(models, state.y, strict=True):
            vector_to_parameters(row, model.parameters())

    x = torch.rand(2000, 2) * 2 - 1
    right = (models[0](x).argmax(1) == (x[:, 0] * x[:, 1] > 0)).float().mean()
    total = dpps.total([dpps.Charge("gaussian", noise_multiplier=0.02, count=ROUNDS)], delta=1e-5)
    print(
        f"{100 * float(right):.1f} % right after {ROUNDS} rounds; everything a node contributed: {dpps.label(total.epsilon)}"
    )


if __name__ == "__main__":
    main()
