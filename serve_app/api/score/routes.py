"""`POST /score` and `/v1/score`: say how well texts fit together, in vLLM's shape."""

from fastapi import APIRouter, Request

from deployments.contract.errors import InvalidRequestError
from serve_app.api.body.limits import check_texts
from serve_app.api.openai.text_schema import TextUsage
from serve_app.api.requests.comparer import Comparison, Texts, compare
from serve_app.api.requests.context import ApiContext
from serve_app.api.requests.sentence_prompts import named_prompt
from serve_app.api.score.schema import Score, ScoreBody, Scores
from serve_app.http.json_route import JsonRoute
from serve_app.http.request_id import request_id_of


class ScoreApi:
    """Scores pairs of texts."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(route_class=JsonRoute, tags=["ranking"])
        for path in ("/score", "/v1/score"):
            router.add_api_route(
                path,
                self.score,
                methods=["POST"],
                response_model=Scores,
                summary="Score pairs of texts",
                operation_id=f"score{path.replace('/', '_')}",
            )
        return router

    async def score(self, body: ScoreBody, request: Request) -> Scores:
        """Return how well each pair of texts fits."""
        model = await self._context.models.find_comparer(body.model)
        vectors = model.description.embedding
        prompt = "" if vectors is None else named_prompt(vectors, None)
        firsts = _side(body.text_1, "text_1", prompt)
        seconds = _side(body.text_2, "text_2", prompt)
        if len(firsts.texts) not in (1, len(seconds.texts)):
            raise InvalidRequestError(
                f"text_1 holds {len(firsts.texts)} texts and text_2 {len(seconds.texts)}; send one "
                "in text_1, or as many as in text_2.",
                "text_1",
            )
        check_texts([*firsts.texts, *seconds.texts], self._context.limits, "text_2")
        compared = await compare(
            model,
            Comparison(
                request_id_of(request),
                "score",
                firsts,
                seconds,
                truncate=body.drops_ends,
                max_num_tokens=body.max_num_tokens,
                priority=body.priority,
            ),
            self._context.limits,
        )
        return Scores(
            id=f"score-{request_id_of(request)}",
            created=int(self._context.clock.unix_s()),
            model=model.description.id,
            data=[Score(index=index, score=score) for index, score in enumerate(compared.scores)],
            usage=TextUsage.of(compared.num_tokens),
        )


def _side(texts: str | list[str], param: str, prompt: str) -> Texts:
    if isinstance(texts, str):
        return Texts([texts], param, is_list=False, prompt=prompt)
    return Texts(texts, param, is_list=True, prompt=prompt)
