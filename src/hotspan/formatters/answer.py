"""An answer as users' formatters expect it: a dict, and also an object with attributes."""

from typing import Any


class Answer(dict[str, Any]):
    """A dict whose fields are attributes too, at every depth.

    LMI says that an output formatter gets a dict, and gives it vLLM's Pydantic objects: `model.py` files out there
    read `answer["choices"]` or `answer.choices`, and set either. Both work on this.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the answer has no {name}: it has {', '.join(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """The plain dict, as Pydantic gives it."""
        return dict(self)


def as_answer(value: Any) -> Any:
    """`value` with an Answer in the place of each dict."""
    if isinstance(value, dict):
        return Answer({name: as_answer(item) for name, item in value.items()})
    if isinstance(value, list):
        return [as_answer(item) for item in value]
    return value
