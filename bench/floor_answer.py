"""The floor of a one-shot answer: a script that stores the question, asks, stores the answer, prints it.

python bench/floor_answer.py --url http://127.0.0.1:PORT/v1 --store FILE QUESTION
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.floor_store import FloorStore


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("question")
    parser.add_argument("--url", required=True)
    parser.add_argument("--store", type=Path, required=True)
    options = parser.parse_args()
    session = os.urandom(8).hex()
    question = {"role": "user", "content": options.question}
    store = FloorStore(options.store)
    store.create(session)
    store.append(session, question)
    place = urlsplit(str(options.url))
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    body = json.dumps({"model": "bench", "messages": [question]})
    connection.request("POST", place.path + "/chat/completions", body, {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())["choices"][0]["message"]
    store.append(session, answer)
    print(answer["content"])
    store.close()


if __name__ == "__main__":
    main()
