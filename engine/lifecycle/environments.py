"""The environment of a run, from its configuration: its prompts as the model sees them, and its generator."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from asyncrl.collectors.data.renderer import Renderer
from asyncrl.collectors.environments.agents.chat import Drawn
from asyncrl.collectors.environments.agents.history import Rendering
from asyncrl.collectors.environments.agents.solver import Solver
from asyncrl.collectors.environments.between import Between
from asyncrl.collectors.environments.conversation import Conversation, Limits
from asyncrl.collectors.environments.generator import EnvironmentGenerator
from asyncrl.collectors.environments.load import load_environment
from asyncrl.collectors.environments.tools import BEGIN, Tools, schemas
from asyncrl.collectors.generators.base import Generator
from asyncrl.collectors.generators.engine_generator import EngineGenerator
from asyncrl.collectors.tasks.prepared import PreparedTask
from asyncrl.configs import RunConfig
from asyncrl.engine.errors import ConfigError
from asyncrl.engine.model.tokenizer import ChatTokenizer


def with_environment(
    config: RunConfig,
    generator: Generator,
    tokenizer: ChatTokenizer,
    *,
    stop_ids: Sequence[int],
    taken: Collection[str],
) -> Generator:
    """Return what plays the run's environment with an engine's turns; the engine's generator alone if there is none.

    `taken` are the tags that no part of a reward may be called by.
    """
    section = config.environment
    if section.name is None:
        return generator
    assert isinstance(generator, EngineGenerator), "batch is refused with an environment"
    environment = load_environment(section.name, section.options)
    taken = frozenset(taken)
    limits = Limits(
        max_turns=section.max_turns,
        max_tokens=section.max_tokens,
        max_turn_tokens=config.rollout.max_new_tokens,
        step_timeout_s=section.step_timeout_s,
        tool_timeout_s=section.tool_timeout_s,
        on_tool_error=section.on_tool_error,
    )
    if isinstance(environment, Solver):
        rendering = Rendering(tokenizer, stop_ids, chat=Renderer(config.data, (), tokenizer).chat)
        return _with_agent(config, generator, environment, limits, rendering=rendering, taken=taken)
    conversation = Conversation(
        environment,
        section.name,
        limits,
        between=_between(config, tokenizer, stop_ids, environment.tools),
        tokenizer=tokenizer,
        taken=taken,
    )
    return EnvironmentGenerator(generator, conversation)


def _with_agent(
    config: RunConfig,
    engine: EngineGenerator,
    agent: Solver,
    limits: Limits,
    *,
    rendering: Rendering,
    taken: frozenset[str],
) -> Generator:
    # Here, because only runs with agents need aiohttp.
    from asyncrl.collectors.environments.agents.play import AgentPlay
    from asyncrl.collectors.environments.agents.proxy import Proxy

    rollout = config.rollout
    proxy = Proxy(Drawn(rollout.top_p, tuple(rollout.stop_strings)))
    play = AgentPlay(agent, limits, rendering=rendering, proxy=proxy, temperature=rollout.temperature, taken=taken)
    return EnvironmentGenerator(engine, play, beside=play.run)


def check_environment(config: RunConfig, tokenizer: ChatTokenizer, *, stop_ids: Sequence[int], tools: Tools) -> None:
    """ConfigError if the tokenizer cannot write what stands between turns, or read calls of tools."""
    if config.environment.is_agent and config.data.system_prompt is not None:
        raise ConfigError("data.system_prompt is set, and an agent writes its own messages; it must be null")
    renderer = Renderer(config.data, (), tokenizer, tools=schemas(tools))
    if tools and BEGIN not in tokenizer.decode(tokenizer.encode_more(BEGIN)):
        raise ConfigError(
            f"environment.name {config.environment.name} has tools, and the tokenizer of {config.model.path!r} leaves "
            f"{BEGIN} out of texts; calls could not be read"
        )
    try:
        with_tools = renderer.text("QUESTION")
    except ValueError as error:
        raise ConfigError(f"environment.name {config.environment.name}: {error}") from error
    if config.environment.is_agent:
        renderer.check_first_token(with_tools)
    missing = [tool.name for tool in tools if tool.name not in with_tools]
    if missing:
        raise ConfigError(
            f"environment.name {config.environment.name} has the tool {missing[0]!r}, and the chat template of "
            f"{config.model.path!r} writes no tools into a prompt; take a model that calls tools"
        )
    _between(config, tokenizer, stop_ids, tools).check()


def with_own_prompts(
    config: RunConfig, tokenizer: ChatTokenizer, prepared: PreparedTask, *, tools: Tools
) -> PreparedTask:
    """Return an environment's own prompts and examples as the model sees them: through the chat template if it has one.

    ConfigError for a text that the template refuses.
    """
    renderer = Renderer(config.data, (), tokenizer, tools=schemas(tools), raw=config.environment.is_agent)
    try:
        prompts = [replace(prompt, text=renderer.text(prompt.text)) for prompt in prepared.prompts]
        examples = [(renderer.text(prompt), answer) for prompt, answer in prepared.examples]
    except ValueError as error:
        raise ConfigError(f"environment.name {config.environment.name}: a prompt cannot be used: {error}") from error
    if prompts:
        renderer.check_first_token(prompts[0].text)
    return replace(prepared, prompts=prompts, examples=examples)


def _between(config: RunConfig, tokenizer: ChatTokenizer, stop_ids: Sequence[int], tools: Tools) -> Between:
    chat = Renderer(config.data, (), tokenizer).chat
    return Between(tokenizer, stop_ids, chat=chat, tools=schemas(tools))
