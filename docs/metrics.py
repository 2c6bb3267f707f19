"""Write metrics.md, the page of the columns of metrics.jsonl; run `python docs/metrics.py`."""

from __future__ import annotations

from pathlib import Path

from meshwright.training.log.columns import STEP_COLUMNS

PAGE = Path(__file__).with_suffix(".md")
COMMON_COLUMNS = {
    "event": "kind of row",
    "attempt": "number of the attempt: starts of this run so far",
    "iteration": "steps taken so far",
    "time": "seconds since 1970",
}

START_COLUMNS = {
    "command": "words of the command line",
    "version": "version of Meshwright",
    "torch": "version of torch",
    "python": "version of Python",
    "device": "name of the device",
    "host": "name of rank 0's machine",
    "parameters": "parameters of the model",
    "block": "how the layers are run",
    "dtype": "format of weights and activations",
    "startup": "seconds of each phase of the start",
    "ready": "seconds until the first step",
    "tokens_per_step": "tokens of a full global batch",
    "bytes_per_token": "about how many bytes of the training text a token stands for",
    "train_iters": "steps of the run",
}

# event -> when it is written, and its columns
EVENTS: dict[str, tuple[str, dict[str, str]]] = {
    "start": (
        "an attempt begins to train; it replaces earlier rows from its iteration on",
        START_COLUMNS,
    ),
    "evaluate": ("an attempt begins with --skip-train; it replaces no rows", START_COLUMNS),
    "step": ("a step is done", {column.name: column.meaning for column in STEP_COLUMNS}),
    "validation": (
        "a validation or test is done",
        {
            "name": "validation or test",
            "loss": "mean loss of the unmasked tokens",
            "ema_loss": "the same for the average of --ema, if it is kept",
            "ppl": "perplexity, exp(loss), at most exp(20)",
            "seconds": "time it took",
            "set": "name of the data set, if there are several",
            "end": "true after the last step",
            "by_position": "mean loss of each range of positions: 0, 1, 2-3, 4-7 and so on",
            "by_data": "mean loss of each pair of token files, by its prefix, if there are several",
        },
    ),
    "average": (
        "the mean of --average-last is validated at the end of a run",
        {
            "steps": "the saved steps whose weights it averages",
            "loss": "mean validation loss of that mean over the sets",
            "seconds": "time it took",
        },
    ),
    "sample": (
        "text of --sample-interval is written",
        {"number": "number of the prompt", "prompt": "prompt", "text": "its continuation"},
    ),
    "scores": (
        "one of --eval-tasks is scored",
        {
            "task": "name of the task",
            "variant": "how it is scored",
            "file": "file of its texts",
            "sha256": "hash of this file",
            "seconds": "time it took",
            "values": "all measures",
            "scores": "the measures that are drawn, by their names there",
        },
    ),
    "save": (
        "a checkpoint is saved, or its background save has begun",
        {
            "seconds": "time that the training waited",
            "background": "whether it is still being written",
        },
    ),
    "save-failed": ("a checkpoint could not be saved, with --save-error warn", {"reason": "error"}),
    "used": (
        "a checkpoint is saved, or the training ends",
        {
            "consumed_samples": "samples since the run began",
            "samples": "of these, the number of each data set",
        },
    ),
    "skip": (
        "iterations of --skip-train-iteration-range are passed over",
        {"first": "first iteration", "from_sample": "first sample", "to": "sample after the last"},
    ),
    "nonfinite": (
        "a step was not applied, and is no overflow that fp16's loss scale deals with",
        {
            "loss": "its loss",
            "grad_norm": "its gradient norm",
            "where": "where it began, in words",
            "seconds": "time of the search",
            "kind": "state, forward, backward, sum, none (it is finite when computed again) or unknown",
            "name": "module, parameter or state that was not finite first",
            "fused": "whether that is a layer of fused kernels",
            "ranks": "ranks on which it began",
            "hosts": "machines whose hardware may be at fault, if it is finite when computed again",
        },
    ),
    "spike": (
        "the loss rose above --spike-factor deviations of the steps before",
        {
            "loss": "its loss",
            "median": "median of the steps before",
            "deviation": "their deviation",
        },
    ),
    "rollback": (
        "the run went back to a checkpoint",
        {
            "to": "step of the checkpoint",
            "reason": "why",
            "from_sample": "first sample that is passed over",
            "to_sample": "sample after the last",
            "rollbacks": "rollbacks since a checkpoint of further steps was saved",
            "seconds": "time it took",
        },
    ),
    "straggler": (
        "a rank became slow, or is no longer",
        {
            "rank": "its number",
            "host": "its machine",
            "slow": "whether it is slow",
            "text": "the same in words",
            "ratio": "its time of a step divided by the median",
            "ms": "its time of a step, without waits for other ranks",
            "data_ms": "of this, its wait for data",
            "median_ms": "median of all ranks",
        },
    ),
    "end": ("the attempt ends", {"reason": "why", "status": "exit status"}),
}

TEXT = """# The columns of metrics.jsonl

A run's folder (`--run-dir`, or `--save`) has a file `metrics.jsonl` with a line of JSON for each
step and each event. Numbers that are not finite are the strings `"nan"`, `"inf"` and `"-inf"`.
Other programs may read the file at any time, as `meshwright watch` and `meshwright report` do; a
kill can cut its last line. Every row has these columns:

{common}

## Steps

A number is *summed* if it is made of all ranks' parts, *alike* if all ranks have the same one, and
otherwise that of rank 0. The curve is the name in TensorBoard and other trackers.

{steps}

## Other rows

{events}
"""


def describe_columns() -> str:
    """Return the page."""

    def make_table(head: str, rows: list[tuple[str, ...]]) -> str:
        lines = [
            head,
            "|" + "---|" * head.count(" | ") + "---|",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
        return "\n".join(lines)

    def make_rows(columns: dict[str, str]) -> list[tuple[str, ...]]:
        return [(f"`{name}`", meaning) for name, meaning in columns.items()]

    events = []
    for event, (moment, columns) in EVENTS.items():
        if event == "step" or (event == "evaluate" and columns is START_COLUMNS):
            continue
        title = "`start`, or `evaluate` with `--skip-train`" if event == "start" else f"`{event}`"
        table = make_table("| column | meaning |", make_rows(columns))
        events.append(f"### {title}\n\nWritten when {moment}.\n\n{table}")
    steps: list[tuple[str, ...]] = [
        (f"`{c.name}`", c.meaning, c.ranks, f"`{c.tag}`" if c.tag else "") for c in STEP_COLUMNS
    ]
    return TEXT.format(
        common=make_table("| column | meaning |", make_rows(COMMON_COLUMNS)),
        steps=make_table("| column | meaning | ranks | curve |", steps),
        events="\n\n".join(events),
    )


if __name__ == "__main__":
    PAGE.write_text(describe_columns())
