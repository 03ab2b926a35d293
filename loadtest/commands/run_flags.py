"""The flags of `loadtest run` and their help texts.

Values are passed on as written; `RunConfig` parses them.
"""

from typing import Annotated, Any, Final

import typer

Text = str | None
Texts = list[str] | None

_LOAD: Final = "Load"
_OPEN_LOOP: Final = "Load at a rate"
_QUESTIONS: Final = "Questions"
_SERVER: Final = "Server"
_RESULTS: Final = "Results"


def flag(*names: str, text: str, panel: str, metavar: str) -> Any:
    """Return an option whose value `RunConfig` parses."""
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar)


Url = Annotated[Text, typer.Argument(metavar="URL", show_default=False)]
Queues = Annotated[
    Text,
    flag(
        "-q",
        "--queues",
        "--concurrency",
        text="Concurrent users, each with one request at a time; a list is a sweep. (5)",
        panel=_LOAD,
        metavar="N|1,2,4",
    ),
]
Loops = Annotated[
    Text,
    flag("-n", "--loops", text="Requests per user. (20)", panel=_LOAD, metavar="N"),
]
Requests = Annotated[Text, flag("--requests", text="Total requests.", panel=_LOAD, metavar="N")]
Duration = Annotated[
    Text, flag("-d", "--duration", text="How long to send requests.", panel=_LOAD, metavar="60s")
]
Grace = Annotated[
    Text,
    flag(
        "--grace",
        text="How long requests may take to finish after the last is sent. (30s)",
        panel=_LOAD,
        metavar="30s",
    ),
]
Ramp = Annotated[
    Text,
    flag("--ramp", text="Time over which the load rises. (0s)", panel=_LOAD, metavar="0s"),
]
Warmup = Annotated[
    Text,
    flag(
        "--warmup",
        text="Requests sent before each level and not counted. (1)",
        panel=_LOAD,
        metavar="N",
    ),
]
Interval = Annotated[
    Text,
    flag("--interval", text="A user's pause between requests. (0s)", panel=_LOAD, metavar="0s"),
]
Repeat = Annotated[
    Text, flag("--repeat", text="How many times to run the sweep. (1)", panel=_LOAD, metavar="N")
]
Rate = Annotated[
    Text,
    flag(
        "--rate",
        text="Requests sent per second, however slow the server; a list is a sweep.",
        panel=_OPEN_LOOP,
        metavar="R|1,2,4",
    ),
]
Arrival = Annotated[
    Text,
    flag(
        "--arrival",
        text="How requests are spaced. (poisson)",
        panel=_OPEN_LOOP,
        metavar="poisson|constant",
    ),
]
MaxInflight = Annotated[
    Text,
    flag(
        "--max-inflight", text="The most requests in flight at once.", panel=_OPEN_LOOP, metavar="N"
    ),
]
Data = Annotated[
    Text,
    flag(
        "--data",
        text="File of questions: .json, .jsonl or .txt; ShareGPT's and OpenAI's batches, too. "
        "(100 built-in ones)",
        panel=_QUESTIONS,
        metavar="FILE",
    ),
]
Order = Annotated[
    Text,
    flag(
        "--order",
        text="Order of the questions. (random)",
        panel=_QUESTIONS,
        metavar="random|shuffled|sequential",
    ),
]
Seed = Annotated[
    Text, flag("--seed", text="Seed of all random choices. (0)", panel=_QUESTIONS, metavar="N")
]
Unique = Annotated[
    bool | None,
    typer.Option(
        "--unique",
        help="Give each question its own prefix, to defeat prefix caches.",
        rich_help_panel=_QUESTIONS,
        show_default=False,
    ),
]
Images = Annotated[
    Text,
    flag(
        "--images",
        text="Directory; one of its images is sent with each question.",
        panel=_QUESTIONS,
        metavar="DIR",
    ),
]
Users = Annotated[
    Text,
    flag(
        "--users",
        text="How many different user names to send. (100)",
        panel=_QUESTIONS,
        metavar="N",
    ),
]
MaxTokens = Annotated[
    Text, flag("--max-tokens", text="Most tokens per answer.", panel=_QUESTIONS, metavar="N")
]
Temperature = Annotated[
    Text, flag("--temperature", text="Sampling temperature.", panel=_QUESTIONS, metavar="T")
]
Api = Annotated[
    Text,
    flag(
        "--api",
        text="auto, openai-chat, openai-completions, text-generation, classify or custom. "
        "(auto: from the URL's path)",
        panel=_SERVER,
        metavar="NAME",
    ),
]
Model = Annotated[
    Text,
    flag("--model", text="Model to ask for. (the server's first)", panel=_SERVER, metavar="NAME"),
]
Body = Annotated[
    Text,
    flag(
        "--body",
        text="For custom: the body, with {text}, {messages}, {user}, {index}, {image_url}. "
        "Otherwise: fields that override the body's.",
        panel=_SERVER,
        metavar="@t.json|JSON",
    ),
]
TextPath = Annotated[
    Text,
    flag(
        "--text-path",
        text="For custom: path of the text in an event.",
        panel=_SERVER,
        metavar="JMESPATH",
    ),
]
Done = Annotated[
    Text,
    flag(
        "--done",
        text="For custom: data of the last event; '' if the stream just ends. ('[DONE]')",
        panel=_SERVER,
        metavar="TEXT",
    ),
]
Header = Annotated[
    Texts,
    flag(
        "-H",
        "--header",
        text="Header to send with each request. Repeatable.",
        panel=_SERVER,
        metavar="'NAME: VALUE'",
    ),
]
ApiKeyEnv = Annotated[
    Text,
    flag(
        "--api-key-env",
        text="Environment variable that holds the API key.",
        panel=_SERVER,
        metavar="NAME",
    ),
]
Timeout = Annotated[
    Text, flag("--timeout", text="Time limit of a request. (180s)", panel=_SERVER, metavar="180s")
]
FirstTokenTimeout = Annotated[
    Text,
    flag(
        "--first-token-timeout", text="Time limit to the first text.", panel=_SERVER, metavar="5s"
    ),
]
StallTimeout = Annotated[
    Text,
    flag("--stall-timeout", text="Time limit between texts.", panel=_SERVER, metavar="5s"),
]
Slo = Annotated[
    Texts,
    flag(
        "--slo",
        text="Objectives of a good request, in ms, such as ttft:2000 tpot:100 e2e:30000.",
        panel=_RESULTS,
        metavar="NAME:MS ...",
    ),
]
FailIf = Annotated[
    Texts,
    flag(
        "--fail-if",
        text="Exit with 99 if this holds. Repeatable.",
        panel=_RESULTS,
        metavar="'ttft.p95>2000'",
    ),
]
MaxErrorRate = Annotated[
    Text,
    flag(
        "--max-error-rate",
        text="Exit with 1 above this share of errors. (0)",
        panel=_RESULTS,
        metavar="0..1",
    ),
]
Out = Annotated[
    Text,
    flag("--out", text="Directory of the results. (runs/<time>/)", panel=_RESULTS, metavar="DIR"),
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
        text="Sample this machine's GPUs. (auto)",
        panel=_RESULTS,
        metavar="auto|on|off",
    ),
]
Config = Annotated[
    Text,
    flag(
        "--config",
        text="YAML file of settings, named like these flags.",
        panel=_RESULTS,
        metavar="run.yml",
    ),
]
