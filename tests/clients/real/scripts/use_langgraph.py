"""LangGraph: the ReAct agent, interrupted behind a tool, and with turns of other agents."""

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import MemorySaver
from langgraph.prebuilt import create_react_agent
from steps import BASE_URL, MODEL, QUESTION, run


@tool
def weather(is_rome: bool) -> str:
    """Tell the weather in a city."""
    return f"clear, {is_rome}"


def model() -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=BASE_URL, api_key="none", max_retries=0, temperature=0, max_tokens=100
    )


def human_after_tool() -> None:
    made = create_react_agent(
        model(), [weather], checkpointer=MemorySaver(), interrupt_after=["tools"]
    )
    config = {"configurable": {"thread_id": "1"}}
    asked = made.invoke({"messages": [HumanMessage("What is the weather in Rome?")]}, config)
    assert isinstance(asked["messages"][-1], ToolMessage)
    told = made.invoke({"messages": [HumanMessage(QUESTION)]}, config)
    assert isinstance(told["messages"][-1], (AIMessage, ToolMessage))


def later_system() -> None:
    made = create_react_agent(model(), [], prompt="Be brief.")
    told = made.invoke(
        {
            "messages": [
                HumanMessage("hello"),
                AIMessage("Good day.", name="greeter"),
                AIMessage("I look things up.", name="reader"),
                SystemMessage("Answer as the reader."),
                HumanMessage(QUESTION),
            ]
        }
    )
    assert told["messages"][-1].content


def assistant_first() -> None:
    made = create_react_agent(model(), [])
    told = made.invoke({"messages": [AIMessage("How can I help?"), HumanMessage(QUESTION)]})
    assert told["messages"][-1].content


run(globals())
