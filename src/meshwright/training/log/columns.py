"""The numbers of a step, each with all that the log, trackers, verify-layout and docs know of it.

A further term of the loss is one row here and its name in micro_step.make_loss. docs/metrics.py
makes a page of the table. No torch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class StepColumn(NamedTuple):
    """A number of a step, and its column in metrics.jsonl."""

    name: str
    meaning: str
    ranks: Literal["alike", "summed", "rank 0"] = "alike"  # how it comes from the ranks' values
    line: str = ""  # its form in Megatron's line of the log, if it is there
    tag: str = ""  # Megatron's name of the curve in TensorBoard and other trackers
    needs_flag: bool = False  # whether --log-TAG-to-tensorboard turns the curve on
    compared_as: Literal["", "loss", "gradient norm", "norm of the weights", "loss scale"] = (
        ""  # the row of verify-layout
    )


SCALE: Literal["loss scale"] = "loss scale"
STEP_COLUMNS = (  # in the order of Megatron's line
    StepColumn(
        "lr",
        "learning rate; the log shows that of the next step",
        line="learning rate: {:.3E}",
        tag="learning-rate",
        needs_flag=True,
    ),
    StepColumn("batch", "samples", "alike", "global batch size: {:5d}", "batch-size", True),
    StepColumn(
        "length",
        "tokens of each sample, if --seq-length-schedule changes it",
        line="curriculum seqlen: {:5d}",
        tag="seqlen/curriculum_seqlen",
    ),
    StepColumn(
        "loss",
        "mean loss of the unmasked tokens; the log shows the mean of the steps since the line before",
        "summed",
        "lm loss: {}",
        "lm loss",
        compared_as="loss",
    ),
    StepColumn(
        "z_loss",
        "what --z-loss-coef adds to the training loss; the loss above is without it",
        "summed",
        "z loss: {:.6E}",
        "z loss",
        compared_as="loss",
    ),
    StepColumn(
        "loss_scale", "factor of the loss", "alike", "loss scale: {:.1f}", "loss-scale", True, SCALE
    ),
    StepColumn(
        "grad_norm",
        "norm of all gradients before clipping",
        "summed",
        "grad norm: {:.3f}",
        "grad-norm",
        compared_as="gradient norm",
    ),
    StepColumn(
        "num_zeros", "gradients that are exactly 0", "summed", "num zeros: {:.1f}", "num-zeros"
    ),
    StepColumn(
        "params_norm",
        "norm of all weights",
        "summed",
        "params norm: {:.3f}",
        "params-norm",
        compared_as="norm of the weights",
    ),
    StepColumn(
        "skipped",
        "whether the step was not applied: its numbers were not finite",
        compared_as=SCALE,
    ),
    StepColumn("weight_decay", "weight decay, if it changes during the run"),
    StepColumn("consumed_samples", "samples since the run began, with this step's"),
    StepColumn("ms", "milliseconds since the step before", "rank 0"),
    StepColumn("data_ms", "of these, the wait for the batch", "rank 0"),
    StepColumn("tokens_per_second", "tokens of all ranks", "rank 0"),
    StepColumn("tflops", "10^12 operations per second and device, by Megatron's formula", "rank 0"),
    StepColumn("mfu", "the same divided by the device's peak, if that is known", "rank 0"),
    StepColumn("memory", "peak bytes of the device, if it reports them", "rank 0"),
)
