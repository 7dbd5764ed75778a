"""The Llama of bench_llm.py from PyTorch's own modules, for comparison; gloo.py trains it."""

from __future__ import annotations

from typing import Any, Callable

from bench_llm import BATCH, INNER, LEARNING_RATE, LENGTH, LORA_RANK, MAX_NORM, SIZES


def llama(torch: Any, is_lora: bool) -> Any:
    """Return the model; with adapters, only these are trained."""
    nn: Any = torch.nn
    functional: Any = nn.functional
    width, num_heads = SIZES["hidden_size"], SIZES["num_attention_heads"]
    per_head = width // num_heads
    angles = torch.outer(torch.arange(LENGTH), 1e4 ** -(torch.arange(0, per_head, 2) / per_head)).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()

    class Adapted(nn.Module):
        """A linear layer, with LoRA's adapters if there are any."""

        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.base = nn.Linear(inputs, outputs, bias=False)
            if is_lora:
                self.a = nn.Linear(inputs, LORA_RANK, bias=False)
                self.b = nn.Linear(LORA_RANK, outputs, bias=False)
                nn.init.zeros_(self.b.weight)

        def forward(self, x: Any) -> Any:
            return self.base(x) + self.b(self.a(x)) if is_lora else self.base(x)

    def rotated(x: Any) -> Any:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (Adapted(width, width) for _ in range(4))
            self.gate, self.up, self.down = Adapted(width, INNER), Adapted(width, INNER), Adapted(INNER, width)
            self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)

        def forward(self, x: Any) -> Any:
            normed = self.norm_1(x)
            q, k, v = (f(normed).unflatten(-1, (num_heads, per_head)).transpose(1, 2) for f in (self.q, self.k, self.v))
            attended = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
            x = x + self.o(attended.transpose(1, 2).flatten(-2))
            normed = self.norm_2(x)
            return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(SIZES["vocab_size"], width)
            self.layers = nn.ModuleList(Layer() for _ in range(SIZES["num_hidden_layers"]))
            self.norm = nn.RMSNorm(width, eps=1e-6)
            self.head = nn.Linear(width, SIZES["vocab_size"], bias=False)

        def forward(self, ids: Any) -> Any:
            x = self.words(ids)
            for layer in self.layers:
                x = layer(x)
            logits = self.head(self.norm(x))[:, :-1]
            return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    model = Llama()
    if is_lora:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith((".a.weight", ".b.weight")))
    return model


def trained(distributed: Any, torch: Any, is_lora: bool) -> Callable[[], None]:
    """Return a function that does one update of the Llama with DistributedDataParallel."""
    model: Any = llama(torch, is_lora)
    if distributed.get_world_size() > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)

    def update() -> None:
        optimizer.zero_grad()
        model(torch.randint(SIZES["vocab_size"], (BATCH, LENGTH))).backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()

    return update
