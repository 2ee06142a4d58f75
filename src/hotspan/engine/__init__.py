"""The only code that knows vLLM: connector, spec, manager, worker, identity, launch."""

# First of all: another vLLM fails in some import further down, and says nothing of versions.
from hotspan.engine import contract as contract
