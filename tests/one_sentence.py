"""What every refusal of the user's input has in common: an InputError of one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tf_largebatch.validation import InputError


def refusal(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The sentence with which `call` refuses its arguments."""
    with pytest.raises(InputError) as raised:
        call(*arguments, **options)
    sentence = str(raised.value)
    assert_one_sentence(sentence)
    return sentence


def assert_one_sentence(text: str) -> None:
    assert text.endswith(".") and not text.endswith(".."), text
    assert "\n" not in text, text
    assert not re.search(r"[.!?] +[A-Z]", text), text
