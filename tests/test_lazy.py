"""The rooms' public names: `from dpps.ROOM import name`, loaded when a name is asked for."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import dpps

ROOMS = sorted(module.name for module in pkgutil.iter_modules(dpps.__path__) if module.ispkg)


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_of_a_room_is_found(room):
    module = importlib.import_module(f"dpps.{room}")
    found = {name: getattr(module, name) for name in module.__all__}
    assert found
    assert set(found) <= set(dir(module))
    assert not [name for name in found if name.startswith("_")]
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name


def test_names_are_those_of_the_modules():
    from dpps.noise import Laplace
    from dpps.noise import Laplace as Same

    assert Laplace is Same is dpps.Laplace


def test_rooms_load_what_is_asked_for_and_no_more():
    """Neither torch for the key of a member, nor dp-accounting, which takes a second, for a ledger."""
    code = (
        "import sys\n"
        "from dpps.peers import Identity, read_status\n"
        "from dpps.privacy import LedgerFile\n"
        "from dpps.topology import parse\n"
        "parse('ring', 4)\n"
        "found = [name for name in ('torch', 'grpc', 'dp_accounting') if name in sys.modules]\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_name_needs_an_extra():
    code = (
        "import importlib, sys\n"
        "for name in ('grpc', 'matplotlib', 'pyarrow', 'PIL', 'tensorboard'):\n"
        "    sys.modules[name] = None\n"
        f"for room in {ROOMS}:\n"
        "    module = importlib.import_module(f'dpps.{room}')\n"
        "    for name in module.__all__:\n"
        "        getattr(module, name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
