"""Plain greedy decoding by transformers and PyTorch, to set beside ours.

Runs in an environment of its own (torch, transformers): this project does not depend on PyTorch.
Reads a line with prompts, decodes them one after the other, writes the tokens per second of all;
until there is no more line.

    python benchmarks/hf_generate.py TARGET NEW_TOKENS [--dtype bfloat16] [--stop]

A line is a JSON list of prompts, each a list of token ids.
"""

import argparse
import json
import sys
import time

import torch  # pyrefly: ignore[missing-import]
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("new_tokens", type=int)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--stop", action="store_true", help="end at a stop token")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).eval()
    least = 0 if args.stop else args.new_tokens
    limits = {"max_new_tokens": args.new_tokens, "min_new_tokens": least, "do_sample": False}
    for line in sys.stdin:
        prompts = [torch.tensor([ids]) for ids in json.loads(line)]
        made, start = 0, time.perf_counter()
        with torch.no_grad():
            for prompt in prompts:
                made += model.generate(prompt, **limits).shape[1] - prompt.shape[1]
        print(made / (time.perf_counter() - start), flush=True)


if __name__ == "__main__":
    main()
