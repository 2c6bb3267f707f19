"""Print where the time of a step of the 10M of loop.py goes on a CPU, beside the plain loop.

python profile_steps.py      with benchmarks/ and src/ on PYTHONPATH
"""

import loop
from torch.profiler import ProfilerActivity, profile

STEPS = 2

if __name__ == "__main__":
    shape = loop.ON_CPU["10M"]
    for name in ("fp32", "bf16", "plain"):
        flags = "--bf16" if name == "bf16" else ""
        step = loop.PlainTraining(shape).step if name == "plain" else loop.our_loop(shape, flags)
        for _ in range(2):
            step()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            for _ in range(STEPS):
                step()
        rows = sorted(profiled.key_averages(), key=lambda row: -row.self_cpu_time_total)
        total = sum(row.self_cpu_time_total for row in rows)
        print(f"{name}: {total / STEPS / 1e3:.0f} ms a step")
        for row in rows[:15]:
            print(
                f"{row.self_cpu_time_total / STEPS / 1e3:8.1f} ms {row.self_cpu_time_total / total:6.1%}  {row.key}"
            )
