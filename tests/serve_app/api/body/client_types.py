"""The bodies of our API beside the types of openai and anthropic, which take seconds to import."""

from typing import Any, get_type_hints

from anthropic.types import (
    ImageBlockParam,
    MessageCountTokensParams,
    OutputConfigParam,
    TextBlockParam,
    ThinkingBlockParam,
    ToolParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
    message_create_params,
)
from anthropic.types.beta import message_create_params as beta_params
from openai.types import EmbeddingCreateParams, completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.chat.chat_completion_assistant_message_param import (
    ChatCompletionAssistantMessageParam,
)
from openai.types.chat.chat_completion_developer_message_param import (
    ChatCompletionDeveloperMessageParam,
)
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam
from openai.types.chat.chat_completion_system_message_param import ChatCompletionSystemMessageParam
from openai.types.chat.chat_completion_tool_message_param import ChatCompletionToolMessageParam
from openai.types.chat.chat_completion_user_message_param import ChatCompletionUserMessageParam
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    ResponseFunctionToolCallParam,
    ResponseInputImageParam,
    ResponseInputTextParam,
    ResponseOutputMessageParam,
    ResponseOutputTextParam,
    ResponseReasoningItemParam,
    ResponseTextConfigParam,
)
from openai.types.responses import response_create_params as response_params
from openai.types.shared_params import FunctionDefinition, Reasoning

from serve_app.api.body.strict_body import StrictBody
from serve_app.api.chat.schema import ChatRequest
from serve_app.api.completions.schema import CompletionRequest
from serve_app.api.embeddings.schema import EmbeddingsBody
from serve_app.api.messages.content_schema import (
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from serve_app.api.messages.schema import MessagesRequest, MessagesTool, OutputConfig, PromptFields
from serve_app.api.openai.answer_schema import StreamOptions
from serve_app.api.openai.prompt_schema import MessageBody
from serve_app.api.responses.input_schema import (
    FunctionCallItem,
    InputImage,
    InputText,
    MessageItem,
    ReasoningItem,
)
from serve_app.api.responses.schema import (
    FunctionTool,
    ReasoningConfig,
    ResponsesRequest,
    TextConfig,
)
from serve_app.api.tools.schema import FunctionBody

TYPES: list[tuple[type[StrictBody], type[Any]]] = [
    (ChatRequest, chat_params.CompletionCreateParamsStreaming),
    (ChatRequest, chat_params.CompletionCreateParamsNonStreaming),
    (CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
    (CompletionRequest, completion_create_params.CompletionCreateParamsNonStreaming),
    (EmbeddingsBody, EmbeddingCreateParams),
    (StreamOptions, ChatCompletionStreamOptionsParam),
    (MessageBody, ChatCompletionAssistantMessageParam),
    (MessageBody, ChatCompletionDeveloperMessageParam),
    (MessageBody, ChatCompletionSystemMessageParam),
    (MessageBody, ChatCompletionToolMessageParam),
    (MessageBody, ChatCompletionUserMessageParam),
    (FunctionBody, FunctionDefinition),
    (MessagesRequest, message_create_params.MessageCreateParamsStreaming),
    (MessagesRequest, message_create_params.MessageCreateParamsNonStreaming),
    (MessagesRequest, beta_params.MessageCreateParamsNonStreaming),
    (PromptFields, MessageCountTokensParams),
    (ResponsesRequest, response_params.ResponseCreateParamsStreaming),
    (ResponsesRequest, response_params.ResponseCreateParamsNonStreaming),
    (FunctionTool, FunctionToolParam),
    (FunctionCallItem, ResponseFunctionToolCallParam),
    (ReasoningItem, ResponseReasoningItemParam),
    (MessageItem, EasyInputMessageParam),
    (MessageItem, ResponseOutputMessageParam),
    (InputImage, ResponseInputImageParam),
    (InputText, ResponseInputTextParam),
    (InputText, ResponseOutputTextParam),
    (ReasoningConfig, Reasoning),
    (TextConfig, ResponseTextConfigParam),
    (TextBlock, TextBlockParam),
    (ImageBlock, ImageBlockParam),
    (ThinkingBlock, ThinkingBlockParam),
    (ToolUseBlock, ToolUseBlockParam),
    (ToolResultBlock, ToolResultBlockParam),
    (MessagesTool, ToolParam),
    (OutputConfig, OutputConfigParam),
]

FIELDS = sorted(
    {(ours, name) for ours, theirs in TYPES for name in get_type_hints(theirs)}
    - {(MessagesRequest, "betas")},  # a header
    key=lambda pair: (pair[0].__name__, pair[1]),
)
