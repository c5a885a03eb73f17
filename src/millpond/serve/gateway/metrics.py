"""What the gateway counts, in Prometheus form. Names of vLLM are kept as aliases for existing dashboards.

Nothing is done per token: counts that move with tokens live in `ControllerLink` and are read at scrape.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from millpond.serve.gateway.link import ControllerLink
from millpond.serve.gateway.matcher import MatchResult

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_MATCH_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)


class GatewayMetrics:
    """All metrics of one gateway.

    Args:
        link: Read at scrape.
        model: Label `model_name` of the aliases.
    """

    def __init__(self, link: ControllerLink, model: str) -> None:
        self.registry = CollectorRegistry()
        self.num_cached_tokens = 0
        """Prompt tokens that were loaded and not computed, as all answers together have said."""
        self._model = model
        labels = ("model_name",)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, registry=self.registry, buckets=buckets)

        def alias(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, labels, registry=self.registry, buckets=buckets)

        self._ttft = (
            histogram("millpond_request_ttft_seconds", "Arrival to first token", _LATENCY_S),
            alias("vllm:time_to_first_token_seconds", "Arrival to first token", _LATENCY_S).labels(model),
        )
        self._tpot = (
            histogram("millpond_request_tpot_seconds", "Mean time per output token after the first", _TPOT_S),
            alias("vllm:request_time_per_output_token_seconds", "Time per output token", _TPOT_S).labels(
                model
            ),
        )
        self._latency = (
            histogram("millpond_request_latency_seconds", "Arrival to last token", _LATENCY_S),
            alias("vllm:e2e_request_latency_seconds", "Arrival to last token", _LATENCY_S).labels(model),
        )
        self._finished = Counter(
            "millpond_request_finished", "Calls that were accepted", ("reason",), registry=self.registry
        )
        self._finished_alias = Counter(
            "vllm:request_success",
            "Calls that ended well",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._refused = Counter(
            "millpond_request_refused", "Calls that were refused", ("reason",), registry=self.registry
        )
        self._prompt_tokens = Counter(
            "millpond_request_prompt_tokens", "Prompt tokens of accepted calls", registry=self.registry
        )
        self._prompt_alias = Counter(
            "vllm:prompt_tokens", "Prompt tokens of accepted calls", labels, registry=self.registry
        ).labels(model)
        self._prefix_queries = Counter(
            "vllm:prefix_cache_queries", "Prompt tokens", labels, registry=self.registry
        ).labels(model)
        self._prefix_hits = Counter(
            "vllm:prefix_cache_hits", "Prompt tokens that were loaded", labels, registry=self.registry
        ).labels(model)
        self._matches = Counter(
            "millpond_prefix_match",
            "Prompts by what became of the question how much of them is kept",
            ("outcome",),
            registry=self.registry,
        )
        self._matched_tokens = Counter(
            "millpond_prefix_matched_tokens",
            "Prompt tokens that seemed to be kept; what was loaded of them is told with the prompt tokens",
            registry=self.registry,
        )
        self._match_seconds = histogram(
            "millpond_prefix_match_seconds", "Time of that question, hashing included", _MATCH_S
        )
        self.registry.register(_LinkCollector(link, model))

    def on_refused(self, code: str) -> None:
        """A call was refused; `code` is one of our own, a closed set."""
        self._refused.labels(code).inc()

    def on_accepted(self, num_prompt_tokens: int) -> None:
        """A call was submitted."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self._prompt_alias.inc(num_prompt_tokens)

    def on_matched(self, result: MatchResult) -> None:
        """A prompt was looked up."""
        self._matches.labels(result.outcome).inc()
        self._match_seconds.observe(result.num_seconds)
        if result.cached is not None:
            self._matched_tokens.inc(result.cached.num_tokens)

    def on_prompts(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Prompts of a call got their first token.

        Args:
            num_tokens: Tokens of these prompts, each prompt once.
            num_cached_tokens: Those of them that were loaded and not computed.
        """
        self.num_cached_tokens += num_cached_tokens
        self._prefix_queries.inc(num_tokens)
        self._prefix_hits.inc(num_cached_tokens)

    def on_ended(
        self, reason: str, *, ttft_s: float | None, latency_s: float, num_tokens_per_choice: float
    ) -> None:
        """An accepted call ended.

        Args:
            reason: `stop`, `length`, `aborted` or an error's code.
            ttft_s: Arrival to first token; None if there was none.
            latency_s: Arrival to the end.
            num_tokens_per_choice: Mean output tokens of its choices.
        """
        self._finished.labels(reason).inc()
        if reason in ("stop", "length"):
            self._finished_alias.labels(self._model, reason).inc()
            for histogram in self._latency:
                histogram.observe(latency_s)
        if ttft_s is None:
            return
        for histogram in self._ttft:
            histogram.observe(ttft_s)
        if num_tokens_per_choice > 1:
            for histogram in self._tpot:
                histogram.observe((latency_s - ttft_s) / (num_tokens_per_choice - 1))

    def render(self) -> bytes:
        """Text of `/metrics`."""
        return generate_latest(self.registry)


class _LinkCollector(Collector):
    """Reads the link's counts when asked."""

    def __init__(self, link: ControllerLink, model: str) -> None:
        self._link = link
        self._model = model

    def collect(self) -> Iterator[Metric]:
        link = self._link
        counts = {
            "millpond_request_output_tokens": ("Output tokens delivered", link.num_tokens),
            "millpond_token_dropped": ("Worker tokens that added nothing", link.num_dropped),
            "millpond_request_resubmitted": ("Attempts after the first", link.num_resubmitted),
        }
        for name, (text, value) in counts.items():
            yield CounterMetricFamily(name, text, value=value)
        yield GaugeMetricFamily(
            "millpond_sequences_running", "Sequences past their first token", link.num_open - link.num_waiting
        )
        yield GaugeMetricFamily(
            "millpond_sequences_waiting", "Sequences before their first token", link.num_waiting
        )
        yield GaugeMetricFamily("millpond_ready", "1 while the service takes requests", int(link.is_ready))
        aliases = {
            "vllm:num_requests_running": (GaugeMetricFamily, link.num_open - link.num_waiting),
            "vllm:num_requests_waiting": (GaugeMetricFamily, link.num_waiting),
            "vllm:generation_tokens": (CounterMetricFamily, link.num_tokens),
        }
        for name, (family, value) in aliases.items():
            metric = family(name, "Alias", labels=("model_name",))
            metric.add_metric((self._model,), value)
            yield metric
