"""Whether idle servers leave one another alone, on plain figures."""

import random
from dataclasses import replace

import pytest
from scalegate.serving_check.checks.undisturbed import check_undisturbed
from scalegate.serving_check.evidence.measurement import MeasuredM
from scalegate.serving_check.evidence.undisturbed import AloneFigures, ServerCores

from ..gate_samples import measured_m

CORES = 2


def alone(ratio: float, blocks: int = 4, on_cpu: bool = True) -> AloneFigures:
    return AloneFigures(measured_m(32, ratio, blocks), CORES, on_cpu)


def with_idle_cpu(level: MeasuredM, of_artifact: float, of_baseline: float) -> MeasuredM:
    """Of the cores' time, what either server took during the other's repeats."""
    for block in level.blocks:
        for repeats, share in ((block.artifact, of_baseline), (block.baseline, of_artifact)):
            repeats[:] = [
                replace(repeat, idle_cpu_seconds=share * CORES * repeat.duration) for repeat in repeats
            ]
    return level


def test_servers_that_are_as_fast_beside_one_another_as_alone_pass():
    result = check_undisturbed(alone(1.1), [measured_m(1, 1.3), measured_m(32, 1.1)])
    assert result.status == "pass" and "what they took while idle is not known" in result.measured


@pytest.mark.parametrize(("ratio_alone", "beside", "whose"), [(0.9, 1.0, "artifact"), (1.0, 0.9, "baseline")])
def test_another_ratio_beside_one_another_decides_nothing_and_names_who_disturbs(
    ratio_alone: float, beside: float, whose: str
):
    result = check_undisturbed(alone(ratio_alone), [measured_m(32, beside)])
    assert result.status == "inconclusive" and result.reason.startswith(f"the {whose}'s server takes from")


def test_cpu_time_that_an_idle_server_takes_decides_nothing_on_a_cpu_alone():
    greedy = [with_idle_cpu(measured_m(32, 1.0), of_artifact=0.2, of_baseline=0.0)]
    result = check_undisturbed(alone(1.0), greedy)
    assert result.status == "inconclusive"
    assert "the artifact's server took 20.0% of the CPU while idle" in result.reason
    assert check_undisturbed(alone(1.0, on_cpu=False), greedy).status == "pass"
    alike = [with_idle_cpu(measured_m(32, 1.0), of_artifact=0.2, of_baseline=0.19)]
    assert check_undisturbed(alone(1.0), alike).status == "pass"


def test_another_ratio_is_no_disturbance_on_a_cpu_that_idle_servers_leave_alone():
    beside = [with_idle_cpu(measured_m(32, 1.0), of_artifact=0.001, of_baseline=0.001)]
    assert check_undisturbed(alone(0.7), beside).status == "pass"
    assert check_undisturbed(alone(0.7, on_cpu=False), beside).status == "inconclusive"


def test_servers_that_cannot_be_stopped_leave_it_unknown():
    assert check_undisturbed(None, [measured_m(32, 1.0)]).status == "unknown"
    assert check_undisturbed(alone(0.5), [measured_m(16, 1.0)]).status == "unknown"
    assert check_undisturbed(alone(0.5, blocks=1), [measured_m(32, 1.0)]).status == "unknown"


def noisy(ratio: float, blocks: int, noise: float, generator: random.Random) -> MeasuredM:
    level = measured_m(32, ratio, blocks)
    for block in level.blocks:
        [repeat] = block.artifact
        block.artifact[:] = [replace(repeat, duration=repeat.duration * (1 + generator.gauss(0, noise)))]
    return level


@pytest.mark.parametrize(("disturbed", "least", "most"), [(0.0, 0.0, 0.01), (0.15, 0.9, 1.0)])
def test_noise_seldom_passes_for_disturbance_and_disturbance_seldom_for_noise(
    disturbed: float, least: float, most: float
):
    """Four blocks alone and eight beside one another, each log ratio with a deviation of 4%."""
    generator = random.Random(1)
    found = 0
    for _ in range(200):
        figures = AloneFigures(noisy(1.0 - disturbed, 4, 0.04, generator), CORES, True)
        result = check_undisturbed(figures, [noisy(1.0, 8, 0.04, generator)])
        found += result.status == "inconclusive"
    assert least <= found / 200 <= most


def with_neighbours(level: MeasuredM, others: float, stolen: float) -> MeasuredM:
    """Of the cores' time, what other processes and a hypervisor took."""
    for block in level.blocks:
        for repeats in (block.artifact, block.baseline):
            repeats[:] = [
                replace(
                    repeat,
                    others_cpu_seconds=others * CORES * repeat.duration,
                    stolen_seconds=stolen * CORES * repeat.duration,
                )
                for repeat in repeats
            ]
    return level


def test_what_other_processes_and_a_hypervisor_take_is_told_and_decides_nothing():
    busy = check_undisturbed(alone(1.0), [with_neighbours(measured_m(32, 1.0), others=0.4, stolen=0.1)])
    assert busy.status == "pass"
    assert "other processes took 40.0% of the CPU meanwhile" in busy.measured
    assert "a hypervisor took 10.0% of it" in busy.measured
    assert busy.figures["others_cpu"] == pytest.approx(0.4)
    quiet = check_undisturbed(alone(1.0), [with_neighbours(measured_m(32, 1.0), others=0.01, stolen=0.0)])
    assert "processes" not in quiet.measured and "hypervisor" not in quiet.measured
    assert check_undisturbed(alone(1.0), [measured_m(32, 1.0)]).figures["others_cpu"] is None


def test_servers_on_different_cores_of_a_cpu_decide_nothing():
    def placed(*sides: tuple[int, ...], on_cpu: bool = True) -> AloneFigures:
        artifact, baseline = (ServerCores(cores, 1) for cores in sides)
        return replace(alone(1.0, on_cpu=on_cpu), artifact_cores=artifact, baseline_cores=baseline)

    level = [measured_m(32, 1.0)]
    apart = check_undisturbed(placed((0, 1), (1,)), level)
    assert apart.status == "inconclusive"
    assert apart.reason.startswith("the artifact's server may run on the cores 0, 1, the baseline's on 1")
    assert check_undisturbed(placed((0, 1), (0, 1)), level).status == "pass"
    assert check_undisturbed(placed((0, 1), (1,), on_cpu=False), level).status == "pass"
