"""The flags of `loadtest run`, each with what it says of itself.

Their values are handed on as they are written: `RunConfig` reads them.
"""

from typing import Annotated, Any, Final

import typer

Text = str | None
Texts = list[str] | None

_LOAD: Final = "Load"
_OPEN_LOOP: Final = "Load by a rate"
_QUESTIONS: Final = "What is asked"
_SERVER: Final = "The server"
_RESULTS: Final = "What is made of it"


def flag(*names: str, text: str, panel: str, metavar: str) -> Any:
    """Return an option whose value `RunConfig` reads."""
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar)


Url = Annotated[Text, typer.Argument(metavar="URL", show_default=False)]
Queues = Annotated[
    Text,
    flag(
        "-q",
        "--queues",
        "--concurrency",
        text="Users at once, each with one request at a time; a list is a sweep. (5)",
        panel=_LOAD,
        metavar="N|1,2,4",
    ),
]
Loops = Annotated[
    Text,
    flag("-n", "--loops", text="Requests of each queue. (20)", panel=_LOAD, metavar="N"),
]
Requests = Annotated[Text, flag("--requests", text="Requests in all.", panel=_LOAD, metavar="N")]
Duration = Annotated[
    Text, flag("-d", "--duration", text="How long to send.", panel=_LOAD, metavar="60s")
]
Grace = Annotated[
    Text,
    flag(
        "--grace",
        text="How long requests may go on, once nothing more is sent. (30s)",
        panel=_LOAD,
        metavar="30s",
    ),
]
Ramp = Annotated[
    Text,
    flag("--ramp", text="Over how long the load rises. (0s)", panel=_LOAD, metavar="0s"),
]
Warmup = Annotated[
    Text,
    flag(
        "--warmup",
        text="Requests in front of each level that do not count. (1)",
        panel=_LOAD,
        metavar="N",
    ),
]
Interval = Annotated[
    Text,
    flag(
        "--interval", text="A queue's pause between its requests. (0s)", panel=_LOAD, metavar="0s"
    ),
]
Repeat = Annotated[
    Text, flag("--repeat", text="How often to run it all. (1)", panel=_LOAD, metavar="N")
]
Rate = Annotated[
    Text,
    flag(
        "--rate",
        text="Requests per second, whatever becomes of them; a list is a sweep.",
        panel=_OPEN_LOOP,
        metavar="R|1,2,4",
    ),
]
Arrival = Annotated[
    Text,
    flag(
        "--arrival",
        text="How they follow each other. (poisson)",
        panel=_OPEN_LOOP,
        metavar="poisson|constant",
    ),
]
MaxInflight = Annotated[
    Text,
    flag(
        "--max-inflight", text="Requests under way at once, at most.", panel=_OPEN_LOOP, metavar="N"
    ),
]
Data = Annotated[
    Text,
    flag(
        "--data",
        text="Questions: .json, .jsonl or .txt. (100 that ship with it)",
        panel=_QUESTIONS,
        metavar="FILE",
    ),
]
Order = Annotated[
    Text,
    flag(
        "--order",
        text="How they are drawn. (random)",
        panel=_QUESTIONS,
        metavar="random|shuffled|sequential",
    ),
]
Seed = Annotated[
    Text, flag("--seed", text="Gives the same draws. (0)", panel=_QUESTIONS, metavar="N")
]
Unique = Annotated[
    bool | None,
    typer.Option(
        "--unique",
        help="Begin each question in its own way; defeats prefix caches.",
        rich_help_panel=_QUESTIONS,
        show_default=False,
    ),
]
Images = Annotated[
    Text,
    flag(
        "--images",
        text="One of its images goes with each question.",
        panel=_QUESTIONS,
        metavar="DIR",
    ),
]
Users = Annotated[
    Text,
    flag("--users", text="How many users ask. (100)", panel=_QUESTIONS, metavar="N"),
]
MaxTokens = Annotated[
    Text, flag("--max-tokens", text="Of an answer.", panel=_QUESTIONS, metavar="N")
]
Temperature = Annotated[
    Text, flag("--temperature", text="Of sampling.", panel=_QUESTIONS, metavar="T")
]
Api = Annotated[
    Text,
    flag(
        "--api",
        text="auto, openai-chat, openai-completions, text-generation, classify or custom. "
        "(auto: by the URL's path)",
        panel=_SERVER,
        metavar="NAME",
    ),
]
Model = Annotated[
    Text,
    flag("--model", text="(the server's first)", panel=_SERVER, metavar="NAME"),
]
Body = Annotated[
    Text,
    flag(
        "--body",
        text="For custom: the body, with {text}, {messages}, {user}, {index}, {image_url}; "
        "else: fields laid over it.",
        panel=_SERVER,
        metavar="@t.json|JSON",
    ),
]
TextPath = Annotated[
    Text,
    flag("--text-path", text="For custom: the text.", panel=_SERVER, metavar="JMESPATH"),
]
Done = Annotated[
    Text,
    flag(
        "--done",
        text="For custom: the last event's data; '' if closing ends it. ('[DONE]')",
        panel=_SERVER,
        metavar="TEXT",
    ),
]
Header = Annotated[
    Texts,
    flag(
        "-H",
        "--header",
        text="Sent with each request. Repeatable.",
        panel=_SERVER,
        metavar="'NAME: VALUE'",
    ),
]
ApiKeyEnv = Annotated[
    Text,
    flag("--api-key-env", text="The variable with the key.", panel=_SERVER, metavar="NAME"),
]
Timeout = Annotated[
    Text, flag("--timeout", text="Of a request. (180s)", panel=_SERVER, metavar="180s")
]
FirstTokenTimeout = Annotated[
    Text,
    flag("--first-token-timeout", text="To its first text.", panel=_SERVER, metavar="5s"),
]
StallTimeout = Annotated[
    Text,
    flag("--stall-timeout", text="To its next text.", panel=_SERVER, metavar="5s"),
]
Slo = Annotated[
    Texts,
    flag(
        "--slo",
        text="What makes a request good, in ms: ttft:2000 tpot:100 e2e:30000.",
        panel=_RESULTS,
        metavar="NAME:MS ...",
    ),
]
FailIf = Annotated[
    Texts,
    flag(
        "--fail-if",
        text="What makes it exit with 99. Repeatable.",
        panel=_RESULTS,
        metavar="'ttft.p95>2000'",
    ),
]
MaxErrorRate = Annotated[
    Text,
    flag("--max-error-rate", text="Beyond, exit with 1. (0)", panel=_RESULTS, metavar="0..1"),
]
Out = Annotated[
    Text,
    flag("--out", text="Where the results go. (runs/<time>/)", panel=_RESULTS, metavar="DIR"),
]
Png = Annotated[
    bool | None,
    typer.Option(
        "--png",
        help="Write the plots as PNG too.",
        rich_help_panel=_RESULTS,
        show_default=False,
    ),
]
Gpu = Annotated[
    Text,
    flag(
        "--gpu",
        text="Watch this machine's GPUs. (auto)",
        panel=_RESULTS,
        metavar="auto|on|off",
    ),
]
Config = Annotated[
    Text,
    flag("--config", text="A file of these names.", panel=_RESULTS, metavar="run.yml"),
]
