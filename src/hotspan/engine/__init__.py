"""The only code that knows vLLM: connector, spec, manager, worker, identity, launch."""
