"""LMI's and SageMaker's contract over HTTP, in front of the engine's OpenAI routes."""
