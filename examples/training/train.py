"""Train `treewy-tiny`: the trunk, then its multi-token predictor (MTP) by distillation.

    python train.py trunk --data .data/corpus --out .data/model
    python train.py mtp   --data .data/corpus --out .data/model
    python train.py check --data .data/corpus --out .data/model

`trunk` is ordinary next-token training, and then a short unlikelihood stage that talks the model
out of the verbatim loops to which small models tend under greedy decoding. `mtp` freezes the
trunk (rounded to bfloat16, as it ships), lets it write continuations of training text, and trains
the predictor at depths 1 to 3 to agree with the trunk's own distribution on those continuations
and on the training text.

Both stages write a Hugging Face directory: `config.json`, `generation_config.json` and
`model.safetensors` in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from model import (
    MultiTokenPredictor,
    Ops,
    check_delta_rule,
    check_mtp,
    check_trunk,
    make_config,
    mtp_outputs,
    trunk_hidden,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GenerationConfig, Qwen3_5ForCausalLM

LENGTH = 512
DEPTH_WEIGHTS = (1.0, 0.9, 0.8)


# --------------------------------------------------------------------------- data


def load_tokens(path: Path, device: torch.device) -> Tensor:
    return torch.from_numpy(np.fromfile(path, dtype="<u2").astype(np.int64)).to(device)


def windows(tokens: Tensor, length: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless windows of `length` tokens: every epoch a new offset and a new order."""
    while True:
        offset = int(torch.randint(length, (1,), generator=generator))
        count = (len(tokens) - offset) // length
        rows = tokens[offset : offset + count * length].view(count, length)
        yield from rows[torch.randperm(count, generator=generator).to(tokens.device)]


def batches(rows: Iterator[Tensor], size: int) -> Iterator[Tensor]:
    while True:
        yield torch.stack([next(rows) for _ in range(size)])


@torch.no_grad()
def write_rows(
    model: Qwen3_5ForCausalLM,
    tokens: Tensor,
    rows: int,
    prompt: int,
    length: int,
    temperature: float | None = None,
) -> Tensor:
    """`rows` rows of `length` tokens: prompts from `tokens` that the trunk writes on from.

    Greedy without a temperature. The end-of-text token does not stop the writing.
    """
    places = torch.randint(len(tokens) - prompt, (rows, 1)).to(tokens.device)
    prompts = tokens[places + torch.arange(prompt, device=tokens.device)]
    config = GenerationConfig(max_new_tokens=length - prompt, pad_token_id=0)
    config.eos_token_id = None
    config.do_sample = temperature is not None
    config.temperature = temperature
    config.top_k = None if temperature is None else 0
    mask = torch.ones_like(prompts)
    return model.generate(prompts, attention_mask=mask, generation_config=config)


def repeats(rows: Tensor, order: int, start: int) -> Tensor:
    """Mask of the tokens from `start` on that end an n-gram seen before in their row."""
    count = rows.shape[1] - order + 1
    codes = torch.zeros_like(rows[:, :count])
    for i in range(order):
        codes = codes * 1_000_003 + rows[:, i : i + count]
    mask = torch.zeros_like(rows, dtype=torch.bool)
    for part, out in zip(codes.split(64), mask.split(64), strict=True):
        same = part[:, :, None] == part[:, None, :]
        out[:, order - 1 :] = same.tril(-1).any(-1)
    mask[:, :start] = False
    return mask


# --------------------------------------------------------------------------- optimisation


class Muon(torch.optim.Optimizer):
    """Muon (momentum orthogonalised by Newton-Schulz steps), same-shaped matrices in one batch.

    The step is scaled so that its root-mean-square size is that of a typical AdamW step.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, decay: float) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "momentum": 0.95})
        shapes = dict.fromkeys(p.shape for p in params)
        self.stacks = [[p for p in params if p.shape == shape] for shape in shapes]
        self.buffers = [torch.zeros_like(torch.stack(stack)) for stack in self.stacks]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        (group,) = self.param_groups
        for stack, buffer in zip(self.stacks, self.buffers, strict=True):
            gradient = torch.stack([p.grad for p in stack])
            buffer.lerp_(gradient, 1 - group["momentum"])
            change = orthogonalise(gradient.lerp(buffer, group["momentum"]))
            size = 0.2 * max(change.shape[-2:]) ** 0.5
            torch._foreach_mul_(stack, 1 - group["lr"] * group["decay"])
            torch._foreach_add_(stack, list(change.unbind()), alpha=-group["lr"] * size)


def orthogonalise(x: Tensor) -> Tensor:
    """About the nearest semi-orthogonal matrix, by five quintic Newton-Schulz steps."""
    tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if tall else x).bfloat16()
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = y @ y.mT
        y = 3.4445 * y + (-4.775 * gram + 2.0315 * gram @ gram) @ y
    return (y.mT if tall else y).to(x.dtype)


def make_optimizers(module: nn.Module, lr: float, decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the embedding, the norms and the small parameters."""
    matrices, others = [], []
    for name, parameter in module.named_parameters():
        is_matrix = parameter.dim() == 2 and min(parameter.shape) >= 64
        (matrices if is_matrix and "embed_tokens" not in name else others).append(parameter)
    fused = others[0].is_cuda
    adam = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=fused)
    return [Muon(matrices, lr, decay), adam]


def set_rate(optimizers: list[torch.optim.Optimizer], lr: float, step: int, steps: int) -> None:
    """Linear warm-up over 2% of the steps, then a cosine down to zero."""
    warm = max(1, steps // 50)
    done = (step - warm) / max(1, steps - warm)
    factor = (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * done))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * factor


def apply_gradients(module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()


def mixed_precision(device: torch.device) -> torch.autocast:
    """bfloat16 autocast without its weight cache, which a CUDA graph cannot replay."""
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


class GradientStep:
    """Runs a loss function and its backward pass; with `graph`, as one replayed CUDA graph.

    The model is so small that launching its kernels one by one takes longer than running them.
    """

    def __init__(
        self, function: Callable[..., tuple[Tensor, ...]], module: nn.Module, graph: bool
    ) -> None:
        self.function, self.module = function, module
        self.graph = torch.cuda.CUDAGraph() if graph else None
        self.inputs: list[Tensor] = []
        self.outputs: tuple[Tensor, ...] = ()

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Fresh gradients of the first output; returns all outputs."""
        self.module.zero_grad(set_to_none=True)
        with mixed_precision(inputs[0].device):
            outputs = self.function(*inputs)
        outputs[0].backward()
        return tuple(x.detach() for x in outputs)

    def capture(self, inputs: tuple[Tensor, ...]) -> None:
        self.inputs = [x.clone() for x in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.run(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.module.zero_grad(set_to_none=True)
        with torch.cuda.graph(self.graph):
            self.outputs = self.run(*self.inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self.graph is None:
            return self.run(*inputs)
        if not self.inputs:
            self.capture(inputs)
        for own, new in zip(self.inputs, inputs, strict=True):
            own.copy_(new)
        self.graph.replay()
        return self.outputs


# --------------------------------------------------------------------------- checkpoints


def save_model(model: Qwen3_5ForCausalLM, mtp: MultiTokenPredictor, out: Path) -> None:
    """Write the directory with every tensor rounded to bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    state |= {f"mtp.{k}": v for k, v in mtp.state_dict().items()}
    state = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in state.items()}
    partial = out / "model.safetensors.partial"
    save_file(state, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.rename(out / "model.safetensors")
    model.config.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config["architectures"] = ["Qwen3_5ForCausalLM"]
    config["dtype"] = "bfloat16"
    config.pop("transformers_version", None)
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = {"do_sample": False, "eos_token_id": config["eos_token_id"]}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load_model(
    folder: Path, device: torch.device
) -> tuple[Qwen3_5ForCausalLM, MultiTokenPredictor]:
    """The trunk and its predictor in float32 from a directory that `save_model` wrote."""
    model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mtp = MultiTokenPredictor(model.config)
    state = load_file(folder / "model.safetensors")
    mtp.load_state_dict({k[4:]: v.float() for k, v in state.items() if k.startswith("mtp.")})
    return model.to(device).eval(), mtp.to(device)


# --------------------------------------------------------------------------- trunk


def initialise(model: Qwen3_5ForCausalLM) -> None:
    """Decays that span time scales, and small residual outputs."""
    depth = len(model.model.layers)
    for name, parameter in model.named_parameters():
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            parameter.data.mul_((2 * depth) ** -0.5)
        elif name.endswith("dt_bias"):
            step = torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            parameter.data.copy_(step + torch.log(-torch.expm1(-step)))


def init_mtp(model: Qwen3_5ForCausalLM) -> MultiTokenPredictor:
    """A predictor with the trunk's initialisation scale."""
    mtp = MultiTokenPredictor(model.config).to(model.device)
    for parameter in mtp.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return mtp


def trunk_logits(ops: Ops, model: Qwen3_5ForCausalLM, ids: Tensor) -> Tensor:
    return F.linear(trunk_hidden(ops, model, ids), model.model.embed_tokens.weight)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def validate(model: Qwen3_5ForCausalLM, ops: Ops, tokens: Tensor, batch: int) -> float:
    """Mean next-token loss over held-out windows, under the training precision.

    Batch shape and gradient mode are those of training, so that nothing is compiled anew.
    """
    count = len(tokens) // (LENGTH + 1)
    rows = tokens[: count * (LENGTH + 1)].view(count, -1)
    total = 0.0
    for part in rows.split(batch):
        full = part[torch.arange(batch, device=part.device) % len(part)]  # repeat to fill
        with mixed_precision(part.device):
            logits = trunk_logits(ops, model, full[:, :-1])[: len(part)].detach()
        loss = token_loss(logits, part[:, 1:])
        total += loss.item() * len(part)
    return total / count


def train_trunk(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    tokens = load_tokens(args.data / "train.bin", device)
    held_out = load_tokens(args.data / "val.bin", device)
    model = Qwen3_5ForCausalLM(make_config()).float().to(device)
    initialise(model)
    mtp = init_mtp(model)
    ops = Ops(args.compile)
    optimizers = make_optimizers(model, args.lr, args.decay)
    generator = torch.Generator().manual_seed(args.seed)
    source = batches(windows(tokens, LENGTH + 1, generator), args.batch)

    def loss_of(batch: Tensor) -> tuple[Tensor]:
        return (token_loss(trunk_logits(ops, model, batch[:, :-1]), batch[:, 1:]),)

    gradients = GradientStep(loss_of, model, args.graph)
    start = time.monotonic()
    for step in range(args.steps):
        (loss,) = gradients(next(source))
        set_rate(optimizers, args.lr, step, args.steps)
        apply_gradients(model, optimizers)
        if step % 100 == 0 or step + 1 == args.steps:
            seconds = time.monotonic() - start
            print(f"step {step:5d} loss {loss.item():.4f} {seconds:6.1f} s", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            print(f"held-out loss {validate(model, ops, held_out, args.batch):.4f}", flush=True)
            save_model(model, mtp, args.out)
    unlearn_loops(ops, model, tokens, source, optimizers, args)
    print(f"held-out loss {validate(model, ops, held_out, args.batch):.4f}", flush=True)
    save_model(model, mtp, args.out)


def unlearn_loops(
    ops: Ops,
    model: Qwen3_5ForCausalLM,
    tokens: Tensor,
    source: Iterator[Tensor],
    optimizers: list[torch.optim.Optimizer],
    args: argparse.Namespace,
) -> None:
    """Sequence-level unlikelihood training (Welleck et al., 2020) on the model's greedy text.

    Tokens that end an n-gram already written in the same row are made less likely; the other
    rows of each batch go on with ordinary training.
    """
    share = args.batch // 4

    def loss_of(batch: Tensor, repeated: Tensor) -> tuple[Tensor]:
        logits = trunk_logits(ops, model, batch[:, :-1]).float()
        targets = batch[:, 1:]
        likely = logits[-share:].softmax(-1).gather(-1, targets[-share:, :, None])[..., 0]
        unlikelihood = -torch.log1p(-likely.clamp(max=1 - 1e-4)) * repeated[:, 1:]
        unlikelihood = unlikelihood.sum() / repeated.sum().clamp(min=1)
        return (token_loss(logits[:-share], targets[:-share]) + unlikelihood,)

    gradients = GradientStep(loss_of, model, args.graph)
    for index in range(args.loop_rounds):
        start = time.monotonic()
        rows = write_rows(model, tokens, share * args.loop_steps, 64, LENGTH + 1)
        mask = repeats(rows, order=6, start=64)
        print(f"loop round {index}: {mask[:, 64:].float().mean().item():.3f} repeated", flush=True)
        for step, (own, marks) in enumerate(zip(rows.split(share), mask.split(share), strict=True)):
            (loss,) = gradients(torch.cat((next(source)[:-share], own)), marks)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = args.loop_lr * (1 - step / args.loop_steps)
            apply_gradients(model, optimizers)
        seconds = time.monotonic() - start
        print(f"loop round {index}: loss {loss.item():.4f} {seconds:6.1f} s", flush=True)


# --------------------------------------------------------------------------- MTP


def own_text(model: Qwen3_5ForCausalLM, tokens: Tensor, args: argparse.Namespace) -> Tensor:
    """Training prompts continued by the trunk, two rounds greedy for each sampled one."""
    rows = []
    for index in range(args.rounds):
        start = time.monotonic()
        temperature = args.temperature if index % 3 == 1 else None
        rows.append(
            write_rows(model, tokens, args.generate_batch, args.prompt, args.row, temperature)
        )
        repeated = repeats(rows[-1], order=6, start=args.prompt)[:, args.prompt :].float().mean()
        seconds = time.monotonic() - start
        print(f"round {index}: {repeated.item():.3f} repeated {seconds:6.1f} s", flush=True)
    return torch.cat(rows)


@torch.no_grad()
def hidden_states(model: Qwen3_5ForCausalLM, rows: Tensor) -> Tensor:
    """The frozen trunk's hidden states of all rows, in bfloat16."""
    ops = Ops(compiled=False)
    out = []
    for part in rows.split(128):
        with mixed_precision(part.device):
            out.append(trunk_hidden(ops, model, part).bfloat16())
    return torch.cat(out)


def distillation_loss(
    model: Qwen3_5ForCausalLM, mtp: MultiTokenPredictor, ids: Tensor, hidden: Tensor, hard: float
) -> tuple[Tensor, Tensor]:
    """Loss over the depths, and each depth's share of agreement with the trunk's first choice.

    The target of depth `d` at base `t` is the trunk's distribution at position `t + d`;
    `hard` of the weight goes to its most likely token alone.
    """
    embedding = model.model.embed_tokens.weight
    with torch.no_grad():
        teacher = F.linear(hidden, embedding).float()
        best, probabilities = teacher.argmax(-1), teacher.softmax(-1)
    loss = torch.zeros((), device=ids.device)
    agreement = []
    outputs = mtp_outputs(Ops(compiled=False), model, mtp, ids, hidden.float())
    for depth, out in enumerate(outputs, start=1):
        place = slice(depth, depth + out.shape[1])
        logits = F.linear(out, embedding).float().log_softmax(-1)
        soft = -(probabilities[:, place] * logits).sum(-1).mean()
        first = -logits.gather(-1, best[:, place, None]).mean()
        loss = loss + DEPTH_WEIGHTS[depth - 1] * ((1 - hard) * soft + hard * first)
        agreement.append((logits.argmax(-1) == best[:, place]).float().mean())
    return loss / sum(DEPTH_WEIGHTS), torch.stack(agreement)


def mixed_order(
    own: int, total: int, args: argparse.Namespace, generator: torch.Generator
) -> Iterator[Tensor]:
    """Row numbers of endless batches with the share `args.own_share` of the trunk's own rows."""

    def shuffled(first: int, last: int) -> Iterator[int]:
        while True:
            yield from (first + torch.randperm(last - first, generator=generator)).tolist()

    count = round(args.own_share * args.batch)
    written, text = shuffled(0, own), shuffled(own, total)
    while True:
        rows = [next(written) for _ in range(count)]
        yield torch.tensor(rows + [next(text) for _ in range(args.batch - count)])


def train_mtp(args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    tokens = load_tokens(args.data / "train.bin", device)
    model, _ = load_model(args.trunk or args.out, device)
    model.requires_grad_(False)
    mtp = init_mtp(model)
    written = own_text(model, tokens, args)
    text = tokens[: len(tokens) // args.row * args.row].view(-1, args.row)
    rows = torch.cat((written, text))
    start = time.monotonic()
    hidden = hidden_states(model, rows)
    print(f"hidden states of {rows.numel() / 1e6:.1f} M tokens", flush=True)

    def loss_of(ids: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        return distillation_loss(model, mtp, ids, states, args.hard)

    gradients = GradientStep(loss_of, mtp, args.graph)
    optimizers = make_optimizers(mtp, args.lr, args.decay)
    generator = torch.Generator().manual_seed(args.seed)
    order = mixed_order(len(written), len(rows), args, generator)
    for step in range(args.steps):
        index = next(order).to(device)
        loss, agreement = gradients(rows[index], hidden[index])
        set_rate(optimizers, args.lr, step, args.steps)
        apply_gradients(mtp, optimizers)
        if step % 100 == 0 or step + 1 == args.steps:
            rates = " ".join(f"{x:.3f}" for x in agreement.tolist())
            seconds = time.monotonic() - start
            print(
                f"step {step:5d} loss {loss.item():.4f} agree {rates} {seconds:6.1f} s", flush=True
            )
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save_model(model, mtp, args.out)


# --------------------------------------------------------------------------- command line


def parse_args() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    stages = parser.add_subparsers(dest="stage", required=True)
    trunk = stages.add_parser("trunk", help="train the trunk")
    mtp = stages.add_parser("mtp", help="train the predictor of a trained trunk")
    check = stages.add_parser("check", help="compare a model's fast forward with transformers'")
    for stage in (trunk, mtp, check):
        stage.add_argument("--data", type=Path, required=True, help="folder of train.bin, val.bin")
        stage.add_argument("--out", type=Path, required=True, help="model directory")
        stage.add_argument("--device", default="cuda" if cuda else "cpu")
    for stage in (trunk, mtp):
        stage.add_argument("--seed", type=int, default=0)
        stage.add_argument("--save-every", type=int, default=800)
        stage.add_argument("--graph", action=argparse.BooleanOptionalAction, default=cuda)
    trunk.add_argument("--batch", type=int, default=64, help="rows per step")
    mtp.add_argument("--batch", type=int, default=128, help="rows per step")
    trunk.add_argument("--compile", action=argparse.BooleanOptionalAction, default=cuda)
    trunk.add_argument("--steps", type=int, default=2400)
    trunk.add_argument("--lr", type=float, default=3e-3)
    trunk.add_argument("--decay", type=float, default=0.2)
    trunk.add_argument("--loop-rounds", type=int, default=2, help="rounds of unlikelihood training")
    trunk.add_argument("--loop-steps", type=int, default=80, help="steps of each such round")
    trunk.add_argument("--loop-lr", type=float, default=5e-4)
    mtp.add_argument("--steps", type=int, default=2000)
    mtp.add_argument("--lr", type=float, default=3e-3)
    mtp.add_argument("--decay", type=float, default=0.05)
    mtp.add_argument("--trunk", type=Path, help="directory of the trunk (default: --out)")
    mtp.add_argument("--hard", type=float, default=0.5, help="weight of the trunk's first choice")
    mtp.add_argument("--own-share", type=float, default=0.7, help="share of the trunk's own text")
    mtp.add_argument("--rounds", type=int, default=3, help="batches of own text to write")
    mtp.add_argument("--generate-batch", type=int, default=4096)
    mtp.add_argument("--prompt", type=int, default=64, help="tokens of a prompt to continue")
    mtp.add_argument("--row", type=int, default=384, help="tokens of a row, prompt included")
    mtp.add_argument("--temperature", type=float, default=0.6)
    return parser.parse_args()


def self_check(args: argparse.Namespace) -> None:
    """Compare the fast forward passes with transformers' own, in float32 on the CPU."""
    model, mtp = load_model(args.out, torch.device("cpu"))
    ids = load_tokens(args.data / "val.bin", torch.device("cpu"))[:400].view(2, 200)
    print(f"gated delta rule: largest difference {check_delta_rule():.1e}")
    print(f"trunk hidden states: {check_trunk(model, ids):.1e}")
    print(f"predictor outputs: {check_mtp(model, mtp, ids):.1e}")


def main() -> None:
    args = parse_args()
    torch.set_float32_matmul_precision("high")
    {"trunk": train_trunk, "mtp": train_mtp, "check": self_check}[args.stage](args)


if __name__ == "__main__":
    main()
