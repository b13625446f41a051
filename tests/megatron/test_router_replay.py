"""Router replay on Megatron: given experts are taken in data, expert and pipeline parts as in the PyTorch backend."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncrl.engine.errors import AsyncRLError
from asyncrl.engine.records.columns import ROUTED_EXPERTS
from asyncrl.trainers.backends.base import Rows
from asyncrl.trainers.backends.megatron.settings import Split
from asyncrl.trainers.backends.torch_backend import TorchBackend
from asyncrl.trainers.backends.torch_settings import TorchSettings

LAYERS, CHOSEN, EXPERTS, TOTAL = 2, 2, 4, 20
SPLITS = {
    "dp1": (1, Split()),
    "dp2": (2, Split()),
    "ep2": (2, Split(expert=2)),
    "pp2": (2, Split(pipeline=2)),
}


def with_experts(batches: list[Rows]) -> list[Rows]:
    """Give every token experts that are drawn, but for each sample's last, of which none are known."""
    draw = torch.Generator().manual_seed(7)

    def of(tokens: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(len(tokens), LAYERS, EXPERTS, generator=draw).argsort(-1)[..., :CHOSEN]
        drawn[-1] = -1
        return drawn.to(torch.int16)

    return [replace(rows, extras={ROUTED_EXPERTS: [of(tokens) for tokens in rows.tokens]}) for rows in batches]


def reference_of(model: Any, settings: Any) -> TorchBackend:
    own = TorchSettings(
        settings.temperature,
        settings.clip,
        settings.betas,
        settings.weight_decay,
        settings.max_grad_norm,
        router_replay=True,
    )
    return TorchBackend(model, own, pad_id=0)


@pytest.mark.parametrize(
    "options", [{}, {"packed": True}, {"recompute": True}, {"align": 4}], ids=["padded", "packed", "recompute", "align"]
)
@pytest.mark.parametrize("split", list(SPLITS))
def test_given_experts_are_replayed_forwards_and_backwards(
    world: Any, model: Any, batches: list[Rows], make_settings: Any, split: str, options: dict[str, Any]
) -> None:
    """Experts that no router would choose: log-probabilities, and the gradients, which the first moments hold."""
    ranks, how = SPLITS[split]
    ours, whole, routed = world(ranks), model("qwen3_moe"), with_experts(batches)
    settings = make_settings(how, router_replay=True, **options)
    reference = reference_of(whole, settings)
    ours.each("build", whole.config, dict(whole.state_dict()), settings)
    mine = ours.shares(routed, how)
    for i in range(len(mine[0])):
        answers = ours.apart("logprobs", [(own[i],) for own in mine])
        for rank, answer in enumerate(answers):
            own_choice = reference.logprobs(replace(mine[rank][i], extras={}))
            for found, right, free in zip(answer, reference.logprobs(mine[rank][i]), own_choice, strict=True):
                torch.testing.assert_close(found, right, rtol=0, atol=1e-4)
                assert float((right - free).abs().max()) > 0.01
    for rows in routed:
        reference.accumulate(rows, TOTAL)
    _, norms = ours.update(routed, how, learning_rate=1e-3, total=TOTAL)
    assert norms == pytest.approx([reference.apply(reference.gradients(), learning_rate=1e-3)] * ranks, rel=1e-4)
    found = ours.each("training_state")[0].tensors
    for name, value in reference.training_state().tensors.items():
        if name.startswith("optimizer/exp_avg/"):
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=2e-6 + 2e-5 * float(value.abs().max()))


def test_without_experts_and_for_the_reference_routers_choose_by_themselves(
    world: Any, model: Any, batches: list[Rows], make_settings: Any
) -> None:
    ours, whole, routed = world(2), model("qwen3_moe"), with_experts(batches)
    settings = make_settings(SPLITS["pp2"][1], router_replay=True, reference_kl=0.1)
    plain = reference_of(whole, settings)
    ours.each("build", whole.config, dict(whole.state_dict()), settings)
    right = plain.logprobs(batches[0])
    for found in (ours.each("logprobs", batches[0])[0], ours.each("logprobs", routed[0], reference=True)[0]):
        torch.testing.assert_close(torch.cat(found), torch.cat(right), rtol=0, atol=1e-4)


def test_a_pass_that_fails_leaves_its_experts_to_no_other(
    world: Any, model: Any, batches: list[Rows], make_settings: Any
) -> None:
    """What waits for a backward pass that never comes would be taken by the next one."""
    ours, whole, routed = world(1), model("qwen3_moe"), with_experts(batches)
    settings, norms = make_settings(Split(), router_replay=True, recompute=True), []
    bad = replace(routed[0], advantages=routed[0].advantages[:1])
    for fails in (False, True):
        ours.each("build", whole.config, dict(whole.state_dict()), settings)
        if fails:
            with pytest.raises(AsyncRLError, match="advantages of 1 samples, of 3"):
                ours.each("accumulate", bad, TOTAL)
        norms.append(ours.update([routed[1]], Split(), learning_rate=1e-3)[1])
    assert norms[1] == norms[0]


def test_a_model_without_experts_is_refused(world: Any, model: Any, make_settings: Any) -> None:
    whole = model("llama")
    with pytest.raises(Exception, match=r"router_replay is true; the llama has no experts"):
        world(1).each("build", whole.config, dict(whole.state_dict()), make_settings(Split(), router_replay=True))
