"""Case u01: drivers number cards differently, so nothing may go by a card's number.

A made-up ggml stands for the driver; the order of its devices is what CUDA_DEVICE_ORDER, the order of
CUDA_VISIBLE_DEVICES and another interface change. Nothing asks a management library (NVML) for memory: it
comes from the runtime that computes on the card, so there is no second order to confuse it with.
"""

import itertools

import pytest

from backends.base import DeviceInfo, DeviceSpec
from backends.ggml.devices import DeviceError, open_device
from hetero.plan.devices import Around, choose, list_devices
from hetero.plan.estimate import estimate
from hetero.plan.planner import Limits, ModelFacts, Place
from hetero.plan.problem import SplitProblem

GB = 10**9
BIG, SMALL = "0000:41:00.0", "0000:01:00.0"
CARDS = {BIG: ("RTX 4090", 24 * GB, 23 * GB), SMALL: ("RTX 3050", 8 * GB, 1 * GB)}


class FakeGgml:
    """Devices in the order of `cards`; a handle is a card's place in CARDS, counted from 1."""

    def __init__(self, cards):
        self.cards, self.opened = list(cards), []

    def backend_dev_count(self):
        return len(self.cards)

    def backend_dev_get(self, index):
        return 1 + list(CARDS).index(self.cards[index])

    def backend_dev_get_props(self, handle, reference):
        props, card = reference._obj, list(CARDS)[handle - 1]
        description, total, free = CARDS[card]
        props.name, props.description = f"CUDA{self.cards.index(card)}".encode(), description.encode()
        props.memory_total, props.memory_free, props.type = total, free, 1
        props.device_id = card.upper().encode()  # CUDA writes it so, Vulkan does not

    def backend_dev_backend_reg(self, handle):
        return 7

    def backend_reg_name(self, registry):
        return b"CUDA"

    def backend_reg_get_proc_address(self, registry, name):
        return None

    def backend_dev_init(self, handle, parameters):
        self.opened.append(list(CARDS)[handle - 1])
        return 1

    def backend_dev_buffer_type(self, handle):
        return 1


@pytest.fixture
def driver(monkeypatch):
    """Install a driver that lists these cards in this order."""

    def install(*cards):
        fake = FakeGgml(cards)
        monkeypatch.setattr("backends.ggml.devices.ggml", lambda: fake)
        monkeypatch.setattr("backends.ggml.lib.ggml", lambda: fake)
        return fake

    return install


def around(**environ):
    return Around(environ=environ, backends=lambda: frozenset({"CUDA", "CPU"}))


def planned(choices) -> dict[str, tuple[int, int, int]]:
    """The layers and bytes that each card gets of a model of 10 GB in 32 layers."""
    facts = ModelFacts(
        n_ctx_train=8192,
        layer_windows=(None,) * 32,
        kv_bytes_per_token=(4096,) * 32,
        layer_bytes=(300_000_000,) * 32,
        embed_bytes=GB // 5,
        head_bytes=GB // 5,
        compute_bytes=GB // 10,
    )
    limits = Limits(kv_tokens=16384)
    places = [Place(c.label, c.device.free_bytes, c.device.device_id, shared=False) for c in choices]
    times = [estimate(facts, (0,) * 32, choice, 4 * 4096) for choice in choices]
    problem = SplitProblem(facts, limits, places, times, (0,) * 32, "balanced", ordered=False)
    plan = problem.plan(problem.choose())
    assert plan.fits
    return {choices[s.index].device.device_id: (*s.layers, s.total_bytes) for s in plan.stages}


def test_memory_and_plan_follow_the_card_in_any_order(driver):
    plans, orders = [], []
    for cards in itertools.permutations(CARDS):
        driver(*cards)
        choices = choose((), 0, list_devices(), around())
        for choice in choices:
            description, total, free = CARDS[choice.device.device_id]
            assert (choice.device.description, choice.device.total_bytes, choice.device.free_bytes) == (
                description,
                total,
                free,
            )
        orders.append([c.device.device_id for c in choices])
        plans.append(planned(choices))
    assert orders[0] == orders[1] and plans[0] == plans[1]
    first, last, _ = plans[0][BIG]
    assert last - first >= 30
    assert all(held <= CARDS[card][2] for card, (_, _, held) in plans[0].items())


@pytest.mark.parametrize("name", ["CUDA0", "CUDA1"])
def test_a_process_with_another_order_opens_the_same_card(driver, name):
    driver(BIG, SMALL)
    (choice,) = choose((name,), 0, list_devices(), around())
    other = driver(SMALL, BIG)
    device = open_device(choice.spec)
    assert other.opened == [choice.device.device_id] and device.info.device_id == choice.device.device_id
    assert device.info.name != name


@pytest.mark.parametrize(
    ("value", "cards"),
    [
        ("1", [SMALL]),
        ("1,0", [SMALL, BIG]),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", [BIG]),
        (None, [BIG, SMALL]),
    ],
)
def test_a_setting_that_picks_cards_is_believed(driver, value, cards):
    driver(*cards)
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    found = choose((), 0, list_devices(), around(CUDA_DEVICE_ORDER="PCI_BUS_ID", **environ))
    assert sorted(c.device.device_id for c in found) == sorted(cards)


def test_an_empty_setting_leaves_the_cpu(driver):
    driver()
    cpu = DeviceInfo("CPU", "cpu", "a processor", 8 * GB, 4 * GB, "CPU", "CPU")
    assert list_devices() == []
    (choice,) = choose((), 1, [cpu], around(CUDA_VISIBLE_DEVICES=""))
    assert choice.device == cpu


@pytest.mark.parametrize(("value", "cards"), [("2", []), ("0,2", [BIG]), ("GPU_8932f937", []), ("0 1", [])])
def test_a_bad_setting_is_named(driver, value, cards):
    driver(*cards)
    with pytest.raises(DeviceError, match=f"^CUDA_VISIBLE_DEVICES={value}: "):
        choose((), 0, list_devices(), around(CUDA_VISIBLE_DEVICES=value))


def test_a_card_that_vanished_is_named(driver):
    driver(BIG, SMALL)
    choices = choose(("CUDA0", "CUDA1"), 0, list_devices(), around())
    driver(SMALL)  # it is CUDA0 now: the name of the card that is gone
    with pytest.raises(DeviceError, match=rf"CUDA0 \({BIG}\) is not there; .* CUDA0 \({SMALL}\)"):
        open_device(choices[0].spec)
    assert open_device(choices[1].spec).info.device_id == SMALL


def test_without_ids_a_card_goes_by_its_name(driver, monkeypatch):
    fake = driver(BIG, SMALL)
    whole = fake.backend_dev_get_props

    def without_id(handle, reference):
        whole(handle, reference)
        reference._obj.device_id = None

    monkeypatch.setattr(fake, "backend_dev_get_props", without_id)
    assert [d.device_id for d in list_devices()] == ["CUDA0", "CUDA1"]
    assert open_device(DeviceSpec("CUDA1", "CUDA1")).info.description == "RTX 3050"
