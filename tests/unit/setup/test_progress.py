"""The estimate while ninja compiles, on a clock that the test moves."""

from __future__ import annotations

from pyctl.setup.progress import BuildProgress, cpu_seconds, duration, steps_of

OUTPUT = """ninja: Entering directory `build'
[1/5] Building CXX object src/CMakeFiles/llama.dir/llama.cpp.o
[2/5] Building CUDA object ggml/src/ggml-cuda/CMakeFiles/ggml-cuda.dir/template-instances/mmq-instance-q4_k.cu.o
[3/5] Building CUDA object ggml/src/ggml-cuda/CMakeFiles/ggml-cuda.dir/acc.cu.o
ptxas info: nothing
[4/5] Building C object ggml/src/CMakeFiles/ggml-base.dir/ggml.c.o
[5/5] Linking CXX shared library bin/libllama.so
"""


def test_steps_weigh_by_kind_and_architectures() -> None:
    steps = steps_of(OUTPUT)
    assert [step.seconds for step in steps] == [4.0, 34.0, 9.0, 4.0, 0.5]
    assert cpu_seconds(steps_of(OUTPUT, 2)) - cpu_seconds(steps) == 43.0


def test_the_estimate_follows_the_speed_so_far() -> None:
    clock, steps = [100.0], steps_of(OUTPUT)
    progress = BuildProgress(steps, 2, lambda: clock[0])
    assert progress.line() == "0%, file 0 of 4, about 26 seconds left"
    progress.finish(steps[1])  # 34 of 51.5 seconds, which took 340
    clock[0] += 340.0
    assert progress.line() == "66%, file 1 of 4, about 3 minutes left"
    for step in (steps[0], *steps[2:]):
        progress.finish(step)
    assert progress.line() == "100%, file 4 of 4, about 1 seconds left"


def test_a_busy_machine_is_noticed_early() -> None:
    clock, steps = [0.0], steps_of(OUTPUT)
    progress = BuildProgress(steps, 1, lambda: clock[0])
    progress.finish(steps[-1])  # half a second of 51.5
    clock[0] = 60.0
    assert progress.seconds_left == 51.0
    clock[0] = 180.0
    assert round(progress.seconds_left) == 180 * 102


def test_nothing_to_do_is_done() -> None:
    assert BuildProgress([], 1, lambda: 0.0).share == 1.0


def test_durations_have_the_unit_that_fits() -> None:
    assert [duration(seconds) for seconds in (0, 119, 1600, 9000)] == [
        "1 seconds", "119 seconds", "27 minutes", "2 hours 30 minutes",
    ]  # fmt: skip
