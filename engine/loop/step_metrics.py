"""How a step's plan worked out: how even, how full, how fast. Every figure is always there; 0 if it is not known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.engine import metrics
from asyncrl.engine.events.types import Published
from asyncrl.engine.loop.stages import forward_length, row_positions
from asyncrl.engine.records import Plan
from asyncrl.engine.records.traffic import NEAR, PATHS, Flow, Traffic
from asyncrl.engine.records.work import RankResult
from asyncrl.trainers.cost.step_time import StepTime
from asyncrl.trainers.fan_out import Cost


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """Figures of one step: metrics by name, and seconds by rank. None are predicted before the first measurement."""

    metrics: dict[str, float]
    rank_seconds: list[float]
    predicted_seconds: list[float]


class StepMetrics:
    """Turns a plan and what the ranks measured into metrics. `cost` is what plans are balanced by; None: tokens.

    It predicts each step's seconds from those before it, and then learns from the step.
    """

    def __init__(self, cost: Cost | None, *, packed: bool, one_length: bool, align: int = 1) -> None:
        self._cost = cost
        self._packed = packed
        self._one_length = one_length
        self._align = align
        self._step_time = StepTime()

    def figures(self, plan: Plan, lengths: Mapping[str, int], results: Sequence[RankResult]) -> PlanFigures:
        """Return the figures of one step."""
        planned = self._costs(plan, lengths, fillers=False)
        computed = self._costs(plan, lengths, fillers=True)
        seconds = [result.seconds for result in results]
        predicted = self._step_time.seconds(computed) or []
        self._step_time.observe(computed, seconds)
        flops = sum(planned) if callable(self._cost) else 0.0
        peak = sum(result.peak_flops for result in results) if all(result.peak_flops for result in results) else 0.0
        by_name: dict[str, float] = {
            metrics.MICRO_BATCHES: sum(len(rank) for rank in plan.ranks),
            metrics.UPDATES: len(plan.parts),
            metrics.FILLER_MICRO_BATCHES: len(plan.filler_places),
            metrics.FILLER_FRACTION: 1 - sum(planned) / sum(computed) if sum(computed) else 0.0,
            metrics.PADDING_FRACTION: self._padding(plan, lengths),
            metrics.PLANNED_IMBALANCE: imbalance(planned),
            metrics.MEASURED_IMBALANCE: imbalance(seconds),
            metrics.BUBBLE_FRACTION: 1 - 1 / imbalance(seconds),
            metrics.RANK_SECONDS: max(seconds),
            metrics.PREDICTED_SECONDS: max(predicted, default=0.0),
            metrics.PREDICTION_ERROR: _error(predicted, seconds) if predicted else 0.0,
            metrics.ROW_WAIT: max(result.waited_s for result in results),
            metrics.FLOPS: flops,
            metrics.PEAK_FRACTION: flops / (max(seconds) * peak) if max(seconds) and peak else 0.0,
            metrics.RANKS: len(results),
        }
        return PlanFigures(by_name, seconds, predicted)

    def _costs(self, plan: Plan, lengths: Mapping[str, int], *, fillers: bool) -> list[float]:
        """Return what each rank's samples cost: FLOPs where there is a cost model, else tokens."""
        out = []
        for rank in plan.ranks:
            keys = [key for micro in rank if fillers or not micro.filler for key in micro.keys]
            tokens = np.array([lengths[key] for key in keys], np.int64)
            out.append(float(self._cost(tokens).sum()) if callable(self._cost) else float(tokens.sum()))
        return out

    def _padding(self, plan: Plan, lengths: Mapping[str, int]) -> float:
        """Return the share of the positions computed that do not hold a token of a sample."""
        batches = [micro for rank in plan.ranks for micro in rank]
        packed, align = self._packed, self._align
        step = forward_length(plan, lengths, packed=packed, align=align) if self._one_length else 0
        rows = [1 if packed else len(micro.keys) for micro in batches]
        longest = [step or row_positions(micro, lengths, packed=packed, align=align) for micro in batches]
        positions = sum(n * tokens for n, tokens in zip(rows, longest, strict=True))
        return 1 - sum(micro.tokens for micro in batches) / positions if positions else 0.0


def loss_metrics(results: Sequence[RankResult]) -> dict[str, float]:
    """Return the loss metrics per trained token, from the sums of the ranks."""
    tokens = sum(result.tokens for result in results)
    return {
        metrics.LOSS: sum(result.loss for result in results),
        metrics.GRAD_NORM: results[0].grad_norm,
        metrics.LEARNING_RATE: results[0].learning_rate,
        metrics.RATIO_MEAN: sum(result.ratio_sum for result in results) / tokens,
        metrics.CLIPPED_FRACTION: sum(result.clipped for result in results) / tokens,
        metrics.KL_MEAN: sum(result.kl_sum for result in results) / tokens,
        metrics.ENTROPY_MEAN: sum(result.entropy_sum for result in results) / tokens,
        metrics.WEIGHT_MEAN: sum(result.weight_sum for result in results) / tokens,
        metrics.USED_WEIGHT_MEAN: sum(result.used_weight_sum for result in results) / tokens,
        metrics.TRUNCATED_FRACTION: sum(result.truncated for result in results) / tokens,
        metrics.REFERENCE_KL_MEAN: sum(result.reference_kl_sum for result in results) / tokens,
        metrics.TOKENS: tokens,
    }


def traffic_metrics(traffic: Traffic) -> dict[str, float]:
    """Return what was put and read, by path, in bytes and bytes per second."""
    out: dict[str, float] = {}
    for name, flows in ((metrics.PUT, traffic.puts), (metrics.GET, traffic.gets)):
        for path in PATHS:
            flow = flows.get(path, Flow())
            out[f"{name}_{path}_bytes"] = flow.bytes
            out[f"{name}_{path}_bytes_per_s"] = flow.bytes / flow.seconds if flow.seconds else 0.0
    read = sum(flow.bytes for flow in traffic.gets.values())
    near = sum(flow.bytes for path, flow in traffic.gets.items() if path in NEAR)
    return {**out, metrics.NEAR_SHARE: near / read if read else 0.0}


def imbalance(values: Sequence[float]) -> float:
    """Return the largest value over the mean; 1 if the sum is 0."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def _error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return the mean over ranks of the relative error; 0 if nothing was predicted or measured.

    A rank that took under a thousandth of the slowest one's time is left out, because its relative error can be huge.
    """
    least = 1e-3 * max(measured, default=0.0)
    pairs = [(p, m) for p, m in zip(predicted, measured, strict=True) if p > 0 and m > least]
    return sum(abs(p - m) / m for p, m in pairs) / len(pairs) if pairs else 0.0


def publish_metrics(last: Published | None) -> dict[str, float]:
    """Return what the last publish took and sent; zeros before the first."""
    last = last or Published(version=0, seconds=0.0)
    return {
        metrics.PUBLISH_SECONDS: last.seconds,
        metrics.PUBLISH_GATHER: last.gather_s,
        metrics.PUBLISH_TRANSFER: last.transfer_s,
        metrics.PUBLISH_STAGE: last.stage_s,
        metrics.PUBLISH_PAUSE: last.pause_s,
        metrics.PUBLISH_BYTES: last.bytes,
        metrics.PUBLISH_SENT_BYTES: last.sent_bytes,
    }
