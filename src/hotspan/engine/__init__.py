"""The only code that knows vLLM: connector, spec, manager, worker, identity, launch."""

# First of all: it says less where vLLM is imported, and another vLLM fails in some import further down, and says
# nothing of versions.
from hotspan.engine import quiet as quiet  # isort: skip
from hotspan.engine import contract as contract
