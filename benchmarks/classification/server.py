"""A small HTTP server that runs all designs under the same conditions.

It serves either the baselines, around one stock pipeline, or this project's classifier without Ray.
These are two processes, since each sets the number of torch's threads. `POST /DESIGN/classify`
takes `{"texts": [...]}`, and `GET /DESIGN/counts` returns the model's calls and the texts in them.

Run: python -m benchmarks.classification.server --model FOLDER --port 8000 --serve baselines
"""

import argparse
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from benchmarks.baselines.replica_context import pass_for_a_replica
from benchmarks.classification.designs import (
    ALL,
    RAYSTREAM,
    Classify,
    CountedClassifier,
    Counts,
    ours,
    running,
    spec_of,
    stock_pipeline,
)


def build_app(folder: str, *, is_ours: bool) -> Starlette:
    """Return the application, which loads its model when it starts."""
    designs = dict[str, Classify]()
    counts = dict[str, Counts]()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        pass_for_a_replica()
        async with AsyncExitStack() as stack:
            if is_ours:
                counted = counts[RAYSTREAM.path] = Counts()
                designs[RAYSTREAM.path] = ours(CountedClassifier(spec_of(folder), counted))
            else:
                pipeline = stock_pipeline(folder)
                for design in ALL:
                    if design is RAYSTREAM:
                        continue
                    counted = counts[design.path] = Counts()
                    context = running(design, pipeline, counted)
                    designs[design.path] = await stack.enter_async_context(context)
            yield

    async def classify(request: Request) -> JSONResponse:
        body = await request.json()
        return JSONResponse(await designs[request.path_params["design"]](body["texts"]))

    async def count(request: Request) -> JSONResponse:
        return JSONResponse(asdict(counts[request.path_params["design"]]))

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({})

    routes = [
        Route("/{design}/classify", classify, methods=["POST"]),
        Route("/{design}/counts", count),
        Route("/health", health),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True, help="a folder with weights and tokenizer")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--serve", choices=("baselines", "raystream"), required=True)
    args = parser.parse_args()
    app = build_app(args.model, is_ours=args.serve == "raystream")
    uvicorn.run(app, host="127.0.0.1", port=args.port, loop="uvloop", log_level="warning")


if __name__ == "__main__":
    main()
