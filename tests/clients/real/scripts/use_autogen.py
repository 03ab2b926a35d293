"""AutoGen: a team of two agents who speak in turn, and an agent with a tool."""

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient
from steps import BASE_URL, MODEL, QUESTION, run


def client() -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=MODEL,
        base_url=BASE_URL,
        api_key="none",
        max_retries=0,
        temperature=0,
        max_tokens=100,
        model_info={
            "vision": True,
            "function_calling": True,
            "json_output": True,
            "structured_output": True,
            "family": "unknown",
        },
    )


async def weather(is_rome: bool) -> str:
    """Tell the weather in a city."""
    return f"clear, {is_rome}"


def agent(name: str, **options: Any) -> AssistantAgent:
    return AssistantAgent(name, client(), description=f"The {name}.", **options)


async def round_robin() -> None:
    team = RoundRobinGroupChat(
        [agent("writer"), agent("critic")], termination_condition=MaxMessageTermination(5)
    )
    told = await team.run(task=QUESTION)
    assert [message.source for message in told.messages] == ["user"] + ["writer", "critic"] * 2


async def round_robin_of_tasks() -> None:
    team = RoundRobinGroupChat(
        [agent("writer"), agent("critic")], termination_condition=MaxMessageTermination(4)
    )
    task = [TextMessage(content=text, source="user") for text in ("Be brief.", QUESTION)]
    assert len((await team.run(task=task)).messages) == 4


async def tool_then_user() -> None:
    made = agent("guide", tools=[weather])
    await made.run(task="What is the weather in Rome?")
    assert (await made.run(task=QUESTION)).messages


run(globals())
