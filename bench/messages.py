"""Messages to store: the same ones in every process, about 560 bytes of JSON each."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]

_HEADS = "al ber cor dun el far gal hor".split()
_MIDDLES = "an en in on un or".split()
_TAILS = "a d est ing ly mo s tic".split()
WORDS = ["".join(parts) for parts in itertools.product(_HEADS, _MIDDLES, _TAILS)]
"""384 words: a small vocabulary is the harder case for a search index."""


def messages(seed: int = 1) -> Iterator[Message]:
    """Turns without end: a question, a call, its result, an answer."""
    chance = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(chance.choices(WORDS, k=words))

    for number in itertools.count():
        call = f"call_{number}"
        function = {"name": "read_file", "arguments": json.dumps({"path": text(3)})}
        yield {"role": "user", "content": text(40)}
        yield {
            "role": "assistant",
            "content": text(20),
            "tool_calls": [{"id": call, "type": "function", "function": function}],
        }
        yield {"role": "tool", "content": text(130), "tool_call_id": call}
        yield {"role": "assistant", "content": text(90)}
