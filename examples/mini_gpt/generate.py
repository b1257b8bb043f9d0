"""Continue an arithmetic sequence greedily with a trained MiniGPT, and say whether its stride stays constant.

    python -m examples.mini_gpt.generate runs/mini_gpt.pt --start 5 --stride 3 --length 24

Exit code 0: the stride stays constant; 1: it does not; 2: the question cannot be asked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

if not __package__:  # run by its path: then Python looks beside this file instead of in the repository
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from examples.mini_gpt import precision
from examples.mini_gpt.data import STRIDES, VOCABULARY, arithmetic, stride_of
from examples.mini_gpt.model import MiniGPT
from lowprec_callback.recipes import RecipeError

SETTLE = 3
"""Passes over the prompt that fill the scales of delayed scaling: each pass uses those of the ones before."""


def continue_prompt(
    model: MiniGPT, prompt: Sequence[int], length: int, region: precision.Region = nullcontext
) -> list[int]:
    """The prompt and the likeliest tokens after it, `length` tokens in all.

    Every pass reads a full sequence, padded at its end: attention is causal, so what stands after a token
    does not change its logits, and FP8 kernels get a token count that they can divide.

    Raises:
        ValueError: an empty prompt, or more tokens than the model has positions.
    """
    if not prompt or not len(prompt) <= length <= model.config.sequence:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens cannot be continued to {length}; "
            f"the model reads 1 to {model.config.sequence}"
        )
    tokens = torch.zeros(1, model.config.sequence, dtype=torch.long, device=model.head.weight.device)
    tokens[0, : len(prompt)] = torch.tensor(prompt)
    model.eval()
    if region is not nullcontext:
        for _ in range(SETTLE):  # with gradients on: without them TE leaves the scales as they are
            with region():
                model(tokens)
    with torch.no_grad():
        for place in range(len(prompt), length):
            with region():
                logits = model(tokens)
            tokens[0, place] = logits[0, place - 1].argmax()
    continued: list[int] = tokens[0, :length].tolist()
    return continued


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the sequence and what became of its stride."""
    p = argparse.ArgumentParser(
        prog="generate.py",
        description="Continue an arithmetic sequence with a trained MiniGPT.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("checkpoint", type=Path, help="what train.py --checkpoint wrote")
    p.add_argument("--start", type=int, default=5, choices=range(VOCABULARY), metavar="0..95", help="first token")
    p.add_argument("--stride", type=int, default=3, choices=STRIDES, help="from each token to the next")
    p.add_argument("--prompt", type=int, default=4, metavar="TOKENS", help="given; from 2 on they show the stride")
    p.add_argument("--length", type=int, default=24, metavar="TOKENS", help="in all")
    p.add_argument("--recipe", help="run in this one, e.g. fp8_delayed; in the model's own dtype")
    options = p.parse_args(arguments)
    try:
        model = MiniGPT.load(options.checkpoint, device="cuda" if torch.cuda.is_available() else "cpu")
        region = nullcontext if options.recipe is None else precision.region(options.recipe, model)
        prompt = arithmetic(options.start, options.stride, options.prompt)
        tokens = continue_prompt(model, prompt, options.length, region)
    except (OSError, RecipeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(*tokens[: options.prompt], "|", *tokens[options.prompt :])
    found = stride_of(tokens)
    if found == options.stride:
        print(f"the stride stays {found}")
        return 0
    expected = arithmetic(options.start, options.stride, options.length)
    first = next(place for place in range(options.length) if tokens[place] != expected[place])
    print(f"the stride breaks at token {first + 1}: {tokens[first]} instead of {expected[first]}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
