"""What a run shows while it runs: a live table in a terminal, plain lines elsewhere.

It reads folds and the controller's state; it changes nothing.
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anyio
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from asyncrl.engine.events.ledger import Ledger
from asyncrl.engine.events.means import Means
from asyncrl.engine.events.progress import Progress
from asyncrl.engine.metrics import ENGINE_BUSY

if TYPE_CHECKING:
    from asyncrl.engine.loop.controller import Controller
    from asyncrl.engine.records.estimates import Estimate

_LIVE_EVERY_S = 0.25
_LINE_EVERY_S = 2.0
_RATE_OVER_S = 10.0


def number(value: float | None, digits: int = 3) -> str:
    """Return a number as text, or a dash for None, NaN and infinities."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def estimate(found: "Estimate | None") -> str:
    """Return a figure with its interval as text, such as `0.800 [0.490, 0.943]`; a dash for None."""
    if found is None:
        return "-"
    return f"{number(found.value)} [{number(found.low)}, {number(found.high)}]"


class View:
    """Shows one run. `watch` gives it the controller, once that exists."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        progress: Progress,
        console: Console,
        clock: Callable[[], float],
        bias_warning: float = 0.0,
    ) -> None:
        self._bias_warning = bias_warning
        self._ledger = ledger
        self._progress = progress
        self._console = console
        self._clock = clock
        self._controller: Controller | None = None
        self._rates: deque[tuple[float, int, int]] = deque()

    def watch(self, controller: "Controller") -> None:
        self._controller = controller
        self._note_tokens()  # Otherwise the first line would have no rate.

    async def run(self) -> None:
        """Show the run until cancelled."""
        if not self._console.is_terminal:
            while True:
                await anyio.sleep(_LINE_EVERY_S)
                if self._progress.batches:
                    self._console.print(self.line(), highlight=False, markup=False, soft_wrap=True)
        with Live(self.table(), console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                await anyio.sleep(_LIVE_EVERY_S)
                live.update(self.table(), refresh=True)

    def figures(self) -> dict[str, str]:
        """Return what is shown, by name."""
        progress, ledger, controller = self._progress, self._ledger.summary(), self._controller
        trained, generated = self._tokens_per_second()
        batch = progress.last_batch
        step = progress.last_step
        figures = {
            "step": f"{progress.steps} ({progress.batches} batches judged)",
            "reward": number(Means.mean(progress.rewards.last)),
            "parts": ", ".join(f"{part}: {number(mean)}" for part, mean in progress.reward_parts.recent().items())
            or "-",
            "ages": _counts(step.ages if step else {}),
            "kept": f"{batch.kept}/{batch.judged} groups" if batch else "-",
            "masked": _counts(ledger["masked"]),
            "dropped": _counts(ledger["dropped"]),
            "failed": _counts(ledger["failed"]),
            "tok/s": f"{trained:.0f} trained, {generated:.0f} generated",
        }
        if step and step.metrics.get(ENGINE_BUSY):
            figures["engines"] = f"{step.metrics[ENGINE_BUSY]:.0%} busy"
        bias = progress.length_bias
        if bias.warns(self._bias_warning):
            figures["length bias"] = (
                f"ratio {number(bias.recent_ratio, 2)}, {bias.prompts.mostly_lost} prompts mostly lost"
            )
        evaluations = progress.evaluations
        if evaluations.last is not None:
            figures["evaluation"] = (
                f"pass@1 {estimate(evaluations.last.scores.pass_at.get('1'))} at version {evaluations.last.version}"
            )
        if evaluations.under_way is not None:
            figures["evaluates"] = f"version {evaluations.under_way}"
        if progress.alarms.raised:
            figures["alarms"] = ", ".join(alarm.name for alarm in progress.alarms.raised)
        if controller is not None:
            groups, versions = controller.core.groups.statistics(), controller.core.versions
            figures["run-ahead"] = f"{groups.run_ahead}/{groups.run_ahead_limit} groups"
            figures["version"] = f"{versions.trainer} trained, {versions.published} published"
            figures["waits"] = controller.waits_for
        return figures

    def line(self) -> str:
        return "  ".join(f"{name} {value}" for name, value in self.figures().items() if value != "-")

    def table(self) -> Table:
        table = Table(show_header=False, box=None)
        for name, value in self.figures().items():
            table.add_row(f"[bold]{name}", escape(value))
        return table

    def _note_tokens(self) -> float:
        now = self._clock()
        self._rates.append((now, self._progress.trained_tokens, self._progress.generated_tokens))
        return now

    def _tokens_per_second(self) -> tuple[float, float]:
        now = self._note_tokens()
        # Two notes are kept however old they are: a slow run would otherwise show no rate.
        while len(self._rates) > 2 and now - self._rates[0][0] > _RATE_OVER_S:
            self._rates.popleft()
        then, trained, generated = self._rates[0]
        seconds = max(now - then, 1e-9)
        if now == then:
            return 0.0, 0.0
        return (
            (self._progress.trained_tokens - trained) / seconds,
            (self._progress.generated_tokens - generated) / seconds,
        )


def _counts(counts: "dict[str, int] | Counter[str]") -> str:
    return ", ".join(f"{name}: {count}" for name, count in sorted(counts.items())) or "-"


def final_lines(summary: dict[str, Any], directory: str) -> list[str]:
    """Return the lines that a run ends with."""
    ledger = summary["ledger"]
    exit_ = summary["exit"]
    return [
        f"{exit_['reason']} (exit {exit_['code']}) after {summary['steps']} steps, "
        f"{summary['batches']} batches judged, {summary['seconds_total']:.0f} s",
        f"reward {number(summary['reward_first_10'])} in the first 10 batches, "
        f"{number(summary['reward_last_10'])} in the last 10",
        *(
            f"  {part} {number(means['first_10'])} in the first 10 batches, {number(means['last_10'])} in the last 10"
            for part, means in summary["reward_parts"].items()
        ),
        f"trained ages (versions: samples) {_counts(summary['trained_age_histogram'])}",
        f"samples: {ledger['dispatched']} dispatched = {ledger['trained']} trained"
        f" + masked [{_counts(ledger['masked'])}] + dropped [{_counts(ledger['dropped'])}]"
        f" + failed [{_counts(ledger['failed'])}]",
        *_evaluation_lines(summary.get("evaluation")),
        *_bias_lines(summary),
        *(
            f"warning: {alarm['name']}, batches {alarm['first_batch']} to {alarm['last_batch']}: {alarm['message']}"
            for alarm in summary["alarms"]
            if alarm["raised"]
        ),
        *_model_lines(summary.get("model"), directory),
        f"everything is in {directory}",
    ]


def _evaluation_lines(evaluation: dict[str, Any] | None) -> list[str]:
    if evaluation is None:
        return []
    lost = evaluation["failed"] + evaluation["skipped"]
    shown: dict[int, dict[str, Any]] = {}
    for name in ("first", "last", "best"):
        if evaluation[name] is not None:
            shown.setdefault(evaluation[name]["version"], evaluation[name])
    parts = []
    for version, ended in shown.items():
        found = ended["scores"]["pass_at"].get("1")
        figure = "-" if found is None else f"{number(found['value'])} [{number(found['low'])}, {number(found['high'])}]"
        best = " (the best)" if version == evaluation["best"]["version"] else ""
        parts.append(f"{figure} at version {version}{best}")
    return [
        *([f"evaluation: pass@1 {', '.join(parts)}"] if parts else []),
        *([f"warning: {lost} versions were left without an evaluation; log.jsonl says why"] if lost else []),
    ]


def _model_lines(model: dict[str, Any] | None, directory: str) -> list[str]:
    if model is None:
        return []
    failed = model["failed_saves"]
    return [
        *([f"warning: {failed} saves of the model failed; {directory}/log.jsonl says why"] if failed else []),
        *(
            f"{name}: {directory}/{name} (version {saved['version']}, reward {number(saved['mean_reward'])})"
            for name, saved in model["folders"].items()
        ),
    ]


def _bias_lines(summary: dict[str, Any]) -> list[str]:
    bias = summary["length_bias"]
    ratio = bias["fresh_ratio"]
    prompts = bias["prompts"]
    lost = [
        f"{prompts['mostly_lost']} of {prompts['counted']} prompts lost over half of their answers to age; the most: "
        + ", ".join(
            f"prompt {tally['prompt']} ({tally['lost_groups']} of {tally['groups']} groups)"
            for tally in prompts["worst"][:3]
        )
    ]
    if bias["cancelled_groups"]:
        return [
            f"warning: {bias['cancelled_groups']} groups were cancelled for age; long answers are lost, and how "
            "many tokens they would have had is not known",
            *lost,
        ]
    if ratio is None or ratio >= bias["warn_below"]:
        return []
    return [
        f"warning: age lets through answers of {bias['fresh_mean_tokens']:.1f} tokens on average, of "
        f"{bias['generated_mean_tokens']:.1f} generated (ratio {ratio:.2f}, under rollout.bias_warning "
        f"{bias['warn_below']}): long answers are lost. See rollout.stale_mode",
        *lost,
    ]
