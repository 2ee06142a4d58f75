"""Lines of vLLM's log that tell nobody anything."""

import logging

logging.getLogger("vllm.triton_utils.importing").addFilter(lambda record: "CPU backend" not in record.getMessage())
"""On a CPU engine vLLM says at each import that Triton has no CPU backend, which it does without."""
