"""The server's command line. `raystream` adds the load tester's to it.

Each command imports what it needs when it runs. `raystream serve` lives as long as its server and
only supervises it, so Ray and torch would take its memory for nothing.
"""

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from serve_app.shipped_files import CONFIG, SHIPPED

HERE: Final = Path("serve_config.yaml")
"""What `raystream serve` serves if no file is named and it exists."""

app = typer.Typer(
    name="raystream",
    help="Serve transformer models from Ray Serve, on this machine or a cluster.",
    epilog="Begin with: raystream serve",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _tell_version(asked: bool) -> None:
    """Print the version and end, if `--version` asks for it."""
    if asked:
        typer.echo(f"raystream {version('raystream')}")
        raise typer.Exit


@app.callback()
def raystream(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_tell_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Serve transformer models from Ray Serve, on this machine or a cluster."""


ConfigFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="A Serve configuration, such as serve_config.yaml.",
        show_default=False,
    ),
]
ServerUrl = Annotated[
    str | None,
    typer.Option(
        help="Where the server's API begins. Without it: your server on this machine, or else "
        "http://127.0.0.1:8000/v1.",
        show_default=False,
    ),
]
SentKey = Annotated[
    str | None,
    typer.Option(
        envvar="RAYSTREAM_API_KEY",
        help="The key that is sent; better in the environment, which other users don't see. "
        "Without it, OPENAI_API_KEY is sent to a --url with https.",
    ),
]
KeyName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Whose key it is: 1 to 64 letters, digits and '_.@-'.",
        show_default=False,
    ),
]
KeyScopes = Annotated[
    list[str] | None,
    typer.Option(
        "--scope",
        metavar="SCOPE",
        help="What the key may do besides using the models: `operate` is to see what all users do "
        "(/metrics, /v1/devices).",
        show_default=False,
    ),
]


@app.command()
def serve(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE | MODEL...]",
            help="A Serve configuration (.yaml), or models: folders, or ids of hub repositories, "
            "with @REVISION if not the commit in the cache, or else the newest. Without any: "
            "serve_config.yaml of this folder, or the embedded models if there is none.",
            show_default=False,
        ),
    ] = None,
    *,
    host: Annotated[
        str | None, typer.Option(help="Where to listen; 127.0.0.1 for models.", show_default=False)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="The port; 8000 for models.", show_default=False),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="A key that clients need: 16 to 256 letters, digits and signs, without commas and "
            "colons. Other users see it in the list of processes: better in the environment, as "
            "RAYSTREAM_API_KEYS, which holds one such key, or name:sha256 pairs with commas "
            "between them.",
            show_default=False,
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="generate, classify or embed. Without it: what a model's files say.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="raystream, or vllm, in the environment of `raystream install-engine vllm`.",
            show_default=False,
        ),
    ] = None,
    num_replicas: Annotated[
        int | None, typer.Option(min=1, help="Replicas of each model; 1.", show_default=False)
    ] = None,
    num_gpus: Annotated[
        str | None,
        typer.Option(help="GPUs of each replica: 0, a share of one, or auto.", show_default=False),
    ] = None,
    num_cpus: Annotated[
        str | None,
        typer.Option(help="Cores that each replica reserves, or auto.", show_default=False),
    ] = None,
    max_model_len: Annotated[
        str | None,
        typer.Option(help="Tokens of prompt and answer together, or auto.", show_default=False),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write the configuration that is served, to be changed.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve models, or a file's models, on this machine until Ctrl-C.

    For example: `raystream serve Qwen/Qwen2.5-0.5B-Instruct --port 8001`, or `raystream serve
    ./my-model`. A model's task, chat template and type are found in its files. Options stand in
    for keys of the file of the same names.

    Everything is checked first, as `raystream check` does, and that the ports are free. Ray is
    started and ended with the server; a cluster that already runs here is left alone. On a cluster,
    use `serve deploy FILE` or KubeRay.
    """
    from serve_app.commands.check.compose import ServeOptions
    from serve_app.commands.run.supervise import run_supervised
    from serve_app.commands.server_environment import (
        MissingHAProxyError,
        NoFolderError,
        with_switches,
    )
    from serve_app.commands.user.new_key import InvalidKeyError, hash_of

    if not names:
        names = [str(HERE if HERE.exists() else CONFIG)]
        if names == [str(CONFIG)]:
            typer.echo(f"There is no {HERE} here, so the embedded models are served.")
            typer.echo("To serve others: raystream serve MODEL, or raystream new-config")
            os.chdir(SHIPPED)  # a folder `models` here must not stand in for the embedded ones
    try:
        sha256 = None if api_key is None else hash_of(api_key)
    except InvalidKeyError as error:
        raise typer.BadParameter(str(error), param_hint="--api-key") from None
    options = ServeOptions(
        tuple(names),
        host=host,
        port=port,
        task=task,
        engine=engine,
        num_replicas=num_replicas,
        num_gpus=num_gpus,
        num_cpus=num_cpus,
        max_model_len=max_model_len,
        api_key_sha256=sha256,
        save=None if save is None else str(save),
    )
    if (wrong := options.misuse()) is not None:
        raise typer.BadParameter(wrong)
    # Ray writes its API's token to ~/.ray/auth_token, which other users must not read.
    os.umask(0o077)
    driver = (sys.executable, "-m", "serve_app.commands.run.driver")
    try:
        code = run_supervised([*driver, *options.arguments()], with_switches(os.environ))
    except (MissingHAProxyError, NoFolderError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename or sys.executable}: {error.strerror}")
    raise typer.Exit(code)


@app.command("new-config")
def new_config(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="The file to write; there must be none yet."),
    ] = HERE,
) -> None:
    """Write the embedded models' configuration into a file, to be changed.

    `raystream serve` without a file reads serve_config.yaml. docs/configuration.md explains each
    key, and so does raystream.schema.json, which is written beside the file, in an editor.
    """
    from serve_app.commands.check.schema import write_new

    try:
        write_new(file, CONFIG.read_text(encoding="utf-8"))
    except OSError as error:
        _fail(f"{error.filename or file}: {error.strerror}")
    typer.echo(f"{file} is written; serve it by: raystream serve {file}")


@app.command()
def status() -> None:
    """Show the servers that `raystream serve` runs on this machine for you, and how they are.

    The exit code is 1 if there is none.
    """
    from serve_app.commands.run import operate

    raise typer.Exit(0 if operate.status(typer.echo, os.environ) else 1)


@app.command()
def deploy(file: ConfigFile) -> None:
    """Bring a changed file to the running server that has the file's port, and wait for it.

    The file is checked first. Replicas whose settings stay as they are serve on. Only a server that
    `raystream serve` runs for you on this machine is meant; to a cluster, `serve deploy FILE` does
    it.
    """
    from serve_app.commands.check.preflight import Depth, is_faultless
    from serve_app.commands.run import operate

    if not is_faultless(str(file), Depth.MACHINE):
        raise typer.Exit(1)
    try:
        operate.deploy(file, typer.echo, os.environ)
    except operate.OperateError as error:
        _fail(str(error))


@app.command()
def stop(
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="The server's port, if there are several."),
    ] = None,
) -> None:
    """Stop the server that `raystream serve` runs on this machine for you, as Ctrl-C does."""
    from serve_app.commands.run import operate

    try:
        operate.stop(port, typer.echo, os.environ)
    except operate.OperateError as error:
        _fail(str(error))


@app.command()
def schema() -> None:
    """Print the JSON schema of a configuration file, with which editors complete and check it.

    `new-config` writes it beside the file. For another file: `raystream schema >
    raystream.schema.json`, and as the file's first line `# yaml-language-server:
    $schema=raystream.schema.json`
    """
    from serve_app.commands.check.schema import schema_text

    typer.echo(schema_text(), nl=False)


@app.command()
def chat(
    question: Annotated[
        str | None,
        typer.Argument(
            metavar="QUESTION",
            help="Ask only this, and print the bare answer. Without it: a conversation, or one "
            "question from standard input if that is no terminal.",
            show_default=False,
        ),
    ] = None,
    *,
    url: ServerUrl = None,
    model: Annotated[
        str | None,
        typer.Option(help="A model's id. Without it: the server's first that generates text."),
    ] = None,
    api_key: SentKey = None,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0: always the likeliest token.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Nucleus sampling.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
) -> None:
    """Talk with a model of a running server, this machine's or another with OpenAI's API.

    For example: `raystream chat "What does os.path.join do?"`, or `raystream chat < question.txt`
    """
    from serve_app.commands.user.chat.chat import key_for, run_chat

    sampling = {
        "temperature": temperature,
        "top_p": top_p,
        "max_tokens": max_tokens,
        "seed": seed,
    }
    raise typer.Exit(
        run_chat(url, api_key or key_for(url, os.environ), question, model, system, sampling)
    )


@app.command()
def batch(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Requests, one JSON object a line, as OpenAI's batches have them; or the id of a "
            "batch that was left, to wait for it.",
            show_default=False,
        ),
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Where the answers go. Without it: FILE with .output.jsonl at its end. Errors go "
            "beside it, into .errors.jsonl.",
            show_default=False,
        ),
    ] = None,
    window: Annotated[str, typer.Option(help="How long it may take: 30m, 24h, 7d.")] = "24h",
    url: ServerUrl = None,
    api_key: SentKey = None,
) -> None:
    """Run a file of requests at a server that keeps batches, and wait for its results.

    Ctrl-C leaves the batch running, and says how to wait for it again. The exit code is 0 if every
    request has an answer, and 1 if any has not.
    """
    from serve_app.commands.user.batch import run_batch
    from serve_app.commands.user.chat.chat import key_for

    raise typer.Exit(run_batch(file, output, window, url, api_key or key_for(url, os.environ)))


@app.command()
def demo(
    *,
    no_color: Annotated[
        bool, typer.Option("--no-color", help="Write plain lines, as without a terminal.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Let the server run afterwards, until Ctrl-C.")
    ] = False,
    save_svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write what is shown as a picture.")
    ] = None,
    parking: Annotated[
        bool,
        typer.Option("--parking", help="Park a slow answer for a chat; no replica is killed."),
    ] = False,
) -> None:
    """Show that answers outlive the replica that writes them, or wait for others and lose nothing.

    Starts a server of its own with two replicas, asks three questions, then asks them again and
    kills a replica meanwhile. With --parking one replica runs one answer at a time: a slow one, and
    then a chat that goes first. The last line compares both runs; the exit code is 1 if they
    differ.
    """
    from serve_app.commands.user.demo.demo import run_demo

    raise typer.Exit(run_demo(is_plain=no_color, keep=keep, svg=save_svg, parks=parking))


@app.command()
def check(
    file: ConfigFile,
    *,
    file_only: Annotated[
        bool,
        typer.Option(
            "--file-only",
            help="The file is for another machine: leave out folders, keys, cores, GPUs, "
            "addresses and ports of this one, and the hub.",
        ),
    ] = False,
) -> None:
    """Name every mistake in a file, Ray's own sections included, without starting anything.

    Ray accepts a mistyped key in silence, and checks some values only on the cluster. This also
    looks for the models' files, and for the cores and GPUs that their replicas ask for.
    """
    from serve_app.commands.check.preflight import Depth, check_file

    is_right = check_file(str(file), Depth.FILE if file_only else Depth.MACHINE)
    raise typer.Exit(0 if is_right else 1)


@app.command()
def plan(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="A Serve configuration, whose models are planned side by side.",
            show_default=False,
        ),
    ] = None,
    *,
    model: Annotated[
        str | None, typer.Option(help="A hub repository's id, a folder, or a config.json.")
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of a GPU, such as 48GiB. Without it: this machine's GPUs, or its CPU."
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="How many such GPUs there are; one if left out.")
    ] = None,
    share: Annotated[
        float | None, typer.Option(min=0.01, max=1, help="The replica's share of the GPU.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Tokens of a sequence.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences at once.")] = None,
    max_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a step.")] = None,
    kv_cache_memory_bytes: Annotated[
        int | None, typer.Option(min=1, help="The most for keys and values, in bytes.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show how memory would be divided, and what does not fit, from configurations only.

    A FILE is checked first, as `raystream check` does; with --gpu-memory it is for another machine.

    For example: `raystream plan --model Qwen/Qwen2.5-7B-Instruct --gpu-memory 48GiB --share 0.5`
    """
    from serve_app.commands.check import plan as planning
    from serve_app.commands.check import plan_report
    from serve_app.commands.check.compose import is_file

    sizes = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_batched_tokens": max_batched_tokens,
        "kv_cache_memory_bytes": kv_cache_memory_bytes,
    }
    given = {name: size for name, size in sizes.items() if size is not None}
    if (file is None) == (model is None):
        raise typer.BadParameter("give either a FILE or --model")
    if file is not None and not is_file(str(file)):
        raise typer.BadParameter(f"{file} is no configuration; for a model write --model {file}")
    if file is not None and (given or dtype != "auto" or share is not None):
        raise typer.BadParameter("a FILE has its models' sizes, dtypes and shares itself")
    if gpus is not None and gpu_memory is None:
        raise typer.BadParameter("--gpus needs --gpu-memory, the memory of each")
    is_right = True
    try:
        card = planning.card_of(gpu_memory, gpus or 1)
        if file is not None:
            from serve_app.commands.check.preflight import Depth, is_faultless

            is_here = gpu_memory is None
            is_right = is_faultless(str(file), Depth.MACHINE if is_here else Depth.FILE)
            entries, turns = planning.models_and_turns_of(file)
        else:
            assert model is not None
            entries, turns = (planning.entry_of(model, dtype, given),), None
        found = planning.plan_models(entries, card, share, turns)
        sleeps = {} if file is None else planning.sleeps_of(file, found)
    except planning.PlanError as error:
        if not is_right:  # which has been told
            raise typer.Exit(2) from None
        _fail(str(error), 2)
    if as_json:
        typer.echo(plan_report.as_json(found, card, turns, sleeps))
    else:
        plan_report.tell(found, card, turns, sleeps)
    raise typer.Exit(0 if is_right and planning.all_fit(found) else 1)


@app.command()
def download(
    file: ConfigFile,
    *,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Download nothing: return when another has downloaded all."),
    ] = False,
) -> None:
    """Download a file's models from the hub at the commits that it names.

    They go into the cache, HF_HUB_CACHE; servers with HF_HUB_OFFLINE=1 read them there and need no
    network. For gated models HF_TOKEN_PATH names a file with a token.
    """
    from serve_app.commands.check.plan import PlanError, models_of, places_of
    from serve_app.commands.user import download as downloading

    cache = downloading.cache_folder()
    try:
        models = downloading.hub_models(models_of(file), places_of(file))
        if not models:
            typer.echo(f"{file} names no model of the hub: there is nothing to download")
        elif wait:
            downloading.wait(models, cache, typer.echo)
        else:
            downloading.download(models, cache, downloading.fetch_from_hub, typer.echo)
    except (PlanError, downloading.DownloadError) as error:
        _fail(str(error))


@app.command("install-engine")
def install_engine(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="ENGINE",
            help="vllm, for the version that raystream is tested with, or vllm==VERSION.",
            show_default=False,
        ),
    ],
    *,
    cpu: Annotated[
        bool | None,
        typer.Option(
            "--cpu/--gpu",
            help="The build for CPUs, or for NVIDIA's GPUs. Without either: what this machine has.",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="The environment, which a model's `engine_python` names. Without it: .venv-vllm "
            "beside raystream's own, or here without one, for all models that name none.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make an environment in which vLLM runs models with `engine: vllm`.

    It takes some minutes, and 3 to 12 GB of disk. Two models can have two versions: `raystream
    install-engine vllm==0.31.0 --to envs/vllm-0.31`. docs/vllm.md says what vLLM is for.
    """
    from rich.console import Console

    from serve_app.commands.user import install_engine as installing
    from serve_app.vllm_environment import DEFAULT_FOLDER

    try:
        installing.install(installing.wanted(engine, to or DEFAULT_FOLDER, cpu), Console())
    except installing.InstallError as error:
        _fail(str(error))


@app.command("new-key")
def new_key(name: KeyName, scope: KeyScopes = None) -> None:
    """Make an API key, and the lines for the file of keys.

    The key is printed once and stored nowhere. The file that `auth.api_keys_file` names gets only
    its hash, and limits if you want any.
    """
    from serve_app.commands.user.new_key import InvalidNameError, InvalidScopeError, make_key

    try:
        typer.echo(make_key(name, scope or ()), nl=False)
    except InvalidScopeError as error:
        raise typer.BadParameter(str(error), param_hint="--scope") from None
    except InvalidNameError as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from None


@app.command()
def info() -> None:
    """Show what this machine and this environment have, for a report of a problem."""
    from serve_app.commands.user.info import describe_machine

    typer.echo(describe_machine(), nl=False)


@app.command(
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False},
)
def supervise(
    context: typer.Context,
    program: Annotated[str, typer.Argument(metavar="COMMAND", show_default=False)],
) -> None:
    """Run a server's command, such as `serve run FILE`, and let nothing outlive it.

    Ray's driver starts about twenty processes, and some of them would stay when it is killed. They
    import from this folder first, so a module here that hides one of raystream's is refused.
    """
    from serve_app.commands.run.supervise import run_supervised
    from serve_app.commands.server_environment import NoFolderError, hiding_module

    if hiding := hiding_module(Path.cwd()):
        _fail(f"{hiding} hides raystream's own: rename it, or start from another folder")
    try:
        code = run_supervised([program, *context.args], os.environ)
    except NoFolderError as error:
        _fail(str(error))
    except OSError as error:  # with a shell's codes
        _fail(f"{program}: {error.strerror}", 127 if isinstance(error, FileNotFoundError) else 126)
    raise typer.Exit(code)


def _fail(message: str, code: int = 1) -> NoReturn:
    """End a command with an error of one line."""
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(code)
