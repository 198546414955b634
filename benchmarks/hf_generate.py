"""Plain greedy decoding by transformers and PyTorch, for `core.py --hf-python` to set beside ours.

Runs in an environment of its own (torch, transformers): this project does not depend on PyTorch.
Reads a line, decodes once, writes the tokens per second; until there is no more line.

    python benchmarks/hf_generate.py TARGET NEW_TOKENS < prompt-token-ids, one line a repeat
"""

import json
import sys
import time

import torch  # pyrefly: ignore[missing-import]
from transformers import AutoModelForCausalLM


def main(target: str, new_tokens: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    limits = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    for line in sys.stdin:
        prompt = torch.tensor([json.loads(line)])
        start = time.perf_counter()
        with torch.no_grad():
            found = model.generate(prompt, **limits)
        made = found.shape[1] - prompt.shape[1]
        print(made / (time.perf_counter() - start), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
