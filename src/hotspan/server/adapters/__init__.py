"""LoRA adapters: which there are, where their files come from, and which the engine has loaded. Pure of vLLM."""
