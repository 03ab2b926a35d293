"""LangChain's own tests of chat models, through `langchain-openai`.

What is expected to fail needs a model that follows instructions, which the embedded one does not,
and says so. What the suite skips is what no surface here claims: audio, PDFs, Anthropic's blocks.
"""

from io import BytesIO
from random import Random
from typing import Any

import httpx
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from models.training.drawings import random_drawing
from tests.clients.questions import MODEL, NARROW
from tests.ray.serve_run import Server

NO_END = pytest.mark.xfail(
    reason="the embedded model was taught neither calls nor JSON: its strings don't end in time",
    strict=True,
)
"""`test_openai_structured` shows with bounded schemas that calls and objects arrive."""


# One test asks with a model of Pydantic 1 and lets langchain-openai choose another way.
@pytest.mark.filterwarnings("ignore:Received a Pydantic BaseModel V1 schema:UserWarning")
class TestChatOpenAI(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _served(self, server: Server) -> None:
        self.base_url = f"{server.url}/v1"

    @pytest.fixture(autouse=True)
    def _image(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put a drawing in the place of a picture that the suite would fetch."""
        data = BytesIO()
        random_drawing(Random(3)).render().save(data, "PNG")
        answer = httpx.Response(200, content=data.getvalue())
        monkeypatch.setattr(
            "langchain_tests.integration_tests.chat_models.httpx.get", lambda *_, **__: answer
        )

    @pytest.fixture
    def benchmark(self) -> None:
        pytest.skip("plays recorded answers of a hosted service; nothing is recorded here")

    @pytest.fixture
    def vcr(self) -> None:
        """Stand in for the recorder, which `benchmark` keeps from being asked."""

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "base_url": self.base_url,
            "api_key": "none",
            "max_tokens": 256,
            "temperature": 0,
            "stream_usage": True,
        }

    @property
    def supports_image_inputs(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return NARROW

    @pytest.mark.xfail(
        reason="the embedded model's chat template, as Gemma's, takes turns that alternate alone",
        strict=True,
    )
    def test_double_messages_conversation(self, model: BaseChatModel) -> None:
        super().test_double_messages_conversation(model)

    @NO_END
    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    def test_tool_calling(self, model: BaseChatModel) -> None:
        super().test_tool_calling(model)

    @NO_END
    async def test_tool_calling_async(self, model: BaseChatModel) -> None:
        await super().test_tool_calling_async(model)

    @NO_END
    def test_bind_runnables_as_tools(self, model: BaseChatModel) -> None:
        super().test_bind_runnables_as_tools(model)

    @NO_END
    def test_tool_choice(self, model: BaseChatModel) -> None:
        super().test_tool_choice(model)

    @NO_END
    def test_tool_calling_with_no_arguments(self, model: BaseChatModel) -> None:
        super().test_tool_calling_with_no_arguments(model)

    @NO_END
    @pytest.mark.parametrize("schema_type", ["pydantic", "typeddict", "json_schema"])
    def test_structured_output(self, model: BaseChatModel, schema_type: Any) -> None:
        super().test_structured_output(model, schema_type)

    @NO_END
    @pytest.mark.parametrize("schema_type", ["pydantic", "typeddict", "json_schema"])
    async def test_structured_output_async(self, model: BaseChatModel, schema_type: Any) -> None:
        await super().test_structured_output_async(model, schema_type)

    @NO_END
    def test_structured_output_pydantic_2_v1(self, model: BaseChatModel) -> None:
        super().test_structured_output_pydantic_2_v1(model)

    @NO_END
    def test_structured_output_optional_param(self, model: BaseChatModel) -> None:
        super().test_structured_output_optional_param(model)

    @pytest.mark.xfail(
        reason="`json_object` names no keys, and the model takes no hint", strict=True
    )
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)

    @pytest.mark.xfail(reason="the embedded model calls no tool of itself", strict=True)
    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @NO_END
    def test_unicode_tool_call_integration(self, model: BaseChatModel, **options: Any) -> None:
        super().test_unicode_tool_call_integration(model, **options)
