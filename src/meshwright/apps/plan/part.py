"""The plan as a part of training: what a run asks of it before it begins and in its first steps."""

from __future__ import annotations

from meshwright.apps.plan.compare import Measured, plan_of_run
from meshwright.apps.plan.describe import predict_here, verdict, verdict_here
from meshwright.apps.plan.prediction import predict
from meshwright.base import host
from meshwright.base.device_profiles import load_profile, this_cpu
from meshwright.config.fields import with_settings
from meshwright.config.schema import TrainConfig
from meshwright.training import forecast


class PlanForecast(forecast.Forecast):
    """A forecast by the memory and the times that the plan predicts.

    Only a dry run and a launch that would be refused measure: where a run trains, memory is
    estimated, and nothing is patched.
    """

    def verdict(
        self, config: TrainConfig, vocabulary: int, ranks_here: int
    ) -> tuple[bool, str] | None:
        prediction = predict_here(config, None, vocabulary, ranks_here, measures=True)
        return (prediction.fits, verdict_here(prediction)) if prediction is not None else None

    def why_too_large(self, config: TrainConfig, device: str | None) -> str | None:
        prediction = predict_here(config, device)
        if prediction is not None and not prediction.fits:
            prediction = prediction.measured()  # an estimate is no reason to refuse a training
        if prediction is None or prediction.fits:
            return None
        profile = prediction.machine.profile
        if device is None and profile.kind == "cpu":
            return None
        return f"on {profile.title} the training {verdict(prediction)}"

    def memory_of_rank(
        self, config: TrainConfig, padded: int, pipeline_rank: int
    ) -> dict[str, int]:
        # By any GPU's profile: only the buffers, of the kinds, are a matter of the device.
        return predict(config, load_profile("h200"), padded).ranks[pipeline_rank].kinds

    def planned_bytes(self, config: TrainConfig, padded: int, size: int) -> int:
        config = with_settings(config, micro_batch_size=size)
        kinds = self.memory_of_rank(config, padded, 0)
        return sum(size for kind, size in kinds.items() if kind not in ("buffers", "batches"))

    def compare_steps(self, config: TrainConfig, vocabulary: int, product: str) -> Measured | None:
        return plan_of_run(config, vocabulary, product)

    def describe_long_step(self, flops: float) -> str | None:
        guess = load_profile("cpu")
        if flops < 6 * guess.flops("float32"):  # far below a minute: the cores need not be measured
            return None
        minutes = flops / this_cpu().flops("float32") / 60
        if minutes < 1:
            return None
        return (
            f"a step is {flops / 1e12:,.0f} TFLOP, about {minutes:,.0f} minutes on these {host.cores()} CPU cores, and "
            "nothing is logged or saved within it; take a smaller model or batch, or an accelerator"
        )
