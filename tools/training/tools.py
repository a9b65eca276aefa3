"""Small tools, and calls of them in the form of Qwen3.6: what the user asks, the call, the result, the reply."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tools.training.words import ADJECTIVES, PLACES, THINGS, Values

__all__ = ["TOOLS", "Use", "call_text", "result_text", "system_text", "use"]

_SKIES = ("sun", "rain", "snow", "clouds", "fog", "wind")


def _tool(name: str, description: str, /, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = {
    "get_weather": _tool("get_weather", "The weather of a town.", city="Name of the town."),
    "get_price": _tool("get_price", "The price of a thing in coins.", thing="What to look for."),
    "look_up": _tool("look_up", "The phone number of a person.", name="Name of the person."),
    "find_thing": _tool("find_thing", "Where a thing lies.", thing="What to look for."),
    "open_door": _tool("open_door", "Opens a door.", door="Which door.", code="The code of the door."),
    "add_event": _tool("add_event", "Adds a meeting to the calendar.", person="With whom.", time="Day and time."),
}


@dataclass(frozen=True)
class Use:
    """One use of a tool, from the question to the answer."""

    tool: str
    question: str
    arguments: dict[str, str]
    result: str
    answer: str


def use(values: Values, name: str, *, door: tuple[str, str] | None = None) -> Use:
    """A random use of a tool; `door` is a door and its code, which only `open_door` wants."""
    random = values.random
    if name == "get_weather":
        city, degrees, sky = values.town(), str(random.randint(1, 35)), random.choice(_SKIES)
        question = random.choice(("What is the weather in {}?", "How is the weather in {}?", "Is it cold in {}?"))
        result = {"degrees": int(degrees), "sky": sky}
        return _use(name, question.format(city), {"city": city}, result, f"In {city} it is {degrees} degrees, {sky}.")
    if name == "get_price":
        thing, coins = f"{random.choice(ADJECTIVES)} {random.choice(THINGS)}", values.amount()
        question = random.choice(("What does the {} cost in the shop?", "Find the price of the {}."))
        return _use(
            name, question.format(thing), {"thing": thing}, {"coins": coins}, f"The {thing} costs {coins} coins."
        )
    if name == "look_up":
        person, phone = values.name(), values.phone()
        question = random.choice(("Look up {}.", "Find the number of {}.", "Look up the phone number of {}."))
        return _use(
            name, question.format(person), {"name": person}, {"phone": phone}, f"{person}'s phone number is {phone}."
        )
    if name == "find_thing":
        thing, spot = f"{random.choice(ADJECTIVES)} {random.choice(THINGS)}", values.spot()
        question = random.choice(("Find the {}.", "Search for the {}.", "Please find the {}."))
        return _use(name, question.format(thing), {"thing": thing}, {"place": spot}, f"The {thing} is in the {spot}.")
    if name == "add_event":
        person, time = values.name(), values.time()
        question = random.choice(("Add a meeting with {} on {}.", "Put a meeting with {} on {} into my calendar."))
        arguments = {"person": person, "time": time}
        return _use(
            name, question.format(person, time), arguments, {"ok": True}, f"The meeting with {person} is on {time}."
        )
    where, code = door or (f"{random.choice(ADJECTIVES)} {random.choice(PLACES)}", values.code())
    question = random.choice(("Open the {}.", "Please open the {}."))
    if door is None:
        question = random.choice(("Open the {} with the code {}.", "The code of the {} is {}. Please open it."))
    return _use(
        "open_door",
        question.format(where, code),
        {"door": where, "code": code},
        {"open": True},
        f"The {where} is open.",
    )


def _use(name: str, question: str, arguments: dict[str, str], result: dict[str, Any], answer: str) -> Use:
    return Use(name, question, arguments, json.dumps(result), answer)


def call_text(call: Use) -> str:
    """The call as the model writes it."""
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in call.arguments.items())
    return f"<tool_call>\n<function={call.tool}>\n{lines}</function>\n</tool_call>"


def result_text(call: Use) -> str:
    """The result as the chat template renders it."""
    return f"<tool_response>\n{call.result}\n</tool_response>"


def system_text(tools: list[dict[str, Any]], system: str = "") -> str:
    """The system message that the chat template makes of tools and the system message before them."""
    listing = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    head = (
        f"# Tools\n\nYou may call these functions:\n\n<tools>{listing}\n</tools>\n\nWrite a call like this:\n\n"
        "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
    )
    return f"{head}\n\n{system}" if system else head
