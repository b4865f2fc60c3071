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

# noise: standard deviation over how far two updates can be apart
NODES, ROUNDS, STEP, NOISE = (
    100,
    15,
    0.2,
    2.5,
)


def examples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two numbers and their product; the class is whether they have the same sign."""
    x = torch.rand(count, 2) * 2 - 1
    product = x.prod(1, keepdim=True)
    return torch.cat([x, product], 1), (product[:, 0] > 0).long()


def main() -> None:
    """100 nodes learn when two numbers have the same sign; all that a node contributes is protected."""
    torch.manual_seed(0)
    data = [examples(100) for _ in range(NODES)]
    models = [nn.Linear(3, 2) for _ in range(NODES)]  # few parameters: noise counts in each of them
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())  # a common, public start
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in models]

    # a round's update is clipped to an L2 norm of STEP; two updates differ by at most twice that
    protocol = dpps.DPPS(
        dpps.Exponential(NODES),
        dpps.Gaussian(noise_multiplier=NOISE),
        dpps.Bounded(clip=STEP),
        noise=dpps.Seeded(0),
        mixes=7,  # gossip steps per message: everybody hears of everybody, so the noise averages out
    )
    state = protocol.start(torch.stack([parameters_to_vector(m.parameters()).detach() for m in models]))
    for _ in range(ROUNDS):
        moved = []
        for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x, target = data[k]
            for _ in range(2):  # whatever your loop does between two messages
                loss = F.cross_entropy(model(x), target)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            moved.append(parameters_to_vector(model.parameters()).detach() - state.y[k])
        protocol.step(state, torch.stack(moved))
        for model, row in zip(models, state.y, strict=True):
            vector_to_parameters(row, model.parameters())

    x, target = examples(2000)
    right = sum((model(x).argmax(1) == target).float().mean() for model in models) / NODES
    print(f"{100 * float(right):.1f} % right after {ROUNDS} rounds")
    print(f"everything a node contributed: {protocol.privacy(delta=1e-5)}")


if __name__ == "__main__":
    main()
