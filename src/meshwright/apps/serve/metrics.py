"""Counters of the server in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
METRIC_HELP = {
    "requests_total": "Answered requests by path and status.",
    "prompt_tokens_total": "Tokens of prompts that were read.",
    "generated_tokens_total": "Tokens that were generated.",
    "texts_running": "Texts that the decoder works on.",
    "requests_waiting": "Requests that wait for the decoder.",
    "request_seconds": "Time from a request to the end of its answer.",
    "first_token_seconds": "Time from a request for text to its first token.",
}


class ServerMetrics:
    """Counters and histograms; only the event loop changes them."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.tokens: Counter[str] = Counter()
        # A count for each bucket, then the sum and the number of all.
        self._seconds: dict[str, list[float]] = {
            name: [0.0] * (len(BUCKETS) + 2) for name in METRIC_HELP if "seconds" in name
        }

    def observe(self, name: str, seconds: float) -> None:
        """Add a time to a histogram."""
        # Buckets are cumulative; the sum of all times and their number follow them.
        values = self._seconds[name]
        # Prometheus' buckets are cumulative: each counts all times up to its limit.
        for at, limit in enumerate(BUCKETS):
            values[at] += seconds <= limit
        values[-2] += seconds
        values[-1] += 1

    def text(self, running: int, waiting: int) -> str:
        out: list[str] = []

        def add(name: str, kind: str, values: Sequence[tuple[str, float]]) -> None:
            out.extend(
                (
                    f"# HELP meshwright_{name} {METRIC_HELP[name]}",
                    f"# TYPE meshwright_{name} {kind}",
                )
            )
            out.extend(f"meshwright_{name}{label} {value:.10g}" for label, value in values)

        counted = sorted(self.requests.items())
        labels = [
            (f'{{path="{path}",status="{status}"}}', float(n)) for (path, status), n in counted
        ]
        add("requests_total", "counter", labels)
        for name in ("prompt_tokens_total", "generated_tokens_total"):
            add(name, "counter", [("", self.tokens[name])])
        add("texts_running", "gauge", [("", running)])
        add("requests_waiting", "gauge", [("", waiting)])
        for name, values in self._seconds.items():
            # The last bucket has them all.
            limits = [*map(str, BUCKETS), "+Inf"]
            buckets = zip(limits, [*values[:-2], values[-1]], strict=True)
            rows = [(f'_bucket{{le="{limit}"}}', value) for limit, value in buckets]
            add(name, "histogram", [*rows, ("_sum", values[-2]), ("_count", values[-1])])
        return "\n".join(out) + "\n"
