"""Arithmetic questions, and a calculator to answer them with."""

import ast
import math
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.collectors.environments.base import Environment, Step, Turn
from asyncrl.collectors.environments.tools import Tool
from asyncrl.engine.records import Prompt

_OPERATORS: Mapping[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_LONGEST = 200
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_ASKED = "What is {}? You may use the tool. Give the number alone as your answer."


def calculate(expression: str) -> float:
    """Return the value of an expression of numbers, + - * / // % and brackets; ValueError if it is anything else.

    There are no powers: the digits of 9**9**9 fill the memory.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters; at most {_LONGEST} are read")
    try:
        value = float(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is not an expression of numbers") from None
    except ArithmeticError as error:
        raise ValueError(str(error)) from None
    if not math.isfinite(value):
        raise ValueError(f"{expression!r} is not a finite number")
    return value


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
    raise ValueError(f"{ast.unparse(node)!r} is not an expression of numbers")


async def _calculate(state: Any, expression: Any) -> str:
    if not isinstance(expression, str):
        raise TypeError(f"expression is {expression!r}; it must be a text")
    return f"{calculate(expression):.12g}"


class Calculator(Environment):
    """`questions` sums and products of `terms` numbers up to `largest`; reward 1 if the last number named is right.

    The model may call the tool `calculate`; a turn without a call is its answer. With prompts of `data` the answers are
    those of the records.
    """

    tools = (
        Tool(
            "calculate",
            "Compute an arithmetic expression.",
            {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "such as (12 + 7) * 3"}},
                "required": ["expression"],
            },
            _calculate,
        ),
    )

    def __init__(self, questions: int = 1000, terms: int = 3, largest: int = 99, seed: int = 0) -> None:
        if questions < 1 or terms < 2 or largest < 1:
            raise ValueError(
                f"questions is {questions}, terms {terms} and largest {largest}; they must be at least 1, 2 and 1"
            )
        self._questions = questions
        self._terms = terms
        self._largest = largest
        self._seed = seed

    def prompts(self) -> Sequence[Prompt]:
        rng = random.Random(self._seed)
        return [self._prompt(i, rng) for i in range(self._questions)]

    async def reset(self, prompt: Prompt, seed: int) -> float:
        return float(prompt.answer)

    async def step(self, state: Any, turn: Turn) -> Step:
        numbers = _NUMBER.findall(turn.text.replace(",", ""))
        return Step(done=True, reward=float(bool(numbers) and abs(float(numbers[-1]) - state) < 1e-6))

    def _prompt(self, number: int, rng: random.Random) -> Prompt:
        text = str(rng.randint(1, self._largest))
        for _ in range(self._terms - 1):
            text += f" {rng.choice('+-*')} {rng.randint(1, self._largest)}"
        return Prompt(number, _ASKED.format(text), f"{calculate(text):.12g}", "calculator")
