"""vLLM engines, some prompts, what they answer: run by the tests in vLLM's own environment, one process a case.

Reads a JSON object on standard input: `engines`: of each, the arguments of vllm.LLM; they run one after the other;
`prompts`: texts, or lists of token ids; `max_tokens`; `logprobs`; `prompt_logprobs`. Writes a JSON list, an object an
engine, to the file named in argv[1].
"""

import gc
import json
import sys
import time


def values(position):
    """[[token, logprob], ...] by descending logprob."""
    return sorted(([int(t), p.logprob] for t, p in position.items()), key=lambda tp: -tp[1])


def answered(engine, asked):
    from vllm import LLM, SamplingParams

    start = time.perf_counter()
    llm = LLM(**engine)
    ready = time.perf_counter() - start
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=asked["max_tokens"],
        logprobs=asked.get("logprobs"),
        prompt_logprobs=asked.get("prompt_logprobs"),
        ignore_eos=True,
    )
    prompts = [{"prompt": p} if isinstance(p, str) else {"prompt_token_ids": p} for p in asked["prompts"]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    answers = []
    for output in outputs:
        one = output.outputs[0]
        answers.append(
            {
                "text": one.text,
                "tokens": list(one.token_ids),
                "logprobs": None if one.logprobs is None else [values(p) for p in one.logprobs],
                "prompt_logprobs": None
                if output.prompt_logprobs is None
                else [None if p is None else values(p) for p in output.prompt_logprobs],
            }
        )
    metrics = []
    if asked.get("metrics"):
        for metric in llm.get_metrics():
            if metric.name.startswith("vllm:spec_decode"):
                metrics.append([metric.name, getattr(metric, "value", None) or getattr(metric, "values", None)])
    return {"answers": answers, "ready_seconds": ready, "metrics": metrics}, llm


def main():
    asked = json.load(sys.stdin)
    found = []
    for engine in asked["engines"]:
        one, llm = answered(engine, asked)
        found.append(one)
        if len(asked["engines"]) > 1:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
    with open(sys.argv[1], "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
