"""What Prometheus reads at /metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from oddrank.runtime.serving.messages import Stats
from oddrank.server.endpoints import Watch

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6)


class Metrics:
    """Of one server; `text` is what it tells."""

    def __init__(self) -> None:
        r = self.registry = CollectorRegistry()
        self.requests = Counter("oddrank_requests", "Requests, by what became of them", ["outcome"], registry=r)
        self.prompt_tokens = Counter("oddrank_prompt_tokens", "Tokens of prompts", registry=r)
        self.generated_tokens = Counter("oddrank_generated_tokens", "Tokens generated", registry=r)
        self.reused_tokens = Counter("oddrank_reused_prompt_tokens", "Of prompts, not computed again", registry=r)
        self.first = Histogram("oddrank_time_to_first_token_seconds", "From request to its first token",
                               buckets=_SECONDS, registry=r)  # fmt: skip
        self.each = Histogram("oddrank_time_per_output_token_seconds", "Between tokens, after the first",
                              buckets=_PER_TOKEN, registry=r)  # fmt: skip
        self.whole = Histogram("oddrank_request_seconds", "From request to the end of its answer",
                               buckets=_SECONDS, registry=r)  # fmt: skip
        self.waiting = Gauge("oddrank_requests_waiting", "Requests that are not in memory yet", registry=r)
        self.running = Gauge("oddrank_requests_running", "Requests in memory", registry=r)
        self.cache = Gauge("oddrank_kv_cache_usage_ratio", "Pages of the KV cache that are held", registry=r)
        self.known = Gauge("oddrank_kv_cache_remembered_pages", "Pages that hold a known prefix", registry=r)
        self.slots = Gauge("oddrank_state_slots_held", "Places of requests in memory, with their states", registry=r)
        self.snapshots = Gauge("oddrank_state_snapshots", "States kept at the ends of known prefixes", registry=r)
        self.unwritten = Gauge("oddrank_state_snapshots_unwritten", "Places for states neither kept nor free",
                               registry=r)  # fmt: skip
        self.preempted = Counter("oddrank_preemptions", "Requests that had to give way and start again", registry=r)
        self.steps = Counter("oddrank_steps", "Steps of the ranks", registry=r)
        self.model = Counter("oddrank_model_seconds", "Of the steps, in the model, up to the logits", registry=r)
        self.step = Histogram("oddrank_step_seconds", "Of a step of the ranks", buckets=_PER_TOKEN, registry=r)
        self._preempted = self._reused = 0

    def stats(self, found: Stats) -> None:
        """After a step of the ranks."""
        self.waiting.set(found.waiting)
        self.running.set(found.running)
        self.cache.set(found.pages_held / found.pages if found.pages else 0)
        self.known.set(found.pages_remembered)
        self.slots.set(found.slots_held)
        self.snapshots.set(found.snapshots)
        self.unwritten.set(found.snapshots_unwritten)
        self.preempted.inc(found.preempted - self._preempted)
        self.reused_tokens.inc(found.reused - self._reused)
        self._preempted, self._reused = found.preempted, found.reused
        if found.tokens:
            self.steps.inc()
            self.model.inc(found.model)
            self.step.observe(found.seconds)

    def over(self, watch: Watch, outcome: str, seconds: float) -> None:
        """A request is over. outcome: "ok", "cancelled", "refused" or "failed"."""
        self.requests.labels(outcome).inc()
        self.prompt_tokens.inc(watch.prompt_tokens)
        self.generated_tokens.inc(watch.completion_tokens)
        if watch.first_token is None or watch.last_token is None:
            return
        self.first.observe(watch.first_token - watch.started)
        self.whole.observe(seconds)
        if watch.completion_tokens > watch.choices:
            per = (watch.last_token - watch.first_token) / (watch.completion_tokens / max(1, watch.choices) - 1)
            self.each.observe(max(0.0, per))

    def text(self) -> bytes:
        return generate_latest(self.registry)
