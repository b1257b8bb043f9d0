"""How well a recipe's step is predicted before it runs, on models of different shape. Needs a GPU with TE.

    python benchmarks/prediction.py --output-dir runs/prediction
    python benchmarks/prediction.py --models llama-8b,gpt2-medium --rounds 3
    python benchmarks/prediction.py --read runs/prediction        # the table again, from the Recordings; no GPU

Each model is an embedding, `te.TransformerLayer`s and a head in BF16, trained by a fused AdamW in a plain loop on
random tokens. The table sets the predicted step beside the measured one, and beside the naive reading of the GEMM
benchmark.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console
from rich.table import Table

from lowprec_callback import recording
from lowprec_callback.analyze.summary import analyze
from lowprec_callback.report import Report


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes and its batch."""

    hidden: int
    ffn: int
    heads: int
    layers: int
    batch: int
    sequence: int
    groups: int | None = None
    """Key and value heads, where they are fewer than `heads`."""
    gated: bool = False
    """SwiGLU and RMSNorm, as Llama has them; else GELU and LayerNorm."""
    vocabulary: int = 4096
    micro_batches: int = 1


MODELS = {
    "gpt2-medium": Shape(1024, 4096, 16, 24, batch=8, sequence=512),
    "gpt2-medium-batch-1": Shape(1024, 4096, 16, 12, batch=1, sequence=512),
    "llama-1b": Shape(2048, 8192, 32, 16, batch=8, sequence=1024, groups=8, gated=True),
    "gelu-2048": Shape(2048, 8192, 16, 12, batch=16, sequence=512),
    "long-3072": Shape(3072, 12288, 24, 8, batch=2, sequence=4096),
    "llama-8b": Shape(4096, 14336, 32, 8, batch=4, sequence=2048, groups=8, gated=True),
    "llama-8b-batch-1": Shape(4096, 14336, 32, 8, batch=1, sequence=512, groups=8, gated=True),
    "llama-70b": Shape(8192, 28672, 64, 2, batch=2, sequence=2048, groups=8, gated=True),
}
"""From launch-bound to compute-bound, hidden 1024 to 8192; fewer layers than the models that lent their names."""


def run(name: str, shape: Shape, folder: Path, rounds: int, recipes: list[str] | None) -> Report:
    """One sweep over one model."""
    import torch
    from torch import nn

    from lowprec_callback.engines.transformer_engine import load
    from lowprec_callback.sweep.plan import Settings
    from lowprec_callback.sweep.session import Options, Session, Training

    te = load().te
    torch.manual_seed(0)
    kind = {"params_dtype": torch.bfloat16, "device": "cuda"}

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(shape.vocabulary, shape.hidden, dtype=torch.bfloat16, device="cuda")
            self.layers = nn.ModuleList(
                te.TransformerLayer(
                    shape.hidden,
                    shape.ffn,
                    shape.heads,
                    num_gqa_groups=shape.groups,
                    hidden_dropout=0.0,
                    attention_dropout=0.0,
                    layer_number=index + 1,
                    attn_input_format="bshd",
                    fuse_qkv_params=True,
                    activation="swiglu" if shape.gated else "gelu",
                    normalization="RMSNorm" if shape.gated else "LayerNorm",
                    bias=not shape.gated,
                    **kind,
                )
                for index in range(shape.layers)
            )
            self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False, dtype=torch.bfloat16, device="cuda")

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())

    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    options = Options(
        recipes=recipes,
        settings=Settings(rounds, timed_steps=4, guard_steps=0, max_rounds=10, step_precision=0.02),
        output_dir=str(folder),
        progress=False,
    )
    training = Training(model, torch.device("cuda"), name, [optimizer], micro_batches=shape.micro_batches)
    session = Session.open(options, training, lambda: None)  # its step comes below
    generator = torch.Generator(device="cuda").manual_seed(0)

    def step() -> torch.Tensor:
        for _ in range(shape.micro_batches):
            tokens = torch.randint(shape.vocabulary, (shape.batch, shape.sequence), device="cuda", generator=generator)
            with session.sweep.region():
                loss = model(tokens)
            session.sweep.phase("backward")
            loss.backward()
            session.sweep.phase("")
        session.sweep.phase("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        return loss

    session.sweep.step = step
    session.run()
    return analyze(session.recorder.snapshot())


def table(reports: Iterable[Report]) -> Table:
    """Predicted beside measured beside naive, a row for each model and recipe; medians and worst at the end."""
    made = Table(
        "model", "recipe", "bf16 ms", "predicted ms", "measured ms", "error", "naive ms", "naive error", "bound"
    )
    errors: list[float] = []
    naive: list[float] = []
    for report in reports:
        base = report.recipe(report.baseline)
        for part in report.recipes:
            told = part.prediction
            if part.baseline or part.refusal is not None or told is None:
                continue
            if told.step_ms.value is None or told.error.value is None:
                made.add_row(report.model, part.name, "", told.step_ms.reason or told.error.reason)
                continue
            errors.append(abs(told.error.value))
            naive.append(abs(told.naive_error.value or 0.0) if told.naive_error.known else float("nan"))
            made.add_row(
                report.model,
                part.name,
                f"{base.step_ms.value:.1f}",
                f"{told.step_ms.value:.1f} ±{told.step_ms.half_width or 0:.1f}",
                f"{part.step_ms.value:.1f} ±{part.step_ms.half_width or 0:.1f}",
                f"{told.error.value:+.1%}",
                f"{told.naive_ms.value:.1f}" if told.naive_ms.value is not None else "",
                f"{told.naive_error.value:+.1%}" if told.naive_error.value is not None else "",
                told.bound,
            )
    if errors:
        made.add_section()
        for word, of in (("median", statistics.median), ("worst", max)):
            made.add_row(f"{word} of {len(errors)}", "", "", "", "", f"{of(errors):.1%}", "", f"{of(naive):.1%}")
    return made


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="predicted against measured steps")
    parser.add_argument("--models", default=",".join(MODELS), help="names with commas; %(default)s")
    parser.add_argument("--recipes", help="names with commas; all that can run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/prediction"))
    parser.add_argument("--read", type=Path, help="make the table of a folder of Recordings")
    options = parser.parse_args()
    if options.read is not None:
        reports = [analyze(recording.read(path)) for path in sorted(options.read.glob(f"**/{recording.FILE_NAME}"))]
    else:
        import gc

        import torch

        reports = []
        for name in options.models.split(","):
            reports.append(
                run(
                    name,
                    MODELS[name],
                    options.output_dir,
                    options.rounds,
                    options.recipes.split(",") if options.recipes else None,
                )
            )
            gc.collect()
            torch.cuda.empty_cache()
    Console(width=150).print(table(reports))
    return 0


if __name__ == "__main__":
    sys.exit(main())
