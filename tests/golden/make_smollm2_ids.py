"""Writes smollm2_ids.json: texts and their token ids as llama.cpp reads the vocabulary.

Needs the package llama-cpp-python, which compiles for a long time and is no dependency of ours.
Run `python tests/golden/make_smollm2_ids.py > tests/golden/smollm2_ids.json`.
"""

from __future__ import annotations

import json
import random

import llama_cpp

from millpond.engine.model_files import locate_model

PIECES = (
    "the mill turns",
    " while",
    "  water",
    "\n\n",
    "\t",
    "1234567",
    " 3.14",
    "don't",
    "I'LL",
    "naïve",
    "Straße",
    "水車が回る",
    " 물레방아",
    "мельница",
    "🌊🏞️",
    "👩\u200d👩\u200d👧",
    "def f(x):\n    return x",
    "a_b-c",
    "...",
    "?!",
    "é",
    "é",
    " ",
    "<b>",
    "C++",
    "HTTP/1.1",
    "\r\n",
    "  \n ",
    "ALLCAPS",
    "snake_case_name",
    "مرحبا",
    "#",
    "''",
    '"',
    "\\n",
    "0x1F",
)


def main() -> None:
    path = locate_model("smollm2-135m").weight_files[0]
    vocabulary = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    chance = random.Random(3)
    texts = [*PIECES, *("".join(chance.choices(PIECES, k=chance.randint(2, 8))) for _ in range(150))]
    rows = [[t, vocabulary.tokenize(t.encode(), add_bos=False, special=False)] for t in texts]
    print(json.dumps(rows, ensure_ascii=True, separators=(",", ":")))


if __name__ == "__main__":
    main()
