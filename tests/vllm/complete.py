"""Asks a vLLM server through the `openai` client: run by the tests in vLLM's own environment.

Reads a JSON object on standard input: `address`, `prompts`, `max_tokens`. The last line it prints is a JSON list, one
answer a prompt.
"""

import json
import sys

from openai import OpenAI


def main() -> None:
    asked = json.load(sys.stdin)
    client = OpenAI(base_url=f"{asked['address']}/v1", api_key="none")
    answers = []
    for prompt in asked["prompts"]:
        made = client.completions.create(
            model="served",
            prompt=prompt,
            max_tokens=asked.get("max_tokens", 16),
            temperature=0.0,
            logprobs=5,
            extra_body={"ignore_eos": True, "return_tokens_as_token_ids": True},
        )
        choice = made.choices[0]
        given = choice.logprobs
        answers.append(
            {
                "text": choice.text,
                "tokens": [number(t) for t in given.tokens],
                "logprobs": [[[number(t), v] for t, v in p.items()] for p in given.top_logprobs],
            }
        )
    print(json.dumps(answers))


def number(token: str) -> int:
    """The server writes a token as "token_id:17"."""
    return int(token.removeprefix("token_id:"))


if __name__ == "__main__":
    main()
