"""What hotspan takes from vLLM's API server, whose modules moved three times: engine/compat.py has the table."""

from hotspan.engine.contract import ENGINE

if ENGINE >= (0, 33):
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
elif ENGINE >= (0, 29):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
else:
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args

if ENGINE >= (0, 29):
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList, ModelPermission, PromptTokenUsageInfo
else:
    from vllm.entrypoints.openai.api_server import build_app, init_app_state
    from vllm.entrypoints.openai.engine.protocol import ModelCard, ModelList, ModelPermission, PromptTokenUsageInfo

if ENGINE >= (0, 28):
    from vllm.entrypoints.serve import create_error_response
else:
    from vllm.entrypoints.serve.utils.error_response import create_error_response

__all__ = [
    "ModelCard",
    "ModelList",
    "ModelPermission",
    "PromptTokenUsageInfo",
    "build_app",
    "create_error_response",
    "init_app_state",
    "make_arg_parser",
    "validate_parsed_serve_args",
]
