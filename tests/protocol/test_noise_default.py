"""The bare protocol states an epsilon over noise that nobody knows, or says that it is simulated."""

import math

import pytest
import torch

import dpps
from dpps.noise import SecureNoise


class Elsewhere(dpps.Stacked):
    simulation = False


START_ONLY = dpps.Bounded(clip=0, start_distance=1.0)


def spent(delta: float, **options: object) -> tuple[dpps.DPPS, dpps.privacy.accountant.Total]:
    protocol = dpps.DPPS(dpps.Ring(4), dpps.Laplace(1.0), START_ONLY, **options)  # type: ignore[arg-type]
    state = protocol.start(torch.rand(4, 1, dtype=torch.float64), common_start=False)
    for _ in range(3):
        protocol.step(state)
    return protocol, protocol.privacy(delta)


@pytest.mark.parametrize("fabric", [dpps.Stacked(4), Elsewhere(4)])
def test_by_default_nobody_knows_the_noise(fabric: dpps.transport.Fabric) -> None:
    protocol, total = spent(0.0, fabric=fabric)
    assert isinstance(protocol.noise, SecureNoise)
    assert not total.simulated
    assert "simulated" not in str(total)
    assert total.epsilon == pytest.approx(1.0)


@pytest.mark.parametrize("fabric", [dpps.Stacked(4), Elsewhere(4)])
def test_a_total_over_seeded_noise_says_so_wherever_it_is_printed(fabric: dpps.transport.Fabric) -> None:
    _, total = spent(0.0, fabric=fabric, noise=dpps.Seeded())
    assert total.simulated
    assert total.epsilon == pytest.approx(1.0)
    for printed in (str(total), repr(total), f"{total}"):
        assert "simulated" in printed


def test_the_paper_s_unit_says_so_too() -> None:
    for noise, simulated in ((dpps.Seeded(1), True), (None, False)):
        protocol = dpps.DPPS(dpps.Ring(4), dpps.Laplace(1.0), dpps.Certified(), noise=noise)
        protocol.step(protocol.start(torch.zeros(4, 3)))
        assert protocol.privacy(0.0).simulated is simulated


def test_secure_noise_is_drawn_afresh_for_every_protocol() -> None:
    rows = []
    for _ in range(2):
        protocol = dpps.DPPS(dpps.Complete(3), dpps.Gaussian(1.0), dpps.Bounded(clip=1.0))
        state = protocol.start(torch.zeros(3, 50))
        protocol.step(state)
        rows.append(state.s)
    assert not torch.equal(*rows)
    assert math.isclose(float(rows[0].std()), 2 / math.sqrt(3), rel_tol=0.6)


def test_a_run_s_privacy_says_whether_it_was_simulated() -> None:
    found = {}
    for secure in (False, True):
        data = [(torch.randn(20, 3), torch.randint(0, 2, (20,))) for _ in range(2)]
        algorithm = dpps.PartPSP(torch.nn.Linear(3, 2), "all", batch_size=10)
        options = {"topology": dpps.Ring(2), "privacy": dpps.Record(epsilon=3.0), "seed": 0}
        run = dpps.Run(algorithm, data, secure_noise=secure, **options).fit(epochs=1)  # type: ignore[arg-type]
        found[secure] = run.privacy.simulated, run.privacy.to_json()["simulated"]
    assert found == {False: (True, True), True: (False, False)}
