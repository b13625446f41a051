"""Steps, rewards and ages of a run so far. A fold over the event log, for the view and the summary."""

from collections import Counter

from asyncrl.engine.events.alarms import Alarms
from asyncrl.engine.events.evaluations import Evaluations
from asyncrl.engine.events.length_bias import LengthBias
from asyncrl.engine.events.means import WINDOW, Means
from asyncrl.engine.events.reward_parts import RewardParts
from asyncrl.engine.events.types import AnyEvent, BatchJudged, Published, Put, StepEnded
from asyncrl.engine.metrics import ENGINE_BUSY


class Progress:
    """What the user watches. `rewards` covers all judged samples, `trained_rewards` the trained ones.

    `reward_window` is the largest number of batches that `mean_of_last` can average. `alarms` are those to feed; by
    default they count and do not warn.
    """

    kinds = tuple({*LengthBias.kinds, *Alarms.kinds, *RewardParts.kinds, *Evaluations.kinds, BatchJudged, Published})

    def __init__(self, reward_window: int = WINDOW, alarms: Alarms | None = None) -> None:
        self.length_bias = LengthBias()
        self.alarms = alarms or Alarms()
        self.reward_parts = RewardParts()
        self.steps = 0
        self.batches = 0
        self.trained_tokens = 0
        self.generated_tokens = 0
        self.first_step_s: float | None = None
        self.ages: Counter[int] = Counter()
        self.rewards = Means(reward_window)
        self.trained_rewards = Means()
        self._busy_shares = 0.0
        self.last_step: StepEnded | None = None
        self.last_batch: BatchJudged | None = None
        self.last_publish: Published | None = None
        self.evaluations = Evaluations()

    def apply(self, event: AnyEvent) -> None:
        self.length_bias.apply(event)
        self.alarms.apply(event)
        self.reward_parts.apply(event)
        self.evaluations.apply(event)
        match event:
            case BatchJudged():
                self.batches += 1
                self.rewards.add(event.reward_sum, event.reward_count)
                self.last_batch = event
            case StepEnded():
                self.steps += 1
                self.trained_tokens += event.tokens
                self.ages.update({int(age): count for age, count in event.ages.items()})
                self.trained_rewards.add(event.reward_sum, event.samples)
                self._busy_shares += event.metrics.get(ENGINE_BUSY, 0.0)
                self.last_step = event
                if self.first_step_s is None:
                    self.first_step_s = event.t
            case Published():
                self.last_publish = event
            case Put():
                self.generated_tokens += sum(event.tags.get("trainable_tokens", event.tags.get("response_tokens", ())))

    @property
    def engine_busy_share(self) -> float | None:
        """The mean over steps of the share of time in which engines were busy; None before the first step."""
        return self._busy_shares / self.steps if self.steps else None

    def mean_of_last(self, batches: int) -> float | None:
        """Return the mean reward of the last `batches` batches; None if there were fewer."""
        if self.batches < batches:
            return None
        return Means.mean(self.rewards.recent(batches))
