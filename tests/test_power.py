"""Power and clocks as drivers tell them: stand-ins for NVML and AMD SMI."""

import itertools
import json
import mmap
import os
import sys
import time
import types
from unittest import mock

import pytest
import torch

from llm_train_bench.measure.device import memory_now, peak_memory
from llm_train_bench.measure.power import PowerMeter
from llm_train_bench.measure.sensors.amd import AmdSensor
from llm_train_bench.measure.sensors.nvidia import NvidiaSensor
from llm_train_bench.measure.sensors.sensor import Sample
from llm_train_bench.results.figures import fill_device_metrics
from llm_train_bench.results.result_files import read_result
from llm_train_bench.results.schema import DeviceUse
from tests.helpers import ROOT, cases
from tests.processes import wait_until

GPU = torch.device("cuda", 0)
Some = types.SimpleNamespace
AMD_TYPES = {"AmdSmiTemperatureType": Some(HOTSPOT=1), "AmdSmiTemperatureMetric": Some(CURRENT=0),
             "AmdSmiClkType": Some(GFX=0, MEM=4)}  # fmt: skip


@pytest.fixture
def nvml(monkeypatch):
    """A GPU at 400 W, whose driver has no nvmlDeviceGetPowerUsage."""
    # Idle (0x1) is no reason.
    driver = Some(bits=0x1, clock=1980, processes=[os.getpid()], capped_ns=5_000_000_000)

    def value(i):
        known = {186: 400_000, 74: driver.capped_ns}
        content = Some(uiVal=known.get(i), ullVal=known.get(i))
        kind, code = 1 if i == 186 else 3, 0 if i in known else 3
        return Some(fieldId=i, valueType=kind, nvmlReturn=code, value=content)

    module = Some(
        NVMLError=OSError, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda h: int(400e3 * time.perf_counter()),
        nvmlDeviceGetCurrentClocksEventReasons=lambda h: driver.bits,
        nvmlDeviceGetClockInfo=lambda h, kind: driver.clock if kind == 1 else 3201,
        nvmlDeviceGetMaxClockInfo=lambda h, kind: 1980,
        nvmlDeviceGetTemperature=lambda h, kind: 61,
        nvmlDeviceGetEnforcedPowerLimit=lambda h: 700_000,
        nvmlDeviceGetFieldValues=lambda h, ids: [value(i) for i in ids],
        nvmlDeviceGetComputeRunningProcesses=lambda h: [Some(pid=i) for i in driver.processes],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Some(uuid="1234"))
    monkeypatch.setattr(PowerMeter, "INTERVAL_S", 0.02)
    monkeypatch.setattr(PowerMeter, "SHORTEST_S", 0.0)
    return driver


def measured(during) -> tuple[DeviceUse, float]:
    """What the meter says of a window in the middle of which something happens; the seconds it took."""
    meter = PowerMeter(GPU)
    begin = time.monotonic()
    meter.begin()
    time.sleep(0.2)
    # A busy machine samples late; the middle is that of the samples.
    assert wait_until(lambda: len(meter.samples) > 3, 20)
    before = len(meter.samples)
    during()
    assert wait_until(lambda: len(meter.samples) >= 2 * before, 20)
    use = meter.end(rank=3)
    return use, time.monotonic() - begin


def test_an_undisturbed_window(nvml):
    use, seconds = measured(lambda: None)
    assert use.rank == 3 and use.n_samples >= 5
    assert use.energy_j == pytest.approx(seconds * 400, rel=0.3)
    assert use.average_power_w == pytest.approx(400, rel=0.02)
    assert use.peak_power_w == 400 and use.power_limit_w == 700
    assert use.sm_clock_mean_mhz == use.sm_clock_min_mhz == use.sm_clock_limit_mhz == 1980
    assert use.memory_clock_mean_mhz == 3201 and use.temperature_max_c == 61
    assert use.throttled == {} and use.other_processes == 0


def test_energy_needs_both_readings_of_a_counter_that_moves(nvml, monkeypatch):
    unusable = [(None, 9), (9, None), (5, 5), (5, 4)]
    for first, last, used in [*((*readings, None) for readings in unusable), (5, 9, 4)]:
        meter = PowerMeter(GPU)
        monkeypatch.setattr(meter.sensor, "joules", mock.Mock(side_effect=[first, last]))
        meter.begin()
        assert meter.end(rank=0).energy_j == used


def test_counters_of_a_short_window_are_not_used(nvml, monkeypatch):
    monkeypatch.setattr(PowerMeter, "SHORTEST_S", 60.0)
    meter = PowerMeter(GPU)
    meter.begin()
    nvml.capped_ns += 1
    use = meter.end(rank=0)
    assert use.energy_j is use.average_power_w is None and use.peak_power_w == 400
    assert use.throttled == {} and meter.source == "none: the window is shorter than 60 s"


def test_a_throttled_and_shared_window_says_so(nvml):
    def get_hot():
        nvml.bits, nvml.clock = 0x1 | 0x40, 1500
        nvml.processes.append(99999)

    use, _ = measured(get_hot)
    assert 1500 == use.sm_clock_min_mhz < use.sm_clock_mean_mhz < 1980
    assert set(use.throttled) == {"thermal (hardware)"}
    assert use.throttled["thermal (hardware)"] == pytest.approx(0.5, abs=0.2)
    assert use.other_processes == 1


def test_a_visitor_within_the_window_is_seen_and_other_ranks_are_none(nvml):
    nvml.processes.append(5)
    meter = PowerMeter(GPU, {5})
    meter.begin()
    nvml.processes.append(99999)
    assert wait_until(lambda: len(meter.others) > 1, 10)
    nvml.processes.pop()
    assert meter.end(rank=0).other_processes == 1


def test_the_drivers_own_counter_goes_before_samples(nvml):
    after = nvml.capped_ns + 100_000_000  # a quarter of the window, between two samples
    use, seconds = measured(lambda: vars(nvml).update(capped_ns=after))
    assert use.throttled == {"power cap": pytest.approx(0.1 / seconds, rel=0.3)}


def test_a_counter_at_rest_does_not_hide_what_samples_see(nvml, monkeypatch):
    use, _ = measured(lambda: vars(nvml).update(bits=0x4))
    assert use.throttled == {"power cap": pytest.approx(0.5, abs=0.2)}
    # But a single sample counts less than a counter.
    meter = PowerMeter(GPU)
    nvml.bits = 0
    meter.begin()
    meter.stop.set()
    meter.thread.join()
    for n, throttled in ((1, {}), (2, {"power cap": 1 / 3})):
        meter.samples = [Sample(reasons=set())] * 4 + [Sample(reasons={"power cap"})] * n
        assert meter.end(rank=0).throttled == throttled
    meter.samples, meter.counters = [], (0, {"x": 0})  # a counter may run a little fast
    monkeypatch.setattr(meter.sensor, "throttle_counters", lambda: (99, {"x": 101}))
    assert meter.end(rank=0).throttled == {"x": 1.0}
    monkeypatch.setattr(meter.sensor, "throttle_counters", lambda: (99, {"x": 120}))
    assert meter.end(rank=0).throttled == {}


def test_processes_of_a_container_are_told_by_host_ids(nvml):
    ours = frozenset({os.getpid()})
    nvml.processes = [424242]  # that is ourselves
    assert NvidiaSensor(GPU).other_processes(ours) == 0
    nvml.processes = [424242, 99999]
    assert NvidiaSensor(GPU).other_processes(ours) == 1
    nvml.processes = []
    assert NvidiaSensor(GPU).other_processes(ours) is None


@pytest.mark.parametrize(("devices", "expected"), cases("devices"))
def test_metrics_and_notes_of_devices(devices, expected):
    result = read_result(ROOT / "tests/sample/plain/result.json")
    result.device.type, result.remarks = "cuda", []
    uses = enumerate(json.loads(f"[{devices}]"))
    fill_device_metrics(result, [DeviceUse(rank=i, **use) for i, use in uses])
    result.judge()
    m, notes = result.metrics, result.texts("information")
    figures = [m.energy_j, m.clocks_held_down, m.device_shared, m.power_cap_fraction]
    assert [*figures, *(n for n in notes if n.startswith("rank"))] == json.loads(expected)
    assert ("shared GPU" in result.invalid) == bool(m.device_shared)
    assert any("clocks held down" in text for text in result.invalid) == bool(m.clocks_held_down)


@pytest.mark.parametrize("newer", [True, False])
def test_amd(newer, monkeypatch):
    ticks = itertools.count(1_000_000, 1_000_000)
    power = {"current_socket_power": 2**32 - 1, "average_socket_power": 612}
    if newer:
        power = {"socket_power": 612} | dict.fromkeys(power, "N/A")

    def energy(handle):
        return {"energy_accumulator": next(ticks), "counter_resolution": 15.3, "timestamp": 1}

    def metrics(handle):
        n = next(ticks)
        return {"accumulation_counter": n, "ppt_residency_acc": n // 4,
                "prochot_residency_acc": 0, "hbm_thm_residency_acc": 2**64 - 1}  # fmt: skip

    # Process 8 has only opened the driver; the memory of 7 is not known.
    sizes = {os.getpid(): 2**33, 7: "N/A", 8: 2**20, 10: 2**19, 9: 2**27}
    clock = {"clk": 2100, "max_clk": 2105}
    module = Some(
        AmdSmiException=OSError, **AMD_TYPES, amdsmi_init=lambda: None,
        amdsmi_get_processor_handle_from_bdf=lambda bdf: bdf,
        amdsmi_get_energy_count=energy,
        amdsmi_get_power_info=lambda h: power,
        amdsmi_get_power_cap_info=lambda h: {"power_cap": 750_000_000},
        amdsmi_get_clock_info=lambda h, kind: clock,
        amdsmi_get_temp_metric=lambda h, kind, what: 58,
        amdsmi_get_gpu_metrics_info=metrics,
        amdsmi_get_gpu_process_list=lambda h: [{"pid": p, "mem": m} for p, m in sizes.items()],
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "amdsmi", module, raising=False)
    properties = Some(pci_domain_id=0, pci_bus_id=0x0C, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(PowerMeter, "INTERVAL_S", 0.02)
    monkeypatch.setattr(PowerMeter, "SHORTEST_S", 0.0)
    sensor = AmdSensor(GPU)
    assert sensor.handle == "0000:0c:00.0"
    first = sensor.joules()
    assert sensor.joules() - first == pytest.approx(15.3)
    monkeypatch.setattr(module, "amdsmi_get_energy_count", lambda h: {"energy_accumulator": 1})
    assert sensor.joules() is None
    monkeypatch.setattr(module, "amdsmi_get_energy_count", energy)
    assert sensor.limits() == (750.0, 2105) and sensor.sample().power_w == 612
    assert sensor.other_processes(frozenset({os.getpid(), 7})) == 1
    use, _ = measured(lambda: None)
    assert use.peak_power_w == 612 and use.sm_clock_mean_mhz == 2100 and use.temperature_max_c == 58
    assert use.throttled == {"power cap": pytest.approx(0.25, abs=0.02)}
    assert use.other_processes == 2


def test_the_second_die_of_a_package_has_no_power_of_its_own():
    """On an MI250X 0 W and a limit of 0 W are no readings."""
    sensor = AmdSensor.__new__(AmdSensor)
    sensor.handle, sensor.error = None, OSError
    sensor.smi = sensor.library = Some(
        AmdSmiException=OSError, amdsmi_get_power_info=lambda h: {"average_socket_power": 0},
        amdsmi_get_power_cap_info=lambda h: {"power_cap": 0}, **AMD_TYPES,
    )  # fmt: skip
    assert sensor.sample().power_w is None and sensor.limits() == (None, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to be asked")
@pytest.mark.parametrize("device", [GPU, torch.device("cpu")])
def test_no_counter_is_a_reason_and_no_failure(device):
    meter = PowerMeter(device)
    meter.begin()
    use = meter.end(rank=0)
    assert use == DeviceUse(rank=0, memory_mean_gib=use.memory_mean_gib)
    assert meter.source.startswith("none: ")


def test_peaks_of_a_gpu_are_those_of_its_allocator(monkeypatch):
    stats = {}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    assert list(peak_memory(GPU).values()) == [0, 0, 0, None]
    stats |= {"allocated_bytes.all.peak": 3 * 2**29, "reserved_bytes.all.peak": 2**31}
    assert list(peak_memory(GPU).values()) == [1.5, 2.0, 0, None]
    stats |= {"num_alloc_retries": 4}
    assert list(peak_memory(GPU).values()) == [1.5, 2.0, 4, None]


def test_mean_memory_is_of_all_looks(monkeypatch):
    """Also without a sensor: at the begin and at the end, of the process on a CPU."""
    readings = iter([1.0, 4.0])
    monkeypatch.setattr("llm_train_bench.measure.power.memory_now", lambda device: next(readings))
    meter = PowerMeter(GPU)
    meter.begin()
    assert meter.end(rank=0).memory_mean_gib == 2.5
    before = memory_now(torch.device("cpu"))
    # Not the allocator's, which may have so much to spare.
    with mmap.mmap(-1, 2 * 10**8) as ballast:
        ballast.write(b"x" * (2 * 10**8))
        assert 0.15 < memory_now(torch.device("cpu")) - before < 0.3
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * 2**29)
    assert memory_now(GPU) == 1.5
