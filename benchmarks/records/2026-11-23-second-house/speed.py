"""Print the median milliseconds of a step, after ten, for each run folder."""

import json
import statistics
import sys

for folder in sys.argv[1:]:
    with open(f"{folder}/metrics.jsonl") as file:
        steps = [row for row in map(json.loads, file) if row["event"] == "step"][10:]
    print(
        folder,
        "ms median",
        statistics.median(row["ms"] for row in steps),
        "loss",
        steps[-1]["loss"],
    )
